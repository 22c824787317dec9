"""SmolLM3: a Llama in which every fourth layer has no position encoding (NoPE)."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import change_attention, read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.qwen2 import uses_window
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec

SMOLLM3 = (
    DEFAULTS
    | defaults(vocab=128256, hidden=2048, layers=36, heads=16, kv_heads=4, context=32768, tied=True)
    | defaults(rope_theta=2e6)
)


def read_rope_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Return which layers have rope."""
    interval = config.size("no_rope_layer_interval", 4)
    # Despite its name, 1 stands for a layer with rope.
    has_rope = config.list_of("no_rope_layers", int)
    if not has_rope:
        return tuple((i + 1) % interval != 0 for i in config.layers())
    config.check_layer_count("no_rope_layers", has_rope)
    return tuple(bool(value) for value in has_rope)


def read_smollm3(config: ConfigReader) -> ModelSpec:
    has_rope = read_rope_layers(config)
    enabled = uses_window(config)
    windows = read_layer_windows(config, lambda i: enabled and not has_rope[i])
    rope_layer = read_layer(config)
    layers = []
    for i, window in enumerate(windows):
        layer = change_attention(rope_layer, window=window)
        layers.append(layer if has_rope[i] else change_attention(layer, position=None))
    return read_model(config, layers)


FAMILIES = {"smollm3": ModelFamily(read_smollm3, NAMES, SMOLLM3)}

"""Qwen2 and 2.5: a Llama with biases on q, k and v, and optional windows in its upper layers."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec

QWEN = DEFAULTS | defaults(
    vocab=151936, mlp=22016, kv_heads=32, context=32768, sliding_window=4096, max_window_layers=28
)


def uses_window(config: ConfigReader) -> bool:
    enabled = config.flag("use_sliding_window", False)
    window = config.get("sliding_window")
    return enabled and window is not None


def read_upper_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the windows: layers from max_window_layers on have one, if windows are used."""
    enabled = uses_window(config)
    first = config.integer("max_window_layers")
    return read_layer_windows(config, lambda i: enabled and i >= first)


def read_qwen2(config: ConfigReader) -> ModelSpec:
    config.require("use_mrope", False)
    layers = [
        read_layer(config, bias=True, out_bias=False, window=window)
        for window in read_upper_windows(config)
    ]
    return read_model(config, layers)


FAMILIES = {
    "qwen2": ModelFamily(read_qwen2, NAMES, QWEN),
}

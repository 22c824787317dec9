"""Granite with windows in three of four layers, attention sinks, and a rope base per layer."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.granite import build_granite, read_scaled_layer
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec

GRANITE_SWA = (
    DEFAULTS
    | defaults(vocab=100352, hidden=2560, mlp=8192, layers=24, heads=20, kv_heads=4, context=8192)
    | defaults(tied=True, rms_norm_eps=1e-5, sliding_window=128)
)
SINK_NAMES = replace(NAMES, extra={**NAMES.extra, "sinks": "self_attn.sinks"})


def read_granite_swa(config: ConfigReader) -> ModelSpec:
    rope = read_rope(config, config.head_dim())
    thetas = config.list_of("layer_rope_theta", float, [rope.theta] * len(config.layers()))
    config.check_layer_count("layer_rope_theta", thetas)
    layers = []
    for theta, window in zip(thetas, read_layer_windows(config, lambda i: i % 4 != 0)):
        position = replace(rope, theta=float(theta)) if theta else None
        layers.append(read_scaled_layer(config, position=position, window=window, sinks=True))
    return build_granite(config, layers)


FAMILIES = {
    "granite_swa": ModelFamily(read_granite_swa, SINK_NAMES, GRANITE_SWA),
}

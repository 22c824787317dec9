"""Granite: a Llama with multipliers on embeddings, attention scores, residuals and logits.

Granite with windows (granite_swa): a window in three of four layers, attention sinks, and a rope
base per layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.llama import DEFAULTS, NAMES, read_layer, read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec

GRANITE_SWA = (
    DEFAULTS
    | defaults(vocab=100352, hidden=2560, mlp=8192, layers=24, heads=20, kv_heads=4, context=8192)
    | defaults(tied=True, rms_norm_eps=1e-5, sliding_window=128)
)
SINK_NAMES = replace(NAMES, extra={**NAMES.extra, "sinks": "self_attn.sinks"})


def read_scaled_layer(config: ConfigReader, **changes: Any) -> LayerSpec:
    """Read a layer with scaled scores and residuals; keywords go to the attention."""
    layer = read_layer(config, scale=config.number("attention_multiplier", 1.0), **changes)
    return replace(layer, residual_scale=config.number("residual_multiplier", 1.0))


def build_granite(config: ConfigReader, layers: Iterable[LayerSpec]) -> ModelSpec:
    """Build a model with scaled embeddings and logits."""
    divisor = config.number("logits_scaling", 1.0)
    if divisor == 0:
        raise config.error("logits_scaling", "is 0, and logits are divided by it")
    embed_scale = config.number("embedding_multiplier", 1.0)
    return read_model(config, layers, embed_scale=embed_scale, logit_scale=1 / divisor)


def read_granite(config: ConfigReader) -> ModelSpec:
    return build_granite(config, [read_scaled_layer(config)] * len(config.layers()))


def read_granite_swa(config: ConfigReader) -> ModelSpec:
    rope = read_rope(config, config.head_dim())
    num_layers = len(config.layers())
    thetas = config.list_of("layer_rope_theta", float, [rope.theta] * num_layers)
    if len(thetas) != num_layers:
        raise config.error("layer_rope_theta", f"names {len(thetas)} layers of {num_layers}")
    layers = []
    for theta, window in zip(thetas, read_layer_windows(config, lambda i: i % 4 != 0)):
        position = replace(rope, theta=float(theta)) if theta else None
        layers.append(read_scaled_layer(config, position=position, window=window, sinks=True))
    return build_granite(config, layers)


FAMILIES = {
    "granite": ModelFamily(read_granite, NAMES, DEFAULTS),
    "granite_swa": ModelFamily(read_granite_swa, SINK_NAMES, GRANITE_SWA),
}

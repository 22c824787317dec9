"""Granite: a Llama with multipliers on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader
from bloomery.spec import LayerSpec, ModelSpec


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


FAMILIES = {
    "granite": ModelFamily(read_granite, NAMES, DEFAULTS),
}

"""Granite: a Llama with multipliers on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.llama import DEFAULTS, NAMES, read_layer, read_model
from bloomery.families.reader import ConfigReader
from bloomery.spec import ModelSpec


def read_granite(config: ConfigReader) -> ModelSpec:
    layer = read_layer(config, scale=config.number("attention_multiplier", 1.0))
    layer = replace(layer, residual_scale=config.number("residual_multiplier", 1.0))
    divisor = config.number("logits_scaling", 1.0)
    if divisor == 0:
        raise config.error("logits_scaling", "is 0, and logits are divided by it")
    return read_model(
        config,
        [layer] * len(config.layers()),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / divisor,
    )


FAMILIES = {"granite": ModelFamily(read_granite, NAMES, DEFAULTS)}

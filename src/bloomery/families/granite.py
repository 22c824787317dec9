"""Granite: a Llama with four multipliers, on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, model
from bloomery.families.reader import Reader
from bloomery.spec import Model


def granite(c: Reader) -> Model:
    plain = layer(c, scale=c.number("attention_multiplier", 1.0))
    divisor = c.number("logits_scaling", 1.0)
    if divisor == 0:
        raise c.wrong("logits_scaling", "is 0, and logits are divided by it")
    scaled = replace(plain, residual_scale=c.number("residual_multiplier", 1.0))
    embed = c.number("embedding_multiplier", 1.0)
    return model(c, [scaled] * len(c.layers()), embed_scale=embed, logit_scale=1 / divisor)


FAMILIES = {"granite": Family(granite, NAMES, DEFAULTS)}

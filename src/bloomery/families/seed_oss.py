"""Seed-OSS: a Llama with a stated head_dim and separate flags for the biases of attention."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec

SEED_OSS = (
    DEFAULTS
    | defaults(vocab=155136, mlp=27648, layers=64, heads=80, kv_heads=8, context=524288)
    | defaults(head_dim=128, attention_bias=True)
)


def read_seed_oss(config: ConfigReader) -> ModelSpec:
    layer = read_layer(config, out_bias=config.flag("attention_out_bias", False))
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"seed_oss": ModelFamily(read_seed_oss, NAMES, SEED_OSS)}

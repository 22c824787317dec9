"""Helium: a Llama with interleaved rope."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import ModelSpec

HELIUM = (
    DEFAULTS
    | defaults(vocab=48000, hidden=2560, mlp=7040, layers=24, heads=20, kv_heads=20, context=4096)
    | defaults(head_dim=128, rms_norm_eps=1e-8, rope_theta=1e5)
)


def read_helium(config: ConfigReader) -> ModelSpec:
    position = read_rope(config, config.head_dim(), interleaved=True)
    layer = read_layer(config, position=position, out_bias=False)
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"helium": ModelFamily(read_helium, NAMES, HELIUM)}

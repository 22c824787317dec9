"""ERNIE 4.5: a Llama with interleaved rope, and one flag for all biases."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_mlp, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import LayerSpec, ModelSpec

ERNIE = (
    DEFAULTS
    | defaults(vocab=103424, hidden=1024, mlp=3072, layers=18, heads=16, kv_heads=2, context=131072)
    | defaults(tied=True, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5)
)


def read_dense_layer(config: ConfigReader) -> LayerSpec:
    bias = config.flag("use_bias", False)
    position = read_rope(config, config.head_dim(), interleaved=True)
    layer = read_layer(config, position=position, bias=bias, out_bias=bias)
    return replace(layer, mlp=replace(read_mlp(config), bias=bias))


def read_ernie(config: ConfigReader) -> ModelSpec:
    return read_model(config, [read_dense_layer(config)] * len(config.layers()))


FAMILIES = {"ernie4_5": ModelFamily(read_ernie, NAMES, ERNIE)}

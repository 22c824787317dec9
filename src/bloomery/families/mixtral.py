"""Mixtral: a Mistral with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_mlp, read_model
from bloomery.families.llama import NAMES
from bloomery.families.mistral import MISTRAL, read_window_layers
from bloomery.families.moe import name_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, MoeSpec

MIXTRAL = MISTRAL | defaults(
    rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, num_experts=8, num_experts_per_tok=2
)
MIXTRAL_NAMES = name_experts(
    NAMES,
    "block_sparse_moe.experts",
    up=("w1", "w3"),
    down="w2",
    router="block_sparse_moe.gate",
)


def read_mixtral(config: ConfigReader) -> ModelSpec:
    moe = MoeSpec(config.size("num_experts"), config.size("num_experts_per_tok"), read_mlp(config))
    layers = [replace(layer, mlp=moe) for layer in read_window_layers(config)]
    return read_model(config, layers)


FAMILIES = {
    "mixtral": ModelFamily(read_mixtral, MIXTRAL_NAMES, MIXTRAL),
}

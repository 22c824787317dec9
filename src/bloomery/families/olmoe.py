"""OLMoE: a Llama with experts in every layer, and norms on q and k over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import build_moe_names, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, NormSpec, RouterSpec

OLMOE_NAMES = build_moe_names("mlp.gate")
OLMOE = (
    DEFAULTS
    | defaults(vocab=50304, hidden=2048, mlp=2048, layers=16, heads=16, context=4096)
    | defaults(rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
)


def read_olmoe(config: ConfigReader) -> ModelSpec:
    router = RouterSpec(normalize=config.flag("norm_topk_prob", False))
    layer = read_layer(
        config,
        qk_norm=NormSpec("rms", config.number("rms_norm_eps")),
        qk_norm_over="all",
        clip=config.optional_number("clip_qkv"),
    )
    layer = replace(layer, mlp=read_experts(config, router, "intermediate_size"))
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"olmoe": ModelFamily(read_olmoe, OLMOE_NAMES, OLMOE)}

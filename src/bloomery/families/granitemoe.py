"""Granite 3 with experts: all experts of a layer are one tensor, and the softmax is taken over the
chosen experts only. Some models have a shared expert (granitemoeshared).
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_mlp
from bloomery.families.granite import read_granite
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.moe import read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import FusedTensor, ModelSpec, RouterSpec

GRANITE_MOE_NAMES = replace(
    NAMES,
    extra={**NAMES.extra, "router": "block_sparse_moe.router.layer"},
    experts="block_sparse_moe.",
    expert_up=FusedTensor("input_linear"),
    expert_down="output_linear",
    stacked_experts=True,
    shared_up=FusedTensor("shared_mlp.input_linear"),
    shared_down="shared_mlp.output_linear",
)
GRANITE_MOE = DEFAULTS | defaults(num_experts=8, num_experts_per_tok=2)


def read_granite_moe(config: ConfigReader) -> ModelSpec:
    model = read_granite(config)
    router = RouterSpec(score_chosen_only=True)
    moe = read_experts(config, router, "intermediate_size")
    if config.integer("shared_intermediate_size", 0):
        moe = replace(moe, shared=read_mlp(config, "shared_intermediate_size"))
    return replace(model, layers=tuple(replace(layer, mlp=moe) for layer in model.layers))


FAMILIES = {
    "granitemoe": ModelFamily(read_granite_moe, GRANITE_MOE_NAMES, GRANITE_MOE),
    "granitemoeshared": ModelFamily(read_granite_moe, GRANITE_MOE_NAMES, GRANITE_MOE),
}

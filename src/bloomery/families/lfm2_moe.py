"""LFM2-MoE: LFM2's layers, all but the first with experts behind a sigmoid router that has a
correction bias.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.lfm2 import LFM2, LFM2_NAMES, build_lfm2, read_conv_layers
from bloomery.families.moe import name_experts, put_experts, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, RouterSpec

LFM2_MOE_NAMES = name_experts(
    LFM2_NAMES,
    "feed_forward.experts",
    up=("w1", "w3"),
    down="w2",
    router="feed_forward.gate",
    correction_bias="feed_forward.expert_bias",
)
LFM2_MOE = (
    LFM2
    | defaults(hidden=2048, mlp=7168, num_experts=32, num_experts_per_tok=4)
    | defaults(moe_intermediate_size=1792, num_dense_layers=2)
)


def read_lfm2_moe(config: ConfigReader) -> ModelSpec:
    router = RouterSpec(
        score="sigmoid",
        correction_bias=config.flag("use_expert_bias", True),
        normalize=config.flag("norm_topk_prob", True),
        min_normalizer=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    first_moe = config.integer("num_dense_layers")
    is_sparse = [i >= first_moe for i in config.layers()]
    layers = put_experts(read_conv_layers(config), read_experts(config, router), is_sparse)
    return build_lfm2(config, layers)


FAMILIES = {"lfm2_moe": ModelFamily(read_lfm2_moe, LFM2_MOE_NAMES, LFM2_MOE)}

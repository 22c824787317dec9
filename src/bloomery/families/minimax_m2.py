"""MiniMax M2: a Mixtral whose router has sigmoid scores and a correction bias, with norms on q and
k over all heads at once, and rope on a part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.mixtral import MIXTRAL_NAMES
from bloomery.families.moe import SIGMOID_ROUTER, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import ModelSpec, NormSpec

MINIMAX_M2_NAMES = replace(
    MIXTRAL_NAMES,
    extra={
        **MIXTRAL_NAMES.extra,
        "correction_bias": "block_sparse_moe.e_score_correction_bias",
    },
)
MINIMAX_M2 = (
    DEFAULTS
    | defaults(vocab=200064, hidden=3072, mlp=1536, layers=62, heads=48, kv_heads=8, head_dim=128)
    | defaults(context=196608, rope_theta=5e6, num_experts=256, num_experts_per_tok=8)
)


def read_minimax_m2(config: ConfigReader) -> ModelSpec:
    for switch in ("use_qk_norm", "use_routing_bias"):
        config.require(switch, True)
    config.require("qk_norm_type", "per_layer")  # over all heads of a layer
    config.require("scoring_func", "sigmoid")
    config.require("shared_intermediate_size", 0)
    config.require("attn_type_list", [1] * len(config.layers()))  # 0 would be linear attention
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    position = read_rope(config, config.head_dim(), partial=True)
    layer = read_layer(
        config, position=position, bias=False, out_bias=False, qk_norm=norm, qk_norm_over="all"
    )
    layer = replace(layer, mlp=read_experts(config, SIGMOID_ROUTER, "intermediate_size"))
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"minimax_m2": ModelFamily(read_minimax_m2, MINIMAX_M2_NAMES, MINIMAX_M2)}

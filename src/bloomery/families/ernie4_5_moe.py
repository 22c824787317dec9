"""ERNIE 4.5 with experts: a softmax router with a correction bias, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.ernie4_5 import ERNIE, read_dense_layer
from bloomery.families.moe import build_moe_names, put_experts, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, RouterSpec

ERNIE_MOE_NAMES = replace(
    build_moe_names(
        "mlp.gate", "mlp.shared_experts", correction_bias="mlp.moe_statics.e_score_correction_bias"
    ),
    ignored=("*.rotary_emb.inv_freq", "model.mtp_*"),  # layers for multi-token prediction
)
ERNIE_MOE = (
    ERNIE
    | defaults(hidden=2560, mlp=12288, layers=28, heads=20, kv_heads=4, head_dim=None)
    | defaults(num_experts=64, num_experts_per_tok=6, num_shared_experts=2)
    | defaults(moe_intermediate_size=1536, moe_layer_start_index=1, moe_norm_min=1e-12)
)


def read_ernie_moe(config: ConfigReader) -> ModelSpec:
    router = RouterSpec(correction_bias=True, min_normalizer=config.number("moe_norm_min"))
    bias = config.flag("use_bias", False)
    moe = read_experts(config, router)
    if moe.shared is not None:
        moe = replace(moe, shared=replace(moe.shared, bias=bias))
    first = config.integer("moe_layer_start_index")
    last = len(config.layers()) - 1
    if config.get("moe_layer_end_index", -1) != -1:
        last = config.integer("moe_layer_end_index")
    step = config.size("moe_layer_interval", 1)
    is_sparse = [first <= i <= last and (i + 1) % step == 0 for i in config.layers()]
    layers = put_experts([read_dense_layer(config)] * len(is_sparse), moe, is_sparse)
    return read_model(config, layers, head_bias=bias)


FAMILIES = {"ernie4_5_moe": ModelFamily(read_ernie_moe, ERNIE_MOE_NAMES, ERNIE_MOE)}

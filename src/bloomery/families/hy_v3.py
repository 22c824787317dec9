"""Hunyuan 3 (Hy3): a Qwen3 with sigmoid scores, a correction bias and a shared expert; the first
layer is dense.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import (
    SIGMOID_ROUTER,
    build_moe_names,
    ignore_mtp_layers,
    put_experts,
    read_experts,
    read_sparse_layers,
)
from bloomery.families.qwen3 import read_qk_norm_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec

HY_V3_NAMES = build_moe_names(
    "mlp.router.gate", "mlp.shared_mlp", correction_bias="mlp.expert_bias"
)
HY_V3 = (
    DEFAULTS
    | defaults(vocab=120832, mlp=13312, layers=80, heads=64, kv_heads=8, head_dim=128)
    | defaults(context=131072, rms_norm_eps=1e-5, rope_theta=11158840.0, num_experts=192)
    | defaults(num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1536)
    | defaults(router_scaling_factor=2.826)
)


def read_hy_v3(config: ConfigReader) -> ModelSpec:
    for switch in ("qk_norm", "route_norm", "moe_router_use_sigmoid"):
        config.require(switch, True)
    config.require("moe_router_enable_expert_bias", True)
    config.get("enable_moe_fp32_combine")  # rounding only: sums of experts are always float32
    router = replace(SIGMOID_ROUTER, scale=config.number("router_scaling_factor"))
    first = config.integer("first_k_dense_replace", 1)
    is_sparse = read_sparse_layers(config, lambda i: i >= first)
    layers = [read_qk_norm_layer(config)] * len(config.layers())
    moe = read_experts(config, router)
    return read_model(config, put_experts(layers, moe, is_sparse))


FAMILIES = {"hy_v3": ModelFamily(read_hy_v3, ignore_mtp_layers(HY_V3_NAMES), HY_V3)}

"""GLM 4.5 to 4.7: a Llama with DeepSeek's router, a shared expert, dense first layers, and rope on
half of each head; some models have norms on q and k.

Solar Open: experts in every layer, and rope on whole heads.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import (
    build_moe_names,
    ignore_mtp_layers,
    put_experts,
    read_experts,
    read_grouped_router,
)
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import ModelSpec, NormSpec

GLM4_MOE_NAMES = build_moe_names(
    "mlp.gate", "mlp.shared_experts", correction_bias="mlp.gate.e_score_correction_bias"
)
SOLAR_OPEN = (
    DEFAULTS
    | defaults(vocab=196608, layers=48, heads=64, kv_heads=8, context=131072, rms_norm_eps=1e-5)
    | defaults(head_dim=128, rope_theta=1e6, num_experts=128, num_experts_per_tok=8)
    | defaults(num_shared_experts=1, moe_intermediate_size=1280, norm_topk_prob=True)
)
GLM4_MOE = (
    SOLAR_OPEN
    | defaults(vocab=151552, mlp=10944, layers=46, heads=96, head_dim=None, rope_theta=1e4)
    | defaults(partial_rotary_factor=0.5, moe_intermediate_size=1408, first_k_dense_replace=1)
)


def read_glm4_moe(config: ConfigReader) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    qk_norm = None
    if config.flag("use_qk_norm", False):
        qk_norm = NormSpec("rms", config.number("rms_norm_eps"))
    position = read_rope(config, config.head_dim(), partial=True)
    layer = read_layer(config, position=position, out_bias=False, qk_norm=qk_norm)
    moe = read_experts(config, read_grouped_router(config))
    first = config.integer("first_k_dense_replace", 0)
    is_sparse = [i >= first for i in config.layers()]
    return read_model(config, put_experts([layer] * len(is_sparse), moe, is_sparse))


FAMILIES = {
    "glm4_moe": ModelFamily(read_glm4_moe, ignore_mtp_layers(GLM4_MOE_NAMES), GLM4_MOE),
    "solar_open": ModelFamily(read_glm4_moe, GLM4_MOE_NAMES, SOLAR_OPEN),
}

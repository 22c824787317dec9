"""Jamba: Mamba-1 with norms on dt, B and C in most layers, attention without positions in the
others, and experts in every second layer.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import name_experts, put_experts, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import MAMBA_NAMES, put_recurrent
from bloomery.spec import MambaSpec, ModelSpec, NormSpec, RouterSpec

JAMBA_NAMES = name_experts(
    MAMBA_NAMES,
    "feed_forward.experts",
    router="feed_forward.router",
    x_proj="mamba.x_proj",
    dt_proj="mamba.dt_proj",
    dt_norm="mamba.dt_layernorm",
    b_norm="mamba.b_layernorm",
    c_norm="mamba.c_layernorm",
)
JAMBA = (
    DEFAULTS
    | defaults(vocab=65536, mlp=14336, kv_heads=8, context=262144, num_experts=16)
    | defaults(num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
)


def read_mamba(config: ConfigReader) -> MambaSpec:
    config.require("hidden_act", "silu")
    hidden = config.size("hidden_size")
    dt_rank = -(-hidden // 16)
    if config.get("mamba_dt_rank", "auto") != "auto":
        dt_rank = config.size("mamba_dt_rank")
    return MambaSpec(
        config.size("mamba_expand") * hidden,
        config.size("mamba_d_state"),
        dt_rank,
        config.size("mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        norm=NormSpec("rms", config.number("rms_norm_eps")),
    )


def read_jamba(config: ConfigReader) -> ModelSpec:
    config.require("sliding_window", None)
    layer = read_layer(config, position=None)
    period = config.size("attn_layer_period", 8)
    offset = config.integer("attn_layer_offset", 4)
    is_recurrent = [i % period != offset for i in config.layers()]
    layers = put_recurrent(layer, read_mamba(config), is_recurrent)
    if config.size("num_experts") > 1:
        moe = read_experts(config, RouterSpec(normalize=False), "intermediate_size")
        expert_period = config.size("expert_layer_period", 2)
        expert_offset = config.integer("expert_layer_offset", 1)
        is_sparse = [i % expert_period == expert_offset for i in config.layers()]
        layers = put_experts(layers, moe, is_sparse)
    return read_model(config, layers)


FAMILIES = {"jamba": ModelFamily(read_jamba, JAMBA_NAMES, JAMBA)}

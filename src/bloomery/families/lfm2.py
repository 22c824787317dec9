"""LFM2: gated short convolutions in most layers, attention with norms on q and k in the others.
LFM2-MoE: experts behind a sigmoid router with a correction bias, but for the first layers.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.llama import DEFAULTS, NAMES, read_attention, read_mlp, read_model
from bloomery.families.moe import put_experts, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import put_recurrent
from bloomery.spec import LayerSpec, ModelSpec, NormSpec, RouterSpec, ShortConvSpec, SplitTensors

LFM2_NAMES = replace(
    NAMES,
    attn_out="self_attn.out_proj",
    mlp_up=SplitTensors(("feed_forward.w1", "feed_forward.w3")),
    mlp_down="feed_forward.w2",
    recurrent_in="conv.in_proj",
    recurrent_out="conv.out_proj",
    recurrent_conv="conv.conv",
    final_norm="model.embedding_norm",
    extra={
        "attn_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "router": "feed_forward.gate",
        "correction_bias": "feed_forward.expert_bias",
    },
    experts="feed_forward.experts.{e}.",
    expert_up=SplitTensors(("w1", "w3")),
    expert_down="w2",
)
LFM2 = (
    DEFAULTS
    | defaults(vocab=65536, hidden=2560, mlp=12288, kv_heads=8, context=128000, tied=True)
    | defaults(norm_eps=1e-5, rope_theta=1e6, conv_L_cache=3)
)
LFM2_MOE = (
    LFM2
    | defaults(hidden=2048, mlp=7168, num_experts=32, num_experts_per_tok=4)
    | defaults(moe_intermediate_size=1792, num_dense_layers=2)
)
IS_CONV = {"conv": True, "full_attention": False}


def read_layers(config: ConfigReader) -> list[LayerSpec]:
    hidden = config.size("hidden_size")
    norm = NormSpec("rms", config.number("norm_eps"))
    attention = read_attention(config, qk_norm=norm)
    layer = LayerSpec(attention, read_mlp(config), attn_norm=norm, mlp_norm=norm)
    conv = ShortConvSpec(hidden, config.size("conv_L_cache"), config.flag("conv_bias", False))
    attention_layers = config.list_of("full_attn_idxs", int, tuple(config.layers()))
    is_conv = config.layer_choices("layer_types", IS_CONV, lambda i: i not in attention_layers)
    return put_recurrent(layer, conv, is_conv)


def read_mlp_size(config: ConfigReader) -> int:
    """Read the inner size of the MLP, which older files state before its adjustment."""
    size = config.size("block_ff_dim", config.size("intermediate_size"))
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    multiple = config.size("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * (2 * size // 3)) // multiple) * multiple


def build_model(config: ConfigReader, layers: list[LayerSpec]) -> ModelSpec:
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings"))
    norm = NormSpec("rms", config.number("norm_eps"))
    return read_model(config, layers, final_norm=norm, tied=tied)


def read_lfm2(config: ConfigReader) -> ModelSpec:
    mlp = replace(read_mlp(config), size=read_mlp_size(config))
    return build_model(config, [replace(layer, mlp=mlp) for layer in read_layers(config)])


def read_lfm2_moe(config: ConfigReader) -> ModelSpec:
    router = RouterSpec(
        score="sigmoid",
        correction_bias=config.flag("use_expert_bias", True),
        normalize=config.flag("norm_topk_prob", True),
        min_normalizer=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    first_moe = config.integer("num_dense_layers")
    layers = put_experts(
        read_layers(config), read_experts(config, router), lambda i: i >= first_moe
    )
    return build_model(config, layers)


FAMILIES = {
    "lfm2": ModelFamily(read_lfm2, LFM2_NAMES, LFM2),
    "lfm2_moe": ModelFamily(read_lfm2_moe, LFM2_NAMES, LFM2_MOE),
}

"""LFM2: gated short convolutions in most layers, attention with normed q and k in the others."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_mlp, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import put_recurrent
from bloomery.spec import LayerSpec, ModelSpec, NormSpec, ShortConvSpec, SplitTensors

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
    },
)
LFM2 = (
    DEFAULTS
    | defaults(vocab=65536, hidden=2560, mlp=12288, kv_heads=8, context=128000, tied=True)
    | defaults(norm_eps=1e-5, rope_theta=1e6, conv_L_cache=3)
)
IS_CONV = {"conv": True, "full_attention": False}


def read_conv_layers(config: ConfigReader) -> list[LayerSpec]:
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


def build_lfm2(config: ConfigReader, layers: list[LayerSpec]) -> ModelSpec:
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings"))
    norm = NormSpec("rms", config.number("norm_eps"))
    return read_model(config, layers, final_norm=norm, tied=tied)


def read_lfm2(config: ConfigReader) -> ModelSpec:
    mlp = replace(read_mlp(config), size=read_mlp_size(config))
    return build_lfm2(config, [replace(layer, mlp=mlp) for layer in read_conv_layers(config)])


FAMILIES = {"lfm2": ModelFamily(read_lfm2, LFM2_NAMES, LFM2)}

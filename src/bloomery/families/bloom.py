"""BLOOM: ALiBi, a norm after the embedding, QKV fused head by head."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import (
    AlibiSpec,
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    TensorNames,
)

NAMES = TensorNames(
    embed="transformer.word_embeddings",
    layer="transformer.h.{i}.",
    final_norm="transformer.ln_f",
    head="lm_head",
    attn_qkv=FusedTensor("self_attention.query_key_value", grouped=True),
    attn_out="self_attention.dense",
    mlp_up="mlp.dense_h_to_4h",
    mlp_down="mlp.dense_4h_to_h",
    extra={
        "embed_norm": "transformer.word_embeddings_layernorm",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    prefixes=("transformer.", ""),
)
# ALiBi itself has no limit; the context is the length it was trained with.
DEFAULTS = defaults(vocab=250880, hidden=64, layers=2, heads=8, context=2048, tied=True)


def read_bloom(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(
        attention=read_attention(config, position=AlibiSpec(), bias=True, out_bias=True),
        mlp=MlpSpec(4 * config.size("hidden_size"), "gelu_tanh", gated=False, bias=True),
        attn_norm=norm,
        mlp_norm=norm,
        residual_after_norm=config.flag("apply_residual_connection_post_layernorm", False),
    )
    context = config.size("seq_length", config.size("max_position_embeddings"))
    return read_model(
        config, [layer] * len(config.layers()), final_norm=norm, embed_norm=norm, context=context
    )


FAMILIES = {"bloom": ModelFamily(read_bloom, NAMES, DEFAULTS)}

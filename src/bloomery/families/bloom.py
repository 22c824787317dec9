"""BLOOM: ALiBi, a norm after the embedding, QKV fused head by head."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Alibi, Attention, Fused, Layer, Mlp, Model, Names, Norm

NAMES = Names(
    embed="transformer.word_embeddings",
    layer="transformer.h.{i}.",
    final_norm="transformer.ln_f",
    head="lm_head",
    attn_qkv=Fused("self_attention.query_key_value", grouped=True),
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
# The context is what it was trained on: ALiBi itself knows no end.
DEFAULTS = defaults(vocab=250880, hidden=64, layers=2, heads=8, context=2048, tied=True)


def bloom(c: Reader) -> Model:
    c.must("apply_residual_connection_post_layernorm", False)
    heads = c.size("num_attention_heads")
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = Layer(
        attention=Attention(heads, heads, c.head_dim(), Alibi(), bias=True, out_bias=True),
        mlp=Mlp(4 * c.size("hidden_size"), "gelu_tanh", gated=False, bias=True),
        attn_norm=norm,
        mlp_norm=norm,
    )
    context = c.size("seq_length", c.size("max_position_embeddings"))
    return model(c, [layer] * len(c.layers()), final_norm=norm, embed_norm=norm, context=context)


FAMILIES = {"bloom": Family(bloom, NAMES, DEFAULTS)}

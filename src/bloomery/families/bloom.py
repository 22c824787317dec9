"""BLOOM: ALiBi, a norm after the embedding, QKV fused head by head."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.reader import Reader
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
DEFAULTS = {"vocab_size": 250880, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}


def bloom(c: Reader) -> Model:
    c.must("apply_residual_connection_post_layernorm", False)
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = Layer(
        attention=Attention(heads, heads, c.head_dim(), Alibi(), bias=True, out_bias=True),
        mlp=Mlp(4 * hidden, "gelu_tanh", gated=False, bias=True),
        attn_norm=norm,
        mlp_norm=norm,
    )
    return Model(
        vocab=c.size("vocab_size"),
        hidden=hidden,
        layers=(layer,) * len(c.layers()),
        final_norm=norm,
        context=c.size("seq_length", 2048),
        embed_norm=norm,
        tied=c.flag("tie_word_embeddings", True),
    )


FAMILIES = {"bloom": Family(bloom, NAMES, DEFAULTS)}

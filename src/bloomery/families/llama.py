"""Llama, and the pieces of it that its descendants put together anew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bloomery.families import Family
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.spec import Attention, Layer, Mlp, Model, Names, Norm, Split

NAMES = Names(
    embed="model.embed_tokens",
    layer="model.layers.{i}.",
    final_norm="model.norm",
    head="lm_head",
    attn_qkv=Split(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    attn_out="self_attn.o_proj",
    mlp_up=Split(("mlp.gate_proj", "mlp.up_proj")),
    mlp_down="mlp.down_proj",
    extra={
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    },
    prefixes=("model.", ""),
    ignored=("*.rotary_emb.inv_freq",),
)

DEFAULTS = defaults(
    vocab=32000,
    hidden=4096,
    mlp=11008,
    layers=32,
    heads=32,
    context=2048,
    hidden_act="silu",
    rms_norm_eps=1e-6,
)


def attention(c: Reader, **changes: Any) -> Attention:
    """The attention of a plain config; keywords replace what a family does its own way."""
    heads = c.size("num_attention_heads")
    bias = c.flag("attention_bias", False)
    plain = Attention(
        heads, c.size("num_key_value_heads", heads), c.head_dim(), bias=bias, out_bias=bias
    )
    position = changes["position"] if "position" in changes else rope(c, plain.head_dim)
    return replace(plain, **{**changes, "position": position})


def mlp(c: Reader, size: str = "intermediate_size") -> Mlp:
    return Mlp(c.size(size), c.activation("hidden_act"), bias=c.flag("mlp_bias", False))


def layer(c: Reader, **changes: Any) -> Layer:
    """Two RMS norms before two blocks; keywords go to the attention."""
    norm = Norm("rms", c.number("rms_norm_eps"))
    return Layer(attention(c, **changes), mlp(c), attn_norm=norm, mlp_norm=norm)


def model(c: Reader, layers: Iterable[Layer], **changes: Any) -> Model:
    plain = Model(
        vocab=c.size("vocab_size"),
        hidden=c.size("hidden_size"),
        layers=tuple(layers),
        final_norm=Norm("rms", c.number("rms_norm_eps", 1e-6)),
        context=c.size("max_position_embeddings"),
        tied=c.flag("tie_word_embeddings", False),
    )
    return replace(plain, **changes)


def llama(c: Reader) -> Model:
    return model(c, [layer(c)] * len(c.layers()))


FAMILIES = {"llama": Family(llama, NAMES, DEFAULTS)}

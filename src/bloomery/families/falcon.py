"""Falcon: 7B (one key-value head, one norm), 40B and later (grouped heads, one norm or two), RW (ALiBi, sequential)."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family, bloom
from bloomery.families.llama import model
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.spec import Alibi, Attention, Fused, Layer, Mlp, Model, Names, Norm

DEFAULTS = defaults(
    vocab=65024,
    hidden=4544,
    layers=32,
    heads=71,
    context=2048,
    tied=True,
    multi_query=True,
    parallel_attn=True,
)


def two_norms(c: Reader) -> bool:
    if not c.flag("new_decoder_architecture", False) or c.get("num_ln_in_parallel_attn") == 1:
        return False
    c.must("num_ln_in_parallel_attn", 2)
    return True


def names(c: Reader) -> Names:
    grouped = c.flag("new_decoder_architecture", False) or not c.flag("multi_query")
    return replace(
        bloom.NAMES,
        attn_qkv=Fused("self_attention.query_key_value", grouped),
        extra={
            "attn_norm": "ln_attn" if two_norms(c) else "input_layernorm",
            "mlp_norm": "ln_mlp" if two_norms(c) else "post_attention_layernorm",
        },
        ignored=("*.rotary_emb.inv_freq", "*.maybe_rotary.inv_freq"),
    )


def falcon(c: Reader) -> Model:
    c.must("apply_residual_connection_post_layernorm", False)
    hidden = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    head_dim = c.head_dim()
    bias = c.flag("bias", False)
    grouped = c.flag("new_decoder_architecture", False)
    if grouped:
        c.must("parallel_attn", True)
    parallel = c.flag("parallel_attn")
    kv_heads = c.size("num_kv_heads", heads) if grouped else 1 if c.flag("multi_query") else heads
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    # RW scales its slopes together with the scores
    position = Alibi(scale=head_dim**-0.5) if c.flag("alibi", False) else rope(c, head_dim)
    size = c.size("intermediate_size", c.size("ff_factor", 4) * hidden)
    layer = Layer(
        attention=Attention(heads, kv_heads, head_dim, position, bias=bias, out_bias=bias),
        mlp=Mlp(size, c.activation("activation", "gelu"), gated=False, bias=bias),
        attn_norm=norm,
        mlp_norm=norm if two_norms(c) or not parallel else None,
        parallel=parallel,
    )
    return model(c, [layer] * len(c.layers()), final_norm=norm)


FAMILIES = {"falcon": Family(falcon, names, DEFAULTS)}

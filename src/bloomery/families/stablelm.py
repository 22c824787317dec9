"""StableLM: a Llama with biased layer norms and partial rotary; some norm q and k with a weight for every head."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, attention, mlp, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.spec import Layer, Model, Norm

STABLELM_NAMES = replace(
    NAMES,
    extra={
        **NAMES.extra,
        "q_norm": "self_attn.q_layernorm.norms.{h}",
        "k_norm": "self_attn.k_layernorm.norms.{h}",
    },
)
STABLELM = DEFAULTS | defaults(
    vocab=50304, hidden=2560, mlp=6912, kv_heads=32, context=4096, partial_rotary_factor=0.25
)


def stablelm(c: Reader) -> Model:
    norm = Norm("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    parallel = c.flag("use_parallel_residual", False)
    block = attention(
        c,
        position=rope(c, c.head_dim(), partial=True),
        bias=c.flag("use_qkv_bias", False),
        out_bias=False,
        qk_norm=replace(norm, bias=False) if c.flag("qk_layernorm", False) else None,
        qk_norm_over="each",
    )
    layer = Layer(
        block, mlp(c), attn_norm=norm, mlp_norm=None if parallel else norm, parallel=parallel
    )
    return model(c, [layer] * len(c.layers()), final_norm=norm)


FAMILIES = {"stablelm": Family(stablelm, STABLELM_NAMES, STABLELM)}

"""Phi-3 and 4: a Llama whose q|k|v and gate|up are stored as one, stretched by longrope."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.families.window import windows
from bloomery.spec import Fused, Model

PHI3_NAMES = replace(NAMES, attn_qkv=Fused("self_attn.qkv_proj"), mlp_up=Fused("mlp.gate_up_proj"))
PHI3 = DEFAULTS | defaults(
    vocab=32064,
    hidden=3072,
    mlp=8192,
    context=4096,
    original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)


def phi3(c: Reader) -> Model:
    position = rope(c, c.head_dim(), partial=True)
    sizes = windows(c, lambda i: c.get("sliding_window") is not None)
    return model(
        c, [layer(c, position=position, bias=False, out_bias=False, window=size) for size in sizes]
    )


FAMILIES = {"phi3": Family(phi3, PHI3_NAMES, PHI3)}

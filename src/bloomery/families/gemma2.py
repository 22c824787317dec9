"""Gemma 2: norms on either side of both blocks, a window in every other layer, soft caps on scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import Family
from bloomery.families.gemma import GEMMA, around, norm_of
from bloomery.families.llama import NAMES, attention
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Layer, Mlp, Model

GEMMA2 = GEMMA | defaults(
    hidden=2304, mlp=9216, layers=26, heads=8, kv_heads=4, query_pre_attn_scalar=256, sliding_window=4096,
    final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
)  # fmt: skip
SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA2_NAMES = replace(NAMES, extra={**NAMES.extra, **SANDWICH})


def sandwich(c: Reader, **changes: Any) -> Layer:
    """A layer with a norm on either side of both blocks."""
    c.must("use_bidirectional_attention", False)
    norm, mlp = norm_of(c), Mlp(c.size("intermediate_size"), c.activation("hidden_activation", "gelu_pytorch_tanh"))
    scale, softcap = c.size("query_pre_attn_scalar") ** -0.5, c.optional_number("attn_logit_softcapping")
    return Layer(attention(c, scale=scale, softcap=softcap, **changes), mlp, norm, norm, norm, norm)


def gemma2(c: Reader) -> Model:
    return around(c, [sandwich(c, window=window) for window in windows(c, lambda i: i % 2 == 0)])


FAMILIES = {"gemma2": Family(gemma2, GEMMA2_NAMES, GEMMA2)}

"""OLMo 2: norms only after each block, q and k normed across all heads at once."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, attention, mlp, model
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Layer, Model, Norm

OLMO2_NAMES = replace(
    NAMES,
    extra={
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    },
)
OLMO2 = DEFAULTS | defaults(vocab=50304, rms_norm_eps=1e-5)


def olmo2(c: Reader) -> Model:
    norm = Norm("rms", c.number("rms_norm_eps"))
    layer = Layer(
        attention(c, qk_norm=norm, qk_norm_over="all"),
        mlp(c),
        attn_post_norm=norm,
        mlp_post_norm=norm,
    )
    return model(c, [layer] * len(c.layers()))


FAMILIES = {"olmo2": Family(olmo2, OLMO2_NAMES, OLMO2)}

"""Gemma: norms stored as 1 + weight, scaled embeddings. Gemma 2 adds norms after each block, windows and soft caps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import Family
from bloomery.families.llama import NAMES, attention, model
from bloomery.families.reader import ACTIVATIONS, Reader
from bloomery.families.window import windows
from bloomery.spec import Layer, Mlp, Model, Norm

GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
GEMMA2 = GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
SANDWICH_NAMES = replace(NAMES, extra={**NAMES.extra, **SANDWICH})


def norm_of(c: Reader) -> Norm:
    return Norm("rms", c.number("rms_norm_eps", 1e-6), unit_offset=True)


def around(c: Reader, layers: list[Layer]) -> Model:
    return model(
        c,
        layers,
        final_norm=norm_of(c),
        embed_scale=c.size("hidden_size") ** 0.5,
        tied=c.flag("tie_word_embeddings", True),
        logit_softcap=c.optional_number("final_logit_softcapping"),
    )


def gemma(c: Reader) -> Model:
    c.must("use_bidirectional_attention", False)
    # Gemma's first files say gelu and mean its tanh form.
    activation = c.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    mlp, norm = Mlp(c.size("intermediate_size"), activation), norm_of(c)
    return around(c, [Layer(attention(c), mlp, attn_norm=norm, mlp_norm=norm)] * len(c.layers()))


def sandwich(c: Reader, **changes: Any) -> Layer:
    """A layer with a norm on either side of both blocks."""
    c.must("use_bidirectional_attention", False)
    norm, mlp = norm_of(c), Mlp(c.size("intermediate_size"), c.activation("hidden_activation", "gelu_pytorch_tanh"))
    scale, softcap = c.size("query_pre_attn_scalar") ** -0.5, c.optional_number("attn_logit_softcapping")
    return Layer(attention(c, scale=scale, softcap=softcap, **changes), mlp, norm, norm, norm, norm)


def gemma2(c: Reader) -> Model:
    return around(c, [sandwich(c, window=window) for window in windows(c, lambda i: i % 2 == 0)])


FAMILIES = {"gemma": Family(gemma, NAMES, GEMMA), "gemma2": Family(gemma2, SANDWICH_NAMES, GEMMA2)}

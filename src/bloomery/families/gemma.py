"""Gemma: a Llama with norms stored as 1 + weight, scaled embeddings and gated GELU.

Gemma 2: norms on either side of both blocks, a window in every other layer, soft caps on scores and logits.
Gemma 3: q and k normed, local layers that turn at their own speed; alone or as the text part of a seeing model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import Family
from bloomery.families.llama import NAMES, attention, model
from bloomery.families.reader import ACTIVATIONS, Reader, defaults
from bloomery.families.rope import read
from bloomery.families.window import windows
from bloomery.spec import Layer, Mlp, Model, Norm, Rope

GEMMA = defaults(
    vocab=256000,
    hidden=3072,
    mlp=24576,
    layers=28,
    heads=16,
    kv_heads=16,
    context=8192,
    tied=True,
    head_dim=256,
)
GEMMA2 = GEMMA | defaults(
    hidden=2304,
    mlp=9216,
    layers=26,
    heads=8,
    kv_heads=4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
)
GEMMA3 = GEMMA2 | defaults(
    vocab=262208, context=131072, final_logit_softcapping=None, attn_logit_softcapping=None
)
SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA2_NAMES = replace(NAMES, extra={**NAMES.extra, **SANDWICH})
# The text part of a model that also sees: its vision tower and projector stay unread.
TEXT_NAMES = replace(
    GEMMA2_NAMES,
    embed="language_model.model.embed_tokens",
    layer="language_model.model.layers.{i}.",
    final_norm="language_model.model.norm",
    head="language_model.lm_head",
    prefixes=("language_model.model.", "model.language_model.", "model.", ""),
    ignored=("*vision_tower.*", "*multi_modal_projector.*"),
)


def norm_of(c: Reader) -> Norm:
    return Norm("rms", c.number("rms_norm_eps", 1e-6), unit_offset=True)


def around(c: Reader, layers: list[Layer]) -> Model:
    return model(
        c,
        layers,
        final_norm=norm_of(c),
        embed_scale=c.size("hidden_size") ** 0.5,
        logit_softcap=c.optional_number("final_logit_softcapping"),
    )


def gemma(c: Reader) -> Model:
    c.must("use_bidirectional_attention", False)
    # Gemma's first files say gelu and mean its tanh form.
    activation = c.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    mlp = Mlp(c.size("intermediate_size"), activation)
    norm = norm_of(c)
    return around(c, [Layer(attention(c), mlp, attn_norm=norm, mlp_norm=norm)] * len(c.layers()))


def sandwich(c: Reader, **changes: Any) -> Layer:
    """A layer with a norm on either side of both blocks."""
    c.must("use_bidirectional_attention", False)
    norm = norm_of(c)
    mlp = Mlp(c.size("intermediate_size"), c.activation("hidden_activation", "gelu_pytorch_tanh"))
    scale = c.size("query_pre_attn_scalar") ** -0.5
    softcap = c.optional_number("attn_logit_softcapping")
    return Layer(attention(c, scale=scale, softcap=softcap, **changes), mlp, norm, norm, norm, norm)


def gemma2(c: Reader) -> Model:
    return around(c, [sandwich(c, window=window) for window in windows(c, lambda i: i % 2 == 0)])


def gemma3_text(c: Reader) -> Model:
    pattern = c.size("sliding_window_pattern", 6)
    sizes = windows(c, lambda i: (i + 1) % pattern != 0)
    return around(
        c,
        [
            sandwich(c, window=size, qk_norm=norm_of(c), position=position(c, size))
            for size in sizes
        ],
    )


def position(c: Reader, window: int | None) -> Rope:
    """Local layers turn by their own theta and are never stretched by the older files' rope_scaling."""
    nested = c.under("rope_parameters")
    stretched = c.under("rope_scaling")
    unknown = sorted(set(nested.values) - {"sliding_attention", "full_attention"})
    if unknown:
        raise nested.wrong(
            unknown[0], "is not known: sliding_attention and full_attention have one object each"
        )
    if window is not None:
        return read(
            c,
            nested.under("sliding_attention"),
            c.head_dim(),
            c.number("rope_local_base_freq", 1e4),
        )
    scaling = stretched if stretched.values else nested.under("full_attention")
    return read(c, scaling, c.head_dim(), c.number("rope_theta", 1e6))


def gemma3(c: Reader) -> Model:
    text = c.under("text_config", GEMMA3)
    text.must("model_type", "gemma3_text")
    model = gemma3_text(text)
    return replace(model, tied=c.flag("tie_word_embeddings", model.tied))


FAMILIES = {
    "gemma": Family(gemma, NAMES, GEMMA),
    "gemma2": Family(gemma2, GEMMA2_NAMES, GEMMA2),
    "gemma3_text": Family(gemma3_text, GEMMA2_NAMES, GEMMA3),
    "gemma3": Family(gemma3, TEXT_NAMES),
}

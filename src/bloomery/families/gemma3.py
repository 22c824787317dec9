"""Gemma 3: q and k normed, local layers that turn at their own speed; alone or as the text part of a seeing model."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.gemma import around, norm_of
from bloomery.families.gemma2 import GEMMA2, GEMMA2_NAMES, sandwich
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import read
from bloomery.families.window import windows
from bloomery.spec import Model, Rope

GEMMA3 = GEMMA2 | defaults(vocab=262208, context=131072, final_logit_softcapping=None, attn_logit_softcapping=None)
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


def gemma3_text(c: Reader) -> Model:
    pattern = c.size("sliding_window_pattern", 6)
    sizes = windows(c, lambda i: (i + 1) % pattern != 0)
    return around(c, [sandwich(c, window=size, qk_norm=norm_of(c), position=position(c, size)) for size in sizes])


def position(c: Reader, window: int | None) -> Rope:
    """Local layers turn by their own theta and are never stretched by the older files' rope_scaling."""
    nested, stretched = c.under("rope_parameters"), c.under("rope_scaling")
    unknown = sorted(set(nested.values) - {"sliding_attention", "full_attention"})
    if unknown:
        raise nested.wrong(unknown[0], "is not known: sliding_attention and full_attention have one object each")
    if window is not None:
        return read(c, nested.under("sliding_attention"), c.head_dim(), c.number("rope_local_base_freq", 1e4))
    scaling = stretched if stretched.values else nested.under("full_attention")
    return read(c, scaling, c.head_dim(), c.number("rope_theta", 1e6))


def gemma3(c: Reader) -> Model:
    text = c.under("text_config", GEMMA3)
    text.must("model_type", "gemma3_text")
    model = gemma3_text(text)
    return replace(model, tied=c.flag("tie_word_embeddings", model.tied))


FAMILIES = {"gemma3_text": Family(gemma3_text, GEMMA2_NAMES, GEMMA3), "gemma3": Family(gemma3, TEXT_NAMES)}

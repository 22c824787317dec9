"""The text part of vision models: where config.json and the checkpoint have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bloomery.families.reader import ConfigReader
from bloomery.spec import ModelSpec, TensorNames

# How published checkpoints name the text part of a vision model; the text model itself is "model.".
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
OTHER_HEADS = ("language_model.lm_head", "model.language_model.lm_head", "model.lm_head")
VISION = ("visual.*", "model.visual.*", "*vision_tower.*", "*multi_modal_projector.*")

MROPE_KEYS = {"mrope_section", "mrope_interleaved"}

# model_type of text_config -> how it is read, and the values of keys it leaves out.
TextReaders = Mapping[str, tuple[Callable[[ConfigReader], ModelSpec], Mapping[str, Any]]]


def text_names(names: TensorNames) -> TensorNames:
    """Return the names of a text model as those of a vision model's text part."""
    return replace(names, prefixes=PREFIXES, other_heads=OTHER_HEADS, vision=VISION)


def flatten_mrope(value: Any) -> Any:
    """Return rope parameters without the sections of mrope; any other value is returned as it is.

    Sections of the frequencies rotate by the time, the row and the column of a patch. In text the
    three are equal, so the rope is an ordinary one.
    """
    if not isinstance(value, Mapping) or not MROPE_KEYS & value.keys():
        return value
    rope = {key: entry for key, entry in value.items() if key not in MROPE_KEYS}
    for key in ("rope_type", "type"):
        if rope.get(key) == "mrope":
            rope[key] = "default"
    return rope


def read_text_part(config: ConfigReader, readers: TextReaders) -> ModelSpec:
    """Read text_config. In older files its keys are beside those of the vision part.

    A text_config without a model_type, and older files, are read as the first of `readers`.
    """
    first_type = next(iter(readers))
    text = config
    text_type = first_type
    if config.get("text_config") is not None:
        text_type = config.section("text_config").choice(
            "model_type", {name: name for name in readers}, first_type
        )
        text = config.section("text_config")
    text.values = {key: flatten_mrope(value) for key, value in text.values.items()}
    read_model, defaults = readers[text_type]
    text.defaults = {**defaults, **text.defaults}
    model = read_model(text)
    return replace(model, tied=config.flag("tie_word_embeddings", model.tied))

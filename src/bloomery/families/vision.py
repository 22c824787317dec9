"""The text part of vision models: where config.json and the checkpoint have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.reader import EMPTY, ConfigReader
from bloomery.spec import ModelSpec, TensorNames

# How published checkpoints name the text part of a vision model; the text model itself is "model.".
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
OTHER_HEADS = ("language_model.lm_head", "model.language_model.lm_head", "model.lm_head")
VISION = ("visual.*", "model.visual.*", "*vision_tower.*", "*multi_modal_projector.*")

MROPE_KEYS = {"mrope_section", "mrope_interleaved"}


def build_vision_family(
    text_families: Mapping[str, ModelFamily],
    names: TensorNames,
    defaults: Mapping[str, Any] = EMPTY,
) -> ModelFamily:
    """Return the family of a vision model whose text part is one of these; see read_text_part.

    `names` are those of the text model, with the patterns of the vision part if they are unusual.
    `defaults` are for the keys beside text_config.
    """

    def read_vision_model(config: ConfigReader) -> ModelSpec:
        return read_text_part(config, text_families)

    return ModelFamily(read_vision_model, text_names(names), defaults)


def text_names(names: TensorNames) -> TensorNames:
    """Return the names of a text model as those of a vision model's text part."""
    return replace(names, prefixes=PREFIXES, other_heads=OTHER_HEADS, vision=names.vision or VISION)


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


def read_text_part(config: ConfigReader, families: Mapping[str, ModelFamily]) -> ModelSpec:
    """Read text_config. In older files its keys are beside those of the vision part.

    A text_config without a model_type, and older files, are read as the first of `families`.
    """
    first_type = next(iter(families))
    text = config
    text_type = first_type
    if config.get("text_config") is not None:
        text_type = config.section("text_config").choice(
            "model_type", {name: name for name in families}, first_type
        )
        text = config.section("text_config")
    text.values = {key: flatten_mrope(value) for key, value in text.values.items()}
    family = families[text_type]
    text.defaults = {**family.defaults, **text.defaults}
    model = family.read_model(text)
    return replace(model, tied=config.flag("tie_word_embeddings", model.tied))

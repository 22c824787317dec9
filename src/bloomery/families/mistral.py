"""Mistral: a Llama that looks through a sliding window."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Layer, Model

MISTRAL = DEFAULTS | defaults(mlp=14336, kv_heads=8, context=131072, sliding_window=4096)


def layers(c: Reader) -> list[Layer]:
    return [layer(c, window=size) for size in windows(c, lambda i: c.get("sliding_window") is not None)]


def mistral(c: Reader) -> Model:
    return model(c, layers(c))


FAMILIES = {"mistral": Family(mistral, NAMES, MISTRAL)}

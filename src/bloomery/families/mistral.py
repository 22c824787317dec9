"""Mistral: a Llama with a sliding window. Ministral: a Mistral whose layers may differ in it."""

from __future__ import annotations

from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec

MISTRAL = DEFAULTS | defaults(mlp=14336, kv_heads=8, context=131072, sliding_window=4096)


def read_window_layers(config: ConfigReader, **changes: Any) -> list[LayerSpec]:
    """Read the layers; keywords go to their attention."""
    windows = read_layer_windows(config)
    return [read_layer(config, window=window, **changes) for window in windows]


def read_mistral(config: ConfigReader) -> ModelSpec:
    return read_model(config, read_window_layers(config))


FAMILIES = {
    "mistral": ModelFamily(read_mistral, NAMES, MISTRAL),
    "ministral": ModelFamily(read_mistral, NAMES, MISTRAL),
}

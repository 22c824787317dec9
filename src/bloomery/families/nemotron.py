"""Nemotron: an ungated MLP with squared ReLU, partial rope, layer norms stored as weight - 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_mlp, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

UNGATED_NAMES = replace(NAMES, mlp_up="mlp.up_proj")
NEMOTRON = (
    DEFAULTS
    | defaults(vocab=256000, hidden=6144, mlp=24576, heads=48, context=4096, hidden_act="relu2")
    | defaults(partial_rotary_factor=0.5)
)


def read_ungated_layer(config: ConfigReader, **changes: Any) -> LayerSpec:
    layer = read_layer(config, **changes)
    return replace(layer, mlp=replace(read_mlp(config), gated=False))


def read_nemotron(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("layer", config.number("norm_eps", 1e-5), bias=True, unit_offset=True)
    position = read_rope(config, config.head_dim(), partial=True)
    layer = read_ungated_layer(config, position=position)
    layer = replace(layer, attn_norm=norm, mlp_norm=norm)
    return read_model(config, [layer] * len(config.layers()), final_norm=norm)


FAMILIES = {"nemotron": ModelFamily(read_nemotron, UNGATED_NAMES, NEMOTRON)}

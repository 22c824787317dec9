"""Families with an ungated MLP. Nemotron: squared ReLU, partial rope, and layer norms stored as
1 + weight. Arcee: a Llama with squared ReLU. Apertus: xIELU, and norms on q and k per head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.llama import DEFAULTS, NAMES, read_layer, read_mlp, read_model
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

UNGATED_NAMES = replace(NAMES, mlp_up="mlp.up_proj")
NEMOTRON = (
    DEFAULTS
    | defaults(vocab=256000, hidden=6144, mlp=24576, heads=48, context=4096, hidden_act="relu2")
    | defaults(partial_rotary_factor=0.5)
)
ARCEE = DEFAULTS | defaults(
    hidden=2560, mlp=18432, context=4096, hidden_act="relu2", rms_norm_eps=1e-5
)
APERTUS = (
    DEFAULTS
    | defaults(vocab=131072, mlp=14336, context=65536, hidden_act="xielu", rms_norm_eps=1e-5)
    | defaults(rope_theta=12e6)
    | defaults(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    )
)
APERTUS_NAMES = replace(
    UNGATED_NAMES,
    extra={
        **NAMES.extra,
        "attn_norm": "attention_layernorm",
        "mlp_norm": "feedforward_layernorm",
        "xielu_alpha_p": "mlp.act_fn.alpha_p",
        "xielu_alpha_n": "mlp.act_fn.alpha_n",
    },
    ignored=(*NAMES.ignored, "*.mlp.act_fn.beta", "*.mlp.act_fn.eps"),  # constants
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


def read_arcee(config: ConfigReader) -> ModelSpec:
    return read_model(config, [read_ungated_layer(config)] * len(config.layers()))


def read_apertus(config: ConfigReader) -> ModelSpec:
    config.require("qk_norm", True)
    config.require("post_norm", False)
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    layer = read_ungated_layer(config, qk_norm=norm)
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {
    "nemotron": ModelFamily(read_nemotron, UNGATED_NAMES, NEMOTRON),
    "arcee": ModelFamily(read_arcee, UNGATED_NAMES, ARCEE),
    "apertus": ModelFamily(read_apertus, APERTUS_NAMES, APERTUS),
}

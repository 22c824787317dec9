"""Apertus: a Llama with norms on q and k per head, whose MLP is ungated, with xIELU."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.nemotron import UNGATED_NAMES, read_ungated_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import ModelSpec, NormSpec

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


def read_apertus(config: ConfigReader) -> ModelSpec:
    config.require("qk_norm", True)
    config.require("post_norm", False)
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    layer = read_ungated_layer(config, qk_norm=norm)
    return read_model(config, [layer] * len(config.layers()))


FAMILIES = {"apertus": ModelFamily(read_apertus, APERTUS_NAMES, APERTUS)}

"""Phi 1 and 2: parallel blocks after one norm, partial rope, biases everywhere, head included."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

PHI_NAMES = replace(
    NAMES,
    final_norm="model.final_layernorm",
    attn_out="self_attn.dense",
    mlp_up="mlp.fc1",
    mlp_down="mlp.fc2",
    extra={
        "attn_norm": "input_layernorm",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
    },
)
PHI = DEFAULTS | defaults(
    vocab=51200, hidden=2048, mlp=8192, layers=24, hidden_act="gelu_new", partial_rotary_factor=0.5
)


def read_phi(config: ConfigReader) -> ModelSpec:
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    attention = read_attention(
        config,
        position=read_rope(config, config.head_dim(), partial=True),
        bias=True,
        out_bias=True,
        qk_norm=norm if config.flag("qk_layernorm", False) else None,
    )
    layer = LayerSpec(attention, read_ungated_mlp(config), attn_norm=norm, parallel=True)
    layers = [layer] * len(config.layers())
    return read_model(config, layers, final_norm=norm, head_bias=True)


FAMILIES = {"phi": ModelFamily(read_phi, PHI_NAMES, PHI)}

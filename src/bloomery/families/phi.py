"""Phi 1 and 2: both blocks behind one norm, partial rotary, biases everywhere, the head too."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, attention, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.spec import Layer, Mlp, Model, Norm

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


def phi(c: Reader) -> Model:
    norm = Norm("layer", c.number("layer_norm_eps", 1e-5), bias=True)
    block = attention(
        c,
        position=rope(c, c.head_dim(), partial=True),
        bias=True,
        out_bias=True,
        qk_norm=norm if c.flag("qk_layernorm", False) else None,
    )
    mlp = Mlp(c.size("intermediate_size"), c.activation("hidden_act"), gated=False, bias=True)
    layers = [Layer(block, mlp, attn_norm=norm, parallel=True)] * len(c.layers())
    return model(c, layers, final_norm=norm, head_bias=True)


FAMILIES = {"phi": Family(phi, PHI_NAMES, PHI)}

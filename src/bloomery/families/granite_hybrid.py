"""Granite 4: Mamba-2 in most layers, attention in the others (without positions in most models),
Granite's multipliers, and experts beside a shared expert. Models without experts have only that.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_mlp
from bloomery.families.granite import build_granite, read_scaled_layer
from bloomery.families.granitemoe import GRANITE_MOE, GRANITE_MOE_NAMES
from bloomery.families.moe import read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import (
    MAMBA2,
    mamba_names,
    put_recurrent,
    read_mamba2,
    read_recurrent_layers,
)
from bloomery.families.rope import read_rope
from bloomery.spec import MlpSpec, ModelSpec, MoeSpec, RouterSpec

GRANITE_HYBRID_NAMES = mamba_names(
    replace(
        GRANITE_MOE_NAMES,
        mlp_up=GRANITE_MOE_NAMES.shared_up,
        mlp_down=GRANITE_MOE_NAMES.shared_down,
    )
)
GRANITE_HYBRID = GRANITE_MOE | MAMBA2 | defaults(shared_intermediate_size=1024)
HAS_ROPE = {"rope": True, "nope": False}


def read_hybrid_mlp(config: ConfigReader) -> MlpSpec | MoeSpec:
    shared = read_mlp(config, "shared_intermediate_size")
    if not config.integer("num_experts", 0):
        return shared
    router = RouterSpec(score_chosen_only=True)
    return read_experts(config, router, "intermediate_size", shared=shared)


def read_granite_hybrid(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", "silu")
    rope = read_rope(config, config.head_dim())
    position = rope if config.choice("position_embedding_type", HAS_ROPE, "nope") else None
    layer = replace(read_scaled_layer(config, position=position), mlp=read_hybrid_mlp(config))
    is_recurrent = read_recurrent_layers(config, lambda i: True)
    return build_granite(config, put_recurrent(layer, read_mamba2(config), is_recurrent))


FAMILIES = {
    "granitemoehybrid": ModelFamily(read_granite_hybrid, GRANITE_HYBRID_NAMES, GRANITE_HYBRID)
}

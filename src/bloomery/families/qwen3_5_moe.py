"""Qwen3.5 to 3.8 with experts (35B-A3B): Qwen3.5's layers, with many experts beside a gated shared
expert in each.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.qwen2_moe import MOE_NAMES, read_gated_moe
from bloomery.families.qwen3_5 import QWEN3_5, SPLIT, build_hybrid, read_hybrid_layers
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import delta_net_names
from bloomery.families.vision import build_vision_family
from bloomery.spec import ModelSpec

QWEN3_5_MOE = (
    QWEN3_5
    | defaults(hidden=2048, layers=40, kv_heads=2, num_experts=256, num_experts_per_tok=8)
    | defaults(moe_intermediate_size=512, shared_expert_intermediate_size=512)
)
QWEN3_5_MOE_NAMES = delta_net_names(MOE_NAMES, SPLIT)


def read_qwen3_5_moe(config: ConfigReader) -> ModelSpec:
    config.require("mlp_only_layers", [])
    moe = read_gated_moe(config)
    moe = replace(moe, router=replace(moe.router, normalize=True))
    layers = [replace(layer, mlp=moe) for layer in read_hybrid_layers(config)]
    return build_hybrid(config, layers)


TEXT = {"qwen3_5_moe_text": ModelFamily(read_qwen3_5_moe, QWEN3_5_MOE_NAMES, QWEN3_5_MOE)}
FAMILIES = TEXT | {
    "qwen3_5_moe": build_vision_family(TEXT, QWEN3_5_MOE_NAMES, defaults(tied=False))
}

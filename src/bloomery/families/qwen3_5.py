"""Qwen3.5 to 3.8: a gated delta net in three of four layers, gated attention in the others, and
norms stored as weight - 1. Most checkpoints are vision models, which are served as text.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import NAMES
from bloomery.families.qwen2 import QWEN
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import (
    delta_net_names,
    put_recurrent,
    read_delta_net,
    read_recurrent_layers,
)
from bloomery.families.rope import read_rope
from bloomery.families.vision import MROPE_KEYS, build_vision_family
from bloomery.spec import AttentionGateSpec, LayerSpec, ModelSpec, NormSpec, SplitTensors

HYBRID = (
    defaults(head_dim=256, partial_rotary_factor=0.25, linear_num_key_heads=16)
    | defaults(linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
    | defaults(linear_conv_kernel_dim=4)
)
QWEN3_5 = QWEN | HYBRID | defaults(vocab=248320, mlp=12288, heads=16, kv_heads=4)
PROJECTIONS = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
SPLIT = SplitTensors(PROJECTIONS, parts=(3, 1, 1, 1))
QWEN3_5_NAMES = delta_net_names(NAMES, SPLIT)


def read_hybrid_layers(config: ConfigReader) -> list[LayerSpec]:
    config.require("attn_output_gate", True)
    config.require("hidden_act", "silu")
    norm = NormSpec("rms", config.number("rms_norm_eps"), unit_offset=True)
    rope = read_rope(config, config.head_dim(), partial=True, other_keys=tuple(MROPE_KEYS))
    layer = read_layer(config, position=rope, qk_norm=norm, gate=AttentionGateSpec("packed"))
    layer = replace(layer, attn_norm=norm, mlp_norm=norm)
    interval = config.size("full_attention_interval", 4)
    is_recurrent = read_recurrent_layers(config, lambda i: (i + 1) % interval != 0)
    return put_recurrent(layer, read_delta_net(config), is_recurrent)


def build_hybrid(config: ConfigReader, layers: list[LayerSpec]) -> ModelSpec:
    final_norm = NormSpec("rms", config.number("rms_norm_eps"), unit_offset=True)
    return read_model(config, layers, final_norm=final_norm)


def read_qwen3_5(config: ConfigReader) -> ModelSpec:
    config.require("mlp_only_layers", [])
    return build_hybrid(config, read_hybrid_layers(config))


TEXT = {"qwen3_5_text": ModelFamily(read_qwen3_5, QWEN3_5_NAMES, QWEN3_5)}
FAMILIES = TEXT | {"qwen3_5": build_vision_family(TEXT, QWEN3_5_NAMES, defaults(tied=False))}

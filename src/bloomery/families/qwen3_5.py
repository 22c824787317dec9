"""Qwen3.5 to 3.8: a gated delta net in three of four layers, gated attention in the others, and
norms stored as weight - 1. Most checkpoints are vision models, which are served as text.
Qwen3-Next: the same with experts, and input projections fused by head.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.llama import NAMES, read_layer, read_mlp, read_model
from bloomery.families.qwen2 import MOE_NAMES, QWEN, QWEN2_MOE, mix_dense_and_moe, read_moe
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import MTP, put_recurrent, read_delta_net, read_recurrent_layers
from bloomery.families.rope import read_rope
from bloomery.families.vision import MROPE_KEYS, read_text_part, text_names
from bloomery.spec import (
    AttentionGateSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    SplitTensors,
    TensorNames,
)

HYBRID = (
    defaults(head_dim=256, partial_rotary_factor=0.25, linear_num_key_heads=16)
    | defaults(linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
    | defaults(linear_conv_kernel_dim=4)
)
QWEN3_5 = QWEN | HYBRID | defaults(vocab=248320, mlp=12288, heads=16, kv_heads=4)
QWEN3_5_MOE = (
    QWEN3_5
    | defaults(hidden=2048, layers=40, kv_heads=2, num_experts=256, num_experts_per_tok=8)
    | defaults(moe_intermediate_size=512, shared_expert_intermediate_size=512)
)
QWEN3_NEXT = (
    QWEN2_MOE
    | HYBRID
    | defaults(layers=48, kv_heads=2, num_experts=512, num_experts_per_tok=10)
    | defaults(moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True)
)
PROJECTIONS = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
SPLIT = SplitTensors(PROJECTIONS, parts=(3, 1, 1, 1))
FUSED_BY_HEAD = SplitTensors(
    ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), parts=(4, 2), grouped=(True, True)
)


def delta_net_names(names: TensorNames, recurrent_in: SplitTensors) -> TensorNames:
    """Add the tensors of a gated delta net."""
    return replace(
        names,
        recurrent_in=recurrent_in,
        recurrent_out="linear_attn.out_proj",
        recurrent_conv="linear_attn.conv1d",
        extra={
            **names.extra,
            "recurrent_norm": "linear_attn.norm",
            "A_log": "linear_attn.A_log",
            "dt_bias": "linear_attn.dt_bias",
        },
        ignored=(*names.ignored, *MTP),
    )


def read_hybrid_layers(config: ConfigReader) -> list[LayerSpec]:
    config.require("attn_output_gate", True)
    norm = NormSpec("rms", config.number("rms_norm_eps"), unit_offset=True)
    rope = read_rope(config, config.head_dim(), partial=True, other_keys=tuple(MROPE_KEYS))
    layer = read_layer(config, position=rope, qk_norm=norm, gate=AttentionGateSpec("packed"))
    layer = replace(layer, attn_norm=norm, mlp_norm=norm)
    interval = config.size("full_attention_interval", 4)
    is_recurrent = read_recurrent_layers(config, lambda i: (i + 1) % interval != 0)
    return put_recurrent(layer, read_delta_net(config), is_recurrent)


def read_shared_moe(config: ConfigReader) -> MoeSpec:
    shared = read_mlp(config, "shared_expert_intermediate_size")
    return replace(read_moe(config), shared=shared, shared_gate=True)


def read_hybrid(config: ConfigReader, layers: list[LayerSpec]) -> ModelSpec:
    final_norm = NormSpec("rms", config.number("rms_norm_eps"), unit_offset=True)
    return read_model(config, layers, final_norm=final_norm)


def read_qwen3_5(config: ConfigReader) -> ModelSpec:
    config.require("mlp_only_layers", [])
    return read_hybrid(config, read_hybrid_layers(config))


def read_qwen3_5_moe(config: ConfigReader) -> ModelSpec:
    config.require("mlp_only_layers", [])
    moe = read_shared_moe(config)
    moe = replace(moe, router=replace(moe.router, normalize=True))
    return read_hybrid(config, [replace(layer, mlp=moe) for layer in read_hybrid_layers(config)])


def read_qwen3_next(config: ConfigReader) -> ModelSpec:
    layers = read_hybrid_layers(config)
    return read_hybrid(config, mix_dense_and_moe(config, layers, read_shared_moe(config)))


def read_qwen3_5_vision(config: ConfigReader) -> ModelSpec:
    return read_text_part(config, {"qwen3_5_text": (read_qwen3_5, QWEN3_5)})


def read_qwen3_5_moe_vision(config: ConfigReader) -> ModelSpec:
    return read_text_part(config, {"qwen3_5_moe_text": (read_qwen3_5_moe, QWEN3_5_MOE)})


DENSE_NAMES = delta_net_names(NAMES, SPLIT)
SPARSE_NAMES = delta_net_names(MOE_NAMES, SPLIT)
UNTIED = defaults(tied=False)
FAMILIES = {
    "qwen3_5_text": ModelFamily(read_qwen3_5, DENSE_NAMES, QWEN3_5),
    "qwen3_5_moe_text": ModelFamily(read_qwen3_5_moe, SPARSE_NAMES, QWEN3_5_MOE),
    "qwen3_5": ModelFamily(read_qwen3_5_vision, text_names(DENSE_NAMES), UNTIED),
    "qwen3_5_moe": ModelFamily(read_qwen3_5_moe_vision, text_names(SPARSE_NAMES), UNTIED),
    "qwen3_next": ModelFamily(
        read_qwen3_next, delta_net_names(MOE_NAMES, FUSED_BY_HEAD), QWEN3_NEXT
    ),
}

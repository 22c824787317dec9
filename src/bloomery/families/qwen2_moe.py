"""Qwen2-MoE: a Qwen2 with many small experts beside a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_mlp, read_model
from bloomery.families.moe import build_moe_names, put_experts, read_experts
from bloomery.families.qwen2 import QWEN, uses_window
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec, MoeSpec, RouterSpec

QWEN2_MOE = (
    QWEN
    | defaults(hidden=2048, mlp=5632, layers=24, heads=16, kv_heads=16, decoder_sparse_step=1)
    | defaults(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    | defaults(shared_expert_intermediate_size=5632)
)
MOE_NAMES = build_moe_names("mlp.gate", "mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def read_moe(config: ConfigReader) -> MoeSpec:
    return read_experts(config, RouterSpec(normalize=config.flag("norm_topk_prob", False)))


def read_gated_moe(config: ConfigReader) -> MoeSpec:
    """Read experts beside a gated shared expert."""
    shared = read_mlp(config, "shared_expert_intermediate_size")
    return replace(read_moe(config), shared=shared, shared_gate=True)


def mix_dense_and_moe(
    config: ConfigReader, layers: list[LayerSpec], moe: MoeSpec
) -> list[LayerSpec]:
    """Put experts into every decoder_sparse_step-th layer that is not in mlp_only_layers."""
    step = config.size("decoder_sparse_step")
    dense_layers = config.list_of("mlp_only_layers", int)
    is_sparse = [(i + 1) % step == 0 and i not in dense_layers for i in config.layers()]
    return put_experts(layers, moe, is_sparse)


def read_qwen2_moe(config: ConfigReader) -> ModelSpec:
    bias = config.flag("qkv_bias", True)
    enabled = uses_window(config)
    end = config.integer("max_window_layers")
    windows = read_layer_windows(config, lambda i: enabled and i % 2 == 0 and i < end)
    layers = [read_layer(config, bias=bias, out_bias=False, window=window) for window in windows]
    return read_model(config, mix_dense_and_moe(config, layers, read_gated_moe(config)))


FAMILIES = {
    "qwen2_moe": ModelFamily(read_qwen2_moe, MOE_NAMES, QWEN2_MOE),
}

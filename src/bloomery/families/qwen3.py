"""Qwen3: a stated head_dim, norms on q and k per head; its MoE has no shared expert."""

from __future__ import annotations

from typing import Any

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import NAMES
from bloomery.families.qwen2 import QWEN, read_upper_windows, uses_window
from bloomery.families.qwen2_moe import MOE_NAMES, QWEN2_MOE, mix_dense_and_moe, read_moe
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec, NormSpec

QWEN3 = QWEN | {"head_dim": 128}
QWEN3_MOE = (
    QWEN2_MOE
    | defaults(mlp=6144, heads=32, kv_heads=4, num_experts=128, num_experts_per_tok=8)
    | defaults(moe_intermediate_size=768)
)


def read_qk_norm_layer(config: ConfigReader, **changes: Any) -> LayerSpec:
    qk_norm = NormSpec("rms", config.number("rms_norm_eps"))
    return read_layer(config, qk_norm=qk_norm, **changes)


def read_qwen3(config: ConfigReader) -> ModelSpec:
    windows = read_upper_windows(config)
    layers = [read_qk_norm_layer(config, window=window) for window in windows]
    return read_model(config, layers)


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    windows = read_layer_windows(config, lambda i: uses_window(config))
    layers = [read_qk_norm_layer(config, window=window) for window in windows]
    return read_model(config, mix_dense_and_moe(config, layers, read_moe(config)))


FAMILIES = {
    "qwen3": ModelFamily(read_qwen3, NAMES, QWEN3),
    "qwen3_moe": ModelFamily(read_qwen3_moe, MOE_NAMES, QWEN3_MOE),
}

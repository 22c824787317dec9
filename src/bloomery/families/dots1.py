"""dots.llm1: a Qwen3 with DeepSeek's router, shared experts and dense first layers."""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.glm4_moe import GLM4_MOE_NAMES
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import put_experts, read_experts, read_grouped_router
from bloomery.families.qwen3 import read_qk_norm_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec

DOTS1 = (
    DEFAULTS
    | defaults(vocab=152064, hidden=4608, mlp=10944, layers=62, kv_heads=32)
    | defaults(moe_intermediate_size=1408, norm_topk_prob=False, sliding_window=4096)
    | defaults(max_window_layers=62)
)


def read_dots1(config: ConfigReader) -> ModelSpec:
    # The published files give the method of balancing here. The scores are sigmoids.
    config.choice("scoring_func", {"noaux_tc": "sigmoid", "sigmoid": "sigmoid"}, "sigmoid")
    has_windows = config.get("sliding_window") is not None
    first_window = config.integer("max_window_layers", 0)
    windows = read_layer_windows(config, lambda i: has_windows and i >= first_window)
    layers = [read_qk_norm_layer(config, window=window) for window in windows]
    moe = read_experts(config, read_grouped_router(config))
    first_moe = config.integer("first_k_dense_replace", 0)
    is_sparse = [i >= first_moe for i in config.layers()]
    return read_model(config, put_experts(layers, moe, is_sparse))


FAMILIES = {"dots1": ModelFamily(read_dots1, GLM4_MOE_NAMES, DOTS1)}

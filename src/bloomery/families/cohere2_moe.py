"""Cohere's Command with experts: Command R7B's parallel blocks, with shared experts that are added
to the others or averaged with them, and dense first layers.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.cohere import COHERE2
from bloomery.families.dense import read_attention, read_mlp, read_model
from bloomery.families.moe import build_moe_names, put_experts, read_experts, read_sparse_layers
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import LayerSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec

COHERE2_MOE_NAMES = build_moe_names("mlp.gate", "mlp.shared_experts")
COHERE2_MOE = COHERE2 | defaults(
    head_dim=128, rms_norm_eps=None, num_experts=8, num_experts_per_tok=2
)
# The factor of the experts and of the shared expert.
COMBINATIONS = {"average": 0.5, "sum": 1.0}


def read_norm(config: ConfigReader) -> NormSpec:
    if config.get("rms_norm_eps") is None:
        return NormSpec("layer", config.number("layer_norm_eps", 1e-5))
    return NormSpec("rms", config.number("rms_norm_eps"))


def read_cohere_experts(config: ConfigReader) -> MoeSpec:
    routers = {
        "softmax": RouterSpec(score_chosen_only=True),
        "sigmoid": RouterSpec(score="sigmoid", normalize=config.flag("norm_topk_prob", True)),
    }
    router = config.choice("expert_selection_fn", routers, "softmax")
    moe = read_experts(config, router, "intermediate_size")
    factor = config.choice("shared_expert_combination_strategy", COMBINATIONS, "average")
    if moe.shared is None:
        return moe
    return replace(moe, router=replace(router, scale=factor), shared_scale=factor)


def read_cohere2_moe(config: ConfigReader) -> ModelSpec:
    config.require("use_parallel_block", True)
    config.require("use_qk_norm", False)
    num_dense = config.integer("first_k_dense_replace", 0)
    dense_period = config.size("prefix_dense_sliding_window_pattern", 1)
    period = config.size("sliding_window_pattern", 4)

    def has_window(i: int) -> bool:
        if i < num_dense:
            return (i + 1) % dense_period != 0
        return (i - num_dense + 1) % period != 0

    norm = read_norm(config)
    rope = read_rope(config, config.head_dim(), interleaved=True)
    mlp = read_mlp(config)
    mlp = replace(mlp, size=config.size("prefix_dense_intermediate_size", mlp.size))
    is_sparse = read_sparse_layers(config, lambda i: i >= num_dense)
    layers = []
    for i, window in enumerate(read_layer_windows(config, has_window)):
        # Layers with full attention have no position, but for dense layers that all have it.
        has_rope = window is not None or (not is_sparse[i] and dense_period == 1)
        attention = read_attention(config, window=window, position=rope if has_rope else None)
        layers.append(LayerSpec(attention, mlp, attn_norm=norm, parallel=True))
    layers = put_experts(layers, read_cohere_experts(config), is_sparse)
    scale = config.number("logit_scale", 1.0)
    return read_model(config, layers, final_norm=norm, logit_scale=scale)


FAMILIES = {"cohere2_moe": ModelFamily(read_cohere2_moe, COHERE2_MOE_NAMES, COHERE2_MOE)}

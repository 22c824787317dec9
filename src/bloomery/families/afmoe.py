"""Arcee's Trinity: gated attention, norms before and after both blocks, rope in layers with a
window only, and a sigmoid router with a correction bias.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import change_attention, read_attention, read_mlp, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import SIGMOID_ROUTER, build_moe_names, put_experts, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import AttentionGateSpec, LayerSpec, ModelSpec, NormSpec

AFMOE_NAMES = build_moe_names(
    "mlp.router.gate",
    "mlp.shared_experts",
    correction_bias="mlp.expert_bias",
    attn_gate="self_attn.gate_proj",
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)
AFMOE = (
    DEFAULTS
    | defaults(vocab=200192, hidden=2048, mlp=6144, heads=16, head_dim=128, context=16384)
    | defaults(rms_norm_eps=1e-5, sliding_window=1024, num_dense_layers=1, num_experts=64)
    | defaults(num_experts_per_tok=6, num_shared_experts=2, moe_intermediate_size=1408)
)


def read_afmoe(config: ConfigReader) -> ModelSpec:
    config.require("score_func", "sigmoid")
    config.require("route_norm", True)
    for groups in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.require(groups, 1)
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    rope = read_rope(config, config.head_dim())
    attention = read_attention(config, position=None, qk_norm=norm, gate=AttentionGateSpec())
    layer = LayerSpec(attention, read_mlp(config), norm, norm, norm, norm)
    period = config.size("global_attn_every_n_layers", 4)
    layers = []
    for window in read_layer_windows(config, lambda i: (i + 1) % period != 0):
        position = None if window is None else rope
        layers.append(change_attention(layer, window=window, position=position))
    router = replace(SIGMOID_ROUTER, scale=config.number("route_scale", 1.0))
    first_moe = config.integer("num_dense_layers", 0)
    is_sparse = [i >= first_moe for i in config.layers()]
    layers = put_experts(layers, read_experts(config, router), is_sparse)
    scale = config.size("hidden_size") ** 0.5 if config.flag("mup_enabled", False) else 1.0
    return read_model(config, layers, embed_scale=scale)


FAMILIES = {"afmoe": ModelFamily(read_afmoe, AFMOE_NAMES, AFMOE)}

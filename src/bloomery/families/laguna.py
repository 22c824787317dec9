"""Poolside's Laguna: gated attention with a number of heads per layer, windows with their own rope,
and a sigmoid router with a correction bias.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_mlp, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import build_moe_names, put_experts, read_experts, read_sparse_layers
from bloomery.families.qwen3 import read_qk_norm_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_layer_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import AttentionGateSpec, ModelSpec, RouterSpec

LAGUNA_NAMES = build_moe_names(
    "mlp.gate",
    "mlp.shared_expert",
    correction_bias="mlp.experts.e_score_correction_bias",
    attn_gate="self_attn.g_proj",
)
LAGUNA = (
    DEFAULTS
    | defaults(vocab=100352, hidden=2048, mlp=8192, layers=40, heads=48, kv_heads=8, head_dim=128)
    | defaults(context=131072, sliding_window=512, num_experts=256, num_experts_per_tok=8)
    | defaults(moe_intermediate_size=512, shared_expert_intermediate_size=512)
    | defaults(
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4},
        }
    )
)
PER_HEAD = AttentionGateSpec(per_head=True, activation="softplus")
PER_ELEMENT = AttentionGateSpec(per_head=False, activation="softplus")
GATES = {
    "per-head": PER_HEAD,
    "per_head": PER_HEAD,
    "per-element": PER_ELEMENT,
    "per_element": PER_ELEMENT,
}


def read_gates(config: ConfigReader) -> tuple[AttentionGateSpec, ...]:
    """Read the gate of each layer."""
    gate = PER_HEAD
    if config.get("gating", True) is not True:
        gate = config.choice("gating", GATES)
    return config.layer_choices("gating_types", GATES, lambda i: gate)


def read_laguna(config: ConfigReader) -> ModelSpec:
    for switch in ("moe_apply_router_weight_on_input", "swa_attention_sink_enabled"):
        config.require(switch, False)
    config.require("norm_topk_prob", True)
    num_heads = config.size("num_attention_heads")
    heads = config.layer_sizes("num_attention_heads_per_layer", num_heads)
    windows = read_layer_windows(config, lambda i: False)
    layers = []
    for num_heads, window, gate in zip(heads, windows, read_gates(config), strict=True):
        position = read_layer_rope(config, window, theta=1e4, local_theta=1e4, partial=True)
        layers.append(
            read_qk_norm_layer(
                config, num_heads=num_heads, window=window, position=position, gate=gate
            )
        )
    router = RouterSpec(
        score="sigmoid",
        correction_bias=True,
        softcap=config.number("moe_router_logit_softcapping", 0.0) or None,
        scale=config.number("moe_routed_scaling_factor", 1.0),
    )
    shared = read_mlp(config, "shared_expert_intermediate_size")
    moe = read_experts(config, router, shared=shared)
    is_sparse = read_sparse_layers(config, lambda i: i > 0)
    return read_model(config, put_experts(layers, moe, is_sparse))


FAMILIES = {"laguna": ModelFamily(read_laguna, LAGUNA_NAMES, LAGUNA)}

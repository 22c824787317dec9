"""Qwen2 and 2.5: a Llama with biases on q, k and v; the MoE adds a gated expert that every token visits."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, mlp, model
from bloomery.families.reader import Reader
from bloomery.families.window import windows
from bloomery.spec import Layer, Model, Moe, Split

QWEN = DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
SPARSE = {"decoder_sparse_step": 1, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN2_MOE = (
    QWEN
    | SPARSE
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
    }
)
MOE_NAMES = replace(
    NAMES,
    extra={**NAMES.extra, "router": "mlp.gate", "shared_gate": "mlp.shared_expert_gate"},
    experts="mlp.experts.{e}.",
    expert_up=Split(("gate_proj", "up_proj")),
    expert_down="down_proj",
    shared_up=Split(("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
    shared_down="mlp.shared_expert.down_proj",
)


def uses_window(c: Reader) -> bool:
    on, window = c.flag("use_sliding_window", False), c.get("sliding_window")
    return on and window is not None


def upper_windows(c: Reader) -> tuple[int | None, ...]:
    """Qwen's rule: layers from max_window_layers on slide, if any do."""
    on, first = uses_window(c), c.whole("max_window_layers")
    return windows(c, lambda i: on and i >= first)


def sparse(c: Reader, i: int, dense: Layer, moe: Moe) -> Layer:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not claim."""
    step = c.size("decoder_sparse_step")
    return dense if i in c.items("mlp_only_layers", int) or (i + 1) % step else replace(dense, mlp=moe)


def qwen2(c: Reader) -> Model:
    return model(c, [layer(c, bias=True, out_bias=False, window=window) for window in upper_windows(c)])


def qwen2_moe(c: Reader) -> Model:
    bias, on, last = c.flag("qkv_bias", True), uses_window(c), c.whole("max_window_layers")
    moe = Moe(
        c.size("num_experts"),
        c.size("num_experts_per_tok"),
        mlp(c, "moe_intermediate_size"),
        renormalize=c.flag("norm_topk_prob", False),
        shared=mlp(c, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    every_other = windows(c, lambda i: on and i % 2 == 0 and i < last)
    dense = (layer(c, bias=bias, out_bias=False, window=window) for window in every_other)
    return model(c, [sparse(c, i, plain, moe) for i, plain in enumerate(dense)])


FAMILIES = {"qwen2": Family(qwen2, NAMES, QWEN), "qwen2_moe": Family(qwen2_moe, MOE_NAMES, QWEN2_MOE)}

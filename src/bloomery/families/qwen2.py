"""Qwen2 and 2.5: a Llama with biases on q, k and v, and windows in its upper layers where switched on. Qwen2-MoE: small
experts behind a router, beside a gated one that every token visits."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, mlp, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Layer, Model, Moe, Split

QWEN = DEFAULTS | defaults(
    vocab=151936, mlp=22016, kv_heads=32, context=32768, sliding_window=4096, max_window_layers=28
)
QWEN2_MOE = QWEN | defaults(
    hidden=2048,
    mlp=5632,
    layers=24,
    heads=16,
    kv_heads=16,
    decoder_sparse_step=1,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
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
    on = c.flag("use_sliding_window", False)
    window = c.get("sliding_window")
    return on and window is not None


def upper_windows(c: Reader) -> tuple[int | None, ...]:
    """Layers from max_window_layers on slide, if any do."""
    on = uses_window(c)
    first = c.whole("max_window_layers")
    return windows(c, lambda i: on and i >= first)


def qwen2(c: Reader) -> Model:
    c.must("use_mrope", False)
    return model(c, [layer(c, bias=True, out_bias=False, window=size) for size in upper_windows(c)])


def experts(c: Reader) -> Moe:
    size = mlp(c, "moe_intermediate_size")
    renormalize = c.flag("norm_topk_prob", False)
    return Moe(c.size("num_experts"), c.size("num_experts_per_tok"), size, renormalize)


def mixed(c: Reader, dense: list[Layer], moe: Moe) -> list[Layer]:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not claim."""
    step = c.size("decoder_sparse_step")
    only = c.items("mlp_only_layers", int)
    return [
        plain if i in only or (i + 1) % step else replace(plain, mlp=moe)
        for i, plain in enumerate(dense)
    ]


def qwen2_moe(c: Reader) -> Model:
    bias = c.flag("qkv_bias", True)
    on = uses_window(c)
    last = c.whole("max_window_layers")
    moe = replace(experts(c), shared=mlp(c, "shared_expert_intermediate_size"), shared_gate=True)
    sizes = windows(c, lambda i: on and i % 2 == 0 and i < last)
    return model(
        c, mixed(c, [layer(c, bias=bias, out_bias=False, window=size) for size in sizes], moe)
    )


FAMILIES = {
    "qwen2": Family(qwen2, NAMES, QWEN),
    "qwen2_moe": Family(qwen2_moe, MOE_NAMES, QWEN2_MOE),
}

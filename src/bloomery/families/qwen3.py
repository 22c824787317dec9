"""Qwen3: heads of a stated width, q and k normed within each; its MoE has no shared expert."""

from __future__ import annotations

from typing import Any

from bloomery.families import Family
from bloomery.families.llama import NAMES, layer, model
from bloomery.families.qwen2 import (
    MOE_NAMES,
    QWEN,
    QWEN2_MOE,
    experts,
    mixed,
    upper_windows,
    uses_window,
)
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Layer, Model, Norm

QWEN3 = QWEN | {"head_dim": 128}
QWEN3_MOE = QWEN2_MOE | defaults(
    mlp=6144,
    heads=32,
    kv_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)


def normed(c: Reader, **changes: Any) -> Layer:
    return layer(c, qk_norm=Norm("rms", c.number("rms_norm_eps")), **changes)


def qwen3(c: Reader) -> Model:
    return model(c, [normed(c, window=size) for size in upper_windows(c)])


def qwen3_moe(c: Reader) -> Model:
    sizes = windows(c, lambda i: uses_window(c))
    return model(c, mixed(c, [normed(c, window=size) for size in sizes], experts(c)))


FAMILIES = {
    "qwen3": Family(qwen3, NAMES, QWEN3),
    "qwen3_moe": Family(qwen3_moe, MOE_NAMES, QWEN3_MOE),
}

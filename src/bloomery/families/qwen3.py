"""Qwen3: heads of a stated width, q and k normed within each; the MoE has no shared expert."""

from __future__ import annotations

from typing import Any

from bloomery.families import Family
from bloomery.families.llama import NAMES, layer, mlp, model
from bloomery.families.qwen2 import MOE_NAMES, QWEN, SPARSE, sparse, upper_windows, uses_window
from bloomery.families.reader import Reader
from bloomery.families.window import windows
from bloomery.spec import Layer, Model, Moe, Norm

QWEN3 = QWEN | {"head_dim": 128}
QWEN3_MOE = (
    QWEN
    | SPARSE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
)


def normed(c: Reader, **changes: Any) -> Layer:
    return layer(c, qk_norm=Norm("rms", c.number("rms_norm_eps")), **changes)


def qwen3(c: Reader) -> Model:
    return model(c, [normed(c, window=window) for window in upper_windows(c)])


def qwen3_moe(c: Reader) -> Model:
    moe = Moe(
        c.size("num_experts"),
        c.size("num_experts_per_tok"),
        mlp(c, "moe_intermediate_size"),
        renormalize=c.flag("norm_topk_prob", False),
    )
    dense = (normed(c, window=window) for window in windows(c, lambda i: uses_window(c)))
    return model(c, [sparse(c, i, plain, moe) for i, plain in enumerate(dense)])


FAMILIES = {"qwen3": Family(qwen3, NAMES, QWEN3), "qwen3_moe": Family(qwen3_moe, MOE_NAMES, QWEN3_MOE)}

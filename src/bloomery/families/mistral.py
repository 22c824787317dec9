"""Mistral: a Llama that looks through a sliding window. Mixtral: one whose MLP is a router over experts."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, mlp, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Layer, Model, Moe, Split

MISTRAL = DEFAULTS | defaults(mlp=14336, kv_heads=8, context=131072, sliding_window=4096)
MIXTRAL = MISTRAL | defaults(
    rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, num_experts=8, num_experts_per_tok=2
)
MIXTRAL_NAMES = replace(
    NAMES,
    extra={**NAMES.extra, "router": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts.{e}.",
    expert_up=Split(("w1", "w3")),
    expert_down="w2",
)


def layers(c: Reader) -> list[Layer]:
    return [
        layer(c, window=size) for size in windows(c, lambda i: c.get("sliding_window") is not None)
    ]


def mistral(c: Reader) -> Model:
    return model(c, layers(c))


def mixtral(c: Reader) -> Model:
    moe = Moe(c.size("num_experts"), c.size("num_experts_per_tok"), mlp(c))
    return model(c, [replace(dense, mlp=moe) for dense in layers(c)])


FAMILIES = {
    "mistral": Family(mistral, NAMES, MISTRAL),
    "mixtral": Family(mixtral, MIXTRAL_NAMES, MIXTRAL),
}

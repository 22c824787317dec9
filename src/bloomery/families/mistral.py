"""Mistral: a Llama that looks through a sliding window. Mixtral: the same, with experts for an MLP."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, mlp, model
from bloomery.families.reader import Reader
from bloomery.families.window import windows
from bloomery.spec import Layer, Model, Moe, Split

MISTRAL = DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MIXTRAL = MISTRAL | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_experts": 8,
}
MIXTRAL_NAMES = replace(
    NAMES,
    extra={**NAMES.extra, "router": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts.{e}.",
    expert_up=Split(("w1", "w3")),
    expert_down="w2",
)


def layers(c: Reader) -> list[Layer]:
    return [layer(c, window=window) for window in windows(c, lambda i: c.get("sliding_window") is not None)]


def mistral(c: Reader) -> Model:
    return model(c, layers(c))


def mixtral(c: Reader) -> Model:
    moe = Moe(c.size("num_experts"), c.size("num_experts_per_tok"), mlp(c))
    return model(c, [replace(plain, mlp=moe) for plain in layers(c)])


FAMILIES = {
    "mistral": Family(mistral, NAMES, MISTRAL),
    "mixtral": Family(mixtral, MIXTRAL_NAMES, MIXTRAL),
}

"""Mixtral: a Mistral whose MLP is a router over experts."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import NAMES, mlp, model
from bloomery.families.mistral import MISTRAL, layers
from bloomery.families.reader import Reader, defaults
from bloomery.spec import Model, Moe, Split

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


def mixtral(c: Reader) -> Model:
    moe = Moe(c.size("num_experts"), c.size("num_experts_per_tok"), mlp(c))
    return model(c, [replace(dense, mlp=moe) for dense in layers(c)])


FAMILIES = {"mixtral": Family(mixtral, MIXTRAL_NAMES, MIXTRAL)}

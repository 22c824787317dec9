"""The attention half of a layer: project, norm and turn q and k, store k and v, attend over the cache, project back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bloomery.attention.base import Backend
from bloomery.layers.linear import Add, Linear, Rotate
from bloomery.layers.norm import Normalize
from bloomery.spec import Attention, Rope

Angles = Mapping[Rope, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Context:
    """What every layer of a forward pass shares."""

    backend: Backend
    plan: Any  # the backend's own, for this step
    slots: torch.Tensor  # [tokens] where the new keys and values go
    angles: Angles  # cos and sin at this step's positions


class AttentionBlock:
    def __init__(
        self, spec: Attention, qkv: Linear, out: Linear, q_norm: Normalize | None = None, k_norm: Normalize | None = None
    ):
        self.spec, self.qkv, self.out, self.q_norm, self.k_norm = spec, qkv, out, q_norm, k_norm

    def __call__(
        self,
        x: torch.Tensor,
        cache: torch.Tensor,
        context: Context,
        before: Normalize | None = None,
        after: Add | None = None,
    ) -> torch.Tensor:
        angles = context.angles[self.spec.position] if isinstance(self.spec.position, Rope) else None
        rotate = Rotate(self.spec, self.q_norm, self.k_norm, angles, cache, context.slots)
        q = self.qkv(x, before, rotate)
        return self.out(context.backend.attend(q, cache, self.spec, context.plan), after=after)

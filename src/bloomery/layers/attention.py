"""The attention half of a layer: project, norm and turn q and k, store k and v, attend over the cache, project back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bloomery.attention.base import Backend
from bloomery.kernels.gemv import Heads, Norm
from bloomery.kernels.store import Turn
from bloomery.layers.linear import Add, Linear, finish
from bloomery.layers.norm import Stream, normalize, value
from bloomery.layout import Layout, spans_heads
from bloomery.spec import Attention, Rope

Angles = Mapping[Rope, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Context:
    """What every layer of a forward pass shares."""

    backend: Backend
    plan: Any  # the backend's own, for this step
    slots: torch.Tensor  # [tokens] where the new keys and values go
    angles: Angles  # cos and sin: at this step's positions, or of all, to be looked up
    positions: torch.Tensor | None  # [tokens] where to look them up
    keep: torch.Tensor | None = (
        None  # in the last layer: the tokens that go on once keys and values are stored
    )

    def kept(self, x: Stream) -> Stream:
        return x if self.keep is None else value(x)[self.keep]


class AttentionBlock:
    def __init__(
        self,
        whole: Attention,
        qkv: Linear,
        out: Linear,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        layout: Layout = Layout(),  # frozen
    ):
        """`whole` is the model's attention; the products have what the layout leaves of it here."""
        spec = self.spec = layout.attention(whole)
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        # A norm over all heads at once, or one with a bias, is not part of the turn.
        self.apart = q_norm is not None and (spec.qk_norm_over == "all" or q_norm.bias is not None)
        normed = (
            whole if spans_heads(whole) else spec
        )  # for such a norm all of q and k are computed here
        self.widths = [
            n * spec.head_dim for n in (normed.num_heads, normed.num_kv_heads, spec.num_kv_heads)
        ]
        self.own = [
            slice(first * spec.head_dim, end * spec.head_dim) for first, end in layout.heads(whole)
        ]

    def __call__(
        self,
        x: Stream,
        cache: torch.Tensor,
        context: Context,
        before: Norm | None = None,
        after: Add | None = None,
    ) -> Stream:
        heads = Heads(cache, context.slots, self._turn(context))
        q = (
            finish(self._normed(self.qkv(x, before)), heads)
            if self.apart
            else self.qkv(x, before, heads)
        )
        attended = context.backend.attend(q, cache, self.spec, context.plan)
        if context.keep is not None:
            attended = attended[context.keep]
        return self.out(attended) if after is None else self.out(attended, None, after)

    def _turn(self, context: Context) -> Turn:
        rope = self.spec.position
        q_norm = self.q_norm
        k_norm = self.k_norm
        angles = context.angles[rope] if isinstance(rope, Rope) else None
        interleaved = isinstance(rope, Rope) and rope.interleaved
        if self.apart or q_norm is None or k_norm is None:
            return Turn(angles, context.positions, interleaved, clip=self.spec.clip)
        weights = (
            None
            if q_norm.weight is None or k_norm.weight is None
            else (q_norm.weight, k_norm.weight)
        )
        return Turn(
            angles, context.positions, interleaved, q_norm.kind, weights, q_norm.eps, self.spec.clip
        )

    def _normed(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split(self.widths, -1)
        if self.spec.qk_norm_over == "all":
            q = normalize(q, self.q_norm)[:, self.own[0]]
            k = normalize(k, self.k_norm)[:, self.own[1]]
            return torch.cat((q, k, v), -1)
        heads = (-1, self.spec.head_dim)
        q = normalize(q.unflatten(-1, heads), self.q_norm).flatten(1)
        return torch.cat((q, normalize(k.unflatten(-1, heads), self.k_norm).flatten(1), v), -1)

"""The attention block of a decoder layer.

It projects to q, k and v, applies the q and k norms and rope, writes k and v to the KV cache,
attends over the cache, and projects back. Only the attention backend knows which tokens belong to
which sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bloomery.attention.base import AttentionBackend
from bloomery.fusion import NormPrologue, QkTransform, QkvEpilogue
from bloomery.layers.linear import (
    AddResidual,
    LinearLayer,
    ResidualStream,
    apply_epilogue,
    apply_norm,
    materialize,
)
from bloomery.layout import TensorParallelLayout, norms_all_heads
from bloomery.native.thread_pool import ThreadPool
from bloomery.spec import AttentionSpec, RopeSpec

RopeCache = Mapping[RopeSpec, tuple[torch.Tensor, torch.Tensor]]  # cos and sin [positions, dim / 2]


@dataclass(frozen=True)
class ForwardContext:
    """The inputs of one forward pass that all layers share."""

    backend: AttentionBackend
    plan: Any  # the backend's plan of this step
    slot_mapping: torch.Tensor  # [tokens]: where the new keys and values go in the KV cache
    rope_cache: RopeCache  # of this step's tokens, or of all positions
    positions: torch.Tensor | None  # [tokens]: rows of the rope cache; None if it is per token
    output_rows: torch.Tensor | None = None  # last layer: the tokens whose states are needed

    def select_outputs(self, x: ResidualStream) -> ResidualStream:
        """Return only the output rows of x."""
        return x if self.output_rows is None else materialize(x)[self.output_rows]


class AttentionBlock:
    """QKV projection, q and k norms, rope, KV cache update, attention and output projection."""

    def __init__(
        self,
        model_spec: AttentionSpec,
        qkv: LinearLayer,
        out: LinearLayer,
        q_norm: NormPrologue | None = None,
        k_norm: NormPrologue | None = None,
        layout: TensorParallelLayout = TensorParallelLayout(),  # noqa: B008 (it is frozen)
        pool: ThreadPool | None = None,
    ):
        """`model_spec` is the attention of the model; `qkv` and `out` hold this rank's part."""
        spec = layout.attention(model_spec)
        self.spec = spec
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.pool = pool
        # The QKV epilogue supports neither a norm over all heads together nor a norm with a bias.
        self.separate_norm = q_norm is not None and (
            spec.qk_norm_over == "all" or q_norm.bias is not None
        )
        # A norm over all heads needs all of q and k on every rank.
        computed = model_spec if norms_all_heads(model_spec) else spec
        num_heads = (computed.num_heads, computed.num_kv_heads, spec.num_kv_heads)
        self.qkv_widths = [count * spec.head_dim for count in num_heads]
        self.own_columns = [
            slice(first * spec.head_dim, end * spec.head_dim)
            for first, end in layout.heads(model_spec)
        ]

    def __call__(
        self,
        x: ResidualStream,
        kv_cache: torch.Tensor,
        context: ForwardContext,
        prologue: NormPrologue | None = None,
        epilogue: AddResidual | None = None,
    ) -> ResidualStream:
        """x [tokens, hidden] -> [tokens, hidden], of the context's output rows only."""
        qkv_epilogue = QkvEpilogue(kv_cache, context.slot_mapping, self._qk_transform(context))
        if self.separate_norm:
            qkv = self._norm_qk(self.qkv(x, prologue))
            q = apply_epilogue(qkv, qkv_epilogue, self.pool)
        else:
            q = self.qkv(x, prologue, qkv_epilogue)
        attended = context.backend.attend(q, kv_cache, self.spec, context.plan)
        if context.output_rows is not None:
            attended = attended[context.output_rows]
        if epilogue is None:
            return self.out(attended)
        return self.out(attended, None, epilogue)

    def _qk_transform(self, context: ForwardContext) -> QkTransform:
        rope = self.spec.position
        angles = None
        interleaved = False
        if isinstance(rope, RopeSpec):
            angles = context.rope_cache[rope]
            interleaved = rope.interleaved
        q_norm = self.q_norm
        k_norm = self.k_norm
        clip = self.spec.clip
        if self.separate_norm or q_norm is None or k_norm is None:
            return QkTransform(angles, context.positions, interleaved, clip=clip)
        weights = None
        if q_norm.weight is not None and k_norm.weight is not None:
            weights = (q_norm.weight, k_norm.weight)
        return QkTransform(
            angles, context.positions, interleaved, q_norm.kind, weights, q_norm.eps, clip
        )

    def _norm_qk(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norm q and k outside of the epilogue; returns this rank's heads of q | k | v."""
        q, k, v = qkv.split(self.qkv_widths, -1)
        if self.spec.qk_norm_over == "all":
            q_columns, k_columns = self.own_columns
            q = apply_norm(q, self.q_norm, self.pool)[:, q_columns]
            k = apply_norm(k, self.k_norm, self.pool)[:, k_columns]
            return torch.cat((q, k, v), -1)
        per_head = (-1, self.spec.head_dim)
        q = apply_norm(q.unflatten(-1, per_head), self.q_norm, self.pool).flatten(1)
        k = apply_norm(k.unflatten(-1, per_head), self.k_norm, self.pool).flatten(1)
        return torch.cat((q, k, v), -1)

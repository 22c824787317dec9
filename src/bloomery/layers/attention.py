"""The attention block of a decoder layer.

It projects to q, k and v, applies the norms and rope, writes k and v to the KV cache, attends over
the cache, gates the result in some models, and projects back. Only the attention backend knows
which tokens belong to which sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bloomery.attention.base import AttentionBackend
from bloomery.errors import UnsupportedModel
from bloomery.fusion import NormPrologue, QkTransform, QkvEpilogue
from bloomery.kernels.lora import AdapterBatch
from bloomery.kernels.select_rows import select_rows
from bloomery.layers.linear import (
    AddResidual,
    DeferredAdd,
    LinearLayer,
    ResidualStream,
    apply_epilogue,
    apply_norm,
    materialize,
)
from bloomery.layout import TensorParallelLayout, gate_size, norms_all_heads, qkv_sizes
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.spec import AttentionSpec, QueryScaling, RopeSpec

RopeCache = Mapping[RopeSpec, tuple[torch.Tensor, torch.Tensor]]  # cos and sin [positions, dim / 2]


@dataclass(frozen=True)
class ForwardContext:
    """The inputs of one forward pass that all layers with the same block table share."""

    backend: AttentionBackend
    plan: Any  # the backend's plan of this step
    slot_mapping: torch.Tensor  # [tokens]: where the new keys and values go in the KV cache
    rope_cache: RopeCache  # of this step's tokens, or of all positions
    positions: torch.Tensor | None  # [tokens]: rows of the rope cache; None if it is per token
    output_rows: torch.Tensor | None = None  # last layer: the tokens whose states are needed
    # Factors of queries, of this step's tokens or of all positions, as the rope cache.
    query_scales: Mapping[QueryScaling, torch.Tensor] = field(default_factory=dict)
    adapter_batch: AdapterBatch | None = None
    # [tokens, hidden]: the input of the model's first layer; None if no layer here needs it
    embeddings: torch.Tensor | None = None
    pool: ThreadPool | None = None

    def select_adapters(self) -> None:
        """From here on adapters see only the output rows.

        A layer calls this once, after its mixer and before the output projection.
        """
        if self.adapter_batch is not None:
            self.adapter_batch.select(self.output_rows)

    def restore_adapters(self) -> None:
        """From here on adapters see all rows again: a second mixer begins."""
        if self.adapter_batch is not None:
            self.adapter_batch.select(None)

    def select_outputs(self, x: ResidualStream) -> ResidualStream:
        """Return only the output rows of x."""
        if self.output_rows is None:
            return x
        return select_rows(materialize(x), self.output_rows, self.pool)


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
        v_norm: NormPrologue | None = None,
        sinks: torch.Tensor | None = None,
    ):
        """`model_spec` is the attention of the model; `qkv` and `out` hold this rank's part.

        The rows of `qkv` are q | k | v | gate; `sinks` are those of this rank's heads.
        """
        spec = layout.attention(model_spec)
        self.spec = spec
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.pool = pool
        self.v_norm = v_norm
        self.sinks = sinks
        self.gate_size = gate_size(spec)
        # The QKV epilogue supports neither a norm over all heads together nor a norm with a bias.
        self.separate_norm = q_norm is not None and (
            spec.qk_norm_over == "all" or q_norm.bias is not None
        )
        if self.separate_norm and spec.qk_norm_after_rope:
            raise UnsupportedModel("a norm of q and k after rope must span one head, without bias")
        # A norm over all heads needs all of q and k on every rank.
        computed = model_spec if norms_all_heads(model_spec) else spec
        self.qk_widths = qkv_sizes(computed)[:2]
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
        gate = self._allocate_gate(x)
        transform = self._qk_transform(context)
        qkv_epilogue = QkvEpilogue(kv_cache, context.slot_mapping, transform, gate)
        if self.separate_norm:
            qkv = self._norm_qk(self.qkv(x, prologue))
            q = apply_epilogue(qkv, qkv_epilogue, self.pool)
        else:
            q = self.qkv(x, prologue, qkv_epilogue)
        attended = context.backend.attend(q, kv_cache, self.spec, context.plan, self.sinks, gate)
        if context.output_rows is not None:
            attended = select_rows(attended, context.output_rows, self.pool)
            context.select_adapters()
        if epilogue is None:
            return self.out(attended)
        return self.out(attended, None, epilogue)

    def _allocate_gate(self, x: ResidualStream) -> torch.Tensor | None:
        """Allocate memory for the gate of each token of x, which the QKV epilogue fills."""
        if not self.gate_size:
            return None
        if isinstance(x, DeferredAdd):
            x = x.residual
        shape = (len(x), self.gate_size)
        return x.new_empty(shape) if self.pool is None else self.pool.empty(shape, x.dtype)

    def _qk_transform(self, context: ForwardContext) -> QkTransform:
        spec = self.spec
        transform = QkTransform(
            positions=context.positions,
            clip=spec.clip,
            norm_after_rope=spec.qk_norm_after_rope,
            v_norm=self.v_norm,
            # A separate norm appends the values to q and k.
            keys_as_values=spec.keys_as_values and not self.separate_norm,
        )
        if isinstance(spec.position, RopeSpec):
            angles = context.rope_cache[spec.position]
            transform = replace(transform, angles=angles, interleaved=spec.position.interleaved)
        if spec.query_scaling is not None:
            query_scales = context.query_scales[spec.query_scaling]
            transform = replace(transform, query_scales=query_scales)
        q_norm = self.q_norm
        k_norm = self.k_norm
        if self.separate_norm or q_norm is None or k_norm is None:
            return transform
        weights = None
        if q_norm.weight is not None and k_norm.weight is not None:
            weights = (q_norm.weight, k_norm.weight)
        return replace(transform, norm=q_norm.kind, weights=weights, eps=q_norm.eps)

    def _norm_qk(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norm q and k outside of the epilogue; returns this rank's heads of q | k | v | gate."""
        norms = (self.q_norm, self.k_norm)
        affine = [
            tensor for norm in norms if norm is not None for tensor in (norm.weight, norm.bias)
        ]
        if self.pool is not None and self.pool.accepts(qkv, *affine):
            return ops.norm_columns(self.pool, qkv, self._normed_columns(qkv.shape[1]))
        qk_width = sum(self.qk_widths)
        q, k = qkv[:, :qk_width].split(self.qk_widths, -1)
        parts = [qkv[:, qk_width:]]  # v | gate
        if self.spec.qk_norm_over == "all":
            q_columns, k_columns = self.own_columns
            if self.spec.keys_as_values:
                parts.insert(0, k[:, k_columns])
            q = apply_norm(q, self.q_norm, self.pool)[:, q_columns]
            k = apply_norm(k, self.k_norm, self.pool)[:, k_columns]
        else:
            if self.spec.keys_as_values:
                parts.insert(0, k)
            per_head = (-1, self.spec.head_dim)
            q = apply_norm(q.unflatten(-1, per_head), self.q_norm, self.pool).flatten(1)
            k = apply_norm(k.unflatten(-1, per_head), self.k_norm, self.pool).flatten(1)
        return torch.cat((q, k, *parts), -1)

    def _normed_columns(self, width: int) -> list[ops.NormedColumns]:
        """Describe `_norm_qk` of rows q | k | v | gate of this width to the native operation."""
        q_width, k_width = self.qk_widths
        rest = width - q_width - k_width
        if self.spec.qk_norm_over == "all":
            q_columns, k_columns = self.own_columns
            q = ops.NormedColumns(0, 1, q_width, self.q_norm, q_columns)
            k = ops.NormedColumns(q_width, 1, k_width, self.k_norm, k_columns)
        else:
            dim = self.spec.head_dim
            q = ops.NormedColumns(0, q_width // dim, dim, self.q_norm, slice(None))
            k = ops.NormedColumns(q_width, k_width // dim, dim, self.k_norm, slice(None))
        parts = [q, k]
        if self.spec.keys_as_values:
            parts.append(k._replace(norm=None))
        if rest:
            parts.append(ops.NormedColumns(q_width + k_width, 1, rest, None, slice(None)))
        return parts

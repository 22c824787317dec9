"""The linear layer, fused with the norm before it and the epilogue after it where possible.

`layer(x, prologue, epilogue)` computes norm, matrix product, bias and epilogue. If the weights have
a kernel that does all of it for this batch, that kernel runs; otherwise the parts run one by one.
Callers cannot tell which happened. A part runs as a native CPU operation if a thread pool is given
and accepts its tensors, else as a Triton kernel or in torch (kernels/).

Additions to the residual stream may be deferred: on a GPU an addition and the norm after it are one
pass over the same bytes. A DeferredAdd represents the sum until a norm or another reader needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, overload

import torch

from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    NormPrologue,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels.activation import apply_activation
from bloomery.kernels.norm import RmsNorm, add_norm, layer_norm, norm_add_norm, rms_norm
from bloomery.kernels.rope_cache import apply_rope_and_cache
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import PreparedWeight
from bloomery.quant.dense import DenseWeight
from bloomery.quant.lora import LinearAdapters


class DeferredAdd:
    """The sum residual + scale * y, not computed yet. Only used on a GPU.

    With an inner norm, y is normed before it is added.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        y: torch.Tensor,
        scale: float,
        inner_norm: RmsNorm | None = None,
        added: torch.Tensor | None = None,
    ):
        """`added` is a second part of y."""
        self.residual = residual
        self.y = y
        self.added = added
        self.scale = scale
        self.inner_norm = inner_norm
        self.total: torch.Tensor | None = None

    def materialize(self) -> torch.Tensor:
        """Compute the sum, once."""
        if self.total is None and self.inner_norm is not None:
            self.total = norm_add_norm(self.residual, self.y, self.scale, self.inner_norm, None)[0]
        elif self.total is None:
            y = self.y if self.added is None else self.y + self.added
            self.total = torch.add(self.residual, y, alpha=self.scale)
        return self.total

    def materialize_normed(self, norm: NormPrologue) -> torch.Tensor:
        """Add and norm in one pass; the sum stays available."""
        if self.total is None and self.inner_norm is not None and norm.kind == "rms":
            outer = RmsNorm(norm.weight, norm.eps)
            self.total, normed = norm_add_norm(
                self.residual, self.y, self.scale, self.inner_norm, outer
            )
            return normed
        if self.total is not None or self.inner_norm is not None:
            return apply_norm(self.materialize(), norm)
        self.total, normed = add_norm(
            self.residual,
            self.y,
            self.scale,
            norm.weight,
            norm.bias,
            norm.eps,
            norm.kind == "layer",
            self.added,
        )
        return normed


ResidualStream = torch.Tensor | DeferredAdd


class AddResidual(NamedTuple):
    """The epilogue residual + scale * y, where the residual may itself be deferred."""

    residual: ResidualStream
    scale: float = 1.0


@dataclass(frozen=True)
class LinearLayer:
    """y = x W^T + bias, with an optional norm before it and an optional epilogue after it."""

    matrix: PreparedWeight  # [out, in]
    bias: torch.Tensor | None = None
    # Tensor parallel ranks that hold the other inputs: results are summed before the epilogue.
    group: CommunicationGroup | None = None
    pool: ThreadPool | None = None  # for native CPU kernels
    adapters: LinearAdapters | None = None  # the LoRA adapters that some rows of a step may have
    # Added to the product. It has the layer's bias, so there is none here, and no group either.
    low_rank: LowRankPart | None = None

    @overload
    def __call__(
        self, x: ResidualStream, prologue: NormPrologue | None, epilogue: AddResidual
    ) -> ResidualStream: ...
    @overload
    def __call__(
        self,
        x: ResidualStream,
        prologue: NormPrologue | None = None,
        epilogue: ActivationEpilogue | QkvEpilogue | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        x: ResidualStream,
        prologue: NormPrologue | None = None,
        epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None = None,
    ) -> ResidualStream:
        """x [tokens, in] -> [tokens, out], or the result of the epilogue."""
        if self.low_rank is not None:
            return self._run_with_low_rank(self.low_rank, x, prologue, epilogue)
        if self.group is not None:
            local = LinearLayer(self.matrix, self.bias, None, self.pool, self.adapters)
            return apply_epilogue(self.group.all_reduce(local(x, prologue)), epilogue, self.pool)
        if self.adapters is not None and self.adapters.is_active:
            return self._run_adapted(self.adapters, x, prologue, epilogue)
        if isinstance(x, torch.Tensor):
            fused = self._run_fused(x, prologue, epilogue)
            if fused is not None:
                return fused
        normed = apply_norm(x, prologue, self.pool)
        is_deferred = isinstance(x, DeferredAdd)
        if isinstance(epilogue, ActivationEpilogue) or (
            is_deferred and isinstance(epilogue, QkvEpilogue)
        ):
            fused = self._run_fused(normed, None, epilogue)
            if fused is not None:
                return fused
        return apply_epilogue(self.matrix.linear(normed, self.bias), epilogue, self.pool)

    def prepare_prologue(self, prologue: NormPrologue | None) -> None:
        """Announce the norm that calls will pass, before the first one."""
        if prologue is not None and isinstance(self.matrix, DenseWeight):
            self.matrix.prepare_prologue(prologue)

    def select_adapters(self, rows: torch.Tensor) -> None:
        """From here on the adapters of all layers see only these rows of the step."""
        if self.adapters is not None:
            self.adapters.batch.select(rows)

    def _run_with_low_rank(
        self,
        low_rank: LowRankPart,
        x: ResidualStream,
        prologue: NormPrologue | None,
        epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None,
    ) -> ResidualStream:
        """Add the low-rank part to the product. If x is one row, it is nothing but a bias."""
        normed = apply_norm(x, prologue, self.pool)
        added = low_rank.up(low_rank.down(normed))
        if len(normed) == 1:
            return replace(self, bias=added[0], low_rank=None)(normed, None, epilogue)
        y = replace(self, low_rank=None)(normed, None, AddResidual(added))
        if epilogue is not None and isinstance(y, DeferredAdd) and y.added is None:
            return apply_epilogue_to_sum(y.y, added, epilogue)
        return apply_epilogue(materialize(y), epilogue, self.pool)

    def _run_adapted(
        self,
        adapters: LinearAdapters,
        x: ResidualStream,
        prologue: NormPrologue | None,
        epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None,
    ) -> ResidualStream:
        """Add the part of each row's adapter to the product, before the epilogue."""
        if prologue is not None and prologue.kind != "rms":
            x = apply_norm(x, prologue, self.pool)
            prologue = None
        lora = adapters.fused()
        if (
            lora is not None
            and isinstance(x, torch.Tensor)
            and isinstance(self.matrix, DenseWeight)
        ):
            fusable = build_fusable(epilogue)
            fused = self.matrix.fused_lora(x, self.bias, prologue, fusable, lora)
            if fused is not None:
                return fused
        normed = apply_norm(x, prologue, self.pool)
        if len(normed) == 1 and normed.is_cuda:
            bias = adapters.as_bias(normed, self.bias)
            return LinearLayer(self.matrix, bias)(normed, None, epilogue)
        side = adapters.batch.side_stream
        if side is not None and epilogue is not None:
            # The kernel that runs the epilogue adds the second part for nothing. Products before a
            # residual are narrow and long and are spread over all processors.
            multiply = partial(self.matrix.linear, bias=self.bias)
            shrinks_first = isinstance(epilogue, AddResidual)
            y, added = adapters.multiply_beside(normed, multiply, side, shrinks_first)
            return apply_epilogue_to_sum(y, added, epilogue)
        y = adapters.add(normed, self.matrix.linear(normed, self.bias), self.pool)
        return apply_epilogue(y, epilogue, self.pool)

    def _run_fused(
        self,
        x: torch.Tensor,
        prologue: NormPrologue | None,
        epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None,
    ) -> torch.Tensor | None:
        """Run everything as one kernel, or all but a QKV epilogue; None if there is no kernel."""
        y = self.matrix.fused_linear(x, self.bias, prologue, build_fusable(epilogue))
        if y is not None or not isinstance(epilogue, QkvEpilogue):
            return y
        y = self.matrix.fused_linear(x, self.bias, prologue, None)
        return None if y is None else apply_epilogue(y, epilogue, self.pool)


@dataclass(frozen=True)
class LowRankPart:
    """The product of two narrow matrices: up(down(x))."""

    down: LinearLayer
    up: LinearLayer


def build_fusable(
    epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None,
) -> Epilogue:
    """Return the epilogue as kernels take it."""
    if isinstance(epilogue, AddResidual):
        return ResidualEpilogue(materialize(epilogue.residual), epilogue.scale)
    return epilogue


def materialize(x: ResidualStream) -> torch.Tensor:
    """Return the residual stream as a tensor."""
    return x.materialize() if isinstance(x, DeferredAdd) else x


def apply_norm(
    x: ResidualStream, norm: NormPrologue | None, pool: ThreadPool | None = None
) -> torch.Tensor:
    """Norm x over its last axis; without a norm, return x itself."""
    if norm is None:
        return materialize(x)
    if isinstance(x, DeferredAdd):
        return x.materialize_normed(norm)
    if pool is not None and pool.accepts(x, norm.weight, norm.bias):
        return ops.normalize(pool, x, norm.kind, norm.weight, norm.bias, norm.eps)
    if norm.kind == "rms":
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


@overload
def apply_epilogue(
    y: torch.Tensor, epilogue: AddResidual, pool: ThreadPool | None
) -> ResidualStream: ...
@overload
def apply_epilogue(
    y: torch.Tensor, epilogue: ActivationEpilogue | QkvEpilogue | None, pool: ThreadPool | None
) -> torch.Tensor: ...
@overload
def apply_epilogue(
    y: torch.Tensor,
    epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None,
    pool: ThreadPool | None,
) -> ResidualStream: ...
def apply_epilogue(
    y: torch.Tensor,
    epilogue: AddResidual | ActivationEpilogue | QkvEpilogue | None,
    pool: ThreadPool | None,
) -> ResidualStream:
    """Run an epilogue on its own, after a product that was not fused with it."""
    match epilogue:
        case AddResidual(residual, scale):
            if y.is_cuda:
                return DeferredAdd(materialize(residual), y, scale)
            return add_scaled(materialize(residual), y, scale, pool)
        case ActivationEpilogue():
            return activate(y, epilogue, pool)
        case QkvEpilogue():
            return split_qkv(y, epilogue, pool)
    return y


def apply_epilogue_to_sum(
    y: torch.Tensor,
    added: torch.Tensor,
    epilogue: AddResidual | ActivationEpilogue | QkvEpilogue,
) -> ResidualStream:
    """Run an epilogue after a product of two parts, which it adds. On a GPU."""
    match epilogue:
        case AddResidual(residual, scale):
            return DeferredAdd(materialize(residual), y, scale, added=added)
        case ActivationEpilogue():
            return apply_activation(y, epilogue, added)
        case QkvEpilogue(kv_cache, slot_mapping, transform, gate):
            return apply_rope_and_cache(y, kv_cache, slot_mapping, transform, gate, added)


def add_normed(
    y: ResidualStream, norm: NormPrologue, epilogue: AddResidual, pool: ThreadPool | None
) -> ResidualStream:
    """Add the norm of y to the residual. On a GPU, both wait for the next norm if they can."""
    y = materialize(y)
    residual, scale = epilogue
    if y.is_cuda and norm.kind == "rms":
        inner_norm = RmsNorm(norm.weight, norm.eps)
        return DeferredAdd(materialize(residual), y, scale, inner_norm)
    return apply_epilogue(apply_norm(y, norm, pool), epilogue, pool)


def add_scaled(
    residual: torch.Tensor, y: torch.Tensor, scale: float, pool: ThreadPool | None
) -> torch.Tensor:
    """Return residual + scale * y.

    The native operation avoids torch's threads, which keep spinning on cores that the thread pool
    needs.
    """
    if pool is not None and residual.shape == y.shape and pool.accepts(residual, y):
        return ops.elementwise(pool, ops.ADD_SCALED, residual, y, scale)
    return torch.add(residual, y, alpha=scale)


def concatenate(x: torch.Tensor, y: torch.Tensor, pool: ThreadPool | None) -> torch.Tensor:
    """Put rows of x and y side by side: [rows, width of x + width of y]."""
    if pool is not None and pool.accepts(x, y):
        return ops.concatenate(pool, (x, y))
    return torch.cat((x, y), -1)


def activate(
    y: torch.Tensor, activation: ActivationEpilogue, pool: ThreadPool | None
) -> torch.Tensor:
    """Return activation(y), or activation(gate) * up for y [tokens, gate | up]."""
    if pool is not None and pool.accepts(y):
        return ops.activate(pool, y, activation)
    return apply_activation(y, activation)


def split_qkv(y: torch.Tensor, epilogue: QkvEpilogue, pool: ThreadPool | None) -> torch.Tensor:
    """Apply rope, write keys and values to the KV cache, and return q [tokens, heads, dim]."""
    kv_cache, slot_mapping, transform, gate = epilogue
    v_weight = None if transform.v_norm is None else transform.v_norm.weight
    if (
        pool is not None
        and ops.supports_kv_cache(kv_cache)
        and pool.accepts(y, *(transform.weights or ()), *(transform.angles or ()))
        and pool.accepts(v_weight, transform.query_scales, gate)
        and slot_mapping.dtype == torch.int64
    ):
        return ops.apply_rope_and_cache(pool, y, kv_cache, slot_mapping, transform, gate)
    return apply_rope_and_cache(y, kv_cache, slot_mapping, transform, gate)

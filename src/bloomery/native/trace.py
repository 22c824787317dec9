"""Records one step as a trace of native operations, which replays without Python.

A trace is for a CPU what a CUDA graph is for a GPU. A recorder intercepts all torch operations of
the step: it executes views, translates a few simple operations to native ones, and raises for any
other operation. So no operation is missing from a trace unnoticed, and the model needs no code for
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.native import ops
from bloomery.native.thread_pool import OpTrace, ThreadPool, TraceArena

aten = torch.ops.aten
LIFT_CONSTANT = aten.lift_fresh.default  # a constant created during the step


class UnsupportedOperation(Exception):
    """A torch operation of the step has no native equivalent."""


def record_trace(pool: ThreadPool, work: Callable[[], None], arena: TraceArena) -> OpTrace:
    """Run `work` once, recording instead of executing; raises UnsupportedOperation."""
    with OpTraceRecorder(pool):
        return pool.record(work, arena)


class OpTraceRecorder(TorchDispatchMode):
    """Translates the torch operations of a recorded step to native ones."""

    def __init__(self, pool: ThreadPool):
        super().__init__()
        self.pool = pool

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this mode, which would take seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.is_view:
            view = function(*args, **kwargs)
            return self.pool.keep_alive(view) if function is LIFT_CONSTANT else view
        translate = TRANSLATIONS.get(function)
        result = None if translate is None else translate(self.pool, *args, **kwargs)
        if result is None:
            raise UnsupportedOperation(f"{function} has no native equivalent here")
        return result


# Each translation returns None where it does not cover the arguments.


def translate_add(
    pool: ThreadPool, x: torch.Tensor, y: torch.Tensor | float, alpha: float = 1
) -> torch.Tensor | None:
    if isinstance(y, torch.Tensor):
        if not accepts_pair(pool, x, y):
            return None
        return ops.elementwise(pool, ops.ADD_SCALED, x, y, alpha)
    if x.dtype == torch.int64 and x.is_contiguous():
        return ops.add_integer(pool, x, int(y * alpha))
    if not pool.accepts(x):
        return None
    return ops.elementwise(pool, ops.ADD_NUMBER, x, number=y * alpha)


def translate_multiply(
    pool: ThreadPool, x: torch.Tensor, y: torch.Tensor | float
) -> torch.Tensor | None:
    if isinstance(y, torch.Tensor) and y.dim():
        return ops.elementwise(pool, ops.MULTIPLY, x, y) if accepts_pair(pool, x, y) else None
    if not pool.accepts(x):
        return None
    return ops.elementwise(pool, ops.MULTIPLY_NUMBER, x, number=float(y))


def translate_divide(
    pool: ThreadPool, x: torch.Tensor, y: torch.Tensor | float
) -> torch.Tensor | None:
    if isinstance(y, torch.Tensor) and y.dim():
        return None
    return translate_multiply(pool, x, 1.0 / float(y))


def translate_tanh(pool: ThreadPool, x: torch.Tensor) -> torch.Tensor | None:
    return ops.elementwise(pool, ops.TANH, x) if pool.accepts(x) else None


def translate_index_rows(
    pool: ThreadPool, x: torch.Tensor, indices: list[torch.Tensor | None]
) -> torch.Tensor | None:
    """Translate x[rows] of a matrix."""
    rows, *other_axes = indices
    return None if other_axes or rows is None else ops.select_rows(pool, x, rows)


def translate_copy(
    pool: ThreadPool, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor | None:
    if target.dtype != source.dtype or target.shape != source.shape:
        return None
    if not target.is_contiguous() or not source.is_contiguous():
        return None
    ops.copy_tensor(pool, target, source)
    return target


def accepts_pair(pool: ThreadPool, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether native operations accept these two tensors of one shape."""
    return x.shape == y.shape and pool.accepts(x, y)


TRANSLATIONS: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    aten.add.Tensor: translate_add,
    aten.mul.Tensor: translate_multiply,
    aten.div.Tensor: translate_divide,
    aten.tanh.default: translate_tanh,
    aten.index.Tensor: translate_index_rows,
    aten.copy_.default: translate_copy,
}

"""A step written down: run once with native operations recorded, and everything else caught.

What a CUDA graph does by watching a stream is done here by watching torch: an operation that is a view passes, a few
plain ones are put in native terms, and any other ends the recording by name. So no operation can be left out of a
program unnoticed, and no model needs to be told that it is being recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.native import ops
from bloomery.native.arena import Arena
from bloomery.native.team import Program, team

aten = torch.ops.aten
LIFT = aten.lift_fresh.default  # a constant made on the way


class Unrecordable(Exception):
    """An operation that has no native form."""


def record(work: Callable[[], None], arena: Arena) -> Program:
    with Watch():
        return team().record(work, arena)


class Watch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps a mode against its compiler, and imports that for it: seconds, and nobody compiles here."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.is_view:
            view = function(*args, **kwargs)
            return team().keep(view) if function is LIFT else view
        form = FORMS.get(function)
        if form is None or (found := form(*args, **kwargs)) is None:
            raise Unrecordable(f"{function} has no native form here")
        return found


def add(x: torch.Tensor, y: torch.Tensor | float, alpha: float = 1) -> torch.Tensor | None:
    if isinstance(y, torch.Tensor):
        return ops.elements(ops.ADD_SCALED, x, y, alpha) if alike(x, y) else None
    if x.dtype == torch.int64 and x.is_contiguous():
        return ops.shift(x, int(y * alpha))
    return ops.elements(ops.PLUS, x, number=y * alpha) if team().takes(x) else None


def multiply(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor | None:
    if isinstance(y, torch.Tensor) and y.dim():
        return ops.elements(ops.MULTIPLY, x, y) if alike(x, y) else None
    return ops.elements(ops.TIMES, x, number=float(y)) if team().takes(x) else None


def divide(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor | None:
    return None if isinstance(y, torch.Tensor) and y.dim() else multiply(x, 1.0 / float(y))


def tanh(x: torch.Tensor) -> torch.Tensor | None:
    return ops.elements(ops.TANH, x) if team().takes(x) else None


def index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Rows of a table by number."""
    rows, *others = indices
    if (
        others
        or rows is None
        or rows.dtype != torch.int64
        or rows.dim() != 1
        or x.dim() != 2
        or not team().takes(x)
    ):
        return None
    return ops.gather(team().keep(ops.Matrix.dense(x)), rows)


def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor | None:
    if (
        to.dtype != source.dtype
        or to.shape != source.shape
        or not (to.is_contiguous() and source.is_contiguous())
    ):
        return None
    ops.copy(to, source)
    return to


def alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and team().takes(x, y)


FORMS: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    aten.add.Tensor: add,
    aten.mul.Tensor: multiply,
    aten.div.Tensor: divide,
    aten.tanh.default: tanh,
    aten.index.Tensor: index,
    aten.copy_.default: copy,
}

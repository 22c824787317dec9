"""The one product of the model, in a vocabulary that can be fused.

`linear(x, before, after)` says what surrounds the product: a norm of its input; a residual to add, an activation, or
the turning and storing of q, k and v behind its output. A matrix that has a kernel for the whole phrase and the batch
at hand takes it; otherwise the phrase is spoken word by word. Which it is never shows outside of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, overload

import torch

from bloomery.kernels.activation import activate, gate
from bloomery.kernels.gemv import Activation, Heads, Norm, Residual
from bloomery.kernels.store import turn_and_store
from bloomery.layers.norm import Stream, Sum, normalize, value
from bloomery.parallel.groups import ALONE, Group
from bloomery.quant.base import Ready


class Add(NamedTuple):
    """residual + scale * y"""

    residual: Stream
    scale: float = 1.0


@dataclass(frozen=True)
class Linear:
    matrix: Ready
    bias: torch.Tensor | None = None
    group: Group = (
        ALONE  # ranks that hold the other inputs: their results are added before anything follows
    )

    @overload
    def __call__(self, x: Stream, before: Norm | None, after: Add) -> Stream: ...
    @overload
    def __call__(
        self, x: Stream, before: Norm | None = None, after: Activation | Heads | None = None
    ) -> torch.Tensor: ...
    def __call__(
        self, x: Stream, before: Norm | None = None, after: Add | Activation | Heads | None = None
    ) -> Stream:
        if self.group.size > 1:
            return finish(self.group.sum(Linear(self.matrix, self.bias)(x, before)), after)
        if isinstance(x, torch.Tensor):
            phrase = (
                Residual(value(after.residual), after.scale) if isinstance(after, Add) else after
            )
            y = self.matrix.phrase(x, self.bias, before, phrase)
            if y is not None:
                return y
            if (
                isinstance(after, Heads)
                and (y := self.matrix.phrase(x, self.bias, before, None)) is not None
            ):
                return finish(y, after)
        normed = normalize(x, before)
        if (
            isinstance(after, Activation)
            and (y := self.matrix.phrase(normed, self.bias, None, after)) is not None
        ):
            return y
        return finish(self.matrix.linear(normed, self.bias), after)


@overload
def finish(y: torch.Tensor, after: Add) -> Stream: ...
@overload
def finish(y: torch.Tensor, after: Activation | Heads | None) -> torch.Tensor: ...
@overload
def finish(y: torch.Tensor, after: Add | Activation | Heads | None) -> Stream: ...
def finish(y: torch.Tensor, after: Add | Activation | Heads | None) -> Stream:
    match after:
        case Add(residual, scale):
            total = Sum(value(residual), y, scale)
            return total if y.is_cuda else total.value()
        case Activation(name, gated):
            return gate(y, name) if gated else activate(y, name)
        case Heads(cache, slots, turn):
            return turn_and_store(y, cache, slots, turn)
    return y

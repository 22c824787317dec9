"""The one product of the model, in a vocabulary that can be fused.

`linear(x, before, after)` says what surrounds the product: a norm of its input; a residual to add, an activation, or
the turning and storing of q, k and v behind its output. A matrix that has a kernel for the whole phrase and the batch
at hand takes it; otherwise the phrase is spoken word by word. Which it is never shows outside of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.activation import activate, gate
from bloomery.kernels.gemv import Activation, After, Heads, Norm, Residual
from bloomery.kernels.store import turn_and_store
from bloomery.layers.norm import normalize
from bloomery.quant.base import Ready


@dataclass(frozen=True)
class Linear:
    matrix: Ready
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, before: Norm | None = None, after: After = None) -> torch.Tensor:
        y = self.matrix.phrase(x, self.bias, before, after)
        if y is not None:
            return y
        x = normalize(x, before)
        if isinstance(after, Residual) and (y := self.matrix.added(x, self.bias, after)) is not None:
            return y
        return finish(self.matrix.linear(x, self.bias), after)


def finish(y: torch.Tensor, after: After) -> torch.Tensor:
    match after:
        case Residual(tensor, scale):
            return torch.add(tensor, y, alpha=scale)
        case Activation(name, gated):
            return gate(y, name) if gated else activate(y, name)
        case Heads(cache, slots, turn):
            return turn_and_store(y, cache, slots, turn)
    return y

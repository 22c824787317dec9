"""Products on a CPU with all that surrounds them, by native kernels: the counterpart of gemv there."""

from __future__ import annotations

import torch

from bloomery.kernels.gemv import Activation, After, Heads, Norm, Residual
from bloomery.native import ops
from bloomery.native.team import team


def phrase(
    matrix: ops.Matrix,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    before: Norm | None,
    after: After,
) -> torch.Tensor | None:
    """norm -> product -> residual or activation as one operation, two where rows are many; None where it is not one."""
    if isinstance(after, Heads) or (
        isinstance(after, Activation) and after.gated and not matrix.halves
    ):
        return None
    residual = (after.tensor, after.scale) if isinstance(after, Residual) else None
    if not team().takes(x, bias, residual[0] if residual else None) or (
        before and not plain(before)
    ):
        return None
    norm = None if before is None else (before.kind, before.weight, before.bias, before.eps)
    activation = (after.name, after.gated) if isinstance(after, Activation) else None
    return ops.linear(matrix, x, bias, norm, residual, activation)


def plain(norm: Norm) -> bool:
    return team().takes(norm.weight, norm.bias) and (norm.weight is None or norm.weight.dim() == 1)

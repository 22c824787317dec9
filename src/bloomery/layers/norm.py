"""Norms, and sums that wait for the norm behind them.

A residual stream is added to and normed in turn. On a GPU both are one pass over the same bytes, so an addition may be
put off: a Sum stands for its value until somebody norms it, or asks.
"""

from __future__ import annotations

import torch

from bloomery.kernels.gemv import Norm
from bloomery.kernels.norm import add_norm, add_scaled, layer_norm, rms_norm


class Sum:
    """residual + scale * y, not added yet."""

    def __init__(self, residual: torch.Tensor, y: torch.Tensor, scale: float):
        self.residual = residual
        self.y = y
        self.scale = scale
        self.added: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        if self.added is None:
            self.added = add_scaled(self.residual, self.y, self.scale)
        return self.added

    def normed(self, norm: Norm) -> torch.Tensor:
        if self.added is not None:
            return normalize(self.added, norm)
        self.added, out = add_norm(
            self.residual,
            self.y,
            self.scale,
            norm.weight,
            norm.bias,
            norm.eps,
            norm.kind == "layer",
        )
        return out


Stream = torch.Tensor | Sum


def value(x: Stream) -> torch.Tensor:
    return x.value() if isinstance(x, Sum) else x


def normalize(x: Stream, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return value(x)
    if isinstance(x, Sum):
        return x.normed(norm)
    if norm.kind == "rms":
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)

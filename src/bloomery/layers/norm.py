"""A norm with its weights, kept in float32: they are small, and Gemma's 1 + weight needs the digits."""

from __future__ import annotations

import torch

from bloomery.kernels.gemv import Norm
from bloomery.kernels.norm import layer_norm, rms_norm


def normalize(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    if norm.kind == "rms":
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)

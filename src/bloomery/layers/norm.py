"""A norm with its weights, kept in float32: they are small, and Gemma's 1 + weight needs the digits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.norm import layer_norm, rms_norm
from bloomery.spec import Norm


@dataclass(frozen=True)
class Normalize:
    spec: Norm
    weight: torch.Tensor | None  # already 1 + weight where the spec says so
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.kind == "rms":
            return rms_norm(x, self.weight, self.spec.eps)
        return layer_norm(x, self.weight, self.bias, self.spec.eps)

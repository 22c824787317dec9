"""The feed-forward half of a layer."""

from __future__ import annotations

import torch

from bloomery.kernels.gemv import Activation, Norm, Residual
from bloomery.layers.linear import Linear
from bloomery.spec import Mlp


class MlpBlock:
    def __init__(self, spec: Mlp, up: Linear, down: Linear):
        self.up, self.down = up, down
        self.activation = Activation(spec.activation, spec.gated)

    def __call__(self, x: torch.Tensor, before: Norm | None = None, after: Residual | None = None) -> torch.Tensor:
        return self.down(self.up(x, before, self.activation), after=after)

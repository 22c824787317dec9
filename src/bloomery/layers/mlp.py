"""The feed-forward half of a layer."""

from __future__ import annotations

import torch

from bloomery.layers.linear import Activate, Add, Linear
from bloomery.layers.norm import Normalize
from bloomery.spec import Mlp


class MlpBlock:
    def __init__(self, spec: Mlp, up: Linear, down: Linear):
        self.up, self.down = up, down
        self.activate = Activate(spec.activation, spec.gated)

    def __call__(self, x: torch.Tensor, before: Normalize | None = None, after: Add | None = None) -> torch.Tensor:
        return self.down(self.up(x, before, self.activate), after=after)

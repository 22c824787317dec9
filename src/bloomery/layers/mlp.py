"""The feed-forward half of a layer."""

from __future__ import annotations

from bloomery.kernels.gemv import Activation, Norm
from bloomery.layers.linear import Add, Linear
from bloomery.layers.norm import Stream
from bloomery.spec import Mlp


class MlpBlock:
    def __init__(self, spec: Mlp, up: Linear, down: Linear):
        self.up = up
        self.down = down
        self.activation = Activation(spec.activation, spec.gated)

    def __call__(self, x: Stream, before: Norm | None = None, after: Add | None = None) -> Stream:
        up = self.up(x, before, self.activation)
        return self.down(up) if after is None else self.down(up, None, after)

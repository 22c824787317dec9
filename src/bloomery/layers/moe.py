"""A router over experts, and an expert every token visits where the model has one."""

from __future__ import annotations

import torch

from bloomery.kernels.experts import route
from bloomery.kernels.gemv import Norm
from bloomery.layers.linear import Add, Linear, finish
from bloomery.layers.mlp import MlpBlock
from bloomery.layers.norm import Stream, normalize, value
from bloomery.parallel.groups import ALONE, Group
from bloomery.quant.base import Ready
from bloomery.quant.experts import mixed
from bloomery.spec import Moe


class MoeBlock:
    def __init__(
        self,
        spec: Moe,
        router: Linear,
        up: Ready,  # [experts * (gate | up), hidden]
        down: Ready,  # [experts * hidden, size]
        shared: MlpBlock | None = None,
        shared_gate: Linear | None = None,
        group: Group = ALONE,  # ranks that hold other parts of every expert
    ):
        self.spec = spec
        self.router = router
        self.up = up
        self.down = down
        self.shared = shared
        self.shared_gate = shared_gate
        self.group = group

    def __call__(self, x: Stream, before: Norm | None = None, after: Add | None = None) -> Stream:
        x = normalize(x, before)
        chosen, weights = route(self.router(x), self.spec.top_k, self.spec.renormalize)
        y = mixed(
            x, chosen, weights, self.up, self.down, self.spec.experts, self.spec.mlp.activation
        )
        if self.shared is not None:
            common = value(self.shared(x))
            y = y + (
                common if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * common
            )
        return finish(self.group.sum(y), after)

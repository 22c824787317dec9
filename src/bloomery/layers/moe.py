"""A router over experts, and an expert every token visits where the model has one."""

from __future__ import annotations

import torch

from bloomery.kernels.experts import mix, route
from bloomery.kernels.gemv import Norm
from bloomery.layers.linear import Add, Linear, finish
from bloomery.layers.mlp import MlpBlock
from bloomery.layers.norm import Stream, normalize, value
from bloomery.spec import Moe


class MoeBlock:
    def __init__(
        self,
        spec: Moe,
        router: Linear,
        up: torch.Tensor,  # [experts, gate | up, hidden]
        down: torch.Tensor,  # [experts, hidden, size]
        shared: MlpBlock | None = None,
        shared_gate: Linear | None = None,
    ):
        self.spec, self.router, self.up, self.down = spec, router, up, down
        self.shared, self.shared_gate = shared, shared_gate

    def __call__(self, x: Stream, before: Norm | None = None, after: Add | None = None) -> Stream:
        x = normalize(x, before)
        chosen, weights = route(self.router(x), self.spec.top_k, self.spec.renormalize)
        y = mix(x, chosen, weights, self.up, self.down, self.spec.mlp.activation)
        if self.shared is not None:
            common = value(self.shared(x))
            y = y + (common if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * common)
        return finish(y, after)

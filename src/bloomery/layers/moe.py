"""A router over experts, and an expert every token visits where the model has one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.kernels.gemv import Norm, Residual
from bloomery.layers.linear import Linear, finish
from bloomery.layers.mlp import MlpBlock
from bloomery.layers.norm import normalize
from bloomery.spec import Moe


class MoeBlock:
    def __init__(
        self,
        spec: Moe,
        router: Linear,
        experts: Sequence[MlpBlock],
        shared: MlpBlock | None = None,
        shared_gate: Linear | None = None,
    ):
        self.spec, self.router, self.experts = spec, router, experts
        self.shared, self.shared_gate = shared, shared_gate

    def __call__(self, x: torch.Tensor, before: Norm | None = None, after: Residual | None = None) -> torch.Tensor:
        x = normalize(x, before)
        weights, chosen = self.router(x).float().softmax(-1).topk(self.spec.top_k, -1)
        if self.spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        y = self._mix(x, chosen, weights.to(x.dtype))
        if self.shared is not None:
            common = self.shared(x)
            y = y + (common if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * common)
        return finish(y, after)

    def _mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each expert once, over the tokens that chose it."""
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            y.index_add_(0, token, self.experts[expert](x[token]) * weights[token, place, None])
        return y

"""The mixture-of-experts block: a router, its experts, and a shared expert in some models."""

from __future__ import annotations

import torch

from bloomery.fusion import NormPrologue
from bloomery.kernels.moe import route_topk
from bloomery.layers.linear import (
    AddResidual,
    LinearLayer,
    ResidualStream,
    apply_epilogue,
    apply_norm,
    materialize,
)
from bloomery.layers.mlp import MlpBlock
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import PreparedWeight
from bloomery.quant.experts import run_experts
from bloomery.spec import MoeSpec


class MoeBlock:
    """Routes each token to its top_k experts and sums their weighted results.

    group: tensor parallel ranks, each of which holds a part of every expert.
    """

    def __init__(
        self,
        spec: MoeSpec,
        router: LinearLayer,
        up: PreparedWeight,  # [experts * (gate | up), hidden]
        down: PreparedWeight,  # [experts * hidden, size]
        shared: MlpBlock | None = None,
        shared_gate: LinearLayer | None = None,
        group: CommunicationGroup | None = None,
        pool: ThreadPool | None = None,
    ):
        self.spec = spec
        self.router = router
        self.up = up
        self.down = down
        self.shared = shared
        self.shared_gate = shared_gate
        self.group = group
        self.pool = pool

    def __call__(
        self,
        x: ResidualStream,
        prologue: NormPrologue | None = None,
        epilogue: AddResidual | None = None,
    ) -> ResidualStream:
        """x [tokens, hidden] -> [tokens, hidden]."""
        x = apply_norm(x, prologue, self.pool)
        spec = self.spec
        expert_ids, expert_weights = route_topk(self.router(x), spec.top_k, spec.renormalize)
        y = run_experts(
            x,
            expert_ids,
            expert_weights,
            self.up,
            self.down,
            spec.num_experts,
            spec.mlp.activation,
        )
        if self.shared is not None:
            shared = materialize(self.shared(x))
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(x)) * shared
            y = y + shared
        if self.group is not None:
            y = self.group.all_reduce(y)
        return apply_epilogue(y, epilogue, self.pool)

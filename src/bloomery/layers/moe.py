"""The mixture-of-experts block: a router, its experts, and a shared expert in some models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.fusion import NormPrologue, ResidualEpilogue
from bloomery.kernels.moe import (
    NO_FUSED_SHARED,
    ExpertsFusion,
    FusedSharedExperts,
    SharedOutput,
    route_topk,
)
from bloomery.layers.linear import (
    AddResidual,
    LinearLayer,
    ResidualStream,
    apply_epilogue,
    apply_norm,
    materialize,
)
from bloomery.layers.mlp import MlpBlock
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.experts import ExpertStack, route_inputs, run_experts
from bloomery.spec import RouterSpec


@dataclass(frozen=True)
class MoeNorms:
    """The norms of blocks whose parts have norms of their own."""

    router: NormPrologue | None = None
    experts: NormPrologue | None = None
    expert_sum: NormPrologue | None = None
    shared: NormPrologue | None = None
    shared_output: NormPrologue | None = None


@dataclass(frozen=True)
class ExpertRouter:
    """Chooses the experts of each token and their weights."""

    spec: RouterSpec
    top_k: int
    linear: LinearLayer  # [experts, hidden]
    correction_bias: torch.Tensor | None = None  # [experts]
    expert_scale: torch.Tensor | None = None  # [experts]
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED  # `linear` has their gate as the last row

    def __call__(
        self, x: torch.Tensor, prologue: NormPrologue | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> ids and weights of experts, [tokens, choices] each."""
        logits = self.linear(x, prologue)
        extra = (self.correction_bias, self.expert_scale)
        pool = self.linear.pool
        if pool is not None and pool.accepts(logits, *extra):
            return ops.route_topk(pool, logits, self.top_k, self.spec, *extra)
        return route_topk(logits, self.top_k, self.spec, *extra, self.fused_shared)


@dataclass(frozen=True)
class LatentSpace:
    """The projections of a narrower space that the experts work in."""

    down: LinearLayer  # [latent, hidden]
    up: LinearLayer  # [hidden, latent]


class MoeBlock:
    """Routes each token to its top_k experts and sums their weighted results.

    group: tensor parallel ranks, each of which holds a part of every expert.
    """

    def __init__(
        self,
        router: ExpertRouter,
        experts: ExpertStack,
        shared: MlpBlock | None = None,
        shared_gate: LinearLayer | None = None,
        shared_scale: float = 1.0,
        norms: MoeNorms = MoeNorms(),
        group: CommunicationGroup | None = None,
        pool: ThreadPool | None = None,
        latent: LatentSpace | None = None,
    ):
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.shared_scale = shared_scale
        self.norms = norms
        self.has_norms = norms != MoeNorms()
        self.group = group
        self.pool = pool
        self.latent = latent

    def __call__(
        self,
        x: ResidualStream,
        prologue: NormPrologue | None = None,
        epilogue: AddResidual | None = None,
    ) -> ResidualStream:
        """x [tokens, hidden] -> [tokens, hidden]."""
        if self._fuses_with_neighbors(x, prologue):
            return self._run_fused(materialize(x), prologue, epilogue)
        x = apply_norm(x, prologue, self.pool)
        norms = self.norms
        expert_ids, expert_weights = self.router(apply_norm(x, norms.router, self.pool))
        expert_input = apply_norm(x, norms.experts, self.pool)
        if self.latent is not None:
            expert_input = self.latent.down(expert_input)
        routed = (expert_input, expert_ids, expert_weights, self.experts)
        shared = self._run_shared(apply_norm(x, norms.shared, self.pool))
        if self.latent is not None:
            # The sum over the ranks comes last, because both projections are linear.
            y = self.latent.up(run_experts(*routed))
            if shared is not None:
                y = y + shared.weighted_reference()
            y = self._all_reduce(y)
        elif not self._norms_outputs():
            y = self._all_reduce(run_experts(*routed, ExpertsFusion(shared=shared)))
        else:
            y = apply_norm(self._all_reduce(run_experts(*routed)), norms.expert_sum, self.pool)
            if shared is not None:
                weighted = self._all_reduce(shared.weighted_reference())
                y = y + apply_norm(weighted, norms.shared_output, self.pool)
        return apply_epilogue(y, epilogue, self.pool)

    def _fuses_with_neighbors(self, x: ResidualStream, prologue: NormPrologue | None) -> bool:
        """Whether the norm before and the addition after are part of the experts' kernels.

        For one token that saves launches. With more it is cheaper to norm once, and to defer the
        addition to the next norm.
        """
        if not isinstance(x, torch.Tensor) or not x.is_cuda or len(x) > 1:
            return False
        if prologue is not None and prologue.kind != "rms":
            return False
        return self.group is None and not self.has_norms and self.latent is None

    def _run_fused(
        self, x: torch.Tensor, prologue: NormPrologue | None, epilogue: AddResidual | None
    ) -> torch.Tensor:
        """Run the block for one token, each part with the norm in its own kernel."""
        residual = None
        if epilogue is not None:
            residual = ResidualEpilogue(materialize(epilogue.residual), epilogue.scale)
        router = self.router
        logits = router.linear(x, prologue)
        expert_ids, expert_weights, prepared = route_inputs(
            x,
            self.experts,
            prologue,
            logits,
            router.top_k,
            router.spec,
            router.correction_bias,
            router.expert_scale,
            router.fused_shared,
        )
        fusion = ExpertsFusion(prologue, self._run_shared(x, prologue), residual, prepared)
        return run_experts(x, expert_ids, expert_weights, self.experts, fusion)

    def _run_shared(
        self, x: torch.Tensor, prologue: NormPrologue | None = None
    ) -> SharedOutput | None:
        """Run the expert that every token uses."""
        if self.shared is None:
            return None
        gate_logits = None if self.shared_gate is None else self.shared_gate(x, prologue)
        y = materialize(self.shared(x, prologue))
        if self.shared_scale != 1.0:
            y = y * self.shared_scale
        return SharedOutput(y, gate_logits)

    def _norms_outputs(self) -> bool:
        return self.norms.expert_sum is not None or self.norms.shared_output is not None

    def _all_reduce(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the parts of all ranks."""
        return y if self.group is None else self.group.all_reduce(y)

"""A shared expert that is stacked behind the others gives what its own products give."""

from __future__ import annotations

import pytest
import torch

from bloomery.fusion import NormPrologue
from bloomery.kernels import gemv, moe
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.moe import FusedSharedExperts
from bloomery.layers.linear import AddResidual, LinearLayer, materialize
from bloomery.layers.mlp import MlpBlock, build_activation
from bloomery.layers.moe import ExpertRouter, MoeBlock
from bloomery.quant.dense import DenseWeight
from bloomery.quant.experts import ExpertStack
from bloomery.spec import MlpSpec, RouterSpec

NUM_EXPERTS = 6
TOP_K = 3
COUNT = 2  # the shared expert is as wide as two others
HIDDEN = 64
SIZE = 32
SCALE = 1.5


def build_linear(weight: torch.Tensor) -> LinearLayer:
    return LinearLayer(DenseWeight(weight.contiguous()))


def build_blocks(has_gate: bool) -> tuple[MoeBlock, MoeBlock]:
    """The same block with the shared expert on its own, and stacked."""
    up = torch.randn(NUM_EXPERTS + COUNT, 2 * SIZE, HIDDEN) * 0.2
    down = torch.randn(NUM_EXPERTS + COUNT, HIDDEN, SIZE) * 0.2
    router = torch.randn(NUM_EXPERTS, HIDDEN) * 0.3
    gate = torch.randn(1, HIDDEN) * 0.3
    fused_shared = FusedSharedExperts(COUNT, SCALE, has_gate)
    spec = RouterSpec()

    def build_stack(count: int) -> ExpertStack:
        ups = DenseWeight(up[:count].flatten(0, 1))
        return ExpertStack(count, ups, DenseWeight(down[:count].flatten(0, 1)))

    shared_up = up[NUM_EXPERTS:]
    shared = MlpBlock(
        build_activation(MlpSpec(COUNT * SIZE, "silu")),
        build_linear(torch.cat((*shared_up[:, :SIZE], *shared_up[:, SIZE:]))),
        build_linear(torch.cat(tuple(down[NUM_EXPERTS:]), 1)),
    )
    separate = MoeBlock(
        ExpertRouter(spec, TOP_K, build_linear(router)),
        build_stack(NUM_EXPERTS),
        shared,
        build_linear(gate) if has_gate else None,
        SCALE,
    )
    rows = torch.cat((router, gate)) if has_gate else router
    stacked = MoeBlock(
        ExpertRouter(spec, TOP_K, build_linear(rows), fused_shared=fused_shared),
        build_stack(NUM_EXPERTS + COUNT),
    )
    return separate, stacked


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("in_kernels", [False, True])
def test_stacked_shared_experts_give_the_same(
    tokens: int, has_gate: bool, in_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    separate, stacked = build_blocks(has_gate)
    norm = NormPrologue("rms", torch.rand(HIDDEN), None, 1e-6)
    x = torch.randn(tokens, HIDDEN)
    residual = torch.randn(tokens, HIDDEN)
    expected = materialize(separate(x, norm, AddResidual(residual)))
    if in_kernels:  # as a GPU runs them
        if not triton_interpreted():
            pytest.skip("kernels run on the CPU only under TRITON_INTERPRET=1")
        monkeypatch.setattr(moe, "use_triton", lambda x: True)
        monkeypatch.setattr(gemv, "use_triton", lambda x: True)
        monkeypatch.setattr(MoeBlock, "_fuses_with_neighbors", lambda *_: tokens == 1)
    result = materialize(stacked(x, norm, AddResidual(residual)))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)

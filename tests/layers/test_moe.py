"""A block of experts with norms of its own, beside a dense MLP, against its equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bloomery.fusion import ActivationEpilogue, NormPrologue
from bloomery.kernels.moe import ExpertOptions
from bloomery.layers.linear import AddResidual, LinearLayer
from bloomery.layers.mlp import MlpBlock
from bloomery.layers.moe import ExpertRouter, MoeBlock, MoeNorms
from bloomery.quant.dense import DenseWeight
from bloomery.quant.experts import ExpertStack
from bloomery.spec import RouterSpec

HIDDEN = 12
SIZE = 10
NUM_EXPERTS = 5
TOKENS = 7


def make_linear(outputs: int, inputs: int) -> LinearLayer:
    return LinearLayer(DenseWeight(torch.randn(outputs, inputs)))


def weight_of(linear: LinearLayer) -> torch.Tensor:
    assert isinstance(linear.matrix, DenseWeight)
    return linear.matrix.weight


def make_norm() -> NormPrologue:
    return NormPrologue("rms", torch.rand(HIDDEN) + 0.5, None, 1e-6)


def norm(x: torch.Tensor, spec: NormPrologue | None) -> torch.Tensor:
    assert spec is not None
    return F.rms_norm(x, (HIDDEN,), spec.weight, spec.eps)


def test_router_experts_and_dense_mlp_have_their_own_norms() -> None:
    torch.manual_seed(0)
    gelu = ActivationEpilogue("gelu_tanh", True)
    up = torch.randn(NUM_EXPERTS, 2 * SIZE, HIDDEN)
    down = torch.randn(NUM_EXPERTS, HIDDEN, SIZE)
    experts = ExpertStack(
        NUM_EXPERTS,
        DenseWeight(up.flatten(0, 1)),
        DenseWeight(down.flatten(0, 1)),
        ExpertOptions(gelu),
    )
    expert_scale = torch.rand(NUM_EXPERTS)
    linear = make_linear(NUM_EXPERTS, HIDDEN)
    spec = RouterSpec(logit_scale=HIDDEN**-0.5, expert_scale=True)
    router = ExpertRouter(spec, 2, linear, None, expert_scale)
    dense = MlpBlock(gelu, make_linear(2 * SIZE, HIDDEN), make_linear(HIDDEN, SIZE))
    norms = MoeNorms(make_norm(), make_norm(), make_norm(), make_norm(), make_norm())
    block = MoeBlock(router, experts, dense, norms=norms)
    x = torch.randn(TOKENS, HIDDEN)
    actual = block(x, None, AddResidual(x))

    def run_mlp(v: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = (v @ up.T).chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") * value) @ down.T

    logits = norm(x, norms.router) @ weight_of(linear).T * HIDDEN**-0.5
    weights, chosen = logits.softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True) * expert_scale[chosen]
    expert_input = norm(x, norms.experts)
    expert_sum = torch.zeros_like(x)
    for token in range(TOKENS):
        for choice in range(2):
            expert = int(chosen[token, choice])
            y = run_mlp(expert_input[token : token + 1], up[expert], down[expert])
            expert_sum[token] += weights[token, choice] * y[0]
    dense_output = run_mlp(norm(x, norms.shared), weight_of(dense.up), weight_of(dense.down))
    expected = x + norm(expert_sum, norms.expert_sum) + norm(dense_output, norms.shared_output)
    assert isinstance(actual, torch.Tensor)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_gated_shared_expert_is_added() -> None:
    torch.manual_seed(1)
    silu = ActivationEpilogue("silu", True)
    experts = ExpertStack(
        NUM_EXPERTS,
        DenseWeight(torch.zeros(NUM_EXPERTS * 2 * SIZE, HIDDEN)),
        DenseWeight(torch.zeros(NUM_EXPERTS * HIDDEN, SIZE)),
    )
    router = ExpertRouter(RouterSpec(), 2, make_linear(NUM_EXPERTS, HIDDEN))
    shared = MlpBlock(silu, make_linear(2 * SIZE, HIDDEN), make_linear(HIDDEN, SIZE))
    gate = make_linear(1, HIDDEN)
    x = torch.randn(TOKENS, HIDDEN)
    actual = MoeBlock(router, experts, shared, gate)(x)
    expected = torch.sigmoid(x @ weight_of(gate).T) * shared(x)
    assert isinstance(actual, torch.Tensor)
    torch.testing.assert_close(actual, expected)

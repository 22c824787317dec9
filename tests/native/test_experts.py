"""Routing and experts of the native CPU kernels, against their torch references."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels import moe
from bloomery.kernels.packed import CodebookWeight
from bloomery.layers.linear import LinearLayer
from bloomery.layers.moe import ExpertRouter, MoeBlock
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool, TraceArena
from bloomery.native.trace import record_trace
from bloomery.quant.base import PreparedWeight
from bloomery.quant.dense import prepare_dense
from bloomery.quant.experts import ExpertStack, find_native_experts, run_experts
from bloomery.quant.native import NativeWeight
from bloomery.quant.quantized_weight import prepare_weight
from bloomery.spec import RouterSpec
from tests.kernels.moe_oracles import EXPERT_KINDS, ROUTERS, make_expert_options
from tests.kernels.packed_oracles import MXFP4, make_packed_weight

NUM_EXPERTS = 6
TOP_K = 2
SIZE = 64  # of an expert
HIDDEN = 96


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(pool: ThreadPool, name: str) -> None:
    torch.manual_seed(1)
    router, num_experts, top_k = ROUTERS[name]
    logits = 2 * torch.randn(30, num_experts)
    correction_bias = torch.randn(num_experts) if router.correction_bias else None
    expert_scale = torch.rand(num_experts) if router.expert_scale else None
    extra = (correction_bias, expert_scale)
    expert_ids, weights = ops.route_topk(pool, logits, top_k, router, *extra)
    expected_ids, expected = moe.route_topk_reference(logits, top_k, router, *extra)
    assert torch.equal(expert_ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_equal_logits_choose_the_lowest_expert(pool: ThreadPool) -> None:
    expert_ids, _ = ops.route_topk(pool, torch.zeros(3, 5), 3, RouterSpec(), None, None)
    assert expert_ids.tolist() == [[0, 1, 2]] * 3


def make_experts(kind: str, packed: bool, pool: ThreadPool | None) -> ExpertStack:
    """Random experts, in full precision or in MXFP4."""
    torch.manual_seed(0)
    options = make_expert_options(kind, NUM_EXPERTS, SIZE, HIDDEN, torch.float32, "cpu")
    up_rows = NUM_EXPERTS * (2 * SIZE if options.activation.gated else SIZE)

    def make_weight(rows: int, columns: int) -> PreparedWeight:
        weight = make_packed_weight(MXFP4, rows, columns, "cpu")
        assert isinstance(weight, CodebookWeight)
        if packed:
            return prepare_weight([weight], torch.float32, pool)
        return prepare_dense(weight.dequantize(), torch.float32, pool)

    up = make_weight(up_rows, HIDDEN)
    down = make_weight(NUM_EXPERTS * HIDDEN, SIZE)
    return ExpertStack(NUM_EXPERTS, up, down, options)


def test_mxfp4_weights_keep_their_values(pool: ThreadPool) -> None:
    packed = make_packed_weight(MXFP4, 24, 160, "cpu")
    weight = prepare_weight([packed], torch.float32, pool)
    assert isinstance(weight, NativeWeight)
    assert torch.equal(weight.gather(torch.arange(24)), packed.dequantize())


@pytest.mark.parametrize("packed", [True, False], ids=["mxfp4", "float32"])
@pytest.mark.parametrize("kind", EXPERT_KINDS)
@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_experts(pool: ThreadPool, tokens: int, kind: str, packed: bool) -> None:
    experts = make_experts(kind, packed, pool)
    x, y = torch.randn(2, tokens, HIDDEN)
    fusion = moe.ExpertsFusion(shared=moe.SharedOutput(y, torch.randn(tokens, 1)))
    expert_ids = torch.randint(-1, NUM_EXPERTS + 1, (tokens, TOP_K), dtype=torch.int32)
    expert_ids[:, 1] = (expert_ids[:, 0] + 1) % NUM_EXPERTS  # a token has no expert twice
    weights = torch.rand(tokens, TOP_K)
    assert find_native_experts(x, experts, fusion) is not None
    actual = run_experts(x, expert_ids, weights, experts, fusion)
    reference = make_experts(kind, packed, None)
    expected = run_experts(x, expert_ids, weights, reference, fusion)
    error = (actual - expected).norm() / expected.norm()
    assert error < (0.02 if packed else 1e-5)  # activations of eight bits


def test_results_do_not_depend_on_other_tokens(pool: ThreadPool) -> None:
    experts = make_experts("clamped, biases", True, pool)
    x = torch.randn(40, HIDDEN)
    expert_ids, weights = moe.route_topk_reference(torch.randn(40, NUM_EXPERTS), 2, RouterSpec())
    together = run_experts(x, expert_ids, weights, experts)
    for i in (0, 17, 39):
        token = slice(i, i + 1)
        alone = run_experts(x[token], expert_ids[token], weights[token], experts)
        assert torch.equal(alone, together[token])


def test_weights_that_do_not_fill_panels_are_left_to_torch(pool: ThreadPool) -> None:
    weight = prepare_dense(torch.randn(3 * 2 * 12, 8), torch.float32, pool)
    down = prepare_dense(torch.randn(3 * 8, 12), torch.float32, pool)
    experts = ExpertStack(3, weight, down)
    assert find_native_experts(torch.randn(1, 8), experts, moe.ExpertsFusion()) is None


@pytest.mark.parametrize("packed", [True, False], ids=["mxfp4", "float32"])
def test_a_block_can_be_traced(pool: ThreadPool, packed: bool) -> None:
    experts = make_experts("clamped, biases", packed, pool)
    assert isinstance(experts.up, NativeWeight)
    torch.manual_seed(3)
    weight = prepare_dense(torch.randn(NUM_EXPERTS, HIDDEN), torch.float32, pool)
    bias = torch.randn(NUM_EXPERTS)
    linear = LinearLayer(weight, bias, None, pool)
    router = ExpertRouter(RouterSpec("sigmoid", bias=True, scale=2.0), TOP_K, linear)
    block = MoeBlock(router, experts, pool=pool)
    x = torch.randn(20, HIDDEN)
    out = torch.zeros(20, HIDDEN)

    def work() -> None:
        y = block(x)
        assert isinstance(y, torch.Tensor)
        out.copy_(y)

    trace = record_trace(pool, work, TraceArena(1 << 20))
    for _ in range(2):
        x.normal_()
        trace.replay()
        expected = block(x)
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

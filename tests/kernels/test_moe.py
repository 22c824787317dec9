"""The mixture-of-experts kernels under the interpreter, against a loop over experts in float64."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.moe import (
    GroupedGemmTiling,
    fused_experts,
    fused_experts_reference,
    route_topk,
    route_topk_reference,
    route_topk_triton,
)
from bloomery.spec import RouterSpec
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS
from tests.kernels.moe_oracles import ROUTERS, check_experts, check_router

SMALL_TILING = GroupedGemmTiling(16, 32, 32, 4, 2)


@pytest.mark.parametrize(
    (
        "tokens",
        "num_experts",
        "top_k",
        "intermediate_size",
        "hidden_size",
        "method",
        "dtype",
        "kind",
    ),
    [
        (1, 4, 2, 8, 16, "gemv", torch.float32, "plain"),
        (2, 4, 2, 8, 16, "gemv", torch.float16, "clamped, biases"),
        (3, 4, 2, 8, 16, "gemv", torch.float32, "ungated"),
        (3, 4, 2, 8, 16, "gemv", torch.float32, "weights of the input"),
        (1, 4, 2, 24, 40, "grouped", torch.float32, "clamped, biases"),
        (40, 3, 2, 32, 40, "grouped", torch.float16, "plain"),
        (40, 3, 2, 32, 40, "grouped", torch.float16, "weights of the input"),
        (7, 9, 3, 40, 32, "grouped", torch.float32, "ungated"),
    ],
)
def test_kernels_equal_reference(
    tokens: int,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    hidden_size: int,
    method: str,
    dtype: torch.dtype,
    kind: str,
) -> None:
    torch.manual_seed(tokens)
    error = check_experts(
        tokens,
        num_experts,
        top_k,
        intermediate_size,
        hidden_size,
        method,
        dtype,
        "cpu",
        SMALL_TILING,
        kind,
    )
    assert error < LINEAR_ERROR_LIMITS[dtype]


@pytest.mark.parametrize("name", ROUTERS)
def test_router_kernel_equals_reference(name: str) -> None:
    torch.manual_seed(0)
    assert check_router(name, 20, "cpu") < 1e-6


def test_equal_scores_choose_the_lowest_expert() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    for route in (route_topk_reference, route_topk_triton):
        topk_ids, topk_weights = route(logits, 4, RouterSpec(score_chosen_only=True))
        assert topk_ids.tolist() == [[1, 2, 4, 0]]
        assert topk_weights[0, 0] == topk_weights[0, 2]


def test_cpu_tensors_are_computed_by_the_reference() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    up = torch.randn(3, 12, 8)
    down = torch.randn(3, 8, 6)
    topk_ids, topk_weights = route_topk(torch.randn(5, 3), 2, RouterSpec())
    assert topk_ids.dtype == torch.int32
    torch.testing.assert_close(topk_weights.sum(-1), torch.ones(5))
    together = fused_experts(x, topk_ids, topk_weights, up, down)
    expected = fused_experts_reference(x, topk_ids, topk_weights, up, down)
    torch.testing.assert_close(together, expected)
    one_by_one = []
    for i in range(5):
        token = slice(i, i + 1)
        one_by_one.append(fused_experts(x[token], topk_ids[token], topk_weights[token], up, down))
    torch.testing.assert_close(together, torch.cat(one_by_one))

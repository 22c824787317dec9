"""Experts without a loop, under the interpreter, against the loop in float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.products import LIMITS, check_experts
from bloomery.kernels.experts import Blocks, mix, mix_reference, route

CUT = Blocks(16, 32, 32, 4, 2)


@pytest.mark.parametrize(
    ("tokens", "count", "k", "size", "hidden", "way", "dtype"),
    [
        (1, 4, 2, 8, 16, "singly", torch.float32),
        (2, 4, 2, 8, 16, "singly", torch.float16),
        (1, 4, 2, 24, 40, "grouped", torch.float32),
        (40, 3, 2, 32, 40, "grouped", torch.float16),
        (7, 9, 3, 40, 32, "grouped", torch.float32),
    ],
)
def test_kernels_equal_reference(
    tokens: int, count: int, k: int, size: int, hidden: int, way: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    assert check_experts(tokens, count, k, size, hidden, way, dtype, "cpu", CUT) < LIMITS[dtype]


def test_without_kernels_the_reference_answers() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    up = torch.randn(3, 12, 8)
    down = torch.randn(3, 8, 6)
    chosen, weights = route(torch.randn(5, 3), 2, True)
    assert chosen.dtype == torch.int32
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    torch.testing.assert_close(
        mix(x, chosen, weights, up, down), mix_reference(x, chosen, weights, up, down)
    )
    alone = [mix(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1], up, down) for i in range(5)]
    torch.testing.assert_close(mix(x, chosen, weights, up, down), torch.cat(alone))

"""Packed experts without a loop, under the interpreter, against the loop over unpacked ones in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.kernels import error
from benchmarks.packed import KINDS, made
from benchmarks.products import LIMITS
from bloomery.kernels import packed_gemv
from bloomery.kernels.experts import route
from bloomery.kernels.packed import Grid, pack
from bloomery.kernels.packed_experts import grouped, mix_packed_reference, possible, singly

HALF = torch.float16
EXPERTS = 3


CASES = [(singly, 1, kind) for kind in ("int4 128 zero", "fp8 row")]
CASES += [(grouped, 20, kind) for kind in (*KINDS.values(), "int4 64 zero")]


@pytest.mark.parametrize(("way", "tokens", "kind"), CASES)
def test_kernels_equal_the_reference(
    way: Callable[..., torch.Tensor], tokens: int, kind: str
) -> None:
    torch.manual_seed(tokens)
    size, hidden = (64, 64) if kind.startswith(("int8", "fp8")) else (128, 128)
    up = made(kind, EXPERTS * 2 * size, hidden, "cpu")
    down = made(kind, EXPERTS * hidden, size, "cpu")
    x = torch.randn(tokens, hidden).to(HALF)
    chosen, weights = route(torch.randn(tokens, EXPERTS), 2, True)
    chosen[0, 1], chosen[tokens // 2, 0] = (
        -1,
        EXPERTS if tokens > 1 else 1,
    )  # a line that only pads visits nobody
    cut = packed_gemv.Tiling(32, 32, 1) if way is singly else None
    got = way(x, chosen, weights, up, down, EXPERTS, "silu", cut)
    wanted = mix_packed_reference(x.double(), chosen, weights, up, down, EXPERTS)
    assert error(got, wanted) < 2 * LIMITS[HALF]


def test_what_kernels_cannot_read_they_say() -> None:
    grid = made("int4 128 zero", 64, 512, "cpu")
    assert possible(grid, HALF) and not possible(grid, torch.float32)
    assert not possible(made("int4 128 zero order", 64, 512, "cpu"), HALF)
    assert not possible(Grid(pack(torch.zeros(4, 48), 4), torch.ones(4, 3)), HALF), "groups of 16"

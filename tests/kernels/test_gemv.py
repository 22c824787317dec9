"""The product of few tokens and all that surrounds it, under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.products import LIMITS, MODELS, check_product
from bloomery.kernels.gemv import Heads, Tiling, pays, possible, product, product_reference, tiling
from bloomery.kernels.store import Turn

HALF = torch.float16
FULL = torch.float32


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "before", "after", "bias", "dtype"),
    [
        (1, 11, 576, "", "", True, HALF),
        (1, 8, 896, "rms", "", False, FULL),
        (1, 8, 1536, "layer", "add", True, FULL),
        (1, 8, 6144, "layer bare", "activate gelu", False, HALF),
        (1, 8, 896, "rms", "add", False, HALF),
        (1, 20, 576, "rms", "gate silu", True, FULL),
        (1, 8, 576, "layer", "activate gelu_tanh", True, FULL),
        (1, 8, 576, "", "activate relu", False, FULL),
        (3, 8, 576, "", "add", True, FULL),
        (2, 8, 576, "rms", "", False, HALF),
        (1, 40, 576, "rms", "heads 3 1 8 8 tables", True, FULL),
        (1, 32, 576, "", "heads 2 1 8 0", False, HALF),
        (1, 32, 576, "layer", "heads 2 1 8 4", True, FULL),
        (2, 32, 576, "rms", "heads 2 1 8 4 interleaved tables", False, FULL),
        (1, 32, 576, "", "heads 2 1 8 8 interleaved", False, FULL),
    ],
)
def test_kernel_equals_reference(
    tokens: int, rows: int, columns: int, before: str, after: str, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(columns + rows)
    cut = Tiling(8, 512 if columns % 512 == 0 else 1024, 4)
    assert (
        check_product(tokens, rows, columns, before, after, bias, dtype, "cpu", cut) < LIMITS[dtype]
    )


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_shape_has_a_cut(tokens: int, itemsize: int) -> None:
    shapes = [line[:2] for model in MODELS.values() for line in model.linears().values()]
    for rows, columns in [*shapes, (576, 576), (9, 896), (1536, 1536), (4672, 4544), (64, 8)]:
        for paired in (False, True):
            cut = tiling(rows, columns, paired, itemsize, tokens)
            assert all(number & (number - 1) == 0 for number in cut), "powers of two"
            assert columns % cut.inputs == 0 or columns < 2 * cut.inputs or cut.inputs >= 1024
            assert cut.inputs * itemsize >= 16 * 32 * cut.warps or cut.warps == 1, (
                "16 bytes a thread of every row"
            )


def test_possible() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    slots = torch.zeros(1, dtype=torch.int32)
    assert possible(torch.zeros(4, 16))
    assert not possible(torch.zeros(4, 12)), "rows start at multiples of 16 bytes"
    assert not possible(torch.zeros(4, 16).t())
    assert possible(torch.zeros(24, 16), Heads(cache, slots, Turn()))
    assert not possible(torch.zeros(24, 16), Heads(cache, slots, Turn(norm="rms"))), (
        "a norm needs the whole head"
    )
    assert not possible(torch.zeros(24, 16), Heads(cache, slots, Turn(clip=1.0)))
    assert not pays(1, torch.zeros(4, 16)), "not on this device"


def test_without_a_kernel_the_reference_answers() -> None:
    x = torch.randn(2, 16)
    weight = torch.randn(4, 16)
    assert torch.equal(product(x, weight), product_reference(x, weight))
    assert product(x, weight, dtype=torch.float64).dtype == torch.float64

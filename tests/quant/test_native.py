"""Packed products on a CPU with native kernels: the same numbers in other blocks, the inputs rounded to eight bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bloomery.native.team import team
from bloomery.quant.native import BlocksReady
from bloomery.quant.packed import PackedReady
from tests.quant.test_law import CPU, FORMATS


@pytest.fixture(autouse=True)
def started() -> Iterator[None]:
    if (why_not := team().start(1)) is not None:
        pytest.skip(why_not)
    yield
    team().stop()


SAID = [
    "int8",
    "w8a8",
    "int4",
    "int4-64",
    "int3",
    "int2",
    "gptq-4",
    "gptq-3",
    "gptq-4-row",
    "awq",
    "w4a16",
]


@pytest.mark.parametrize("name", SAID)
def test_the_same_product(name: str) -> None:
    torch.manual_seed(0)
    matrix = FORMATS[name](torch.randn(96, 256))
    x = torch.randn(5, 256)
    values = matrix.dense(torch.float32, CPU)
    ready = matrix.prepare(torch.float32, CPU)
    assert isinstance(ready, BlocksReady)
    assert (ready.gather(torch.arange(96)) - values).norm() < 1e-3 * values.norm()
    assert (ready.linear(x) - x @ values.T).norm() < 1e-2 * (x @ values.T).norm()
    assert ready.nbytes < 0.3 * values.nbytes


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {*SAID, "dense"}))
def test_what_blocks_cannot_say_is_rounded_to_eight_bits(name: str) -> None:
    """Which costs a tenth of what the format's own rounding did, or less than the inputs' rounding does."""
    torch.manual_seed(0)
    weight = torch.randn(96, 256)
    x = torch.randn(5, 256)
    matrix = FORMATS[name](weight)
    values = matrix.dense(torch.float32, CPU)
    ready = matrix.prepare(torch.float32, CPU)
    assert isinstance(ready, BlocksReady)
    assert (ready.gather(torch.arange(96)) - values).norm() < 6e-3 * values.norm()
    assert (ready.linear(x) - x @ values.T).norm() < 1.2e-2 * (x @ values.T).norm()
    assert ready.nbytes < 0.3 * values.nbytes


def test_rows_that_are_not_whole_blocks_stay_as_they_are() -> None:
    assert isinstance(FORMATS["nf4"](torch.randn(96, 264)).prepare(torch.float32, CPU), PackedReady)

"""Grids on a CPU with native kernels: the same numbers in other blocks, the inputs rounded to eight bits."""

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


@pytest.mark.parametrize("name", ["int8", "w8a8", "int4", "int4-64", "gptq-4", "gptq-3", "gptq-4-row", "awq", "w4a16"])
def test_the_same_product(name: str) -> None:
    torch.manual_seed(0)
    matrix, x = FORMATS[name](torch.randn(96, 256)), torch.randn(5, 256)
    values, ready = matrix.dense(torch.float32, CPU), matrix.prepare(torch.float32, CPU)
    assert isinstance(ready, BlocksReady)
    assert (ready.gather(torch.arange(96)) - values).norm() < 1e-3 * values.norm()
    assert (ready.linear(x) - x @ values.T).norm() < 1e-2 * (x @ values.T).norm()
    assert ready.nbytes < 0.3 * values.nbytes


@pytest.mark.parametrize("name", ["nf4", "fp8", "int2", "gptq-8", "gptq-4-act-order"])
def test_what_blocks_cannot_say_stays_as_it_is(name: str) -> None:
    assert isinstance(FORMATS[name](torch.randn(96, 256)).prepare(torch.float32, CPU), PackedReady)

"""Made-up weights by the kernel, under the interpreter: the reference's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.dice import throw_kernel_rows, throw_reference


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", [-2_000_000_001, 77])
def test_the_kernel_throws_the_same(dtype: torch.dtype, seed: int) -> None:
    got = torch.empty(5, 3000, dtype=dtype)
    wanted = torch.empty(5, 3000, dtype=dtype)
    throw_kernel_rows(got, seed, (1 << 20, 40), 0.02)
    throw_reference(wanted, seed, (1 << 20, 40), 0.02)
    assert torch.equal(got, wanted)
    assert abs(float(got.float().std()) - 0.02) < 1e-3 and abs(float(got.float().mean())) < 1e-3

"""Random weights from the kernel, under the interpreter: those of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.random_init import fill_random_reference, fill_random_triton


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", [-2_000_000_001, 77])
def test_kernel_equals_reference_bit_for_bit(dtype: torch.dtype, seed: int) -> None:
    actual = torch.empty(5, 3000, dtype=dtype)
    expected = torch.empty(5, 3000, dtype=dtype)
    fill_random_triton(actual, seed, (1 << 20, 40), 0.02)
    fill_random_reference(expected, seed, (1 << 20, 40), 0.02)
    assert torch.equal(actual, expected)
    assert abs(float(actual.float().std()) - 0.02) < 1e-3
    assert abs(float(actual.float().mean())) < 1e-3

"""Quantization to 8 bits per row, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.quantize_rows import quantize_rows_reference
from tests.kernels.packed_oracles import check_quantize_rows


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_kernel_equals_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    error = check_quantize_rows(5, 100, torch.float16, dtype, "cpu")
    assert error < 0.03, "the interpreter rounds 8-bit floats towards zero"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_reference_rounds_to_the_nearest_code(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 64)
    codes, scale = quantize_rows_reference(x, dtype)
    half_step = 0.5 if dtype == torch.int8 else codes.float().abs().clamp(min=2**-6) / 8
    error = (codes.float() * scale - x).abs()
    assert bool((error <= scale * half_step * 1.01).all())

"""The norm kernel under the interpreter, against its references.

benchmarks/kernels.py makes the same comparison on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.norm import (
    RmsNorm,
    add_norm,
    norm_add_norm_reference,
    norm_add_norm_triton,
    norm_triton,
    supports_norm_triton,
)
from tests.kernels.oracles import check_norm

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(
    "options", ["rms", "rms bare", "rms strided", "layer", "layer bias", "layer bare strided"]
)
@pytest.mark.parametrize(
    ("width", "dtype", "limit"), [(100, torch.float32, 1e-6), (256, torch.float16, 1e-3)]
)
def test_kernel_equals_reference(
    width: int, options: str, dtype: torch.dtype, limit: float
) -> None:
    assert check_norm(width, options, dtype, "cpu") < limit


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_residual_sum_and_its_norm_in_one_pass(
    centered: bool, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    residual, y = torch.randn(2, 5, 100).to(dtype)
    weight = torch.randn(100)
    bias = torch.randn(100) if centered else None
    total, normed = norm_triton(y, weight, bias, 1e-5, centered, residual, 0.5)
    expected_total, expected = add_norm(residual.clone(), y, 0.5, weight, bias, 1e-5, centered)
    torch.testing.assert_close(total, expected_total, rtol=limit, atol=limit)
    torch.testing.assert_close(normed, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("has_outer", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 4e-3)])
def test_a_norm_around_a_sum_of_a_norm(
    weighted: bool, has_outer: bool, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    residual, y = torch.randn(2, 5, 100).to(dtype)
    inner_weight, outer_weight = torch.randn(2, 100)
    inner = RmsNorm(inner_weight if weighted else None, 1e-5)
    outer = RmsNorm(outer_weight if weighted else None, 1e-6) if has_outer else None
    expected = norm_add_norm_reference(residual, y, 0.5, inner, outer)
    actual = norm_add_norm_triton(residual, y, 0.5, inner, outer)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


def test_the_kernel_refuses_inputs_it_does_not_support() -> None:
    x = torch.randn(3, 4, 8)
    assert supports_norm_triton(x, torch.ones(8), None)
    assert not supports_norm_triton(x, torch.ones(4, 8), None)
    assert not supports_norm_triton(x.transpose(0, 1), torch.ones(8), None)
    assert not supports_norm_triton(torch.empty(1, 1 << 16), None, None)

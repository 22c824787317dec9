"""The norm kernel, under the interpreter, against its references; benchmarks/kernels.py does the same on a card."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import check_norm
from bloomery.kernels.launch import interpreted
from bloomery.kernels.norm import add_norm, fits, norm_rows

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(
    "kind", ["rms", "rms bare", "rms strided", "layer", "layer bias", "layer bare strided"]
)
@pytest.mark.parametrize(
    ("width", "dtype", "limit"), [(100, torch.float32, 1e-6), (256, torch.float16, 1e-3)]
)
def test_kernel_equals_reference(width: int, kind: str, dtype: torch.dtype, limit: float) -> None:
    assert check_norm(width, kind, dtype, "cpu") < limit


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_a_sum_and_its_norm_in_one_pass(centered: bool, dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    residual, y = torch.randn(2, 5, 100).to(dtype)
    weight = torch.randn(100)
    bias = torch.randn(100) if centered else None
    total, out = norm_rows(y, weight, bias, 1e-5, centered, residual, 0.5)
    want_total, want = add_norm(residual.clone(), y, 0.5, weight, bias, 1e-5, centered)
    torch.testing.assert_close(total, want_total, rtol=limit, atol=limit)
    torch.testing.assert_close(out, want, rtol=limit, atol=limit)


def test_what_the_kernel_cannot_take() -> None:
    x = torch.randn(3, 4, 8)
    assert fits(x, torch.ones(8), None)
    assert not fits(x, torch.ones(4, 8), None)
    assert not fits(x.transpose(0, 1), torch.ones(8), None)
    assert not fits(torch.empty(1, 1 << 16), None, None)

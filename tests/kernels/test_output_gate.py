"""The kernel that gates the output of attention, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import triton_interpreted
from tests.kernels.oracles import ERROR_LIMITS, check_output_gate

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
@pytest.mark.parametrize("per_head", [False, True], ids=["elements", "heads"])
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_reference(
    kind: str, per_head: bool, head_dim: int, dtype: torch.dtype
) -> None:
    error = check_output_gate(3, head_dim, per_head, kind, dtype, "cpu")
    assert error < ERROR_LIMITS[dtype]

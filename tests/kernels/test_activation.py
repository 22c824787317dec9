"""The activation kernel under the interpreter, against its references."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.activation import ACTIVATIONS
from bloomery.kernels.launch import triton_interpreted
from tests.kernels.oracles import check_activation

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(
    ("width", "dtype", "limit"), [(1100, torch.float32, 1e-6), (64, torch.float16, 1e-3)]
)
def test_kernel_equals_reference(
    width: int, dtype: torch.dtype, limit: float, name: str, gated: bool
) -> None:
    assert check_activation(width, name, gated, dtype, "cpu") < limit

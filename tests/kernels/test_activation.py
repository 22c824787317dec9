"""The activation kernel under the interpreter, against its references."""

from __future__ import annotations

import pytest
import torch

from bloomery.fusion import ActivationEpilogue
from bloomery.kernels.launch import triton_interpreted
from tests.kernels.oracles import ALL_ACTIVATIONS, check_activation

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("epilogue", ALL_ACTIVATIONS, ids=lambda e: f"{e.name} {e.gated}")
@pytest.mark.parametrize(
    ("width", "dtype", "limit"), [(1100, torch.float32, 1e-6), (64, torch.float16, 1e-3)]
)
def test_kernel_equals_reference(
    width: int, dtype: torch.dtype, limit: float, epilogue: ActivationEpilogue
) -> None:
    assert check_activation(width, epilogue, dtype, "cpu") < limit

"""Quantization to 2, 3 or 4 bits per group, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.packed_oracles import check_quantize_groups


@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (4, 64), (3, 32), (2, 16)])
def test_kernel_equals_reference(bits: int, group_size: int) -> None:
    torch.manual_seed(bits)
    assert check_quantize_groups(bits, group_size, "cpu") < 0.002

"""int8 quantization: the largest magnitude of a row is 127 quantization steps."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import GroupedScales
from bloomery.kernels.quantize_rows import INT8, quantize_rows


def quantize_int8(weight: torch.Tensor, quantize_input: bool = False) -> GroupedScales:
    """Quantize weights [out, in] with one scale per row.

    `quantize_input`: kernels may quantize the input to 8 bits as well (W8A8).
    """
    codes, scale = quantize_rows(weight, INT8)
    return GroupedScales(codes, scale, bits=8, quantize_input=quantize_input)

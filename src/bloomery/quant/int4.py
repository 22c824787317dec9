"""int4 quantization, also with 2 or 3 bits: a scale and a zero point per group of columns."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import GroupedScales, pack_codes
from bloomery.kernels.quantize_groups import quantize_groups
from bloomery.quant.int8 import quantize_int8

SMALLEST_GROUP = 8  # columns


def quantize_int4(weight: torch.Tensor, bits: int = 4, group_size: int = 128) -> GroupedScales:
    """Quantize weights [out, in] asymmetrically; scales and zero points are float16.

    The group size is halved until it divides the columns. If no group of at least SMALLEST_GROUP
    columns does, the matrix is quantized to int8.
    """
    while weight.shape[1] % group_size:
        group_size //= 2
    if group_size < SMALLEST_GROUP:
        return quantize_int8(weight)
    codes, scale, zero_point = quantize_groups(weight, bits, group_size)
    if bits == 3:
        codes = pack_codes(codes, 3)
    return GroupedScales(codes, scale, zero_point, bits)

"""MXFP4: 4-bit floats, a power of two for each 32 of a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.kernels.packed import Codebook
from bloomery.quant.base import Product, Range, Tensors, part
from bloomery.quant.packed import PackedMatrix, kept, rows_of

BLOCK = 32
E2M1 = tuple(
    sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
SPELLINGS = (
    ("{}_blocks", "{}_scales"),
    ("{}.weight_blocks", "{}.weight_scales"),
    ("{}.weight_packed", "{}.weight_scale"),
)


class Mxfp4:
    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        for spelling in SPELLINGS:
            codes, scales = (text.format(product.name) for text in spelling)
            if tensors.has(codes) and tensors.has(scales):
                return powers(tensors, product, codes, scales)
        return kept(tensors, product)


def powers(tensors: Tensors, product: Product, codes_name: str, scales_name: str) -> PackedMatrix:
    (rows, width) = product.shape
    expert = product.expert
    codes = part(tensors, codes_name, (rows, width // 2), (torch.uint8,), expert=expert)
    exponents = part(
        tensors,
        scales_name,
        (rows, width // BLOCK),
        (torch.uint8, torch.float8_e8m0fnu),
        expert=expert,
    )

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Codebook:
        power = torch.exp2(rows_of(exponents, ranges, device).view(torch.uint8).float() - 127)
        table = torch.tensor(E2M1, device=device)
        return Codebook(
            rows_of(codes, ranges, device).view(torch.uint8), table, power.to(torch.bfloat16)
        )

    return PackedMatrix.whole(product, read)

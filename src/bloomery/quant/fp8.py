"""8-bit floats: a scale for each row when we round ourselves; for all, for a row or for a square in checkpoints.

Rounding the input as well is the format's own way, and what makes large batches faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.kernels.packed import BLOCK, Fp8
from bloomery.kernels.quantize_rows import FP8, quantize_rows
from bloomery.quant.base import FLOATS, Product, Range, Stored, Tensors, part
from bloomery.quant.packed import PackedMatrix, claim, kept, narrow, rows_of


def fp8(weight: torch.Tensor) -> Fp8:
    return Fp8(*quantize_rows(weight))


class Fp8Format:
    """`weight` in 8-bit floats with `weight_scale_inv` a square (DeepSeek, Qwen) or `weight_scale` for a row or all."""

    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        name = product.name
        for scale in (f"{name}.weight_scale_inv", f"{name}.weight_scale"):
            if tensors.has(scale):
                return floats(tensors, product, scale)
        return kept(tensors, product)


def floats(tensors: Tensors, product: Product, scale_name: str) -> PackedMatrix:
    (rows, width) = product.shape
    name = f"{product.name}.weight"
    weight = part(tensors, name, product.shape, (FP8,), expert=product.expert)
    claim(tensors, product.name, "input_scale", "input_scale_ub", "weight_zero_point")
    found = tensors.shape(scale_name)
    squares = (-(-rows // BLOCK), -(-width // BLOCK))
    wanted = found if found in ((rows, 1), (rows,), (1,), (1, 1)) else squares
    square = wanted == squares and wanted != (rows, 1)
    scale = part(tensors, scale_name, wanted, (*FLOATS, torch.float8_e8m0fnu))

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Fp8:
        codes = rows_of(weight, ranges, device)
        return narrow(Fp8(codes, scales(scale, wanted, ranges, square, len(codes), device)))

    return PackedMatrix.whole(product, read, square)


def scales(
    stored: Stored,
    shape: Sequence[int],
    ranges: Sequence[Range],
    square: bool,
    rows: int,
    device: torch.device,
) -> torch.Tensor:
    """[rows, 1], or one a square of those that the one range of rows touches."""
    if square:
        ranges = [(start // BLOCK, -(-end // BLOCK)) for start, end in ranges]
    elif shape[0] == 1:
        return stored.load(torch.float32, device).expand(rows, 1).contiguous()
    return stored.rows(ranges).load(torch.float32, device).view(-1, shape[1] if square else 1)

"""compressed-tensors: integers of 4 or 8 bits in words, plain 8-bit integers, 8-bit floats, MXFP4.

Which of them a product is, and in which groups, its tensors say; the configuration was checked when it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import Grid
from bloomery.kernels.quantize_rows import FP8
from bloomery.quant.base import Product, Range, Stored, Tensors, part, sizes
from bloomery.quant.fp8 import floats
from bloomery.quant.gptq import WORDS, grid, groups_of, streamed
from bloomery.quant.mxfp4 import powers
from bloomery.quant.packed import Held, PackedMatrix, claim, kept, rows_of


@dataclass(frozen=True)
class Compressed:
    needed: tuple[str, ...] = ()  # parts that must not be missing

    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        name = product.name
        scale = f"{name}.weight_scale"
        if not tensors.has(scale):
            return kept(tensors, product)
        for suffix in self.needed:
            tensors.shape(f"{name}.{suffix}")
        claim(tensors, name, "weight_shape", "input_scale", "input_zero_point")
        if tensors.has(packed := f"{name}.weight_packed"):
            words = part(tensors, packed, sizes(tensors, packed), (*WORDS, torch.uint8))
            if words.dtype == torch.uint8:
                return powers(tensors, product, packed, scale)
            return packed_words(tensors, product, words)
        if tensors.tensor(f"{name}.weight", product.shape).dtype == FP8:
            return floats(tensors, product, scale)
        return integers(tensors, product)


def packed_words(tensors: Tensors, product: Product, words: Stored) -> PackedMatrix:
    (rows, width) = product.shape
    name = product.name
    bits = words.shape[1] * 32 // width
    groups = sizes(tensors, f"{name}.weight_scale")[1]
    if bits not in (4, 8) or words.shape != (rows, width * bits // 32) or width % groups:
        raise CheckpointError(
            f"{name}.weight_packed: {list(words.shape)} words do not hold {rows} x {width} codes of 4 or 8 bits"
        )
    scales = part(tensors, f"{name}.weight_scale", (rows, groups))
    zeros = None
    if tensors.has(f"{name}.weight_zero_point"):
        zeros = part(tensors, f"{name}.weight_zero_point", (-(-rows * bits // 32), groups), WORDS)
    index = groups_of(tensors, f"{name}.weight_g_idx", width, groups)

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Held:
        scale = rows_of(scales, ranges, device)
        zero = torch.full_like(scale, 1 << bits - 1)
        if zeros is not None:
            every = (
                streamed(rows_of(zeros, [(0, zeros.shape[0])], device).T, bits)
                .T[:rows]
                .to(scale.dtype)
            )
            zero = torch.cat([every[start:end] for start, end in ranges])
        return grid(
            rows_of(words, ranges, device),
            bits,
            scale,
            zero,
            None if index is None else index.to(device),
        )

    return PackedMatrix.whole(product, read)


def integers(tensors: Tensors, product: Product) -> PackedMatrix:
    """A byte each, signed; a scale for all, for a row or for groups of it."""
    rows = product.shape[0]
    name = product.name
    weight = part(tensors, f"{name}.weight", product.shape, (torch.int8, FP8))
    shape = tensors.shape(f"{name}.weight_scale")
    groups = 1 if len(shape) == 1 else sizes(tensors, f"{name}.weight_scale")[1]
    alone = shape[0] == 1 and rows != 1
    wanted = (1,) if alone else (rows, groups)
    scales = part(tensors, f"{name}.weight_scale", wanted)
    zeros = None
    if tensors.has(f"{name}.weight_zero_point"):
        zeros = part(tensors, f"{name}.weight_zero_point", wanted, (torch.int8,))

    def each(stored: Stored, ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
        if not alone:
            return rows_of(stored, ranges, device).float()
        count = sum(end - start for start, end in ranges)
        return rows_of(stored, [(0, 1)], device).expand(count, 1).contiguous().float()

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Grid:
        zero = None if zeros is None else each(zeros, ranges, device)
        moved = None if zero is None or not zero.any() else zero
        return Grid(
            rows_of(weight, ranges, device),
            each(scales, ranges, device),
            moved,
            8,
            both=moved is None and groups == 1,
        )

    return PackedMatrix.whole(product, read)

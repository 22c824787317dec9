"""AWQ (its "gemm" layout): 4-bit codes, eight outputs a word in an order of their own, zeros likewise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import Grid, pack
from bloomery.quant.base import Product, Range, Stored, Tensors, part, sizes
from bloomery.quant.gptq import WORDS
from bloomery.quant.packed import PackedMatrix, kept, rows_of

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs of a word lie in it


class Awq:
    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        (rows, width) = product.shape
        name = product.name
        if not tensors.has(f"{name}.qweight"):
            return kept(tensors, product)
        groups = sizes(tensors, f"{name}.scales")[0]
        if width % groups or rows % 8:
            raise CheckpointError(
                f"{name}: {groups} groups of {width} columns, {rows} rows eight a word: neither may leave a rest"
            )
        # Words first, that is outputs: one line a word.
        codes = part(tensors, f"{name}.qweight", (rows // 8, width), WORDS, transposed=True)
        zeros = part(tensors, f"{name}.qzeros", (rows // 8, groups), WORDS, transposed=True)
        scales = part(tensors, f"{name}.scales", (rows, groups), transposed=True)

        def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Grid:
            scale = rows_of(scales, ranges, device)
            zero = unwoven(zeros, ranges, device).to(scale.dtype)
            return Grid(pack(unwoven(codes, ranges, device), 4), scale, zero, 4)

        return PackedMatrix.whole(product, read)


def unwoven(words: Stored, ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    """Rows of numbers of four bits, from lines of which each holds eight of them."""
    found = []
    for start, end in ranges:
        first = start // 8
        lines = rows_of(words, [(first, -(-end // 8))], device)
        numbers = (
            torch.stack([lines >> 4 * place & 15 for place in PLACES], 1)
            .to(torch.uint8)
            .flatten(0, 1)
        )
        found.append(numbers[start - first * 8 : end - first * 8])
    return torch.cat(found)

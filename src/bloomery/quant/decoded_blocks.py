"""Blocks of a GGUF file taken apart into codes, scales and offsets, and the fields of a block.

DecodedBlocks computes the weights from these, bit for bit as the gguf package does (the order of
the multiplications matters), and converts them to the packed matrices that kernels read. This file
must not know the types of blocks: gguf_blocks.py and gguf_grids.py decode them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bloomery.kernels.packed import CodebookWeight, GroupedScales, pack_codes

# From here on, float16 zero points are 32 quantization steps apart, which hides the codes.
MAX_ZERO_POINT = 2.0**15


class DecodedBlocks(NamedTuple):
    """Blocks taken apart: value = code * scale - offset, or codebook[code] * scale."""

    codes: torch.Tensor  # uint8 or int8 [blocks, values]
    scale: torch.Tensor  # float32 [blocks, groups]
    offset: torch.Tensor | None = None  # float32 [blocks, groups]
    codebook: tuple[int, ...] = ()
    bits: int = 8  # of a code in a packed matrix: 4 or 8. 4-bit int8 codes are -8 .. 7
    # Of MXFP4, uint8 [blocks, 1]: the scale of half the codebook's levels is 2 ** (exponent - 127).
    exponents: torch.Tensor | None = None

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantize(self) -> torch.Tensor:
        """Return the values, float32 [blocks, values]."""
        if self.codebook:
            levels = self._codebook_tensor()[self.codes.int()]
        else:
            levels = self.codes.float()
        groups = levels.unflatten(1, (-1, self.group_size))
        groups.mul_(self.scale[..., None])
        if self.offset is not None:
            groups.sub_(self.offset[..., None])
        return groups.flatten(1)

    def to_packed(self, rows: int) -> GroupedScales | CodebookWeight:
        """Convert the blocks, which make up `rows` rows, to a matrix that kernels read.

        The codes stay the same. Scales and zero points are rounded to float16, except the exponents
        of MXFP4.
        """
        codes = self.codes
        if self.exponents is not None:
            packed_codes = pack_codes(codes.reshape(rows, -1), 4)
            levels = self._codebook_tensor() / 2
            return CodebookWeight(packed_codes, levels, self.exponents.reshape(rows, -1))
        scale = self.scale.half()
        zero_point = None
        if self.offset is not None:
            zero_point = self.offset / scale.float()
            # If the zero point is too large, or the scale is zero, all values of the group equal
            # its negative offset. Code 0, zero point -1 and scale -offset express that.
            is_constant = ~(zero_point.abs() < MAX_ZERO_POINT)
            zero_point = torch.where(is_constant, -1.0, zero_point)
            zero_point = zero_point.half().reshape(rows, -1)
            scale = torch.where(is_constant, -self.offset.half(), scale)
            grouped = codes.unflatten(1, (-1, self.group_size))
            codes = grouped.masked_fill(is_constant[..., None], 0)
        codes = codes.reshape(rows, -1)
        scale = scale.reshape(rows, -1)
        if self.codebook:
            return CodebookWeight(pack_codes(codes, 4), self._codebook_tensor(), scale)
        if self.bits == 4:
            unsigned = codes + 8 if codes.dtype == torch.int8 else codes
            codes = pack_codes(unsigned, 4)
        return GroupedScales(codes, scale, zero_point, self.bits)

    def _codebook_tensor(self) -> torch.Tensor:
        return torch.tensor(self.codebook, dtype=torch.float32, device=self.codes.device)


# ---- fields of a block ---------------------------------------------------------------------------


def split_fields(blocks: torch.Tensor, *sizes: int) -> Sequence[torch.Tensor]:
    """Split blocks [blocks, bytes] into fields of these sizes in bytes: [blocks, size] each."""
    return torch.split(blocks, list(sizes), 1)


def float16_field(field: torch.Tensor) -> torch.Tensor:
    """Convert a field of two bytes, a float16 number, to float32 [blocks, 1]."""
    return field.view(torch.float16).float()


def unpack_field(field: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Unpack numbers of `bits` bits: uint8 [blocks, bytes] -> uint8 [blocks, bytes * 8 / bits].

    A run of `run` bytes holds consecutive numbers in its lowest bits, one per byte. The numbers
    that follow are in the next higher bits of the same bytes.
    """
    mask = (1 << bits) - 1
    runs = field.unflatten(1, (-1, run))
    numbers = [(runs >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(numbers, -2).flatten(1)


def center_codes(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Subtract the middle of the range: uint8 -> int8, in place."""
    return codes.view(torch.int8).sub_(middle)

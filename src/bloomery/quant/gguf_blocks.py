"""Decodes GGUF blocks into codes, scales and offsets, on the device where the blocks are.

DecodedBlocks computes the weights from these, bit for bit as the gguf package does (the order of
the multiplications matters), and converts them to the packed matrices that kernels read. The byte
layouts are those of llama.cpp's ggml-common.h. This file must not know files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from bloomery.kernels.packed import CodebookWeight, GroupedScales, pack_codes

# From here on, float16 zero points are 32 quantization steps apart, which hides the codes.
MAX_ZERO_POINT = 2.0**15
# The codebook of IQ4_NL and IQ4_XS: sixteen levels, closer together near zero.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class DecodedBlocks(NamedTuple):
    """Blocks taken apart: value = code * scale - offset, or codebook[code] * scale."""

    codes: torch.Tensor  # uint8 or int8 [blocks, values]
    scale: torch.Tensor  # float32 [blocks, groups]
    offset: torch.Tensor | None = None  # float32 [blocks, groups]
    codebook: tuple[int, ...] = ()
    bits: int = 8  # of a code in a packed matrix: 4 or 8. 4-bit int8 codes are -8 .. 7

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

        The codes stay the same. Scales and zero points are rounded to float16.
        """
        codes = self.codes
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


# ---- blocks of 32 values -------------------------------------------------------------------------


def decode_q4_0(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 15, minus 8."""
    scale, nibbles = split_fields(blocks, 2, 16)
    codes = unpack_field(nibbles, bits=4, run=16)
    return DecodedBlocks(
        center_codes(codes, 8),
        float16_field(scale),
        bits=4,
    )


def decode_q4_1(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 15; the block also stores its minimum, which is the negative offset."""
    scale, minimum, nibbles = split_fields(blocks, 2, 2, 16)
    return DecodedBlocks(
        unpack_field(nibbles, bits=4, run=16),
        float16_field(scale),
        -float16_field(minimum),
        bits=4,
    )


def decode_q5_0(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 31, minus 16. Their fifth bits are stored apart from the nibbles."""
    scale, fifth_bits, nibbles = split_fields(blocks, 2, 4, 16)
    low = unpack_field(nibbles, bits=4, run=16)
    high = unpack_field(fifth_bits, bits=1, run=1)
    codes = low | (high << 4)
    return DecodedBlocks(
        center_codes(codes, 16),
        float16_field(scale),
    )


def decode_q5_1(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 31; the block also stores its minimum, which is the negative offset."""
    scale, minimum, fifth_bits, nibbles = split_fields(blocks, 2, 2, 4, 16)
    low = unpack_field(nibbles, bits=4, run=16)
    high = unpack_field(fifth_bits, bits=1, run=1)
    return DecodedBlocks(
        low | (high << 4),
        float16_field(scale),
        -float16_field(minimum),
    )


def decode_q8_0(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are int8."""
    scale, codes = split_fields(blocks, 2, 32)
    return DecodedBlocks(
        codes.view(torch.int8),
        float16_field(scale),
    )


def decode_iq4_nl(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are indices of IQ4_LEVELS."""
    scale, nibbles = split_fields(blocks, 2, 16)
    return DecodedBlocks(
        unpack_field(nibbles, bits=4, run=16),
        float16_field(scale),
        codebook=IQ4_LEVELS,
        bits=4,
    )


# ---- super-blocks of 256 values, with a scale for each group of 16 or 32 -------------------------


def decode_iq4_xs(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are indices of IQ4_LEVELS. Group scales have six bits, minus 32."""
    scale, high_bits, low_bits, nibbles = split_fields(blocks, 2, 2, 4, 128)
    low = unpack_field(low_bits, bits=4, run=1)
    high = unpack_field(high_bits, bits=2, run=1)
    group_scale = (low | (high << 4)).float().sub_(32)
    return DecodedBlocks(
        unpack_field(nibbles, bits=4, run=16),
        float16_field(scale) * group_scale,
        codebook=IQ4_LEVELS,
        bits=4,
    )


def decode_q2_k(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 3. A group byte holds a scale in its low and an offset in its high half."""
    group_bytes, packed, scale, offset = split_fields(blocks, 16, 64, 2, 2)
    group_scale = (group_bytes & 15).float()
    group_offset = (group_bytes >> 4).float()
    return DecodedBlocks(
        unpack_field(packed, bits=2, run=32),
        float16_field(scale) * group_scale,
        float16_field(offset) * group_offset,
    )


def decode_q3_k(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 7, minus 4. Group scales have six bits, minus 32."""
    fields = split_fields(blocks, 32, 64, 8, 4, 2)
    third_bits, packed, low_scale_bits, high_scale_bits, scale = fields
    low_scale = unpack_field(low_scale_bits, bits=4, run=8)
    high_scale = unpack_field(high_scale_bits, bits=2, run=4)
    group_scale = (low_scale | (high_scale << 4)).float().sub_(32)
    low = unpack_field(packed, bits=2, run=32)
    high = unpack_field(third_bits, bits=1, run=32)
    codes = low | (high << 2)
    return DecodedBlocks(
        center_codes(codes, 4),
        float16_field(scale) * group_scale,
    )


def decode_k_scales(header: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the scales and offsets of Q4_K and Q5_K: float32 [blocks, 8] each.

    The header has 16 bytes: a float16 scale, a float16 offset, and 12 bytes with eight scales and
    eight offsets of six bits, which are relative to these two.
    """
    scale, offset, first, second, third = split_fields(header, 2, 2, 4, 4, 4)
    # Groups 4 .. 7 have their low four bits in `third` and their high two in `first` or `second`.
    last_scales = (third & 15) | ((first >> 2) & 48)
    last_offsets = (third >> 4) | ((second >> 2) & 48)
    group_scale = torch.cat([first & 63, last_scales], 1).float()
    group_offset = torch.cat([second & 63, last_offsets], 1).float()
    return (
        float16_field(scale) * group_scale,
        float16_field(offset) * group_offset,
    )


def decode_q4_k(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 15, in groups of 32."""
    header, nibbles = split_fields(blocks, 16, 128)
    codes = unpack_field(nibbles, bits=4, run=32)
    scale, offset = decode_k_scales(header)
    return DecodedBlocks(codes, scale, offset, bits=4)


def decode_q5_k(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 31, in groups of 32. Their fifth bits are stored apart from the nibbles."""
    header, fifth_bits, nibbles = split_fields(blocks, 16, 32, 128)
    low = unpack_field(nibbles, bits=4, run=32)
    high = unpack_field(fifth_bits, bits=1, run=32)
    codes = low | (high << 4)
    scale, offset = decode_k_scales(header)
    return DecodedBlocks(codes, scale, offset)


def decode_q6_k(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 63, minus 32. Group scales are int8."""
    low_bits, high_bits, group_scales, scale = split_fields(blocks, 128, 64, 16, 2)
    low = unpack_field(low_bits, bits=4, run=64)
    high = unpack_field(high_bits, bits=2, run=32)
    codes = low | (high << 4)
    group_scale = group_scales.view(torch.int8).float()
    return DecodedBlocks(
        center_codes(codes, 32),
        float16_field(scale) * group_scale,
    )


# By GGUF type. A decoder takes uint8 [blocks, bytes of a block].
BLOCK_DECODERS: Mapping[str, Callable[[torch.Tensor], DecodedBlocks]] = {
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1,
    "Q8_0": decode_q8_0,
    "IQ4_NL": decode_iq4_nl,
    "IQ4_XS": decode_iq4_xs,
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
}

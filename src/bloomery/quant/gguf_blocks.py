"""Decodes GGUF blocks into codes, scales and offsets, on the device where the blocks are.

From these follow the values, bit for bit those of the gguf package (the order of multiplications
matters), and the packed matrices that kernels read. Byte layouts are those of llama.cpp's
ggml-common.h. This file must not know files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from bloomery.kernels.packed import CodebookWeight, GroupedScales, pack_codes

# An offset of this many quantization steps hides the steps in half precision.
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
        grouped = levels.unflatten(1, (-1, self.group_size)).mul_(self.scale[..., None])
        if self.offset is not None:
            grouped = grouped.sub_(self.offset[..., None])
        return grouped.flatten(1)

    def to_packed(self, rows: int) -> GroupedScales | CodebookWeight:
        """Convert the blocks of so many rows to a matrix that kernels read.

        The codes stay the same. Scales and zero points are rounded to half precision.
        """
        codes = self.codes
        scale = self.scale.half()
        zero_point = None
        if self.offset is not None:
            zero_point = self.offset / scale.float()
            # Where the zero point is too large, also because the scale is zero, the values of the
            # group are all its offset: code 0, zero point -1, scale -offset.
            is_constant = ~(zero_point.abs() < MAX_ZERO_POINT)
            zero_point = torch.where(is_constant, -1.0, zero_point).half().reshape(rows, -1)
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


def read_half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Read the float16 at this byte offset of each block: float32 [blocks, 1]."""
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def split_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes into numbers of `bits` bits, lowest first.

    [blocks, ..., width] -> [blocks, ..., 8 / bits, width]
    """
    mask = (1 << bits) - 1
    numbers = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(numbers, -2)


def read_nibbles(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Read 32 codes of four bits: the low halves of 16 bytes, then the high halves."""
    return split_bits(blocks[:, offset : offset + 16], 4).flatten(1)


def read_fifth_bits(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Read the fifth bits of 32 codes from four bytes, shifted into place: [blocks, 32]."""
    word = blocks[:, offset : offset + 4].contiguous().view(torch.int32)
    shifts = torch.arange(32, dtype=torch.int32, device=blocks.device)
    return ((word >> shifts) & 1).to(torch.uint8) << 4


def center_codes(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Subtract the middle of the range: uint8 -> int8, in place."""
    return codes.view(torch.int8).sub_(middle)


# ---- blocks of 32 values -------------------------------------------------------------------------


def decode_q4_0(blocks: torch.Tensor) -> DecodedBlocks:
    """18 bytes: scale (float16), then 16 bytes of nibbles with codes 0 .. 15, minus 8."""
    codes = center_codes(read_nibbles(blocks, 2), 8)
    return DecodedBlocks(codes, read_half(blocks, 0), bits=4)


def decode_q4_1(blocks: torch.Tensor) -> DecodedBlocks:
    """20 bytes: scale and minimum (float16), then 16 bytes of nibbles."""
    codes = read_nibbles(blocks, 4)
    return DecodedBlocks(codes, read_half(blocks, 0), -read_half(blocks, 2), bits=4)


def decode_q5_0(blocks: torch.Tensor) -> DecodedBlocks:
    """22 bytes: scale (float16), 4 bytes of fifth bits, then 16 bytes of nibbles; minus 16."""
    codes = read_nibbles(blocks, 6) | read_fifth_bits(blocks, 2)
    return DecodedBlocks(center_codes(codes, 16), read_half(blocks, 0))


def decode_q5_1(blocks: torch.Tensor) -> DecodedBlocks:
    """24 bytes: scale and minimum (float16), 4 bytes of fifth bits, then 16 bytes of nibbles."""
    codes = read_nibbles(blocks, 8) | read_fifth_bits(blocks, 4)
    return DecodedBlocks(codes, read_half(blocks, 0), -read_half(blocks, 2))


def decode_q8_0(blocks: torch.Tensor) -> DecodedBlocks:
    """34 bytes: scale (float16), then 32 int8 codes."""
    return DecodedBlocks(blocks[:, 2:].view(torch.int8), read_half(blocks, 0))


def decode_iq4_nl(blocks: torch.Tensor) -> DecodedBlocks:
    """18 bytes: scale (float16), then 16 bytes of nibbles that index IQ4_LEVELS."""
    codes = read_nibbles(blocks, 2)
    return DecodedBlocks(codes, read_half(blocks, 0), codebook=IQ4_LEVELS, bits=4)


# ---- super-blocks of 256 values, with scales of their own for each 16 or 32 ----------------------


def decode_iq4_xs(blocks: torch.Tensor) -> DecodedBlocks:
    """136 bytes: float16 scale, 6 bytes of group scales, then 128 bytes of nibbles.

    Group scales have six bits, minus 32: two high bits in bytes 2:4, four low ones in bytes 4:8.
    """
    low = split_bits(blocks[:, 4:8, None], 4).flatten(1)
    high = split_bits(blocks[:, 2:4, None], 2).flatten(1)
    group_scale = (low | (high << 4)).float().sub_(32)
    packed = blocks[:, 8:].unflatten(1, (8, 16))
    codes = split_bits(packed, 4).flatten(1)
    scale = read_half(blocks, 0) * group_scale
    return DecodedBlocks(codes, scale, codebook=IQ4_LEVELS, bits=4)


def decode_q2_k(blocks: torch.Tensor) -> DecodedBlocks:
    """84 bytes: 16 of group scales, 64 of 2-bit codes, then the float16 scale and offset.

    A byte of group scales holds a scale in its low and an offset in its high half.
    """
    group_bytes = blocks[:, :16]
    group_scale = (group_bytes & 15).float()
    group_offset = (group_bytes >> 4).float()
    packed = blocks[:, 16:80].unflatten(1, (2, 32))
    codes = split_bits(packed, 2).flatten(1)
    scale = read_half(blocks, 80) * group_scale
    offset = read_half(blocks, 82) * group_offset
    return DecodedBlocks(codes, scale, offset)


def decode_q3_k(blocks: torch.Tensor) -> DecodedBlocks:
    """110 bytes: 32 of third bits, 64 of 2-bit codes, 12 of group scales, one float16 scale.

    Codes are 0 .. 7, minus 4. Group scales have six bits, minus 32.
    """
    low = split_bits(blocks[:, 96:104], 4).flatten(1)
    high = split_bits(blocks[:, 104:108], 2).flatten(1)
    group_scale = (low | (high << 4)).float().sub_(32)
    third_bits = split_bits(blocks[:, :32], 1).view(-1, 2, 4, 32)
    packed = blocks[:, 32:96].unflatten(1, (2, 32))
    codes = split_bits(packed, 2) | (third_bits << 2)
    centered = center_codes(codes.flatten(1), 4)
    scale = read_half(blocks, 108) * group_scale
    return DecodedBlocks(centered, scale)


def read_k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of Q4_K and Q5_K: float32 [blocks, 8] each.

    Bytes 4:16 hold eight scales and eight offsets of six bits, relative to two float16 numbers.
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    # Groups 4 .. 7 have their low four bits in `third` and their high two in `first` or `second`.
    last_scales = (third & 15) | ((first >> 2) & 48)
    last_offsets = (third >> 4) | ((second >> 2) & 48)
    group_scale = torch.cat([first & 63, last_scales], 1).float()
    group_offset = torch.cat([second & 63, last_offsets], 1).float()
    scale = read_half(blocks, 0) * group_scale
    offset = read_half(blocks, 2) * group_offset
    return scale, offset


def decode_q4_k(blocks: torch.Tensor) -> DecodedBlocks:
    """144 bytes: 16 bytes of scales and offsets for groups of 32, then 128 bytes of nibbles."""
    packed = blocks[:, 16:].unflatten(1, (4, 32))
    codes = split_bits(packed, 4).flatten(1)
    scale, offset = read_k_scales(blocks)
    return DecodedBlocks(codes, scale, offset, bits=4)


def decode_q5_k(blocks: torch.Tensor) -> DecodedBlocks:
    """176 bytes: 16 bytes of scales and offsets, 32 of fifth bits, then 128 of nibbles."""
    fifth_bits = split_bits(blocks[:, 16:48], 1).view(-1, 4, 2, 32)
    packed = blocks[:, 48:].unflatten(1, (4, 32))
    codes = split_bits(packed, 4) | (fifth_bits << 4)
    scale, offset = read_k_scales(blocks)
    return DecodedBlocks(codes.flatten(1), scale, offset)


def decode_q6_k(blocks: torch.Tensor) -> DecodedBlocks:
    """210 bytes: low four and high two bits of codes, 16 int8 scales, one float16 scale.

    Codes are 0 .. 63, minus 32.
    """
    packed_low = blocks[:, :128].unflatten(1, (2, 64))
    packed_high = blocks[:, 128:192].unflatten(1, (2, 32))
    low = split_bits(packed_low, 4).view(-1, 2, 4, 32)
    high = split_bits(packed_high, 2)
    codes = center_codes((low | (high << 4)).flatten(1), 32)
    group_scale = blocks[:, 192:208].view(torch.int8).float()
    scale = read_half(blocks, 208) * group_scale
    return DecodedBlocks(codes, scale)


# By GGUF type: uint8 [blocks, bytes] -> DecodedBlocks.
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

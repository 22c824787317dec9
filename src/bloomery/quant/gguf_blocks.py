"""Decodes the blocks of every GGUF type, on the device where they are.

The byte layouts are those of llama.cpp's ggml-common.h; native/gguf_blocks.h reads them for the CPU
kernels. Types whose codes are entries of a grid are in gguf_grids.py. This file must not know files
or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bloomery.quant.decoded_blocks import (
    DecodedBlocks,
    center_codes,
    float16_field,
    split_fields,
    unpack_field,
)
from bloomery.quant.gguf_grids import GRID_DECODERS

# The codebook of IQ4_NL and IQ4_XS: sixteen levels, closer together near zero.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of a 4-bit float with two bits of exponent.
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# The one scale of a ternary block is repeated: kernels read groups of at most 128 values.
TERNARY_GROUPS = 2


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


def decode_mxfp4(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are indices of FP4_LEVELS. The scale is a power of two, stored as its exponent."""
    exponent, nibbles = split_fields(blocks, 1, 16)
    # The levels are doubled, so the scale is halved. Two exponents give subnormal floats.
    normal = (exponent.int() - 1) << 23
    subnormal = 0x00200000 << exponent.int().clamp(max=1)
    bits = torch.where(exponent < 2, subnormal, normal)
    return DecodedBlocks(
        unpack_field(nibbles, bits=4, run=16),
        bits.view(torch.float32),
        codebook=FP4_LEVELS,
        bits=4,
        exponents=exponent,
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


# ---- blocks of 64, 128 and 256 values, with one or few scales -----------------------------------


def decode_nvfp4(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are FP4_LEVELS. Each of the four groups of 16 has an 8-bit float as scale."""
    scale_bytes, nibbles = split_fields(blocks, 4, 32)
    indices = unpack_field(nibbles, bits=4, run=8)
    levels = torch.tensor(FP4_LEVELS, dtype=torch.int8, device=blocks.device)
    # The sign bit has no meaning, except that 0x7F stands for 0 and 0xFF for 480.
    magnitude = scale_bytes & 0x7F
    scale = magnitude.view(torch.float8_e4m3fn).float()
    largest = torch.where(scale_bytes == 0xFF, 480.0, 0.0)
    scale = torch.where(magnitude == 0x7F, largest, scale)
    # The levels are doubled, so the scale is halved.
    return DecodedBlocks(levels[indices.int()], scale * 0.5)


def decode_q1_0(blocks: torch.Tensor) -> DecodedBlocks:
    """A set bit means 1, a clear bit means -1."""
    scale, packed = split_fields(blocks, 2, 16)
    bits = unpack_field(packed, bits=1, run=1)
    codes = center_codes(bits * 2, 1)
    return DecodedBlocks(codes, float16_field(scale), bits=4)


def decode_tq1_0(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are -1, 0 and 1: five in a byte, as the digits of a fraction of base 3."""
    first, second, last, scale = split_fields(blocks, 32, 16, 4, 2)
    codes = torch.cat(
        [unpack_digits(first, 5), unpack_digits(second, 5), unpack_digits(last, 4)], 1
    )
    return DecodedBlocks(codes, float16_field(scale).repeat(1, TERNARY_GROUPS), bits=4)


def unpack_digits(field: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack base-3 digits, minus 1: uint8 [blocks, bytes] -> int8 [blocks, count * bytes].

    A byte is a fraction of 256. Times a power of 3, modulo 256, it begins with the next digit.
    """
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=field.device)
    shifted = field[:, None, :] * powers[:, None]
    digits = (shifted.int() * 3) >> 8
    return digits.to(torch.int8).sub_(1).flatten(1)


def decode_tq2_0(blocks: torch.Tensor) -> DecodedBlocks:
    """Codes are 0 .. 3, minus 1."""
    packed, scale = split_fields(blocks, 64, 2)
    codes = center_codes(unpack_field(packed, bits=2, run=32), 1)
    return DecodedBlocks(codes, float16_field(scale).repeat(1, TERNARY_GROUPS), bits=4)


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
    "TQ1_0": decode_tq1_0,
    "TQ2_0": decode_tq2_0,
    "Q1_0": decode_q1_0,
    "MXFP4": decode_mxfp4,
    "NVFP4": decode_nvfp4,
    **GRID_DECODERS,
}

"""Decodes GGUF types whose codes are entries of a grid: IQ1, IQ2 and IQ3.

A block has an index for every eight (IQ3: four) values, signs, and a scale for each group of 16 or
32. The entry of the grid at that index gives the magnitudes, in units that make the codes integers.
The grids belong to the file format; they are taken from the gguf package. This file must not know
files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from bloomery.quant.decoded_blocks import (
    DecodedBlocks,
    float16_field,
    split_fields,
    unpack_field,
)

SIGN_BITS = 7  # stored for eight values; the number of negative ones is even
SIGN_SHIFTS = (0, 7, 14, 21)  # of the four groups of signs in a 32-bit word


@lru_cache(maxsize=16)
def load_grid(kind: str, device: torch.device = torch.device("cpu")) -> torch.Tensor:  # noqa: B008
    """Return the grid of a type: int8 [entries, values of an entry]."""
    from gguf import quants

    quant = getattr(quants, kind)
    quant.init_grid()
    grid = torch.from_numpy(quant.grid).to(torch.int8)
    return grid.view(grid.shape[-2:]).contiguous().to(device)


# ---- parts of a block ----------------------------------------------------------------------------


def read_integers(field: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read little-endian integers: uint8 [blocks, bytes] -> int32 [blocks, integers].

    Integers of 32 bits keep their bits; they may be negative.
    """
    read = field.contiguous().view(dtype).int()
    return read & 0xFFFF if dtype == torch.int16 else read


def look_up(kind: str, indices: torch.Tensor) -> torch.Tensor:
    """Return the entries at these indices: [blocks, n] -> int8 [blocks, n, values of an entry]."""
    return load_grid(kind, indices.device)[indices.int()]


def apply_signs(magnitudes: torch.Tensor, sign_bytes: torch.Tensor) -> torch.Tensor:
    """Negate the values whose sign bit is set: int8 [blocks, values], a byte for eight of them."""
    negative = unpack_field(sign_bytes.to(torch.uint8), bits=1, run=1).bool()
    return torch.where(negative, -magnitudes, magnitudes)


def complete_signs(seven: torch.Tensor) -> torch.Tensor:
    """Add the eighth sign, which makes the number of negative values even."""
    parity = seven
    for shift in (4, 2, 1):
        parity = parity ^ (parity >> shift)
    return seven | ((parity & 1) << SIGN_BITS)


def split_signs(packed_signs: torch.Tensor) -> torch.Tensor:
    """Split words of four groups of seven signs: [blocks, n] -> sign bytes [blocks, 4 n]."""
    groups = [(packed_signs >> shift) & 127 for shift in SIGN_SHIFTS]
    return complete_signs(torch.stack(groups, -1).flatten(1))


def scale_in_eighths(scale: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return scale * (0.5 + factor) / 4 in the order in which the gguf package multiplies."""
    return scale * (factors.float() + 0.5) * 0.25


# ---- IQ2: eight magnitudes (8, 25, 43) for an index ----------------------------------------------


def decode_iq2_xxs(blocks: torch.Tensor) -> DecodedBlocks:
    """Of 32 values: four indices, then a word with 28 signs and a 4-bit scale."""
    scale, packed = split_fields(blocks, 2, 64)
    groups = packed.unflatten(1, (8, 8))
    indices = groups[..., :4].flatten(1)
    packed_signs = read_integers(groups[..., 4:].flatten(1), torch.int32)
    codes = apply_signs(look_up("IQ2_XXS", indices).flatten(1), split_signs(packed_signs))
    factors = (packed_signs >> 28) & 15
    return DecodedBlocks(codes, scale_in_eighths(float16_field(scale), factors))


def decode_iq2_xs(blocks: torch.Tensor) -> DecodedBlocks:
    """Of eight values: a word with nine bits of index and seven signs."""
    scale, packed, scales = split_fields(blocks, 2, 64, 8)
    packed_indices = read_integers(packed, torch.int16)
    codes = look_up("IQ2_XS", packed_indices & 511).flatten(1)
    codes = apply_signs(codes, complete_signs(packed_indices >> 9))
    factors = unpack_field(scales, bits=4, run=1)
    return DecodedBlocks(codes, scale_in_eighths(float16_field(scale), factors))


def decode_iq2_s(blocks: torch.Tensor) -> DecodedBlocks:
    """Indices have ten bits, two of them stored apart; all eight signs are stored."""
    scale, low, signs, high, scales = split_fields(blocks, 2, 32, 32, 8, 8)
    indices = low.int() | (unpack_field(high, bits=2, run=1).int() << 8)
    codes = apply_signs(look_up("IQ2_S", indices).flatten(1), signs)
    factors = unpack_field(scales, bits=4, run=1)
    return DecodedBlocks(codes, scale_in_eighths(float16_field(scale), factors))


# ---- IQ3: four magnitudes for an index -----------------------------------------------------------


def decode_iq3_xxs(blocks: torch.Tensor) -> DecodedBlocks:
    """Of 32 values: eight indices, and a word with 28 signs and a 4-bit scale."""
    scale, indices, packed = split_fields(blocks, 2, 64, 32)
    packed_signs = read_integers(packed, torch.int32)
    codes = apply_signs(look_up("IQ3_XXS", indices).flatten(1), split_signs(packed_signs))
    factors = ((packed_signs >> 28) & 15).float()
    return DecodedBlocks(codes, float16_field(scale) * (factors + 0.5) * 0.5)


def decode_iq3_s(blocks: torch.Tensor) -> DecodedBlocks:
    """Indices have nine bits, one of them stored apart; all eight signs are stored."""
    scale, low, high, signs, scales = split_fields(blocks, 2, 64, 8, 32, 4)
    indices = low.int() | (unpack_field(high, bits=1, run=1).int() << 8)
    codes = apply_signs(look_up("IQ3_S", indices).flatten(1), signs)
    factors = unpack_field(scales, bits=4, run=1).float() * 2 + 1
    return DecodedBlocks(codes, float16_field(scale) * factors)


# ---- IQ1: eight of -1, 0 and 1 for an index, all moved up or down by an eighth -------------------
# Codes count in eighths, so the scale is divided by eight: a power of two, which loses nothing.


def shift_entries(entries: torch.Tensor, is_down: torch.Tensor) -> torch.Tensor:
    """Convert entries [blocks, n, 8] to eighths and move them; `is_down` is [blocks, n]."""
    eighth = torch.where(is_down, -1, 1).to(torch.int8)
    return (entries * 8 + eighth[..., None]).flatten(1)


def decode_iq1_s(blocks: torch.Tensor) -> DecodedBlocks:
    """Of 32 values: four indices, and a word with their high bits, a scale and the direction."""
    scale, low, packed = split_fields(blocks, 2, 32, 16)
    packed_high = read_integers(packed, torch.int16)
    high = torch.stack([(packed_high >> shift) & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    entries = look_up("IQ1_S", low.int() | (high << 8))
    is_down = (packed_high >> 15).bool().repeat_interleave(4, 1)
    factors = ((packed_high >> 12) & 7).float() * 2 + 1
    return DecodedBlocks(shift_entries(entries, is_down), float16_field(scale) * factors * 0.125)


def decode_iq1_m(blocks: torch.Tensor) -> DecodedBlocks:
    """The float16 scale is stored in the high four bits of four words of group scales."""
    low, high, packed = split_fields(blocks, 32, 16, 8)
    packed_scales = read_integers(packed, torch.int16)
    nibbles = (packed_scales >> 12) & 15
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=blocks.device)
    scale_bits = (nibbles << shifts).sum(1, keepdim=True).to(torch.int16)
    scale = scale_bits.view(torch.float16).float()
    factors = torch.stack([(packed_scales >> shift) & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    high_bits = unpack_field(high, bits=4, run=1).int()
    entries = look_up("IQ1_M", low.int() | ((high_bits & 7) << 8))
    codes = shift_entries(entries, (high_bits & 8).bool())
    return DecodedBlocks(codes, scale * (factors.float() * 2 + 1) * 0.125)


GRID_DECODERS: Mapping[str, Callable[[torch.Tensor], DecodedBlocks]] = {
    "IQ2_XXS": decode_iq2_xxs,
    "IQ2_XS": decode_iq2_xs,
    "IQ2_S": decode_iq2_s,
    "IQ3_XXS": decode_iq3_xxs,
    "IQ3_S": decode_iq3_s,
    "IQ1_S": decode_iq1_s,
    "IQ1_M": decode_iq1_m,
}

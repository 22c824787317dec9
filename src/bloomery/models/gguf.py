"""Blocks of GGUF's quantised types to float32 values, on whatever device the blocks lie.

Each decoder takes uint8 [blocks, bytes] and gives float32 [blocks, values], bit for bit what the gguf package gives:
the order of the multiplications is part of the contract. Types that are not spelled out here go through that package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bloomery.artifacts.gguf import BLOCKS

Decoder = Callable[[torch.Tensor], torch.Tensor]


def decoder(kind: str) -> Decoder | None:
    """How to read a quantised type, or None for one that nobody here can read."""
    if kind in DECODERS:
        return DECODERS[kind]
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values, size = BLOCKS[kind]
    number = GGMLQuantizationType.__members__.get(kind)
    if number is None:
        return None

    def decode(blocks: torch.Tensor) -> torch.Tensor:
        # The package loops over groups of rows: one long row is one group.
        row = dequantize(blocks.cpu().numpy().reshape(1, -1), number)
        return torch.from_numpy(row).view(-1, values).to(blocks.device)

    try:
        decode(torch.zeros(1, size, dtype=torch.uint8))
    except NotImplementedError:
        return None
    return decode


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The scale at byte `at` of each block: [blocks, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned numbers of `bits` bits, lowest first: [blocks, ..., width] -> [blocks, ..., 8 / bits, width]."""
    return torch.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -2)


def _nibbles(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """32 numbers of four bits: the low halves of 16 bytes, then the high ones."""
    return _fields(blocks[:, at : at + 16], 4).flatten(1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Bit i of four bytes, where it stands in a number of five bits: [blocks, 32]."""
    word = blocks[:, at : at + 4].contiguous().view(torch.int32)
    shifts = torch.arange(32, dtype=torch.int32, device=blocks.device)
    return ((word >> shifts) & 1).to(torch.uint8) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks, 2).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks, 4).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


# ---- super-blocks of 256 values, with scales of their own for each 16 or 32 ----------------------


def _scaled(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    """values [blocks, ...] * scales [blocks, groups] (- minimums), each over its share of the 256."""
    grouped = values.reshape(len(values), scales.shape[1], -1).float().mul_(scales[..., None])
    return (grouped if minimums is None else grouped.sub_(minimums[..., None])).flatten(1)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    values = _fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2)
    return _scaled(values, _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Two low bits, a third in a mask where 0 means minus four, scales of six bits less 32."""
    low = _fields(blocks[:, 96:104], 4).flatten(1)
    high = _fields(blocks[:, 104:108], 2).flatten(1)
    scales = (low | (high << 4)).float().sub_(32)
    third = _fields(blocks[:, :32], 1).view(-1, 2, 4, 32)
    values = (_fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2) | (third << 2)).float().sub_(4)
    return _scaled(values, _half(blocks, 108) * scales)


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes 4:16 hold eight scales and eight minimums of six bits: [blocks, 8] each, times their half floats."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minimums.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled(_fields(blocks[:, 16:].unflatten(1, (4, 32)), 4), *_scales_and_minimums(blocks))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    fifth = _fields(blocks[:, 16:48], 1).view(-1, 4, 2, 32)
    values = _fields(blocks[:, 48:].unflatten(1, (4, 32)), 4) | (fifth << 4)
    return _scaled(values, *_scales_and_minimums(blocks))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 2, 4, 32)
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    values = (low | (high << 4)).float().sub_(32)
    return _scaled(values, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float())


DECODERS: Mapping[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

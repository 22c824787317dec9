"""What the bits of GGUF's blocks say: codes, scales and offsets, on whatever device the blocks lie.

From them come the values, bit for bit those of the gguf package (the order of the multiplications is part of the
contract), and the matrices that kernels read. This file must not know files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from bloomery.kernels.packed import Codebook, Grid, pack

FLAT = 2.0**15  # an offset of that many steps leaves nothing of them within half precision


class Steps(NamedTuple):
    """Values are code * scale - less, or those of a table in the codes' place."""

    codes: torch.Tensor  # [blocks, values] uint8, or int8
    scale: torch.Tensor  # float32 [blocks, groups]
    less: torch.Tensor | None = None  # float32 [blocks, groups]
    table: tuple[int, ...] = ()
    bits: int = 8  # that hold a code; int8 less than 8 are centred

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def values(self) -> torch.Tensor:
        """float32 [blocks, values]."""
        codes = self.codes.float() if not self.table else self._table()[self.codes.int()]
        grouped = codes.unflatten(1, (-1, self.group)).mul_(self.scale[..., None])
        return (grouped if self.less is None else grouped.sub_(self.less[..., None])).flatten(1)

    def _table(self) -> torch.Tensor:
        return torch.tensor(self.table, dtype=torch.float32, device=self.codes.device)

    def matrix(self, rows: int) -> Grid | Codebook:
        """The blocks of so many rows as kernels read them: the same codes; scales and zeros in half precision."""
        codes = self.codes
        scale = self.scale.half()
        zero = None
        if self.less is not None:
            zero = self.less / scale.float()
            flat = ~(
                zero.abs() < FLAT
            )  # also where the scale is nothing: the whole group is its offset
            zero = torch.where(flat, -1.0, zero).half()
            scale = torch.where(flat, -self.less.half(), scale)
            codes = codes.unflatten(1, (-1, self.group)).masked_fill(flat[..., None], 0)
        codes = codes.reshape(rows, -1)
        scale = scale.reshape(rows, -1)
        if self.table:
            return Codebook(pack(codes, 4), self._table(), scale)
        if self.bits == 4:
            codes = pack(codes + 8 if codes.dtype == torch.int8 else codes, 4)
        return Grid(codes, scale, None if zero is None else zero.reshape(rows, -1), self.bits)


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


def _centred(codes: torch.Tensor, middle: int) -> torch.Tensor:
    return codes.view(torch.int8).sub_(middle)


# Sixteen levels, closer together near zero.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# ---- super-blocks of 256 values, with scales of their own for each 16 or 32 ----------------------


def _iq4_xs(blocks: torch.Tensor) -> Steps:
    """Scales of six bits less 32: four low ones two a byte, two high ones in a word ahead of them."""
    low = _fields(blocks[:, 4:8, None], 4).flatten(1)
    high = _fields(blocks[:, 2:4, None], 2).flatten(1)
    codes = _fields(blocks[:, 8:].unflatten(1, (8, 16)), 4).flatten(1)
    return Steps(
        codes, _half(blocks, 0) * (low | (high << 4)).float().sub_(32), table=LEVELS, bits=4
    )


def _q2_k(blocks: torch.Tensor) -> Steps:
    scales = blocks[:, :16]
    codes = _fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2).flatten(1)
    return Steps(
        codes, _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float()
    )


def _q3_k(blocks: torch.Tensor) -> Steps:
    """Two low bits, a third in a mask where 0 means minus four, scales of six bits less 32."""
    low = _fields(blocks[:, 96:104], 4).flatten(1)
    high = _fields(blocks[:, 104:108], 2).flatten(1)
    third = _fields(blocks[:, :32], 1).view(-1, 2, 4, 32)
    codes = _fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2) | (third << 2)
    return Steps(
        _centred(codes.flatten(1), 4), _half(blocks, 108) * (low | (high << 4)).float().sub_(32)
    )


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes 4:16 hold eight scales and eight minimums of six bits: [blocks, 8] each, times their half floats."""
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minimums.float()


def _q4_k(blocks: torch.Tensor) -> Steps:
    codes = _fields(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1)
    return Steps(codes, *_scales_and_minimums(blocks), bits=4)


def _q5_k(blocks: torch.Tensor) -> Steps:
    fifth = _fields(blocks[:, 16:48], 1).view(-1, 4, 2, 32)
    codes = _fields(blocks[:, 48:].unflatten(1, (4, 32)), 4) | (fifth << 4)
    return Steps(codes.flatten(1), *_scales_and_minimums(blocks))


def _q6_k(blocks: torch.Tensor) -> Steps:
    low = _fields(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 2, 4, 32)
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return Steps(_centred((low | (high << 4)).flatten(1), 32), scale)


STEPS: Mapping[str, Callable[[torch.Tensor], Steps]] = {  # of b: uint8 [blocks, bytes]
    "Q4_0": lambda b: Steps(_centred(_nibbles(b, 2), 8), _half(b, 0), bits=4),
    "Q4_1": lambda b: Steps(_nibbles(b, 4), _half(b, 0), -_half(b, 2), bits=4),
    "Q5_0": lambda b: Steps(_centred(_nibbles(b, 6) | _fifth_bits(b, 2), 16), _half(b, 0)),
    "Q5_1": lambda b: Steps(_nibbles(b, 8) | _fifth_bits(b, 4), _half(b, 0), -_half(b, 2)),
    "Q8_0": lambda b: Steps(b[:, 2:].view(torch.int8), _half(b, 0)),
    "IQ4_NL": lambda b: Steps(_nibbles(b, 2), _half(b, 0), table=LEVELS, bits=4),
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

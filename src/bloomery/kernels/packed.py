"""Matrices of fewer bits, as they lie on the device, and what they mean.

    Grid      steps of an even grid: (code - zero) * scale, a scale for every group of columns or for a whole row
    Codebook  sixteen values of a table, times the largest of their block, which may itself be a code of 8 bits
    Fp8       8-bit floats, times a scale for all, for a row or for a square block

Codes of 4 bits lie two a byte, the even column in the low half; of 3 bits eight in three bytes, the first lowest.
`dequantize` is the reference of every kernel that reads them. This file must not know where codes come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grid:
    codes: torch.Tensor  # [out, in * bits / 8] uint8; of 8 bits also int8, centred already
    scale: torch.Tensor  # [out, in / group], floating; a group of all columns is a row
    zero: torch.Tensor | None = None  # [out, in / group], floating; None: the middle of the range
    bits: int = 4
    order: torch.Tensor | None = (
        None  # [in] int32: column i of the codes belongs to column order[i] of the input
    )
    both: bool = False  # the input may be rounded to 8 bits as well, where that is faster

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.codes.shape
        return rows, width * 8 // self.bits

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    @property
    def middle(self) -> int:
        return 0 if self.codes.dtype == torch.int8 else 1 << (self.bits - 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in], its columns where the input has them."""
        zero = self.middle if self.zero is None else spread(self.zero.float(), self.group)
        values = (unpack(self.codes, self.bits).float() - zero) * spread(
            self.scale.float(), self.group
        )
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order.long(), values)
        return values.to(dtype)


@dataclass(frozen=True)
class Codebook:
    codes: torch.Tensor  # [out, in / 2] uint8
    table: torch.Tensor  # [16] float32; where maxima are codes, their 256 values behind it
    absmax: torch.Tensor  # [out, in / block], floating; or uint8, codes
    # Of maxima that are codes, float32 [out, 1 + in / block / NESTED rounded up]: what is added to all of a row's, and
    # what every NESTED of them are multiplied by.
    outer: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.codes.shape
        return rows, width * 2

    @property
    def block(self) -> int:
        return self.shape[1] // self.absmax.shape[1]

    @property
    def nest(self) -> int:
        """Columns whose maxima share a factor."""
        return (
            self.shape[1] if self.outer is None or self.outer.shape[1] == 2 else NESTED * self.block
        )

    @property
    def largest(self) -> torch.Tensor:
        """The maxima, [out, in / block] in float32."""
        if self.outer is None:
            return self.absmax.float()
        factor = spread(self.outer[:, 1:], self.nest // self.block)[:, : self.absmax.shape[1]]
        return self.table[16:][self.absmax.long()] * factor + self.outer[:, :1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = self.table.float()[unpack(self.codes, 4).long()]
        return (values * spread(self.largest, self.block)).to(dtype)


@dataclass(frozen=True)
class Fp8:
    codes: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # [1], [out, 1] or [out / 128, in / 128] (rounded up), floating
    both: bool = True  # the input may be rounded to 8 bits as well, where that is faster

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def blocks(self) -> bool:
        return self.scale.numel() not in (1, len(self.codes)) or self.scale.shape[-1] > 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scale = self.scale.float()
        (rows, columns) = self.shape
        if self.blocks:
            scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[
                :, :columns
            ]
        return (self.codes.float() * scale).to(dtype)


BLOCK = 128  # rows and columns that share a scale of Fp8
NESTED = 256  # maxima of a Codebook that share a factor
Packed = Grid | Codebook | Fp8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[out, in] numbers below 2 ** bits -> [out, in * bits / 8] uint8."""
    codes = codes.to(torch.uint8)
    if bits == 3:
        places = torch.arange(0, 24, 3, device=codes.device)
        words = (codes.unflatten(1, (-1, 8)).int() << places).sum(-1)
        return (
            torch.stack([words >> shift & 255 for shift in (0, 8, 16)], -1)
            .flatten(1)
            .to(torch.uint8)
        )
    each = 8 // bits
    out = codes[:, ::each].clone()
    for place in range(1, each):
        out |= codes[:, place::each] << (bits * place)
    return out


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[out, in * bits / 8] -> [out, in]; 8 bits stay as they are."""
    if bits == 8:
        return codes
    if bits == 3:
        octets = codes.unflatten(1, (-1, 3)).int()
        words = octets[..., 0] | octets[..., 1] << 8 | octets[..., 2] << 16
        return (
            (words[..., None] >> torch.arange(0, 24, 3, device=codes.device) & 7)
            .flatten(1)
            .to(torch.uint8)
        )
    parts = [(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(1)


def spread(values: torch.Tensor, each: int) -> torch.Tensor:
    return values.repeat_interleave(each, 1) if values.shape[1] > 1 else values

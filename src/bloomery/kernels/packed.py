"""Quantized weight matrices on the device, and their dequantized values.

    GroupedScales    integer codes: (code - zero_point) * scale, one scale per group of columns
    CodebookWeight   4-bit codes: table[code] * absmax, one absmax per block of columns
    Fp8Weight        8-bit floats times a scale: one per matrix, per row or per 128 x 128 block

How the codes of one row [in] are packed into bytes (bit 0 on the right):

    8 bits   byte i = column i
    4 bits   byte i = | column 2i + 1 | column 2i |
    2 bits   byte i = | column 4i + 3 | ... | column 4i |
    3 bits   bytes 3i .. 3i + 2 = one 24-bit word | column 8i + 7 | ... | column 8i |

`dequantize` is the reference for every kernel that reads these matrices. kernels/packed_linear.py
chooses the kernel. This file must not know checkpoint formats or where the codes come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

FP8_BLOCK_SIZE = 128  # rows and columns that share a scale of a blockwise Fp8Weight
E8M0_BIAS = 127  # of the exponents of MXFP4: a stored byte b means 2 ** (b - 127)
NESTED_BLOCK_SIZE = 256  # absmax codes of a CodebookWeight that share one nested scale


@dataclass(frozen=True)
class GroupedScales:
    """Integer codes with grouped scales: weight = (code - zero_point) * scale."""

    codes: torch.Tensor  # [out, in * bits / 8] uint8; 8-bit codes may be int8 with zero point 0
    scale: torch.Tensor  # [out, in / group_size], floating; one column: a scale per row
    # [out, in / group_size], floating; None: the middle of the range
    zero_point: torch.Tensor | None = None
    bits: int = 4
    # GPTQ's act-order, derived from g_idx. [in] int32: column i of the codes multiplies column
    # act_order[i] of the input.
    act_order: torch.Tensor | None = None
    quantize_input: bool = False  # kernels may quantize the input to 8 bits as well (W8A8)

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.codes.shape
        return rows, row_bytes * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def default_zero_point(self) -> int:
        """The zero point where `zero_point` is None."""
        return 0 if self.codes.dtype == torch.int8 else 1 << (self.bits - 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [out, in] with their columns in the order of the input."""
        zero_point: torch.Tensor | int = self.default_zero_point
        if self.zero_point is not None:
            zero_point = repeat_columns(self.zero_point.float(), self.group_size)
        scale = repeat_columns(self.scale.float(), self.group_size)
        values = (unpack_codes(self.codes, self.bits).float() - zero_point) * scale
        if self.act_order is not None:
            values = torch.empty_like(values).index_copy_(1, self.act_order.long(), values)
        return values.to(dtype)


@dataclass(frozen=True)
class CodebookWeight:
    """4-bit codes that index a table of 16 values: weight = table[code] * absmax.

    With nested quantization (bitsandbytes' double quantization) absmax holds 8-bit codes:
    absmax = table[16 + code] * nested factor + offset. In MXFP4 it holds exponents, and the table
    is that of 4-bit floats, so kernels compute the values instead of looking them up.
    """

    codes: torch.Tensor  # [out, in / 2] uint8
    table: torch.Tensor  # [16] float32, or [16 + 256] with the values of the absmax codes
    # [out, in / block_size], floating; uint8 codes with nested quantization, else uint8 exponents
    absmax: torch.Tensor
    # Float32 [out, 1 + nested blocks]. Column 0 is the offset of the row, the others are the
    # factors of NESTED_BLOCK_SIZE absmax codes each. None: no nested quantization.
    nested_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.codes.shape
        return rows, row_bytes * 2

    @property
    def block_size(self) -> int:
        """Columns that share an absmax."""
        return self.shape[1] // self.absmax.shape[1]

    @property
    def columns_per_nested_scale(self) -> int:
        """Columns whose absmax codes share one nested factor."""
        if self.nested_scale is None or self.nested_scale.shape[1] == 2:
            return self.shape[1]
        return NESTED_BLOCK_SIZE * self.block_size

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes are 4-bit floats (E2M1) and absmax are exponents of two (E8M0)."""
        return self.absmax.dtype == torch.uint8 and self.nested_scale is None

    @property
    def dequantized_absmax(self) -> torch.Tensor:
        """The absmax values [out, in / block_size] in float32."""
        if self.is_mxfp4:
            return torch.exp2(self.absmax.float() - E8M0_BIAS)
        if self.nested_scale is None:
            return self.absmax.float()
        codes_per_factor = self.columns_per_nested_scale // self.block_size
        factor = repeat_columns(self.nested_scale[:, 1:], codes_per_factor)
        factor = factor[:, : self.absmax.shape[1]]
        offset = self.nested_scale[:, :1]
        return self.table[16:][self.absmax.long()] * factor + offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [out, in]."""
        values = self.table.float()[unpack_codes(self.codes, 4).long()]
        return (values * repeat_columns(self.dequantized_absmax, self.block_size)).to(dtype)


@dataclass(frozen=True)
class Fp8Weight:
    """8-bit floats: weight = code * scale."""

    codes: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # floating: [1], [out, 1] or [out / 128, in / 128] (rounded up)
    quantize_input: bool = True  # kernels may quantize the input to 8 bits as well (W8A8)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def is_blockwise(self) -> bool:
        """Whether every FP8_BLOCK_SIZE x FP8_BLOCK_SIZE block has a scale of its own."""
        return self.scale.numel() not in (1, len(self.codes)) or self.scale.shape[-1] > 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [out, in]."""
        scale = self.scale.float()
        rows, columns = self.shape
        if self.is_blockwise:
            scale = scale.repeat_interleave(FP8_BLOCK_SIZE, 0)[:rows]
            scale = scale.repeat_interleave(FP8_BLOCK_SIZE, 1)[:, :columns]
        return (self.codes.float() * scale).to(dtype)


PackedWeight = GroupedScales | CodebookWeight | Fp8Weight


class PackedLayout(NamedTuple):
    """The description of a packed matrix for the kernels, the same for all three kinds."""

    kind: str  # "int" (GroupedScales), "codebook", "mxfp4" or "fp8"
    bits: int
    codes: torch.Tensor  # [out, in * bits / 8], of any 8-bit type
    scale: torch.Tensor
    zero_point: torch.Tensor | None  # the nested_scale of a CodebookWeight
    table: torch.Tensor | None
    group_size: int  # columns that share a scale
    rows_per_scale: int
    signed: bool  # the codes are int8
    columns_per_nested_scale: int = 0  # 0: the whole row


def describe_layout(packed: PackedWeight) -> PackedLayout:
    """Describe a packed matrix for the kernels."""
    rows, columns = packed.shape
    match packed:
        case GroupedScales():
            return PackedLayout(
                kind="int",
                bits=packed.bits,
                codes=packed.codes,
                scale=packed.scale,
                zero_point=packed.zero_point,
                table=None,
                group_size=packed.group_size,
                rows_per_scale=1,
                signed=packed.codes.dtype == torch.int8,
            )
        case CodebookWeight():
            nested_columns = packed.columns_per_nested_scale
            return PackedLayout(
                kind="mxfp4" if packed.is_mxfp4 else "codebook",
                bits=4,
                codes=packed.codes,
                scale=packed.absmax,
                zero_point=packed.nested_scale,
                table=packed.table,
                group_size=packed.block_size,
                rows_per_scale=1,
                signed=False,
                columns_per_nested_scale=nested_columns if nested_columns < columns else 0,
            )
        case Fp8Weight():
            group_size = columns
            rows_per_scale = rows if packed.scale.numel() == 1 else 1
            if packed.is_blockwise:
                group_size = FP8_BLOCK_SIZE
                rows_per_scale = FP8_BLOCK_SIZE
            return PackedLayout(
                kind="fp8",
                bits=8,
                codes=packed.codes,
                scale=packed.scale,
                zero_point=None,
                table=None,
                group_size=group_size,
                rows_per_scale=rows_per_scale,
                signed=False,
            )


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack [out, in] codes below 2 ** bits into [out, in * bits / 8] bytes (uint8)."""
    codes = codes.to(torch.uint8)
    if bits == 3:
        shifts = torch.arange(0, 24, 3, device=codes.device)
        words = (codes.unflatten(1, (-1, 8)).int() << shifts).sum(-1)
        word_bytes = [words >> shift & 255 for shift in (0, 8, 16)]
        return torch.stack(word_bytes, -1).flatten(1).to(torch.uint8)
    codes_per_byte = 8 // bits
    packed = codes[:, ::codes_per_byte].clone()
    for i in range(1, codes_per_byte):
        packed |= codes[:, i::codes_per_byte] << (bits * i)
    return packed


def unpack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack [out, in * bits / 8] bytes into [out, in] codes. 8-bit codes are returned as given."""
    if bits == 8:
        return codes
    if bits == 3:
        triples = codes.unflatten(1, (-1, 3)).int()
        words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        shifts = torch.arange(0, 24, 3, device=codes.device)
        return (words[..., None] >> shifts & 7).flatten(1).to(torch.uint8)
    mask = (1 << bits) - 1
    parts = [(codes >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(1)


def repeat_columns(values: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat every column `count` times. A single column is left to broadcasting."""
    return values.repeat_interleave(count, 1) if values.shape[1] > 1 else values

"""Weights for the native CPU kernels: floats, GGUF blocks, and other packed weights as such blocks.

Floats keep the 16 or 32 bits of the checkpoint.

Packed weights of up to four bits keep their codes and scales. The offset of a block, zero point
times scale, is rounded to float16: an error below a hundredth of a quantization step. MXFP4 and NF4
have blocks of their own; the values of NF4 are rounded to multiples of 1/112 there. Weights that
such blocks cannot express (other codebooks, 8-bit floats, act-order) are rounded to eight bits,
where the largest value of a block is 127 steps. This adds little to the format's own rounding
error, and is many times faster than dequantizing before every product. The kernels round
activations to 15 bits with AVX-512, elsewhere to eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from bloomery.fusion import Epilogue, NormPrologue
from bloomery.kernels.packed import CodebookWeight, GroupedScales, unpack_codes
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.int8 import quantize_int8
from bloomery.quant.nf4 import NF4

BLOCK_COLUMNS = 32  # of Q4_1 and Q8_0 blocks
Q8_0_BLOCK_BYTES = 2 + BLOCK_COLUMNS  # a float16 scale and a byte per code
NUM_LEVELS = 16  # values that a code of four bits selects
NF4_STEPS = 112  # of the largest value, as in levels.h
MIN_NORMAL_HALF = 2.0**-14  # smaller float16 numbers have fewer digits


@dataclass(frozen=True)
class NativeWeight:
    """Weights in the layout of the native kernels.

    If they are quantized, activations are rounded to 15 bits with AVX-512, elsewhere to eight, with
    one scale for each 32.
    """

    matrix: ops.NativeMatrix
    pool: ThreadPool

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return ops.gather_rows(self.pool, self.matrix, rows)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.pool.accepts(x, bias):
            return ops.linear(self.pool, self.matrix, x, bias)
        x_float = x.float().contiguous()
        y = ops.linear(self.pool, self.matrix, x_float)
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        return ops.fused_linear(self.pool, self.matrix, x, bias, prologue, epilogue)

    def reference(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the product from dequantized weights, without rounding the activations."""
        all_rows = torch.arange(self.matrix.rows)
        return F.linear(x, self.gather(all_rows), bias)


class PackedCodes(Protocol):
    """The fields that the packed weights of all formats have."""

    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def shape(self) -> tuple[int, int]: ...


def pack_native(
    packed: PackedCodes,
    dtype: torch.dtype,
    panels: Iterator[torch.Tensor],
    pool: ThreadPool | None,
) -> NativeWeight | None:
    """Convert a packed weight for the native kernels; None if they cannot read it.

    `panels` yields its dequantized values, some rows at a time.
    """
    columns = packed.shape[1]
    if pool is None or packed.codes.device.type != "cpu":
        return None
    if dtype != torch.float32 or columns % BLOCK_COLUMNS:
        return None
    segment: ops.MatrixSegment | None
    if isinstance(packed, GroupedScales) and fits_q4_1(packed):
        segment = ops.pack_segment(pool, "Q4_1", encode_q4_1(packed), columns)
    elif isinstance(packed, CodebookWeight) and fits_mxfp4(packed):
        segment = ops.pack_segment(pool, "MXFP4", encode_mxfp4(packed), columns)
    elif isinstance(packed, CodebookWeight) and fits_nf4(packed):
        segment = ops.pack_segment(pool, "NF4", encode_nf4(packed), columns)
    elif isinstance(packed, GroupedScales) and fits_q8_0(packed):
        segment = ops.pack_segment(pool, "Q8_0", encode_q8_0(packed), columns)
    else:
        segment = round_to_q8_0(packed.shape, panels, pool)
    if segment is None:
        return None
    matrix = ops.NativeMatrix(pool, columns, [segment])
    return NativeWeight(matrix, pool)


def has_one_scale_per_block(packed: GroupedScales) -> bool:
    """Whether every block of 32 columns has one scale."""
    return packed.act_order is None and packed.group_size % BLOCK_COLUMNS == 0


def fits_q4_1(packed: GroupedScales) -> bool:
    """Whether Q4_1 blocks can hold the codes and scales of a weight."""
    return packed.bits <= 4 and has_one_scale_per_block(packed)


def fits_mxfp4(packed: CodebookWeight) -> bool:
    """Whether MXFP4 blocks can hold the codes and exponents of a weight."""
    return packed.is_mxfp4 and packed.block_size % BLOCK_COLUMNS == 0


def fits_nf4(packed: CodebookWeight) -> bool:
    """Whether NF4 blocks can hold the codes and scales of a weight."""
    if packed.is_mxfp4 or packed.block_size % BLOCK_COLUMNS:
        return False
    if packed.table[:NUM_LEVELS].tolist() != torch.tensor(NF4).tolist():
        return False
    return bool(packed.dequantized_absmax.min() >= MIN_NORMAL_HALF * NF4_STEPS)


def fits_q8_0(packed: GroupedScales) -> bool:
    """Whether Q8_0 blocks can hold the codes and scales of a weight."""
    if packed.codes.dtype != torch.int8 or packed.zero_point is not None:
        return False
    if not has_one_scale_per_block(packed):
        return False
    return bool(packed.scale.min() >= MIN_NORMAL_HALF)


def round_to_q8_0(
    shape: tuple[int, int], panels: Iterator[torch.Tensor], pool: ThreadPool
) -> ops.MatrixSegment | None:
    """Round a matrix to Q8_0 blocks. `panels` yields its values, some rows at a time.

    Returns None if the values are too small for float16 scales.
    """
    rows, columns = shape
    bytes_per_row = columns // BLOCK_COLUMNS * Q8_0_BLOCK_BYTES
    blocks = torch.empty(rows, bytes_per_row, dtype=torch.uint8)
    start = 0
    largest_scale = 0.0
    for panel in panels:
        end = start + len(panel)
        rounded = quantize_int8(panel.reshape(-1, BLOCK_COLUMNS))
        blocks[start:end] = encode_q8_0(rounded).view(len(panel), -1)
        start = end
        largest_scale = max(largest_scale, float(rounded.scale.max()))
    if largest_scale < MIN_NORMAL_HALF / 8:
        return None
    return ops.pack_segment(pool, "Q8_0", blocks, columns)


def encode_q4_1(packed: GroupedScales) -> torch.Tensor:
    """Encode as Q4_1 blocks, uint8 [rows, bytes]: scale, offset, then 32 codes of four bits."""
    zero_point = packed.zero_point
    if zero_point is None:
        zero_point = torch.full_like(packed.scale, packed.default_zero_point)
    offset = -(zero_point.float() * packed.scale.float())
    scale_bytes = repeat_for_blocks(packed.scale, packed.group_size)
    offset_bytes = repeat_for_blocks(offset, packed.group_size)
    nibbles = encode_nibbles(packed.codes, packed.bits)
    return torch.cat([scale_bytes, offset_bytes, nibbles], -1).flatten(1)


def encode_mxfp4(packed: CodebookWeight) -> torch.Tensor:
    """Encode as GGUF's MXFP4 blocks, uint8 [rows, bytes]: exponent, then 32 codes of four bits."""
    blocks_per_exponent = packed.block_size // BLOCK_COLUMNS
    exponents = packed.absmax.repeat_interleave(blocks_per_exponent, 1)
    return torch.cat([exponents[..., None], encode_nibbles(packed.codes, 4)], -1).flatten(1)


def encode_nf4(packed: CodebookWeight) -> torch.Tensor:
    """Encode as NF4 blocks, uint8 [rows, bytes]: float16 scale, then 32 codes of four bits."""
    scale = packed.dequantized_absmax / NF4_STEPS
    scale_bytes = repeat_for_blocks(scale, packed.block_size)
    return torch.cat([scale_bytes, encode_nibbles(packed.codes, 4)], -1).flatten(1)


def encode_q8_0(packed: GroupedScales) -> torch.Tensor:
    """Encode as Q8_0 blocks, uint8 [rows, bytes]: scale, then 32 codes."""
    code_bytes = packed.codes.view(torch.uint8)
    codes = code_bytes.unflatten(1, (-1, BLOCK_COLUMNS))
    scale_bytes = repeat_for_blocks(packed.scale, packed.group_size)
    return torch.cat([scale_bytes, codes], -1).flatten(1)


def encode_nibbles(packed_codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Arrange codes of at most four bits as blocks have them: uint8 [rows, blocks, 16].

    The last 16 codes of a block are in the high halves of its 16 bytes.
    """
    codes = unpack_codes(packed_codes, bits).unflatten(1, (-1, BLOCK_COLUMNS))
    half = BLOCK_COLUMNS // 2
    return codes[..., :half] | codes[..., half:] << 4


def repeat_for_blocks(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Repeat the value of each group for its blocks, as float16 bytes: [rows, blocks, 2]."""
    repeated = values.half().repeat_interleave(group_size // BLOCK_COLUMNS, 1)
    return repeated[..., None].view(torch.uint8)

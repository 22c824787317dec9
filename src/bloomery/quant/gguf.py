"""GGUF weights that stay quantized, in the blocks of their file.

The device and the dtype of activations decide which kernels multiply them:

    native CPU kernels   float32 on a CPU. Blocks are interleaved for them. Q2_K, NVFP4, shards that
                         cut through a block and a few unquantized rows are rounded to Q8_0.
    packed kernels       other devices and dtypes. Blocks are converted to a PackedWeight.
    none                 weights are dequantized while they are loaded: on a CPU without native
                         kernels (that is fastest there), and for shards that do not begin and end
                         at a multiple of 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import CheckpointTensors, LinearSpec, PreparedWeight
from bloomery.quant.dense import DenseFormat, DenseMatrix
from bloomery.quant.gguf_blocks import BLOCK_DECODERS
from bloomery.quant.gguf_grids import GRID_DECODERS, load_grid
from bloomery.quant.lazy_tensor import QuantizedBlocks, Range, TensorPiece
from bloomery.quant.loaded_weight import MIN_GROUP_SIZE, LoadedWeight, slice_columns
from bloomery.quant.native import BLOCK_COLUMNS, NativeWeight, round_to_q8_0
from bloomery.quant.quantize_on_load import load_panels
from bloomery.quant.quantized_weight import prepare_weight

CPU = torch.device("cpu")
# Share of a matrix: the rows of a gated delta net's beta and decay, which files keep in float32.
MAX_UNQUANTIZED = 1 / 16


class GgufMatrix(DenseMatrix):
    """A matrix whose file stores it in quantized blocks, not read yet."""

    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        prepared: PreparedWeight | None = None
        if device.type == "cpu" and dtype == torch.float32:
            if pool is not None:
                prepared = self._prepare_native(pool)
        elif any(map(has_packed_layout, self.weight.pieces)):
            prepared = prepare_weight(self.load_packed(dtype, device), dtype, pool)
        if prepared is not None:
            return prepared
        return super().prepare(dtype, device, pool)

    def load_packed(self, dtype: torch.dtype, device: torch.device) -> Iterator[LoadedWeight]:
        """Yield the pieces from top to bottom, packed where that is possible."""
        for piece in self.weight.pieces:
            if has_packed_layout(piece):
                yield from load_packed_panels(piece, device)
            else:
                dense = replace(self.weight, pieces=(piece,))
                yield dense.load(dtype, device)

    def _prepare_native(self, pool: ThreadPool) -> NativeWeight | None:
        """Pack all pieces for native kernels; None if that is impossible for one of them."""
        columns = self.shape[1]
        if columns % BLOCK_COLUMNS:
            return None
        pieces = self.weight.pieces
        unquantized_rows = sum(piece.num_rows for piece in pieces if piece.blocks is None)
        if unquantized_rows > MAX_UNQUANTIZED * self.shape[0]:
            return None
        segments: list[ops.MatrixSegment] = []
        for piece in pieces:
            if has_native_layout(piece):
                segment: ops.MatrixSegment | None = pack_native_segment(piece, pool)
            else:
                segment = self._round_segment(piece, pool)
            if segment is None:
                return None
            segments.append(segment)
        return NativeWeight(ops.NativeMatrix(pool, columns, segments), pool)

    def _round_segment(self, piece: TensorPiece, pool: ThreadPool) -> ops.MatrixSegment | None:
        """Round a piece that native kernels cannot read to Q8_0."""
        columns = self.shape[1]
        stored = replace(self.weight, pieces=(piece,))
        panels = load_panels(stored, [(0, piece.num_rows)], columns, CPU)
        return round_to_q8_0((piece.num_rows, columns), panels, pool)


class GgufFormat:
    """One tensor per linear layer: `name.weight`, in any GGUF type."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> GgufMatrix:
        return GgufMatrix(DenseFormat().open_matrix(tensors, linear).weight)


def get_blocks(piece: TensorPiece) -> tuple[QuantizedBlocks, Range]:
    """Return the blocks and the columns of a piece that is stored in blocks."""
    if piece.blocks is None or piece.cols is None:
        raise ValueError("the piece is not stored in blocks")
    return piece.blocks, piece.cols


# ---- packed kernels ------------------------------------------------------------------------------


def has_packed_layout(piece: TensorPiece) -> bool:
    """Whether the blocks of a piece can be converted to a PackedWeight."""
    if piece.blocks is None or piece.cols is None:
        return False
    start, end = piece.cols
    is_aligned = start % MIN_GROUP_SIZE == 0 and end % MIN_GROUP_SIZE == 0
    return is_aligned and piece.blocks.kind in BLOCK_DECODERS


def load_packed_panels(piece: TensorPiece, device: torch.device) -> Iterator[LoadedWeight]:
    """Load a panel of rows at a time and convert its blocks on the device."""
    blocks, (first_column, end_column) = get_blocks(piece)
    block_size = blocks.values_per_block
    bytes_per_block = blocks.bytes_per_block
    # The blocks that contain the columns, and the columns counted from the first of them.
    first_block = first_column // block_size
    end_block = -(-end_column // block_size)
    columns = (end_block - first_block) * block_size
    start = first_column - first_block * block_size
    end = end_column - first_block * block_size
    first_byte = first_block * bytes_per_block
    end_byte = end_block * bytes_per_block
    raw = blocks.raw.cols(first_byte, end_byte)
    decode = BLOCK_DECODERS[blocks.kind]
    for panel in load_panels(raw, [piece.rows], columns, device):
        decoded = decode(panel.view(-1, bytes_per_block))
        weight = decoded.to_packed(rows=len(panel))
        if (start, end) == (0, columns):
            yield weight
        else:
            yield slice_columns(weight, start, end, blocks.kind)


# ---- native CPU kernels --------------------------------------------------------------------------


def has_native_layout(piece: TensorPiece) -> bool:
    """Whether native kernels read the blocks of a piece, and its columns are whole blocks."""
    if piece.blocks is None or piece.cols is None:
        return False
    start, end = piece.cols
    size = piece.blocks.values_per_block
    is_aligned = start % size == 0 and end % size == 0
    return is_aligned and piece.blocks.kind in ops.PACKED_TYPES


def pack_native_segment(piece: TensorPiece, pool: ThreadPool) -> ops.MatrixSegment:
    """Interleave the blocks of a piece for native kernels."""
    blocks, (start, end) = get_blocks(piece)
    first_block = start // blocks.values_per_block
    end_block = end // blocks.values_per_block
    first_byte = first_block * blocks.bytes_per_block
    end_byte = end_block * blocks.bytes_per_block
    stored = blocks.raw.pieces[0]
    # Reading gives a view of the mapped file: packing makes the only copy.
    raw = stored.read(piece.rows, (first_byte, end_byte))
    grid = load_grid(blocks.kind) if blocks.kind in GRID_DECODERS else None
    return ops.pack_segment(pool, blocks.kind, raw, end - start, grid)

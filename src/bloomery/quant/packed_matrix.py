"""The lazy weight matrix of every quantized format.

A format supplies one function that loads rows of a stored matrix in a layout of
quant/loaded_weight.py. Selecting rows and columns and concatenating are then arithmetic on ranges,
the same for all formats. A PackedMatrix may concatenate matrices of different layouts, such as a
4-bit q projection and a k projection that the format left in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bloomery.kernels.packed import FP8_BLOCK_SIZE
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import CheckpointTensors, LinearSpec, PreparedWeight
from bloomery.quant.dense import DenseFormat
from bloomery.quant.lazy_tensor import Range, find_overlaps, select_ranges
from bloomery.quant.loaded_weight import LoadedWeight, dequantize, slice_columns
from bloomery.quant.quantized_weight import prepare_weight

# Loads all columns of these rows of a stored matrix, in this order. The dtype is that of
# activations; quantized weights may ignore it.
LoadMatrixRows = Callable[[Sequence[Range], torch.dtype, torch.device], LoadedWeight]


@dataclass(frozen=True)
class MatrixSlice:
    """Rows and columns of one stored matrix, not read yet."""

    name: str  # of the linear layer, for messages
    load_rows: LoadMatrixRows
    row_ranges: tuple[Range, ...]
    stored_columns: int
    cols: Range
    # FP8_BLOCK_SIZE rows share scales. `load_rows` then takes one range at a time, which begins at
    # a block or ends in the block where it begins.
    has_row_blocks: bool = False

    @property
    def num_rows(self) -> int:
        return sum(end - start for start, end in self.row_ranges)

    def is_same_matrix(self, other: MatrixSlice) -> bool:
        """Whether one call of `load_rows` can load the rows of both slices."""
        return self.load_rows is other.load_rows and self.cols == other.cols

    def load(self, dtype: torch.dtype, device: torch.device) -> Iterator[LoadedWeight]:
        """Yield the rows from top to bottom, in as few weights as the format allows."""
        requests = [self.row_ranges]
        if self.has_row_blocks:
            requests = [(rows,) for rows in split_at_blocks(self.row_ranges)]
        for row_ranges in requests:
            weight = self.load_rows(row_ranges, dtype, device)
            if self.cols == (0, self.stored_columns):
                yield weight
            else:
                yield slice_columns(weight, *self.cols, self.name)


def split_at_blocks(ranges: Sequence[Range]) -> Iterator[Range]:
    """Split ranges that begin inside a block of FP8_BLOCK_SIZE rows at the end of that block."""
    for start, end in ranges:
        block_end = -(-start // FP8_BLOCK_SIZE) * FP8_BLOCK_SIZE
        middle = min(end, block_end)
        if start < middle:
            yield start, middle
        if middle < end:
            yield middle, end


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [out, in] that is not read yet: slices of stored matrices, stacked along the rows.

    All slices have the same number of columns.
    """

    slices: tuple[MatrixSlice, ...]

    @classmethod
    def from_loader(
        cls, linear: LinearSpec, load_rows: LoadMatrixRows, has_row_blocks: bool = False
    ) -> PackedMatrix:
        """Create the complete stored matrix of a linear layer."""
        rows, columns = linear.shape
        stored = MatrixSlice(
            linear.name,
            load_rows,
            row_ranges=((0, rows),),
            stored_columns=columns,
            cols=(0, columns),
            has_row_blocks=has_row_blocks,
        )
        return cls((stored,))

    @property
    def shape(self) -> tuple[int, int]:
        num_rows = sum(part.num_rows for part in self.slices)
        start, end = self.slices[0].cols
        return num_rows, end - start

    def rows(self, ranges: Sequence[Range]) -> PackedMatrix:
        """Select these rows, in this order."""
        num_rows = self.shape[0]
        heights = [part.num_rows for part in self.slices]
        selected: list[MatrixSlice] = []
        for start, end in ranges:
            if not 0 <= start < end <= num_rows:
                raise IndexError(f"rows {start}:{end} of a matrix with {num_rows}")
            for index, first, last in find_overlaps(heights, start, end):
                part = self.slices[index]
                row_ranges = tuple(select_ranges(part.row_ranges, first, last))
                if selected and selected[-1].is_same_matrix(part):
                    row_ranges = (*selected.pop().row_ranges, *row_ranges)
                selected.append(replace(part, row_ranges=row_ranges))
        return PackedMatrix(tuple(selected))

    def cols(self, start: int, end: int) -> PackedMatrix:
        """Select columns start:end."""
        selected = []
        for part in self.slices:
            offset = part.cols[0]
            cols = (offset + start, offset + end)
            selected.append(replace(part, cols=cols))
        return PackedMatrix(tuple(selected))

    def cat(self, others: Sequence[PackedMatrix]) -> PackedMatrix:
        """Stack other matrices below this one."""
        slices = self.slices
        for other in others:
            slices += other.slices
        return PackedMatrix(slices)

    def prepare(
        self, dtype: torch.dtype, device: torch.device, pool: ThreadPool | None = None
    ) -> PreparedWeight:
        return prepare_weight(self._load(dtype, device), dtype, pool)

    def load_dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        weights = self._load(dtype, device)
        return torch.cat([dequantize(weight, dtype) for weight in weights])

    def _load(self, dtype: torch.dtype, device: torch.device) -> Iterator[LoadedWeight]:
        for part in self.slices:
            yield from part.load(dtype, device)


def open_unquantized(tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
    """Open a matrix that the format leaves in full precision.

    The result is a PackedMatrix so that it can be concatenated with quantized ones.
    """
    weight = DenseFormat().open_matrix(tensors, linear).weight

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # Native kernels multiply weights of 16 bits with activations of 32.
        is_wider = torch.promote_types(weight.dtype, dtype) == dtype
        return weight.rows(ranges).load(weight.dtype if is_wider else dtype, device)

    return PackedMatrix.from_loader(linear, load)

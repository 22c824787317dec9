"""Tensors that are still in their file: sliced and stacked without reading, then loaded once.

A LazyTensor is a stack of TensorPieces. Each piece is a rectangle of a stored tensor and a function
that reads it. Weight matrices of every format are built of lazy tensors, so a tensor parallel rank
reads only its own slices. This file must not know file formats, weight formats or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch

Range = tuple[int, int]  # start and end of consecutive rows or columns; the end is exclusive
# Reads rows and columns of a stored tensor: [rows, cols], or [rows] if the columns are None.
ReadRectangle = Callable[[Range, Range | None], torch.Tensor]
WaitFunction = Callable[[], None]
# Reads the same rectangle into the given memory. Returns a function that waits for the read, or
# None if the read is complete.
FillRectangle = Callable[[torch.Tensor, Range, Range | None], WaitFunction | None]


class QuantizedBlocks(NamedTuple):
    """The stored bytes of a tensor whose file quantizes it in blocks (GGUF)."""

    kind: str  # the file format's name of the block type, such as Q4_K
    values_per_block: int
    bytes_per_block: int
    raw: LazyTensor  # uint8 [rows of the stored tensor, bytes of a row]


@dataclass(frozen=True)
class TensorPiece:
    """A rectangle of a stored tensor."""

    read: ReadRectangle
    rows: Range
    cols: Range | None  # None: the tensor is a vector
    # Reads without a temporary copy, for sources that can.
    fill: FillRectangle | None = None
    blocks: QuantizedBlocks | None = None  # of the stored tensor, not only of this rectangle

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor not read yet: pieces stacked along the rows.

    Slicing and stacking are arithmetic on ranges. `load` reads every byte once.
    """

    pieces: tuple[TensorPiece, ...]
    dtype: torch.dtype  # of the stored values; of pieces that differ, one that holds them all

    @classmethod
    def from_reader(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        read: ReadRectangle,
        fill: FillRectangle | None = None,
        blocks: QuantizedBlocks | None = None,
    ) -> LazyTensor:
        """Create a complete stored tensor: a vector [rows] or a matrix [rows, cols]."""
        rows = (0, shape[0])
        cols = (0, shape[1]) if len(shape) > 1 else None
        piece = TensorPiece(read, rows, cols, fill, blocks)
        return cls((piece,), dtype)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> LazyTensor:
        """Wrap a tensor in memory, with the interface of one in a file."""

        def read(rows: Range, cols: Range | None) -> torch.Tensor:
            selected = tensor[slice(*rows)]
            return selected if cols is None else selected[:, slice(*cols)]

        return cls.from_reader(tensor.shape, tensor.dtype, read)

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows = sum(piece.num_rows for piece in self.pieces)
        cols = self.pieces[0].cols
        if cols is None:
            return (num_rows,)
        return (num_rows, cols[1] - cols[0])

    def rows(self, ranges: Sequence[Range]) -> LazyTensor:
        """Select these rows, in this order."""
        num_rows = self.shape[0]
        heights = [piece.num_rows for piece in self.pieces]
        selected: list[TensorPiece] = []
        for start, end in ranges:
            if not 0 <= start < end <= num_rows:
                raise IndexError(f"rows {start}:{end} of a tensor with {num_rows}")
            for index, first, last in find_overlaps(heights, start, end):
                piece = self.pieces[index]
                offset = piece.rows[0]
                selected.append(replace(piece, rows=(offset + first, offset + last)))
        return replace(self, pieces=tuple(selected))

    def cols(self, start: int, end: int) -> LazyTensor:
        """Select columns start:end."""
        selected: list[TensorPiece] = []
        for piece in self.pieces:
            if piece.cols is None:
                raise IndexError("a vector has no columns")
            offset = piece.cols[0]
            selected.append(replace(piece, cols=(offset + start, offset + end)))
        return replace(self, pieces=tuple(selected))

    def cat(self, others: Sequence[LazyTensor]) -> LazyTensor:
        """Stack other tensors below this one."""
        pieces = self.pieces
        dtype = self.dtype
        for other in others:
            pieces += other.pieces
            dtype = torch.promote_types(dtype, other.dtype)
        return LazyTensor(pieces, dtype)

    def deinterleave(self) -> LazyTensor:
        """Return the rows 0, 2, 4, ... and below them the rows 1, 3, 5, ..."""
        num_rows = self.shape[0]
        half = num_rows // 2

        def load_part(rows: Range, cols: Range | None, like: torch.Tensor) -> torch.Tensor:
            part = self.rows([rows])
            if cols is not None:
                part = part.cols(*cols)
            return part.load(like.dtype, like.device)

        def fill(out: torch.Tensor, rows: Range, cols: Range | None) -> None:
            start, end = rows
            if start == 0 and end == num_rows:  # read every row once, not once for each half
                loaded = load_part(rows, cols, out)
                out[:half] = loaded[0::2]
                out[half:] = loaded[1::2]
                return
            for parity in (0, 1):
                first = max(start - parity * half, 0)
                last = min(end - parity * half, half)
                if first < last:
                    loaded = load_part((2 * first, 2 * last), cols, out)
                    at = parity * half + first - start
                    out[at : at + last - first] = loaded[parity::2]

        def read(rows: Range, cols: Range | None) -> torch.Tensor:
            lengths = [end - start for start, end in (rows, *([cols] if cols else []))]
            out = torch.empty(lengths, dtype=self.dtype)
            fill(out, rows, cols)
            return out

        return LazyTensor.from_reader(self.shape, self.dtype, read, fill)

    def load(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Read the tensor into new memory, with a temporary copy of at most one piece at a time."""
        return self.start_load(dtype, device).wait()

    def start_load(self, dtype: torch.dtype, device: torch.device) -> PendingLoad:
        """Start to read the tensor into new memory."""
        out = torch.empty(self.shape, dtype=dtype, device=device)
        row = 0
        wait_functions: list[WaitFunction] = []
        for piece in self.pieces:
            target = out[row : row + piece.num_rows]
            row += piece.num_rows
            if piece.fill is None:
                target.copy_(piece.read(piece.rows, piece.cols))
                continue
            wait_function = piece.fill(target, piece.rows, piece.cols)
            if wait_function is not None:
                wait_functions.append(wait_function)
        return PendingLoad(out, tuple(wait_functions))


class PendingLoad(NamedTuple):
    """Memory that is still being filled.

    Without a call of `wait` the owner of the source must wait for all reads before the model runs.
    """

    tensor: torch.Tensor
    wait_functions: tuple[WaitFunction, ...] = ()

    def wait(self) -> torch.Tensor:
        for wait_function in self.wait_functions:
            wait_function()
        return self.tensor


def prefetch(loads: Iterator[PendingLoad], count: int) -> Iterator[torch.Tensor]:
    """Yield the loaded tensors in order, with up to `count` loads started ahead."""
    pending = deque(islice(loads, count))
    while pending:
        yield pending.popleft().wait()
        pending.extend(islice(loads, 1))


def find_overlaps(heights: Iterable[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Find which of several stacked parts hold the rows start:end of the stack.

    `heights` are the numbers of rows of the parts. Yields (index of the part, first row, last row),
    where the rows count from the top of that part and the last one is exclusive.
    """
    offset = 0
    for index, height in enumerate(heights):
        first = max(start - offset, 0)
        last = min(end - offset, height)
        if first < last:
            yield index, first, last
        offset += height


def select_ranges(ranges: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """Select rows start:end of the rows in `ranges`. Yields ranges of the stored tensor."""
    heights = [last - first for first, last in ranges]
    for index, first, last in find_overlaps(heights, start, end):
        offset = ranges[index][0]
        yield offset + first, offset + last

"""The seam where lower precision plugs in, and tensors that are still in their file.

A stored matrix knows three moves, and every layout and shard is built of them:

    rows(ranges)   keep these output rows, in this order   (column-parallel, un-grouping QKV)
    cols(a, b)     keep these input columns                (row-parallel)
    cat(parts)     stack on the output axis                (q|k|v, gate|up)

A format is one file: a class with these three moves and `prepare`, the class with `linear` that it becomes, and a
Format that finds such matrices in a checkpoint. Nothing else knows about it. The moves touch no data: they work on
Stored tensors, so a rank reads only its slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.gemv import After, Norm

Range = tuple[int, int]
Read = Callable[[Range, Range | None], torch.Tensor]


class Ready(Protocol):
    """A matrix on its device, ready to multiply."""

    @property
    def nbytes(self) -> int: ...
    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """These rows in full precision: [n] -> [n, in]. An embedding is nothing else."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]."""
        ...

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        """The product with all that surrounds it in one kernel; None where there is none, or it does not pay."""
        ...


class Matrix(Protocol):
    """[out, in] weights in some format."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def rows(self, ranges: Sequence[Range]) -> Self: ...
    def cols(self, start: int, end: int) -> Self: ...
    def cat(self, others: Sequence[Self]) -> Self: ...
    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        """Read what is wanted, onto the device, in the layout the kernels like."""
        ...

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The same numbers in full precision, [out, in]: what every format is compared with."""
        ...


class Tensors(Protocol):
    """What a format sees of a checkpoint."""

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> Stored:
        """The vector [out] or matrix [out, in] of that name, which must be of that shape.

        `transposed`: the file has it as [in, out]. `expert`: the file has a stack of them, and this one is meant.
        """
        ...

    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """As the file has it; packed tensors say by it how they are packed."""
        ...


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def part(
    tensors: Tensors,
    name: str,
    shape: Sequence[int],
    kinds: Sequence[torch.dtype] = FLOATS,
    transposed: bool = False,
    expert: int | None = None,
) -> Stored:
    """A tensor of one of these types: bits taken for another would be numbers too, and wrong."""
    found = tensors.tensor(name, shape, transposed, expert)
    if found.dtype not in kinds:
        raise CheckpointError(
            f"{name}: is {found.dtype}, where {' or '.join(map(str, kinds))} belongs; the checkpoint is damaged, or "
            "packed in a way that its quantization_config does not tell"
        )
    return found


def sizes(tensors: Tensors, name: str, count: int = 2) -> tuple[int, ...]:
    """The shape of a tensor, of so many dimensions; of a packed one it says how it is packed."""
    found = tensors.shape(name)
    if len(found) != count or 0 in found:
        raise CheckpointError(
            f"{name}: {list(found)} is not of {count} dimensions; the checkpoint is damaged"
        )
    return found


class Product(NamedTuple):
    """A matrix as the model asks for it."""

    name: str  # in the checkpoint, without `.weight`
    shape: tuple[int, int]
    transposed: bool = False
    expert: int | None = None
    inside: bool = True  # of a layer; otherwise an embedding, the head or a projection beside them
    precise: bool = False  # a router: never rounded


class Format(Protocol):
    """How the products of a checkpoint are kept."""

    def matrix(self, tensors: Tensors, product: Product) -> Matrix: ...


class Coded(NamedTuple):
    """The same tensor in the bits of its file."""

    kind: str  # the format's own name of the type
    values: int  # of a block
    bytes: int
    raw: Stored  # uint8 [rows of the whole tensor, bytes of a row]


def overlaps(heights: Iterable[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Of parts of such heights, stacked: the number of each that has some of the rows start:end, and which of its own
    rows these are."""
    offset = 0
    for i, height in enumerate(heights):
        a = max(start - offset, 0)
        b = min(end - offset, height)
        if a < b:
            yield i, a, b
        offset += height


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor in a file: `read(rows, cols)` gives it as [rows, cols] (or [rows] without columns)."""

    read: Read
    rows: Range
    cols: Range | None  # None: a vector
    # The same into memory that is already where it belongs, for sources that can go without a copy beside it; where it
    # is only begun, how to wait for it.
    fill: Callable[[torch.Tensor, Range, Range | None], Callable[[], None] | None] | None = None
    blocks: Coded | None = None

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Stored:
    """A tensor not read yet: pieces, stacked. Slicing is arithmetic; `load` reads each byte once."""

    pieces: tuple[Piece, ...]
    dtype: torch.dtype

    @classmethod
    def whole(cls, shape: Sequence[int], dtype: torch.dtype, read: Read, *more: Any) -> Stored:
        rows, *cols = shape
        return cls((Piece(read, (0, rows), (0, cols[0]) if cols else None, *more),), dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        """A tensor already in memory, seen as if it were in a file."""
        return cls.whole(
            tensor.shape,
            tensor.dtype,
            lambda r, c: tensor[slice(*r)] if c is None else tensor[slice(*r), slice(*c)],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        height = sum(piece.height for piece in self.pieces)
        cols = self.pieces[0].cols
        return (height,) if cols is None else (height, cols[1] - cols[0])

    def rows(self, ranges: Sequence[Range]) -> Stored:
        picked: list[Piece] = []
        for start, end in ranges:
            if not 0 <= start < end <= self.shape[0]:
                raise IndexError(f"rows {start}:{end} of a tensor with {self.shape[0]}")
            for i, a, b in overlaps([piece.height for piece in self.pieces], start, end):
                first = self.pieces[i].rows[0]
                picked.append(replace(self.pieces[i], rows=(first + a, first + b)))
        return replace(self, pieces=tuple(picked))

    def cols(self, start: int, end: int) -> Stored:
        def narrow(piece: Piece) -> Piece:
            if piece.cols is None:
                raise IndexError("a vector has no columns")
            return replace(piece, cols=(piece.cols[0] + start, piece.cols[0] + end))

        return replace(self, pieces=tuple(map(narrow, self.pieces)))

    def cat(self, others: Sequence[Stored]) -> Stored:
        return replace(self, pieces=sum((other.pieces for other in others), self.pieces))

    def load(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The wanted part in memory of its own; never more than one piece beside it."""
        return self.begin(dtype, device).get()

    def begin(self, dtype: torch.dtype, device: torch.device) -> Arriving:
        out = torch.empty(self.shape, dtype=dtype, device=device)
        row = 0
        waits = []
        for piece in self.pieces:
            part = out[row : row + piece.height]
            if piece.fill is None:
                part.copy_(piece.read(piece.rows, piece.cols))
            elif wait := piece.fill(part, piece.rows, piece.cols):
                waits.append(wait)
            row += piece.height
        return Arriving(out, tuple(waits))


class Arriving(NamedTuple):
    """Memory that is still being filled. Whoever opened the source waits for all of it before the model runs."""

    tensor: torch.Tensor
    waits: tuple[Callable[[], None], ...] = ()

    def get(self) -> torch.Tensor:
        for wait in self.waits:
            wait()
        return self.tensor


def ahead(begun: Iterator[Arriving], count: int) -> Iterator[torch.Tensor]:
    """Each in its turn, while the next ones are on their way: `count` at a time."""
    under_way = deque(islice(begun, count))
    while under_way:
        yield under_way.popleft().get()
        under_way.extend(islice(begun, 1))

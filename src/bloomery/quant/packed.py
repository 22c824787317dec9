"""Products of fewer bits: the one matrix, and the one Ready, of every format that packs.

A format only says how rows of a stored product are read as kernels.packed knows them. The moves are arithmetic on row
and column numbers; what was read is stacked where it is alike and kept side by side where it is not, so q in four bits
may stand beside k in full precision. On a CPU a product unpacks a panel of rows at a time: no dense copy is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F

from bloomery.errors import UnsupportedModel
from bloomery.kernels.gemv import After, Norm
from bloomery.kernels.packed import BLOCK, Codebook, Fp8, Grid, Packed, unpack
from bloomery.kernels.packed_linear import packed_linear, packed_phrase, unpacked
from bloomery.kernels.quantize_rows import FP8
from bloomery.quant.base import Product, Range, Ready, Stored, Tensors, overlaps
from bloomery.quant.dense import DenseFormat, DenseReady
from bloomery.quant.native import BlocksReady, native

PANEL = 1 << 18  # values a CPU unpacks at once: what its caches hold
STREAMED = 1 << 24  # the same on a GPU, where no kernel reads them packed
FINEST = 16  # columns of the smallest group that kernels read


@dataclass(frozen=True)
class Scattered:
    """A grid whose columns belong to any group: what act-order leaves when the columns of a product are shared out, or
    when groups are not of one size. Codes take a byte, for no kernel reads them."""

    codes: torch.Tensor  # [out, in] uint8, a byte each
    scale: torch.Tensor  # [out, groups]
    zero: torch.Tensor  # [out, groups]
    index: torch.Tensor  # [in] int64: the group of a column

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scale, zero = (part.float()[:, self.index] for part in (self.scale, self.zero))
        return ((self.codes.float() - zero) * scale).to(dtype)


Held = Packed | Scattered | torch.Tensor
Read = Callable[[Sequence[Range], torch.dtype, torch.device], Held]


@dataclass(frozen=True)
class Part:
    """Rows and columns of one stored product, not read yet. `read` gives whole rows."""

    name: str
    read: Read
    ranges: tuple[Range, ...]
    width: int  # of the stored product
    cols: Range
    square: bool = False  # rows share scales by the BLOCK

    @property
    def height(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def load(self, dtype: torch.dtype, device: torch.device) -> Iterator[Held]:
        together = list(self.ranges)
        for ranges in [[part] for part in split(together)] if self.square else [together]:
            held = self.read(ranges, dtype, device)
            yield held if self.cols == (0, self.width) else cut(held, *self.cols, self.name)


def split(ranges: Sequence[Range]) -> Iterator[Range]:
    """At the end of the first block where a range begins inside of one."""
    for start, end in ranges:
        middle = min(end, -(-start // BLOCK) * BLOCK)
        yield from (part for part in ((start, middle), (middle, end)) if part[0] < part[1])


@dataclass(frozen=True)
class PackedMatrix:
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, product: Product, read: Read, square: bool = False) -> PackedMatrix:
        rows, width = product.shape
        return cls((Part(product.name, read, ((0, rows),), width, (0, width), square),))

    @property
    def shape(self) -> tuple[int, int]:
        start, end = self.parts[0].cols
        return sum(part.height for part in self.parts), end - start

    def rows(self, ranges: Sequence[Range]) -> PackedMatrix:
        picked: list[Part] = []
        for start, end in ranges:
            if not 0 <= start < end <= self.shape[0]:
                raise IndexError(f"rows {start}:{end} of a matrix with {self.shape[0]}")
            for i, a, b in overlaps([part.height for part in self.parts], start, end):
                part = self.parts[i]
                found = tuple(within(self.parts[i].ranges, a, b))
                if (
                    picked and picked[-1].read is part.read
                ):  # one reading for all that is wanted of a product
                    picked[-1] = replace(picked[-1], ranges=(*picked[-1].ranges, *found))
                else:
                    picked.append(replace(part, ranges=found))
        return PackedMatrix(tuple(picked))

    def cols(self, start: int, end: int) -> PackedMatrix:
        return PackedMatrix(
            tuple(
                replace(part, cols=(part.cols[0] + start, part.cols[0] + end))
                for part in self.parts
            )
        )

    def cat(self, others: Sequence[PackedMatrix]) -> PackedMatrix:
        return PackedMatrix(sum((other.parts for other in others), self.parts))

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        return as_ready((part for whole in self.parts for part in whole.load(dtype, device)), dtype)

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.cat(
            [values(held, dtype) for part in self.parts for held in part.load(dtype, device)]
        )


def as_ready(helds: Iterator[Held], dtype: torch.dtype) -> Ready:
    """From top to bottom."""
    ready = tuple(
        DenseReady.of(held)
        if isinstance(held, torch.Tensor)
        else native(held, dtype, (panel for _, panel in slabs(held, torch.float32)))
        or PackedReady(held, dtype)
        for held in stacked(helds)
    )
    return ready[0] if len(ready) == 1 else SideBySide(ready)


def within(ranges: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """Rows start:end of those that `ranges` picks, as ranges of the stored product."""
    for i, a, b in overlaps([last - first for first, last in ranges], start, end):
        yield ranges[i][0] + a, ranges[i][0] + b


def kept(tensors: Tensors, product: Product) -> PackedMatrix:
    """A product the format leaves in full precision."""
    weight = DenseFormat().matrix(tensors, product).weight

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return weight.rows(ranges).load(dtype, device)

    return PackedMatrix.whole(product, read)


def claim(tensors: Tensors, name: str, *suffixes: str) -> None:
    """Parts of a format that need not be read: they are not strangers in the checkpoint."""
    for part in (f"{name}.{suffix}" for suffix in suffixes):
        if tensors.has(part):
            tensors.tensor(part, tensors.shape(part))


def rows_of(stored: Stored, ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    """As the file has them."""
    return stored.rows(ranges).load(stored.dtype, device)


# ---- what has been read --------------------------------------------------------------------------


def values(held: Held, dtype: torch.dtype) -> torch.Tensor:
    return held if isinstance(held, torch.Tensor) else held.dequantize(dtype)


def cut(held: Held, start: int, end: int, name: str) -> Held:
    """These columns. Groups that are cut are made smaller: more scales, the same numbers."""
    match held:
        case torch.Tensor():
            return held[:, start:end].contiguous()
        case Scattered():
            return replace(
                held, codes=held.codes[:, start:end].contiguous(), index=held.index[start:end]
            )
        case Grid(order=torch.Tensor()):
            return cut(scattered(held), start, end, name)
        case Grid(bits=bits, scale=scale, zero=zero):
            each = 8 // gcd(8, bits)  # columns of whole bytes
            if scale.shape[1] > 1:
                group = finer(held.group, start, end, held.shape[1], name)
                scale = regroup(scale, held.group, group, start, end)
                zero = None if zero is None else regroup(zero, held.group, group, start, end)
            elif start % each or end % each:
                raise uneven(name, start, end, held.shape[1], each)
            codes = held.codes[:, start * bits // 8 : end * bits // 8].contiguous()
            return replace(held, codes=codes, scale=scale, zero=zero)
        case Codebook():
            block = finer(held.block, start, end, held.shape[1], name)
            if held.outer is not None and (
                held.nest < held.shape[1] or block < held.block or end - start == block
            ):
                held = Codebook(
                    held.codes, held.table[:16], held.largest
                )  # the second level cannot say it
            absmax = regroup(held.absmax, held.block, block, start, end)
            return replace(
                held, codes=held.codes[:, start // 2 : end // 2].contiguous(), absmax=absmax
            )
        case Fp8(scale=scale):
            if scale.shape[1] > 1:
                if start % BLOCK or (end % BLOCK and end != held.shape[1]):
                    raise uneven(name, start, end, held.shape[1], BLOCK)
                scale = scale[:, start // BLOCK : -(-end // BLOCK)].contiguous()
            return narrow(replace(held, codes=held.codes[:, start:end].contiguous(), scale=scale))


def narrow(held: Fp8) -> Fp8:
    """Squares one beside no other are rows."""
    if held.scale.shape[1] > 1 or len(held.scale) == len(held.codes):
        return held
    return replace(held, scale=held.scale.repeat_interleave(BLOCK, 0)[: len(held.codes)])


def finer(group: int, start: int, end: int, width: int, name: str) -> int:
    """The largest group that begins and ends where the columns do."""
    found = gcd(group, start, end)
    if found < min(FINEST, group):
        raise uneven(name, start, end, width, FINEST)
    return found


def regroup(scales: torch.Tensor, group: int, smaller: int, start: int, end: int) -> torch.Tensor:
    return scales.repeat_interleave(group // smaller, 1)[
        :, start // smaller : end // smaller
    ].contiguous()


def uneven(name: str, start: int, end: int, width: int, grain: int) -> UnsupportedModel:
    fitting = [str(count) for count in range(1, 65) if width % (count * grain) == 0]
    return UnsupportedModel(
        f"{name}: columns {start}:{end} of {width} cut through {grain} that belong together; this product can be "
        f"shared out evenly among {', '.join(fitting) or '1'} devices"
    )


def scattered(grid: Grid) -> Scattered:
    """The columns of an act-order grid where the input has them."""
    assert grid.order is not None
    order = grid.order.long()
    codes = torch.empty(grid.shape, dtype=torch.uint8, device=order.device)
    codes[:, order] = unpack(grid.codes, grid.bits)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order), device=order.device) // grid.group
    zero = torch.full_like(grid.scale, grid.middle) if grid.zero is None else grid.zero
    return Scattered(codes, grid.scale, zero, index)


def stacked(helds: Iterator[Held]) -> list[Held]:
    """Neighbours of the same kind become one."""
    runs: list[list[Held]] = []
    for held in helds:
        if runs and alike(runs[-1], held):
            runs[-1].append(held)
        else:
            runs.append([held])
    return [run[0] if len(run) == 1 else joined(run) for run in runs]


def alike(run: list[Held], other: Held) -> bool:
    match run[0], other:
        case torch.Tensor(), torch.Tensor():
            return True
        case Grid() as one, Grid() as two:
            same = (one.bits, one.codes.dtype, one.group, one.both) == (
                two.bits,
                two.codes.dtype,
                two.group,
                two.both,
            )
            orders = one.order is two.order or (
                one.order is not None
                and two.order is not None
                and torch.equal(one.order, two.order)
            )
            return same and orders and (one.zero is None) == (two.zero is None)
        case Codebook() as one, Codebook() as two:
            return one.block == two.block and torch.equal(
                one.table, two.table
            )  # which says if maxima are codes
        case Fp8() as one, Fp8() as two:
            if one.both != two.both or one.blocks != two.blocks:
                return False
            return (
                not one.blocks
                or sum(len(held.codes) for held in run if isinstance(held, Fp8)) % BLOCK == 0
            )
        case Scattered() as one, Scattered() as two:
            return torch.equal(one.index, two.index)
    return False


LINES = (
    "codes",
    "scale",
    "zero",
    "absmax",
    "outer",
)  # what has a line for each row; the rest is for all of them


def by_lines(run: Sequence[Held], change: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """These parts of all, made one; 8-bit floats, which torch neither picks nor stacks, as bytes."""
    made: dict[str, torch.Tensor] = {}
    for name in LINES:
        if (first := getattr(run[0], name, None)) is not None:
            parts = [getattr(held, name) for held in run]
            octets = first.dtype == FP8
            made[name] = (
                change([part.view(torch.uint8) for part in parts]).view(FP8)
                if octets
                else change(parts)
            )
    return replace(cast(Any, run[0]), **made)


def joined(run: list[Held]) -> Held:
    return (
        torch.cat(cast(Any, run)) if isinstance(run[0], torch.Tensor) else by_lines(run, torch.cat)
    )


def some(held: Packed | Scattered, rows: slice | torch.Tensor) -> Packed | Scattered:
    """These rows; a view where they are a slice. Those of squares begin with a square."""
    if isinstance(held, Fp8) and held.blocks and isinstance(rows, slice):
        squares = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        return replace(held, codes=held.codes[rows], scale=held.scale[squares])
    return by_lines([held], lambda parts: parts[0][rows])


# ---- ready to multiply ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedReady:
    """Packed weights on the device."""

    packed: Packed | Scattered
    dtype: torch.dtype  # of what comes out of it

    @property
    def nbytes(self) -> int:
        return sum(
            part.nbytes for part in vars(self.packed).values() if isinstance(part, torch.Tensor)
        )

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        packed = self.packed
        if rows.is_cuda and in_order(packed):
            return unpacked(packed, rows, self.dtype)
        if isinstance(packed, Fp8) and packed.blocks:
            scale = packed.scale.float()[rows // BLOCK].repeat_interleave(BLOCK, 1)[
                :, : packed.shape[1]
            ]
            codes = packed.codes.view(torch.uint8)[rows].view(packed.codes.dtype)
            return (codes.float() * scale).to(self.dtype)
        return some(packed, rows).dequantize(self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda and has_kernels(self.packed):
            return packed_linear(x, self.packed, bias)
        return linear_in_panels(x, self.packed, bias)

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        if not x.is_cuda or not has_kernels(self.packed):
            return None
        return packed_phrase(x, self.packed, bias, before, after)


def has_kernels(packed: Packed | Scattered) -> TypeGuard[Packed]:
    return not isinstance(packed, Scattered) and not (
        isinstance(packed, Grid) and packed.bits not in (4, 8)
    )


def in_order(packed: Packed | Scattered) -> TypeGuard[Packed]:
    """Whether kernels read it, and its columns are where the input has them."""
    return has_kernels(packed) and not (isinstance(packed, Grid) and packed.order is not None)


def by_row(packed: Packed | Scattered) -> TypeGuard[Grid]:
    whole = isinstance(packed, Grid) and packed.zero is None and packed.scale.shape[1] == 1
    return whole and packed.codes.dtype == torch.int8


def linear_in_panels(
    x: torch.Tensor, packed: Packed | Scattered, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, in] -> [tokens, out], unpacking a panel of rows at a time: the reference, and good for any device."""
    y = torch.empty(len(x), packed.shape[0], dtype=x.dtype, device=x.device)
    if (
        by_row(packed) and x.dtype != torch.float16
    ):  # a row's scale can wait for the sum, where that has the room
        for rows in strips(packed):
            torch.mm(x, packed.codes[rows].to(x.dtype).T, out=y[:, rows])
        y *= packed.scale.T
        return y if bias is None else y.add_(bias)
    for rows, panel in slabs(packed, x.dtype):
        y[:, rows] = F.linear(x, panel, None if bias is None else bias[rows])
    return y


def strips(packed: Packed | Scattered) -> Iterator[slice]:
    """Rows to unpack at once: whole squares of them."""
    rows, width = packed.shape
    step = (
        max(1, (PANEL if packed.codes.device.type == "cpu" else STREAMED) // width // BLOCK) * BLOCK
    )
    return (slice(row, min(row + step, rows)) for row in range(0, rows, step))


def slabs(packed: Packed | Scattered, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    return ((rows, some(packed, rows).dequantize(dtype)) for rows in strips(packed))


@dataclass(frozen=True)
class SideBySide:
    """Matrices of different kinds whose outputs follow one another."""

    parts: tuple[Ready, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return slab(self, 0, height(self))[rows]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.cat([part.linear(x) for part in self.parts], -1)
        return y if bias is None else y + bias

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        return None


def height(ready: Ready) -> int:
    match ready:
        case SideBySide(parts):
            return sum(map(height, parts))
        case PackedReady(packed):
            return packed.shape[0]
        case DenseReady(weight):
            return len(weight)
        case BlocksReady(matrix):
            return matrix.rows
    raise TypeError(f"{type(ready).__name__} does not say how many rows it has")


def slab(ready: Ready, start: int, end: int) -> torch.Tensor:
    """Rows start:end in full precision."""
    match ready:
        case DenseReady(weight):
            return weight[start:end]
        case PackedReady(packed, dtype) if packed.codes.is_cuda and in_order(packed):
            return unpacked(packed, range(start, end), dtype)
        case PackedReady(packed, dtype) if start % BLOCK == 0 or not (
            isinstance(packed, Fp8) and packed.blocks
        ):
            return some(packed, slice(start, end)).dequantize(dtype)
        case SideBySide(parts):
            return torch.cat(
                [slab(parts[i], a, b) for i, a, b in overlaps(map(height, parts), start, end)]
            )
    device = ready.packed.codes.device if isinstance(ready, PackedReady) else None
    return ready.gather(torch.arange(start, end, device=device))

"""Tensors pulled from a checkpoint: the model names what it wants and of which shape, a source answers with Stored.

Nothing is read before a Stored is loaded, and then only the rows and columns that are wanted, through a window of the
file that closes behind them: the weights in memory, and one chunk beside them. A missing tensor is an error, an unused
one is listed. A source does not know what a tensor is for.
"""

from __future__ import annotations

import difflib
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol, TextIO

import torch

from bloomery.artifacts import gguf, safetensors
from bloomery.artifacts.locate import Artifact
from bloomery.errors import CheckpointError
from bloomery.kernels.dice import throw
from bloomery.models.gguf import Decoder, decoder
from bloomery.models.stream import Stream, Wait
from bloomery.quant.base import Arriving, Coded, Range, Stored, Tensors, ahead

Advance = Callable[[int], None]
Report = Callable[
    [str, int, int], None
]  # what is being loaded, how much is done, how much there is

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Source(Tensors, Protocol):
    """Where weights come from."""

    advance: Advance  # called with n for every n bytes read

    @property
    def nbytes(self) -> int:
        """All there is to read; 0 for a source that makes its weights up."""
        ...

    def names(self) -> Collection[str]: ...
    def unused(self) -> tuple[str, ...]:
        """Names nobody has asked for."""
        ...


def unheard(count: int) -> None:
    """Of a source that nobody watches."""


def open_source(artifact: Artifact, load_format: str = "auto") -> Source:
    if load_format == "dummy":
        return DummySource()
    if artifact.kind == "gguf":
        return FileSource.gguf(gguf.read(artifact.path, words=False))
    return FileSource.safetensors(artifact.path)


# ---- tensors in files ----------------------------------------------------------------------------

CACHED_VALUES = 1 << 18  # decoded at a time on the CPU: what its caches hold
STREAMED_VALUES = 1 << 22  # copied or decoded at a time otherwise
AHEAD = 16  # such portions on their way while one is decoded


def window(file: Path, start: int, end: int) -> torch.Tensor:
    """Bytes of a file as uint8, without a copy; gone from memory with the last view of them.

    The mapping is private and writable, which torch wants of a buffer; nothing can reach the file. It is opened anew
    for each stretch, so that neither address space nor resident memory ever holds a whole checkpoint.
    """
    if start == end:
        return torch.empty(0, dtype=torch.uint8)
    offset = start - start % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as handle:
        if (
            os.fstat(handle.fileno()).st_size < end
        ):  # touching a page past the end would kill the process
            raise CheckpointError(
                f"{file}: became shorter while it was being read; download it again"
            )
        data = mmap.mmap(handle.fileno(), end - offset, access=mmap.ACCESS_COPY, offset=offset)
    if hasattr(mmap, "MADV_WILLNEED"):  # one request to the disk rather than one a page fault
        data.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(data, dtype=torch.uint8, offset=start - offset)


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, seen as rows of blocks: [product of the outer dimensions, last dimension]."""

    file: Path
    kind: str  # the format's own name of the type, for messages
    shape: tuple[int, ...]
    start: int
    nbytes: int
    dtype: torch.dtype  # of the values
    block: tuple[
        int, int
    ]  # values and bytes of a block: one value where there is nothing to decode
    decode: Decoder | None = None
    readable: bool = True  # False: a type nobody here knows

    @property
    def row_bytes(self) -> int:
        return self.nbytes // prod(self.shape[:-1])

    def undecoded(self) -> Entry:
        """The bytes of its blocks."""
        shape = (*self.shape[:-1], self.row_bytes)
        return replace(self, shape=shape, dtype=torch.uint8, block=(1, 1), decode=None)

    def column_bytes(self, cols: Range) -> Range:
        """The bytes of a row that hold these columns: whole blocks."""
        values, size = self.block
        return cols[0] // values * size, -(-cols[1] // values) * size

    def bytes(self, rows: Range) -> torch.Tensor:
        """uint8 [rows, bytes of a row], a view of the file."""
        start, end = (self.start + row * self.row_bytes for row in rows)
        return window(self.file, start, end).view(rows[1] - rows[0], self.row_bytes)

    def values(self, raw: torch.Tensor, cols: Range, device: torch.device) -> torch.Tensor:
        """uint8 [rows, bytes of a row] -> [rows, cols], decoded on `device`, or a view where there is nothing to."""
        a, b = self.column_bytes(cols)
        if self.decode is None:
            aligned = raw if raw.data_ptr() % self.dtype.itemsize == 0 else raw.clone()
            return aligned[:, a:b].view(self.dtype)
        values, size = self.block
        decoded = self.decode(raw[:, a:b].to(device).reshape(-1, size)).view(len(raw), -1)
        first = cols[0] // values * values
        return decoded[:, cols[0] - first : cols[1] - first]


@dataclass(frozen=True)
class _Matrix:
    """One matrix (or vector) of an entry, from row `first` on, as the model wants to see it."""

    entry: Entry
    first: int
    transposed: bool
    source: FileSource

    def read(self, rows: Range, cols: Range | None) -> torch.Tensor:
        if cols is None:
            return self._values((0, 1), rows, torch.device("cpu"))[0]
        if self.transposed:
            return self._values(cols, rows, torch.device("cpu")).T
        return self._values(rows, cols, torch.device("cpu"))

    def fill(self, out: torch.Tensor, rows: Range, cols: Range | None) -> Wait | None:
        if cols is None:
            out, rows, cols = out[None], (0, 1), rows
        elif self.transposed:
            out, rows, cols = out.T, cols, rows
        stream = self.source.stream
        if stream is not None and stream.device.type == out.device.type:
            return self._streamed(stream, out, rows, cols)
        cached = self.entry.decode is not None and out.device.type == "cpu"
        step = max(1, (CACHED_VALUES if cached else STREAMED_VALUES) // (cols[1] - cols[0]))
        for row in range(*rows, step):
            part = (row, min(row + step, rows[1]))
            out[part[0] - rows[0] : part[1] - rows[0]].copy_(self._values(part, cols, out.device))
        return None

    def _streamed(self, stream: Stream, out: torch.Tensor, rows: Range, cols: Range) -> Wait | None:
        """As `fill`, of whole rows: straight to where they belong, or a few at a time to be cut and decoded there."""
        entry = self.entry
        width = self.entry.row_bytes
        a, b = entry.column_bytes(cols)

        def begin(first: int, skip: int, into: torch.Tensor) -> Wait:
            self.source.advance(into.nbytes)
            return stream.read(entry.file, entry.start + (self.first + first) * width + skip, into)

        unbroken = len(out) == 1 or b - a == width
        as_stored = entry.decode is None and out.dtype == entry.dtype
        if unbroken and as_stored and out.is_contiguous():
            return begin(rows[0], a, out)
        step = max(1, STREAMED_VALUES // entry.shape[-1])

        def panel(row: int) -> Arriving:
            into = torch.empty(
                min(step, rows[1] - row), width, dtype=torch.uint8, device=out.device
            )
            return Arriving(into, (begin(row, 0, into),))

        for row, part in zip(
            range(0, len(out), step), ahead(map(panel, range(*rows, step)), AHEAD), strict=True
        ):
            out[row : row + step].copy_(entry.values(part, cols, out.device))
        return None

    def _values(self, rows: Range, cols: Range, device: torch.device) -> torch.Tensor:
        a, b = self.entry.column_bytes(cols)
        self.source.advance((rows[1] - rows[0]) * (b - a))
        return self.entry.values(
            self.entry.bytes((self.first + rows[0], self.first + rows[1])), cols, device
        )


def _safetensor(file: Path, found: safetensors.TensorEntry) -> Entry:
    dtype = DTYPES.get(found.dtype, torch.uint8)
    known = found.dtype in DTYPES
    size = found.end - found.start
    block = (1, dtype.itemsize)
    return Entry(
        file, found.dtype, found.shape or (1,), found.start, size, dtype, block, readable=known
    )


class FileSource:
    """Tensors of a folder of safetensors files or of a GGUF file: mapped, or by a stream while there is one."""

    def __init__(self, origin: Path, entries: Mapping[str, Entry]):
        self.origin = origin
        self.entries = entries
        self.used: set[str] = set()
        self.advance: Advance = unheard
        self.stream: Stream | None = None

    @classmethod
    def safetensors(cls, folder: Path) -> FileSource:
        return cls(
            folder, {name: _safetensor(*where) for name, where in safetensors.index(folder).items()}
        )

    def over(self, file: Path) -> FileSource:
        """The same with a shard on top, whose tensors take precedence."""
        shard = {
            name: _safetensor(file, found) for name, found in safetensors.read_header(file).items()
        }
        return FileSource(self.origin, {**self.entries, **shard})

    @classmethod
    def gguf(cls, file: gguf.Gguf) -> FileSource:
        decoders = {
            kind: decoder(kind) for kind in {t.type for t in file.tensors.values()} - DTYPES.keys()
        }

        def entry(found: gguf.GgufTensor) -> Entry:
            dtype = DTYPES.get(found.type, torch.float32)
            block = gguf.BLOCKS[found.type]
            decode = decoders.get(found.type)
            known = found.type in DTYPES or decode is not None
            return Entry(
                file.path,
                found.type,
                found.shape,
                found.start,
                found.nbytes,
                dtype,
                block,
                decode,
                known,
            )

        return cls(file.path, {name: entry(found) for name, found in file.tensors.items()})

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> Stored:
        stored = tuple(reversed(shape)) if transposed else tuple(shape)
        entry = self._entry(name, stored, expert)
        self.used.add(name)
        height = stored[0] if len(stored) > 1 else 1
        matrix = _Matrix(entry, height * (expert or 0), transposed, self)
        coded = None
        if entry.decode is not None and len(shape) > 1 and not transposed:
            octets = _Matrix(entry.undecoded(), matrix.first, False, self)
            raw = Stored.whole((shape[0], entry.row_bytes), torch.uint8, octets.read, octets.fill)
            coded = Coded(entry.kind, *entry.block, raw)
        return Stored.whole(shape, entry.dtype, matrix.read, matrix.fill, coded)

    def has(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(name).shape

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def unused(self) -> tuple[str, ...]:
        return tuple(sorted(self.entries.keys() - self.used))

    def _found(self, name: str) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, self.entries, 2)
            hint = f"; the nearest names are {', '.join(near)}" if near else ""
            raise CheckpointError(f"{self.origin}: no tensor {name!r}, which the model needs{hint}")
        return entry

    def _entry(self, name: str, shape: tuple[int, ...], expert: int | None) -> Entry:
        entry = self._found(name)
        found = entry.shape if expert is None else entry.shape[1:]
        if len(shape) == 2 and len(found) > 2:  # blocks of a row one by one
            merged = prod(found[1:])
            entry = replace(entry, shape=(*entry.shape[: -len(found) + 1], merged))
            found = (found[0], merged)
        if (
            shape[0] == 1 and found == shape[1:]
        ):  # quantisers drop the one row of a shared expert's gate
            found = shape
        if found != shape or (expert is not None and expert >= entry.shape[0]):
            wanted = list(shape) if expert is None else ["experts", *shape]
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, the model expects {wanted}"
            )
        if not entry.readable:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is of type {entry.kind}, which cannot be read"
            )
        return entry


# ---- tensors made up -----------------------------------------------------------------------------

DEVIATION = 0.02  # of made-up weights


class DummySource:
    """Random weights of whatever shape is asked for: to measure and to plan without a checkpoint.

    A value is a hash of its tensor's name, row and column, so slices agree with the whole and devices with each other.
    """

    nbytes = 0

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.stored = dtype
        self.advance: Advance = unheard

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> Stored:
        seed = int.from_bytes(
            hashlib.blake2b(f"{name} {expert}".encode(), digest_size=4).digest(),
            "little",
            signed=True,
        )

        def fill(out: torch.Tensor, rows: Range, cols: Range | None) -> None:
            if cols is None:  # norms leave their input alone, biases add nothing
                out.fill_(float(name.endswith("weight")))
            else:
                throw(out, seed, (rows[0], cols[0]), DEVIATION)

        def read(rows: Range, cols: Range | None) -> torch.Tensor:
            spans = (rows,) if cols is None else (rows, cols)
            out = torch.empty([end - start for start, end in spans], dtype=self.stored)
            fill(out, rows, cols)
            return out

        return Stored.whole(shape, self.stored, read, fill)

    def has(self, name: str) -> bool:
        """Plain weights always are; parts of a quantised format never."""
        return name.endswith((".weight", ".bias"))

    def shape(self, name: str) -> tuple[int, ...]:
        raise CheckpointError(f"{name}: made-up weights have no shape of their own")

    def names(self) -> Collection[str]:
        return ()

    def unused(self) -> tuple[str, ...]:
        return ()


# ---- progress ------------------------------------------------------------------------------------


def progress(total: int, stream: TextIO) -> AbstractContextManager[Advance]:
    """Show how many bytes are read and how long the rest will take."""
    return _bar(total, stream) if stream.isatty() else _lines(total, stream)


@contextmanager
def reported(total: int, report: Report) -> Iterator[Advance]:
    """Tell how many bytes are read."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report("weights", done, total)

    yield advance


@contextmanager
def _bar(total: int, stream: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("weights", *columns, console=Console(file=stream)) as bar:
        task = bar.add_task("", total=total or None)
        yield lambda count: bar.advance(task, count)
        bar.update(task, total=bar.tasks[0].completed)


@contextmanager
def _lines(total: int, stream: TextIO, every: float = 5.0) -> Iterator[Advance]:
    begun = told = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        now = time.monotonic()
        if now - told >= every:
            told = now
            left = (now - begun) * max(total - done, 0) / max(done, 1)
            stream.write(f"weights: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {left:.0f} s left\n")

    yield advance
    stream.write(f"weights: {done / 1e9:.2f} GB read in {time.monotonic() - begun:.1f} s\n")

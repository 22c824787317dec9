"""Weight sources: tensors of safetensors folders and GGUF files, and random ones, read on demand.

The model asks for a tensor by name and shape; a source returns a LazyTensor. Nothing is read before
a LazyTensor is loaded, and then only the rows and columns that are needed. Files are mapped in
small windows, so memory never holds a checkpoint besides the weights. A missing tensor is an error,
an unused one is listed. A source does not know what a tensor is used for.
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
from bloomery.artifacts.locate import ModelArtifact
from bloomery.describe import checkpoint_dtype
from bloomery.errors import CheckpointError
from bloomery.kernels.random_init import fill_random, fill_random_bytes
from bloomery.models.gguf_dequant import Dequantize, find_dequantizer
from bloomery.models.weight_stream import WaitForRead, WeightStream
from bloomery.quant.base import CheckpointTensors
from bloomery.quant.lazy_tensor import LazyTensor, PendingLoad, QuantizedBlocks, Range, prefetch

AdvanceProgress = Callable[[int], None]  # called with the number of bytes just read
ProgressReport = Callable[[str, int, int], None]  # title, bytes read so far, total bytes

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
CPU = torch.device("cpu")


class WeightSource(CheckpointTensors, Protocol):
    """Provides the tensors of a model by name."""

    advance: AdvanceProgress

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors in files; 0 for random weights."""
        ...

    def stored_bytes(self, names: Collection[str]) -> int:
        """The bytes of these tensors in files."""
        ...

    def names(self) -> Collection[str]: ...
    def unused(self) -> tuple[str, ...]:
        """Return the names of tensors that were never requested."""
        ...


def ignore_progress(count: int) -> None:
    """An AdvanceProgress that does nothing."""


def open_source(artifact: ModelArtifact, load_format: str = "auto") -> WeightSource:
    """Open the weights of a model, or random weights if `load_format` is "dummy"."""
    if load_format == "dummy":
        return DummySource(getattr(torch, checkpoint_dtype(artifact, dummy=True)))
    if artifact.kind == "gguf":
        return FileSource.gguf(gguf.read_gguf(artifact.path, read_string_arrays=False))
    return FileSource.safetensors(artifact.path)


# ---- tensors in files ----------------------------------------------------------------------------

CACHED_VALUES = 1 << 18  # values decoded at a time on a CPU: they fit into its caches
STREAMED_VALUES = 1 << 22  # values copied or decoded at a time otherwise
PANELS_AHEAD = 16  # panels being read while one is decoded


def map_bytes(file: Path, start: int, end: int) -> torch.Tensor:
    """Map bytes of a file as uint8, without a copy; unmapped with the last view of them.

    The mapping is private and writable, as torch requires of a buffer, so the file cannot change.
    Each range is mapped separately, so neither address space nor resident memory holds a whole
    checkpoint.
    """
    if start == end:
        return torch.empty(0, dtype=torch.uint8)
    offset = start - start % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as handle:
        # Reading a page past the end would kill the process.
        if os.fstat(handle.fileno()).st_size < end:
            raise CheckpointError(
                f"{file}: became shorter while it was being read; download it again"
            )
        mapping = mmap.mmap(handle.fileno(), end - offset, access=mmap.ACCESS_COPY, offset=offset)
    if hasattr(mmap, "MADV_WILLNEED"):  # one disk request instead of one for each page fault
        mapping.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start - offset)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, seen as rows of blocks: [product of outer dimensions, last dimension]."""

    file: Path
    kind: str  # the type as the file format names it, for messages
    shape: tuple[int, ...]
    start: int
    nbytes: int
    dtype: torch.dtype  # of the values
    block: tuple[int, int]  # values and bytes of a block; one value if the type is unquantized
    decode: Dequantize | None = None
    readable: bool = True  # False: the type is unknown

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.nbytes // prod(self.shape[:-1])

    def as_raw(self) -> FileTensor:
        """Return the same tensor as undecoded bytes."""
        shape = (*self.shape[:-1], self.row_bytes)
        return replace(self, shape=shape, dtype=torch.uint8, block=(1, 1), decode=None)

    def column_bytes(self, cols: Range) -> Range:
        """Return the range of a row's bytes that holds these columns, in whole blocks."""
        values, size = self.block
        return cols[0] // values * size, -(-cols[1] // values) * size

    def map_rows(self, rows: Range) -> torch.Tensor:
        """Map rows of the file: uint8 [rows, bytes of a row]."""
        start = self.start + rows[0] * self.row_bytes
        end = self.start + rows[1] * self.row_bytes
        return map_bytes(self.file, start, end).view(rows[1] - rows[0], self.row_bytes)

    def decode_rows(self, raw: torch.Tensor, cols: Range, device: torch.device) -> torch.Tensor:
        """Decode uint8 [rows, bytes of a row] to [rows, cols].

        Blocks are decoded on `device`. Unquantized values are returned as a view.
        """
        first_byte, end_byte = self.column_bytes(cols)
        if self.decode is None:
            aligned = raw if raw.data_ptr() % self.dtype.itemsize == 0 else raw.clone()
            return aligned[:, first_byte:end_byte].view(self.dtype)
        block_values, block_bytes = self.block
        blocks = raw[:, first_byte:end_byte].to(device).reshape(-1, block_bytes)
        decoded = self.decode(blocks).view(len(raw), -1)
        first_value = cols[0] // block_values * block_values
        return decoded[:, cols[0] - first_value : cols[1] - first_value]


@dataclass(frozen=True)
class FileMatrix:
    """One matrix (or vector) of a FileTensor, from row `first_row` on, as the model sees it."""

    tensor: FileTensor
    first_row: int
    transposed: bool
    source: FileSource

    def read(self, rows: Range, cols: Range | None) -> torch.Tensor:
        """Read rows and columns on the CPU; a vector has no columns."""
        if cols is None:
            return self._decode((0, 1), rows, CPU)[0]
        if self.transposed:
            return self._decode(cols, rows, CPU).T
        return self._decode(rows, cols, CPU)

    def fill(self, out: torch.Tensor, rows: Range, cols: Range | None) -> WaitForRead | None:
        """Read into `out`; returns a function that waits for it, or None if the read has ended."""
        if cols is None:
            return self._fill_stored(out[None], (0, 1), rows)
        if self.transposed:
            return self._fill_stored(out.T, cols, rows)
        return self._fill_stored(out, rows, cols)

    def _fill_stored(self, out: torch.Tensor, rows: Range, cols: Range) -> WaitForRead | None:
        """Like `fill`, with rows and columns in the order of the file."""
        stream = self.source.stream
        if stream is not None and stream.device.type == out.device.type:
            return self._fill_streamed(stream, out, rows, cols)
        decodes_on_cpu = self.tensor.decode is not None and out.device.type == "cpu"
        num_values = CACHED_VALUES if decodes_on_cpu else STREAMED_VALUES
        step = max(1, num_values // (cols[1] - cols[0]))
        for start in range(*rows, step):
            end = min(start + step, rows[1])
            panel = self._decode((start, end), cols, out.device)
            out[start - rows[0] : end - rows[0]].copy_(panel)
        return None

    def _fill_streamed(
        self, stream: WeightStream, out: torch.Tensor, rows: Range, cols: Range
    ) -> WaitForRead | None:
        """Stream whole rows: directly into `out`, or in panels that are sliced and decoded."""
        tensor = self.tensor
        width = tensor.row_bytes
        first_byte, end_byte = tensor.column_bytes(cols)

        def begin_read(row: int, skip: int, into: torch.Tensor) -> WaitForRead:
            self.source.advance(into.nbytes)
            start = tensor.start + (self.first_row + row) * width + skip
            return stream.read(tensor.file, start, into)

        is_one_range = len(out) == 1 or end_byte - first_byte == width
        is_unchanged = tensor.decode is None and out.dtype == tensor.dtype
        if is_one_range and is_unchanged and out.is_contiguous():
            return begin_read(rows[0], first_byte, out)
        step = max(1, STREAMED_VALUES // tensor.shape[-1])

        def begin_panel(row: int) -> PendingLoad:
            height = min(step, rows[1] - row)
            panel = torch.empty(height, width, dtype=torch.uint8, device=out.device)
            return PendingLoad(panel, (begin_read(row, 0, panel),))

        panels = prefetch(map(begin_panel, range(*rows, step)), PANELS_AHEAD)
        for row, panel in zip(range(0, len(out), step), panels, strict=True):
            out[row : row + step].copy_(tensor.decode_rows(panel, cols, out.device))
        return None

    def _decode(self, rows: Range, cols: Range, device: torch.device) -> torch.Tensor:
        first_byte, end_byte = self.tensor.column_bytes(cols)
        self.source.advance((rows[1] - rows[0]) * (end_byte - first_byte))
        raw = self.tensor.map_rows((self.first_row + rows[0], self.first_row + rows[1]))
        return self.tensor.decode_rows(raw, cols, device)


class FileSource:
    """Tensors of a folder of safetensors files or of a GGUF file.

    They are read through `stream` if it is set, and mapped into memory otherwise.
    """

    def __init__(self, origin: Path, entries: Mapping[str, FileTensor]):
        self.origin = origin
        self.entries = entries
        self.used: set[str] = set()
        self.advance: AdvanceProgress = ignore_progress
        self.stream: WeightStream | None = None

    @classmethod
    def safetensors(cls, folder: Path) -> FileSource:
        """Open the safetensors files of a folder."""
        return cls(
            folder,
            {
                name: from_safetensors(file, entry)
                for name, (file, entry) in safetensors.index_checkpoint(folder).items()
            },
        )

    def with_shard(self, file: Path) -> FileSource:
        """Return the same source with one more shard, whose tensors take precedence."""
        shard = {
            name: from_safetensors(file, entry)
            for name, entry in safetensors.read_safetensors_header(file).items()
        }
        return FileSource(self.origin, {**self.entries, **shard})

    @classmethod
    def gguf(cls, file: gguf.GgufFile) -> FileSource:
        """Open the tensors of a GGUF file whose header was read."""
        kinds = {tensor.type for tensor in file.tensors.values()}
        dequantizers = {kind: find_dequantizer(kind) for kind in kinds - DTYPES.keys()}
        return cls(
            file.path,
            {
                name: from_gguf(file.path, tensor, dequantizers.get(tensor.type))
                for name, tensor in file.tensors.items()
            },
        )

    @property
    def nbytes(self) -> int:
        return self.stored_bytes(self.entries.keys())

    def stored_bytes(self, names: Collection[str]) -> int:
        return sum(self.entries[name].nbytes for name in names)

    def has_quantized_tensors(self) -> bool:
        """Whether some tensors are stored in quantized blocks."""
        return any(entry.decode is not None for entry in self.entries.values())

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> LazyTensor:
        """Return a tensor that is not read yet; raises if the file does not have that shape."""
        stored_shape = tuple(reversed(shape)) if transposed else tuple(shape)
        entry = self._check_entry(name, stored_shape, expert)
        self.used.add(name)
        height = stored_shape[0] if len(stored_shape) > 1 else 1
        first_row = height * (expert or 0)
        matrix = FileMatrix(entry, first_row, transposed, self)
        blocks = None
        if entry.decode is not None and len(shape) > 1 and not transposed:
            raw_matrix = FileMatrix(entry.as_raw(), first_row, False, self)
            raw_shape = (shape[0], entry.row_bytes)
            raw = LazyTensor.from_reader(raw_shape, torch.uint8, raw_matrix.read, raw_matrix.fill)
            blocks = QuantizedBlocks(entry.kind, *entry.block, raw)
        return LazyTensor.from_reader(shape, entry.dtype, matrix.read, matrix.fill, blocks)

    def has(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find_entry(name).shape

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def unused(self) -> tuple[str, ...]:
        return tuple(sorted(self.entries.keys() - self.used))

    def _find_entry(self, name: str) -> FileTensor:
        entry = self.entries.get(name)
        if entry is None:
            similar = difflib.get_close_matches(name, self.entries, 2)
            hint = f"; the nearest names are {', '.join(similar)}" if similar else ""
            raise CheckpointError(f"{self.origin}: no tensor {name!r}, which the model needs{hint}")
        return entry

    def _check_entry(self, name: str, shape: tuple[int, ...], expert: int | None) -> FileTensor:
        """Return the tensor of that name; raises unless it has the shape and is readable."""
        entry = self._find_entry(name)
        stored = entry.shape if expert is None else entry.shape[1:]
        if len(shape) == 2 and len(stored) > 2:
            # The file stores the blocks of a row as a dimension of their own.
            merged = prod(stored[1:])
            entry = replace(entry, shape=(*entry.shape[: -len(stored) + 1], merged))
            stored = (stored[0], merged)
        if shape[0] == 1 and stored == shape[1:]:
            # Some tools drop the only row of a shared expert's gate.
            stored = shape
        if stored != shape or (expert is not None and expert >= entry.shape[0]):
            expected = list(shape) if expert is None else ["experts", *shape]
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, the model expects "
                f"{expected}"
            )
        if not entry.readable:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is of type {entry.kind}, which cannot be read"
            )
        return entry


def from_safetensors(file: Path, entry: safetensors.TensorEntry) -> FileTensor:
    """Build a FileTensor from an entry of a safetensors header."""
    dtype = DTYPES.get(entry.dtype, torch.uint8)
    return FileTensor(
        file,
        entry.dtype,
        entry.shape or (1,),
        entry.start,
        entry.end - entry.start,
        dtype,
        (1, dtype.itemsize),
        readable=entry.dtype in DTYPES,
    )


def from_gguf(file: Path, tensor: gguf.GgufTensor, decode: Dequantize | None) -> FileTensor:
    """Build a FileTensor from a tensor of a GGUF header."""
    return FileTensor(
        file,
        tensor.type,
        tensor.shape,
        tensor.start,
        tensor.nbytes,
        DTYPES.get(tensor.type, torch.float32),
        gguf.GGML_BLOCKS[tensor.type],
        decode,
        readable=tensor.type in DTYPES or decode is not None,
    )


# ---- random weights ------------------------------------------------------------------------------

DUMMY_DEVIATION = 0.02  # standard deviation of random weights
DUMMY_MXFP4_EXPONENT = 120  # 2 ** -7: random 4-bit floats then have about that deviation
# Names of the stacked MXFP4 experts of gpt-oss.
MXFP4_CODES = "_blocks"
MXFP4_EXPONENTS = "_scales"


class DummySource:
    """Random weights of any shape, to measure and to plan without a checkpoint.

    A value is a hash of its tensor's name, row and column, so slices agree with the whole tensor
    and devices agree with each other.
    """

    nbytes = 0

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.advance: AdvanceProgress = ignore_progress

    def tensor(
        self, name: str, shape: Sequence[int], transposed: bool = False, expert: int | None = None
    ) -> LazyTensor:
        """Return a random tensor of this shape."""
        is_packed = name.endswith((MXFP4_CODES, MXFP4_EXPONENTS))
        dtype = torch.uint8 if is_packed else self.dtype
        digest = hashlib.blake2b(f"{name} {expert}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little", signed=True)

        def fill(out: torch.Tensor, rows: Range, cols: Range | None) -> None:
            if cols is None:  # neutral vectors: norm weights are 1, biases are 0
                out.fill_(float(name.endswith("weight")))
            elif name.endswith(MXFP4_EXPONENTS):
                out.fill_(DUMMY_MXFP4_EXPONENT)
            elif name.endswith(MXFP4_CODES):
                fill_random_bytes(out, seed, (rows[0], cols[0]))
            else:
                fill_random(out, seed, (rows[0], cols[0]), DUMMY_DEVIATION)

        def read(rows: Range, cols: Range | None) -> torch.Tensor:
            ranges = [rows]
            if cols is not None:
                ranges.append(cols)
            out = torch.empty([end - start for start, end in ranges], dtype=dtype)
            fill(out, rows, cols)
            return out

        return LazyTensor.from_reader(shape, dtype, read, fill)

    def has(self, name: str) -> bool:
        """Whether the name is that of an unquantized weight or of stacked MXFP4 experts.

        All of these exist.
        """
        is_packed = name.endswith((MXFP4_CODES, MXFP4_EXPONENTS)) and ".weight_" not in name
        return is_packed or name.endswith((".weight", ".bias"))

    def shape(self, name: str) -> tuple[int, ...]:
        raise CheckpointError(f"{name}: random weights have no shape of their own")

    def stored_bytes(self, names: Collection[str]) -> int:
        return 0

    def names(self) -> Collection[str]:
        return ()

    def unused(self) -> tuple[str, ...]:
        return ()


# ---- progress ------------------------------------------------------------------------------------


def show_progress(total: int, stream: TextIO) -> AbstractContextManager[AdvanceProgress]:
    """Print how many bytes have been read and how long the remaining ones will take."""
    if stream.isatty():
        return _show_progress_bar(total, stream)
    return _print_progress_lines(total, stream)


@contextmanager
def forward_progress(total: int, report: ProgressReport) -> Iterator[AdvanceProgress]:
    """Call `report` with the number of bytes read so far."""
    num_read = 0

    def advance(count: int) -> None:
        nonlocal num_read
        num_read += count
        report("weights", num_read, total)

    yield advance


@contextmanager
def _show_progress_bar(total: int, stream: TextIO) -> Iterator[AdvanceProgress]:
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
def _print_progress_lines(
    total: int, stream: TextIO, interval: float = 5.0
) -> Iterator[AdvanceProgress]:
    started = time.monotonic()
    last_printed = started
    num_read = 0

    def advance(count: int) -> None:
        nonlocal num_read, last_printed
        num_read += count
        now = time.monotonic()
        if now - last_printed >= interval:
            last_printed = now
            seconds_left = (now - started) * max(total - num_read, 0) / max(num_read, 1)
            progress = f"{num_read / 1e9:.2f} of {total / 1e9:.2f} GB"
            stream.write(f"weights: {progress}, {seconds_left:.0f} s left\n")

    yield advance
    seconds = time.monotonic() - started
    stream.write(f"weights: {num_read / 1e9:.2f} GB read in {seconds:.1f} s\n")

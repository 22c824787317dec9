"""Reads the header of a GGUF file: its metadata and the table of its tensors.

The header is untrusted. Every count and length is checked against the bytes left in the file before
anything is allocated, and no tensor may pass the end of the file. Nothing here knows what the
metadata means.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import file_size
from bloomery.errors import CheckpointError

# ggml's number -> (name, values per block, bytes per block)
GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
GGML_BLOCKS: Mapping[str, tuple[int, int]] = {
    name: (values, size) for name, values, size in GGML_TYPES.values()
}

# Number of a metadata value type -> its struct format.
SCALAR_TYPES: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING_TYPE = 8
ARRAY_TYPE = 9

MAX_ELEMENTS = 1 << 23  # of all arrays together; the largest vocabularies have a million
MAX_DEPTH = 4  # of nested arrays
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_NAME_BYTES = 65535
MAX_ALIGNMENT = 1 << 20  # bytes
MIN_FILE_BYTES = 24  # magic, version and the two counts


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the table."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, the reverse of ggml's order
    type: str
    start: int  # in bytes from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path, read_string_arrays: bool = True) -> GgufFile:
    """Read the header of a GGUF file.

    Without `read_string_arrays` arrays of strings are left empty. These are mostly the vocabulary,
    and reading them takes most of the time.
    """
    if file_size(path) < MIN_FILE_BYTES:
        raise CheckpointError(f"{path}: too short for a GGUF file; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _GgufCursor(path, data, read_string_arrays)
        num_tensors, num_pairs = _read_counts(cursor)
        metadata = _read_metadata(cursor, num_pairs)
        alignment = _read_alignment(cursor, metadata)
        tensors = _read_tensors(cursor, num_tensors, alignment)
        return GgufFile(path, metadata, tensors)


class _GgufCursor:
    """A read position that never passes the end of the file.

    `where` names what is being read, for error messages.
    """

    def __init__(self, path: Path, data: mmap.mmap, read_string_arrays: bool = True):
        self.path = path
        self.data = data
        self.size = len(data)
        self.read_string_arrays = read_string_arrays
        self.offset = 0
        self.where = "header"
        self.elements_left = MAX_ELEMENTS

    def error(self, reason: str) -> CheckpointError:
        """Return the error for the current place, to be raised."""
        return CheckpointError(f"{self.path}: {self.where}: {reason}")

    def skip(self, count: int) -> int:
        """Move on by `count` bytes and return where they start."""
        start = self.offset
        num_left = self.size - start
        if count > num_left:
            raise self.error(
                f"{count} bytes wanted, {num_left} left: truncated or damaged, download it again"
            )
        self.offset += count
        return start

    def read_numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """Read numbers of one struct format."""
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self.data, self.skip(layout.size))

    def read_number(self, code: str) -> Any:
        return self.read_numbers(code)[0]

    def read_name(self) -> str:
        length = self.read_number("Q")
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.error(f"a name of {length} bytes")
        self.offset -= 8  # read_strings reads the length again
        return self.read_strings(1)[0]

    def read_names(self, count: int, label: str, index_label: str) -> Iterator[str]:
        """Yield `count` different names. The caller reads what follows each name in the file.

        For error messages: `label` precedes a name, `index_label` the index of an unread name.
        """
        names = set[str]()
        for i in range(count):
            self.where = f"{index_label} {i}"
            name = self.read_name()
            self.where = f"{label} {name!r}"
            if name in names:
                raise self.error("appears twice")
            names.add(name)
            yield name

    def read_strings(self, count: int, keep: bool = True) -> list[str]:
        """Read strings, or skip them unless `keep`.

        This loop is hot: a file has up to half a million tokens and merges.
        """
        strings: list[str] = []
        data = self.data
        size = self.size
        end = self.offset
        unpack_length = struct.Struct("<Q").unpack_from
        append = strings.append
        try:
            for _ in range(count):
                start = end + 8
                end = start + unpack_length(data, end)[0]
                if end > size:
                    raise self.error(
                        "a string passes the end of the file: "
                        "truncated or damaged, download it again"
                    )
                if keep:
                    append(data[start:end].decode())
        except struct.error:
            raise self.error(
                "the file ends within a string: truncated or damaged, download it again"
            ) from None
        except UnicodeDecodeError as error:
            raise self.error(f"a string is not UTF-8 ({error.reason})") from None
        self.offset = end
        return strings

    def read_value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING_TYPE:
            return self.read_strings(1)[0]
        if kind in SCALAR_TYPES:
            return self.read_number(SCALAR_TYPES[kind])
        if kind != ARRAY_TYPE:
            raise self.error(f"value kind {kind} is not known")
        return self.read_array(depth)

    def read_array(self, depth: int) -> list[Any]:
        kind = self.read_number("I")
        count = self.read_number("Q")
        if count > self.elements_left or depth == MAX_DEPTH:
            raise self.error(f"an array of {count} at depth {depth}, more than any model has")
        self.elements_left -= count
        if kind == STRING_TYPE:
            return self.read_strings(count, keep=self.read_string_arrays)
        if kind in SCALAR_TYPES:
            return list(self.read_numbers(SCALAR_TYPES[kind], count))
        return [self.read_value(kind, depth + 1) for _ in range(count)]


def _read_counts(cursor: _GgufCursor) -> tuple[int, int]:
    """Check magic and version, and return the numbers of tensors and of metadata pairs."""
    start = cursor.skip(4)
    magic = cursor.data[start : start + 4]
    version = cursor.read_number("I")
    if magic != b"GGUF":
        raise cursor.error(f"starts with {magic!r}: not a GGUF file")
    if version in (2 << 24, 3 << 24):
        raise cursor.error("a big-endian GGUF; convert the model again for little-endian machines")
    if version not in (2, 3):
        raise cursor.error(
            f"GGUF version {version} is not known, only 2 and 3; convert the model again"
        )
    num_tensors, num_pairs = cursor.read_numbers("Q", 2)
    if num_tensors > MAX_TENSORS or num_pairs > MAX_TENSORS:
        raise cursor.error(
            f"{num_tensors} tensors and {num_pairs} metadata pairs, more than any model has"
        )
    return num_tensors, num_pairs


def _read_metadata(cursor: _GgufCursor, count: int) -> dict[str, Any]:
    metadata = {
        key: cursor.read_value(cursor.read_number("I"))
        for key in cursor.read_names(count, "metadata", "metadata pair")
    }
    cursor.where = "metadata"
    num_parts = metadata.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        raise cursor.error(
            f"one of {num_parts} parts of a split GGUF; "
            "join them first: llama-gguf-split --merge FIRST OUT"
        )
    return metadata


def _read_alignment(cursor: _GgufCursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(
            f"general.alignment {value!r} is not a power of two up to {MAX_ALIGNMENT}"
        )
    return value


def _read_tensors(cursor: _GgufCursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    tensors = {
        name: _read_tensor(cursor, name, alignment)
        for name in cursor.read_names(count, "tensor", "tensor")
    }
    data_start = -(-cursor.offset // alignment) * alignment
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        start = data_start + tensor.start
        if start < end:
            raise CheckpointError(
                f"{cursor.path}: tensor {tensor.name!r} overlaps another; the file is damaged"
            )
        end = start + tensor.nbytes
        if end > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: truncated: tensor {tensor.name!r} ends at byte {end}, "
                f"the file at {cursor.size}; download it again"
            )
        tensors[tensor.name] = replace(tensor, start=start)
    return tensors


def _read_tensor(cursor: _GgufCursor, name: str, alignment: int) -> GgufTensor:
    """Read one entry of the table. Its `start` is relative to the tensor data."""
    num_dims = cursor.read_number("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"{num_dims} dimensions")
    shape = tuple(reversed(cursor.read_numbers("Q", num_dims)))
    number = cursor.read_number("I")
    offset = cursor.read_number("Q")
    if number not in GGML_TYPES:
        raise cursor.error(f"type {number} is not known; a newer Bloomery may read it")
    kind, block_size, block_bytes = GGML_TYPES[number]
    if 0 in shape or shape[-1] % block_size:
        raise cursor.error(f"shape {list(shape)} does not fill blocks of {block_size} ({kind})")
    if offset % alignment:
        raise cursor.error(f"offset {offset} is not aligned to {alignment}")
    num_blocks = prod(shape) // block_size
    return GgufTensor(name, shape, kind, offset, num_blocks * block_bytes)

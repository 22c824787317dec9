"""GGUF files: their metadata and where their tensors lie.

The whole header is untrusted. Every count and length is a Python int, bounded by the bytes left in the file before
anything is allocated, and no tensor may reach past the end. What the values mean is for others to say.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import file_size
from bloomery.errors import CheckpointError

# ggml's number -> (name, values in a block, bytes of a block)
TYPES: Mapping[int, tuple[str, int, int]] = {
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
BLOCKS: Mapping[str, tuple[int, int]] = {
    name: (values, size) for name, values, size in TYPES.values()
}

# metadata value kinds
SCALARS: Mapping[int, str] = {
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
STRING = 8
ARRAY = 9

MAX_ELEMENTS = 1 << 23  # of all arrays together; the largest vocabularies have a million
MAX_DEPTH = 4  # arrays in arrays
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_NAME = 65535


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, the reverse of ggml's order
    type: str
    start: int  # counted from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Gguf:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read(path: Path, words: bool = True) -> Gguf:
    """Without `words` arrays of strings, a vocabulary for the most part, are passed over and left empty."""
    if file_size(path) < 24:
        raise CheckpointError(f"{path}: too short for a GGUF file; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data, words)
        tensor_count, pair_count = _counts(cursor)
        metadata = _metadata(cursor, pair_count)
        tensors = _tensors(cursor, tensor_count, _alignment(cursor, metadata))
        return Gguf(path, metadata, tensors)


class _Cursor:
    """A position in the file that never passes its end. `where` is what is being read, for messages."""

    def __init__(self, path: Path, data: mmap.mmap, words: bool = True):
        self.path = path
        self.data = data
        self.size = len(data)
        self.words = words
        self.at = 0
        self.where = "header"
        self.elements = MAX_ELEMENTS

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}: {why}")

    def skip(self, count: int) -> int:
        """Move on by `count` bytes; where they start."""
        start = self.at
        if count > self.size - start:
            raise self.refuse(
                f"{count} bytes wanted, {self.size - start} left: truncated or damaged, download it again"
            )
        self.at += count
        return start

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self.data, self.skip(layout.size))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def name(self) -> str:
        length = self.number("Q")
        if not 0 < length <= MAX_NAME:
            raise self.refuse(f"a name of {length} bytes")
        self.at -= 8
        return self.strings(1)[0]

    def names(self, count: int, what: str, one: str) -> Iterator[str]:
        """So many, none of them twice; whoever asks for them reads what follows each."""
        seen = set[str]()
        for i in range(count):
            self.where = f"{one} {i}"
            name = self.name()
            self.where = f"{what} {name!r}"
            if name in seen:
                raise self.refuse("appears twice")
            seen.add(name)
            yield name

    def strings(self, count: int, wanted: bool = True) -> list[str]:
        """The hot loop: half a million tokens and merges in a fraction of a second."""
        found: list[str] = []
        data = self.data
        size = self.size
        at = self.at
        length_at = struct.Struct("<Q").unpack_from
        add = found.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    raise self.refuse(
                        "a string passes the end of the file: truncated or damaged, download it again"
                    )
                if wanted:
                    add(data[start:at].decode())
        except struct.error:
            raise self.refuse(
                "the file ends within a string: truncated or damaged, download it again"
            ) from None
        except UnicodeDecodeError as error:
            raise self.refuse(f"a string is not UTF-8 ({error.reason})") from None
        self.at = at
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.strings(1)[0]
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.refuse(f"value kind {kind} is not known")
        return self.array(depth)

    def array(self, depth: int) -> list[Any]:
        kind = self.number("I")
        count = self.number("Q")
        if count > self.elements or depth == MAX_DEPTH:
            raise self.refuse(f"an array of {count} at depth {depth}, more than any model has")
        self.elements -= count
        if kind == STRING:
            return self.strings(count, self.words)
        if kind in SCALARS:
            return list(self.numbers(SCALARS[kind], count))
        return [self.value(kind, depth + 1) for _ in range(count)]


def _counts(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.skip(4)
    magic = cursor.data[start : start + 4]
    version = cursor.number("I")
    if magic != b"GGUF":
        raise cursor.refuse(f"starts with {magic!r}: not a GGUF file")
    if version in (2 << 24, 3 << 24):
        raise cursor.refuse("a big-endian GGUF; convert the model again for little-endian machines")
    if version not in (2, 3):
        raise cursor.refuse(
            f"GGUF version {version} is not known, only 2 and 3; convert the model again"
        )
    tensors, pairs = cursor.numbers("Q", 2)
    if tensors > MAX_TENSORS or pairs > MAX_TENSORS:
        raise cursor.refuse(
            f"{tensors} tensors and {pairs} metadata pairs, more than any model has"
        )
    return tensors, pairs


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found = {
        key: cursor.value(cursor.number("I"))
        for key in cursor.names(count, "metadata", "metadata pair")
    }
    cursor.where = "metadata"
    parts = found.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise cursor.refuse(
            f"one of {parts} parts of a split GGUF; join them first: llama-gguf-split --merge FIRST OUT"
        )
    return found


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= 1 << 20 or value & (value - 1):
        raise cursor.refuse(f"general.alignment {value!r} is not a power of two within reason")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    found = {
        name: _tensor(cursor, name, alignment) for name in cursor.names(count, "tensor", "tensor")
    }
    base = -(-cursor.at // alignment) * alignment
    end = base
    for tensor in sorted(found.values(), key=lambda tensor: tensor.start):
        start = base + tensor.start
        if start < end:
            raise CheckpointError(
                f"{cursor.path}: tensor {tensor.name!r} overlaps another; the file is damaged"
            )
        end = start + tensor.nbytes
        if end > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: truncated: tensor {tensor.name!r} ends at byte {end}, the file at {cursor.size}; "
                "download it again"
            )
        found[tensor.name] = GgufTensor(
            tensor.name, tensor.shape, tensor.type, start, tensor.nbytes
        )
    return found


def _tensor(cursor: _Cursor, name: str, alignment: int) -> GgufTensor:
    """One line of the table; its start is still counted from the start of the data."""
    dims = cursor.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.refuse(f"{dims} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", dims)))
    number = cursor.number("I")
    offset = cursor.number("Q")
    if number not in TYPES:
        raise cursor.refuse(f"type {number} is not known; a newer Bloomery may read it")
    kind, values, size = TYPES[number]
    if 0 in shape or shape[-1] % values:
        raise cursor.refuse(f"shape {list(shape)} does not fill blocks of {values} ({kind})")
    if offset % alignment:
        raise cursor.refuse(f"offset {offset} is not aligned to {alignment}")
    return GgufTensor(name, shape, kind, offset, prod(shape) // values * size)

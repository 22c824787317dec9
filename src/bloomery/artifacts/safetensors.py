"""Reads and checks the headers of safetensors files, before any weight is read.

A header is untrusted: its length, offsets and shapes must fit the file. Nothing here knows what a
tensor is used for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import MAX_JSON_BYTES, file_size, parse_strict_json
from bloomery.errors import CheckpointError

BITS_OF_DTYPE: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(
        ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8
    ),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_TENSORS = 1_000_000
MAX_DIMS = 16
SHARD_NAME = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header: file[start:end]."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes from the start of the file
    end: int


TensorIndex = dict[str, tuple[Path, TensorEntry]]
ShardHeaders = Mapping[str, Mapping[str, TensorEntry]]  # by file name


def index_checkpoint(folder: Path) -> TensorIndex:
    """Return every tensor of a checkpoint and its file; incomplete or inconsistent files raise."""
    index_file = _find_index_file(folder)
    if index_file is None:
        path = _find_single_file(folder)
        return {name: (path, entry) for name, entry in read_safetensors_header(path).items()}
    weight_map = _read_weight_map(index_file)
    _check_files(folder, index_file, weight_map)
    files = sorted(set(weight_map.values()))
    shards = {file: read_safetensors_header(folder / file) for file in files}
    _check_shards(folder, index_file, weight_map, shards)
    return {tensor: (folder / file, shards[file][tensor]) for tensor, file in weight_map.items()}


def _check_shards(
    folder: Path, index_file: Path, weight_map: Mapping[str, str], shards: ShardHeaders
) -> None:
    """Check that the index and the headers of the shards name the same tensors."""
    for tensor, file in weight_map.items():
        if tensor in shards[file]:
            continue
        others = [other for other, header in shards.items() if tensor in header]
        problem = "but no shard has it"
        if others:
            problem = f"but it is in {others[0]}: the shards were swapped or renamed"
        raise CheckpointError(
            f"{index_file}: tensor {tensor!r} should be in {file}, {problem}; download both again"
        )
    for file, header in shards.items():
        for tensor in header:
            listed_file = weight_map.get(tensor)
            if listed_file == file:
                continue
            problem = f"places in {listed_file}" if listed_file else "does not list"
            raise CheckpointError(
                f"{folder / file}: holds tensor {tensor!r}, which {index_file.name} {problem}; "
                "the index and the shards come from different saves, download them again"
            )


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file, checked to be complete."""
    size = file_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
            raise CheckpointError(
                f"{path}: {size} bytes with a header of {length}: "
                "no safetensors file, or truncated; download it again"
            )
        header = parse_strict_json(file.read(length), f"{path}: header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(header)} tensors, more than any model has")
    data_start = 8 + length
    entries = {name: _parse_entry(path, name, value, data_start) for name, value in header.items()}
    _check_coverage(path, entries, data_start, size)
    return entries


def _parse_entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    def build_error(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {reason}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise build_error("its header must have dtype, shape and data_offsets, and nothing else")
    dtype = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_OF_DTYPE:
        raise build_error(f"dtype {dtype!r} is not known")
    if not _is_list_of_sizes(shape) or len(shape) > MAX_DIMS:
        raise build_error(f"shape {shape!r} is not a list of sizes")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise build_error(f"data_offsets {offsets!r} is not a pair of positions")
    num_bits = prod(shape) * BITS_OF_DTYPE[dtype]
    start, end = offsets
    if num_bits % 8 or end - start != num_bits // 8:
        raise build_error(
            f"{dtype} {shape} takes {num_bits / 8:g} bytes, "
            f"not the {end - start} of its data_offsets"
        )
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _is_list_of_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _check_coverage(
    path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int
) -> None:
    """Check that the tensors fill the file from the header to its end, without gap or overlap."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            problem = "leaves a gap before it"
            if entry.start < position:
                problem = "overlaps the one before it"
            raise CheckpointError(
                f"{path}: tensor {name!r} {problem} at byte {entry.start}; the file is damaged"
            )
        if entry.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end}, "
                f"the file at {size}; download it again"
            )
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{path}: {size - position} bytes after the last tensor; "
            "the file is damaged, download it again"
        )


def _find_index_file(folder: Path) -> Path | None:
    """Return the index of a sharded checkpoint, or None if there is none."""
    paths = sorted(folder.glob("*.safetensors.index.json"))
    preferred = [path for path in paths if path.name == "model.safetensors.index.json"] or paths
    if len(preferred) > 1:
        raise CheckpointError(
            f"{folder}: several indexes ({_list_names(preferred)}); keep only the one to load"
        )
    return preferred[0] if preferred else None


def _find_single_file(folder: Path) -> Path:
    """Return the file of a checkpoint without an index."""
    paths = sorted(folder.glob("*.safetensors"))
    preferred = [path for path in paths if path.name == "model.safetensors"] or paths
    if not preferred:
        raise CheckpointError(f"{folder}: no .safetensors file; download the weights")
    if len(preferred) > 1:
        raise CheckpointError(
            f"{folder}: {len(preferred)} .safetensors files ({_list_names(preferred)}) and no "
            "model.safetensors.index.json to say which tensor is where; download the index too"
        )
    return preferred[0]


def _read_weight_map(index_file: Path) -> dict[str, str]:
    """Return the file name of every tensor, as the index states it."""
    if file_size(index_file) > MAX_JSON_BYTES:
        raise CheckpointError(f"{index_file}: larger than any index")
    index = parse_strict_json(index_file.read_bytes(), str(index_file))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: has no weight_map")
    for tensor, file in weight_map.items():
        # Only a bare file name is accepted, so that an index cannot name files elsewhere.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or re.search(r"[/\\:\0]", file)
        ):
            raise CheckpointError(
                f"{index_file}: tensor {tensor!r} is in {file!r}, "
                "which is not a file of this folder"
            )
    return weight_map


def _check_files(folder: Path, index_file: Path, weight_map: Mapping[str, str]) -> None:
    """Check that each shard exists, and that there are no shards of another save."""
    needed = set(weight_map.values())
    for tensor, file in weight_map.items():
        if not (folder / file).is_file():
            num_more = sum(other == file for other in weight_map.values()) - 1
            raise CheckpointError(
                f"{folder / file}: missing; it holds {tensor!r} and {num_more} more; "
                "download it again"
            )
    stale = [
        path
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in needed
        and (SHARD_NAME.fullmatch(path.name) or path.name == "model.safetensors")
    ]
    if stale:
        raise CheckpointError(
            f"{folder}: {_list_names(stale)} not in {index_file.name}; "
            "remove these files of another save"
        )


def _list_names(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return ", ".join(names)

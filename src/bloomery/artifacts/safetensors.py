"""Headers of safetensors files, checked against the files before a byte of weights is mapped.

A header is untrusted: its length, its offsets and its shapes are all bounded by the file it stands in. Nothing here
knows what a tensor is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bloomery.artifacts.files import MAX_JSON, file_size, strict_json
from bloomery.errors import CheckpointError

BITS: Mapping[str, int] = {
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
SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # counted from the start of the file
    end: int


Index = dict[str, tuple[Path, TensorEntry]]


def index(folder: Path) -> Index:
    """Every tensor of a checkpoint and the file it is in; all files complete and in agreement with each other."""
    listing = _listing(folder)
    if listing is None:
        whole = _single(folder)
        return {name: (whole, entry) for name, entry in read_header(whole).items()}
    claimed = _weight_map(listing)
    _check_files(folder, listing, claimed)
    shards = {file: read_header(folder / file) for file in sorted(set(claimed.values()))}
    for tensor, file in claimed.items():
        if tensor not in shards[file]:
            where = [other for other, header in shards.items() if tensor in header]
            found = (
                f"but it is in {where[0]}: the shards were swapped or renamed"
                if where
                else "but no shard has it"
            )
            raise CheckpointError(
                f"{listing}: tensor {tensor!r} should be in {file}, {found}; download both again"
            )
    for file, header in shards.items():
        for tensor in header:
            if claimed.get(tensor) != file:
                raise CheckpointError(
                    f"{folder / file}: holds tensor {tensor!r}, which {listing.name} "
                    + (f"places in {claimed[tensor]}" if tensor in claimed else "does not list")
                    + "; the index and the shards are of different saves, download them again"
                )
    return {tensor: (folder / file, shards[file][tensor]) for tensor, file in claimed.items()}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """What the file says it holds, once all of it is proven to be there."""
    size = file_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_JSON):
            raise CheckpointError(
                f"{path}: {size} bytes with a header of {length}: no safetensors file, or truncated; download it again"
            )
        header = strict_json(file.read(length), f"{path}: header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(header)} tensors, more than any model has")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_cover(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, value: Any, base: int) -> TensorEntry:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {why}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("its header must have dtype, shape and data_offsets, and nothing else")
    dtype = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise refuse(f"dtype {dtype!r} is not known")
    if not _whole_numbers(shape) or len(shape) > MAX_DIMS:
        raise refuse(f"shape {shape!r} is not a list of sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise refuse(f"data_offsets {offsets!r} is not a pair of positions")
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise refuse(
            f"{dtype} {shape} takes {bits / 8:g} bytes, not the {offsets[1] - offsets[0]} of its data_offsets"
        )
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _check_cover(path: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Tensors fill the file from the header to its end, without gap or overlap."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            what = "overlaps the one before it" if entry.start < at else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor {name!r} {what} at byte {entry.start}; the file is damaged"
            )
        if entry.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end}, the file at {size}; download it again"
            )
        at = entry.end
    if at != size:
        raise CheckpointError(
            f"{path}: {size - at} bytes after the last tensor; the file is damaged, download it again"
        )


def _listing(folder: Path) -> Path | None:
    """The index of shards, where there is one and no whole file contradicts it."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    preferred = [path for path in found if path.name == "model.safetensors.index.json"] or found
    if len(preferred) > 1:
        raise CheckpointError(
            f"{folder}: several indexes ({_names(preferred)}); keep the one that is meant"
        )
    return preferred[0] if preferred else None


def _single(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    preferred = [path for path in found if path.name == "model.safetensors"] or found
    if not preferred:
        raise CheckpointError(f"{folder}: no .safetensors file; download the weights")
    if len(preferred) > 1:
        raise CheckpointError(
            f"{folder}: {len(preferred)} .safetensors files ({_names(preferred)}) and no model.safetensors.index.json "
            "to say which tensor is where; download the index too"
        )
    return preferred[0]


def _weight_map(listing: Path) -> dict[str, str]:
    if file_size(listing) > MAX_JSON:
        raise CheckpointError(f"{listing}: larger than any index")
    claimed = strict_json(listing.read_bytes(), str(listing)).get("weight_map")
    if not isinstance(claimed, dict) or not claimed:
        raise CheckpointError(f"{listing}: has no weight_map")
    for tensor, file in claimed.items():
        # A bare file name: what the index names must lie beside it, whatever "..", "/" or a drive letter would say.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or re.search(r"[/\\:\0]", file)
        ):
            raise CheckpointError(
                f"{listing}: tensor {tensor!r} is in {file!r}, which is not a file of this folder"
            )
    return claimed


def _check_files(folder: Path, listing: Path, claimed: Mapping[str, str]) -> None:
    """Each shard is there, and no shard of another save lies about."""
    wanted = set(claimed.values())
    for tensor, file in claimed.items():
        if not (folder / file).is_file():
            more = sum(other == file for other in claimed.values()) - 1
            raise CheckpointError(
                f"{folder / file}: missing; it holds {tensor!r} and {more} more; download it again"
            )
    stale = [
        path
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in wanted
        and (SHARD.fullmatch(path.name) or path.name == "model.safetensors")
    ]
    if stale:
        raise CheckpointError(
            f"{folder}: {_names(stale)} not in {listing.name}; remove what is left of another save"
        )


def _names(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])

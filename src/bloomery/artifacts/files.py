"""The first questions to any weight file: is it there, how large is it, is it what its name says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bloomery.errors import CheckpointError

MAX_JSON = 100_000_000  # bytes; the limit safetensors sets for its headers


def file_size(path: Path) -> int:
    """The size in bytes; a missing file, a folder, a dangling link or a Git LFS stub is refused with the remedy."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; the model is incomplete, download or copy it again"
        )
    size = path.stat().st_size
    if size < 1024:
        with path.open("rb") as file:
            if file.read(1024).startswith(b"version https://git-lfs"):
                raise CheckpointError(
                    f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
                )
    return size


def strict_json(text: bytes, origin: str) -> dict[str, Any]:
    """One JSON object in UTF-8 without duplicate keys, NaN or bottomless nesting."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{origin}: not valid JSON ({error or type(error).__name__})"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} appears twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

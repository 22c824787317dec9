"""Checks that every file format needs: the file exists and is complete, and its JSON is strict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bloomery.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000  # the limit that the safetensors format sets for its header


def file_size(path: Path) -> int:
    """Return the size in bytes. A missing file or a Git LFS pointer is refused with the remedy."""
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


def check_readable(path: Path) -> None:
    """Refuse a file that this user may not read, or that its disk does not return."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check its permissions and its disk"
        ) from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parse_config_json(text: bytes, origin: str) -> dict[str, Any]:
    """Parse a config.json. Published ones have the literal Infinity as the limit of a time step.

    It becomes the object that newer versions of transformers write instead.
    """

    def parse_constant(constant: str) -> Any:
        return {"__float__": constant} if constant == "Infinity" else _refuse_constant(constant)

    return parse_strict_json(text, origin, parse_constant)


def parse_strict_json(
    text: bytes, origin: str, parse_constant: Callable[[str], Any] = _refuse_constant
) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Duplicate keys, NaN and deep nesting are refused."""
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=parse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{origin}: not valid JSON ({error or type(error).__name__})"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: not a JSON object")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} appears twice")
    return values

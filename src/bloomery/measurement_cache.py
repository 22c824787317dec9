"""Measurements of this machine, kept as JSON files in the cache folder.

Each file maps a name to a value. The caller puts everything the value depends on (device, kernel
version, ...) into the name. A file that cannot be read counts as empty.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bloomery.config import cache_directory


def measurement_path(file_name: str) -> Path:
    """The path of a file in the cache folder."""
    return cache_directory() / file_name


def load_measurements(path: Path) -> dict[str, Any]:
    """All values of a file by name; empty when there is no readable file."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def save_measurement(path: Path, name: str, value: Any) -> Path:
    """Add one value to a file and return the file's path.

    The file is replaced by a rename, so readers never see a partial one. When two processes save
    at the same time, one of the two values may be lost.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    values = load_measurements(path) | {name: value}
    partial.write_text(json.dumps(values, indent=1))
    partial.replace(path)
    return path

"""What was once measured on this machine: JSON files in the user's cache folder, each with values by name.

Whoever measures puts into the name all that the value depends on. What cannot be read was never remembered.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path("~/.cache/bloomery")


def recall(path: Path) -> dict[str, Any]:
    """By name; empty where nothing readable is."""
    try:
        found = json.loads(path.expanduser().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(path: Path, name: str, value: Any) -> Path:
    """Gives the file. It appears by a rename, so nobody sees half of it; of two at once one may be forgotten."""
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(recall(path) | {name: value}, indent=1))
    partial.replace(path)
    return path

"""Server-sent events as a client reads them, strictly: one JSON an event, a space after every colon of a field."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str) -> list[Any]:
    """Events in order: data as JSON ("[DONE]" as it is), named ones as (name, data); comments left out."""
    assert text.endswith("\n\n"), "a stream ends with a whole event"
    found: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name = None
        data = None
        for line in block.split("\n"):
            field, value = line.split(": ", 1)
            assert field in ("event", "data") and data is None
            name, data = (value, data) if field == "event" else (name, value)
        assert data is not None
        value = data if data == "[DONE]" else json.loads(data)
        found.append(value if name is None else (name, value))
    return found

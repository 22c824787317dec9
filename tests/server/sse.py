"""A strict parser of server-sent events: one JSON value an event, one space after each colon."""

from __future__ import annotations

import json
from typing import Any


def parse_events(text: str) -> list[Any]:
    """Events in order: data as JSON ("[DONE]" as text), named ones as (name, data); no comments."""
    assert text.endswith("\n\n"), "a stream ends with a complete event"
    events: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name = None
        data = None
        for line in block.split("\n"):
            field, value = line.split(": ", 1)
            assert field in ("event", "data") and data is None
            if field == "event":
                name = value
            else:
                data = value
        assert data is not None
        content = data if data == "[DONE]" else json.loads(data)
        events.append(content if name is None else (name, content))
    return events

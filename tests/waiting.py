"""Waiting for what must come about. The limit is so long that only what never comes reaches it, on any machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONG = 90.0  # seconds


def until(true: Callable[[], object], seconds: float = LONG) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(true())


async def eventually(true: Callable[[], object], seconds: float = LONG) -> bool:
    """The same, while an event loop goes on."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return bool(true())

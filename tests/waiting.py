"""Waits for conditions in tests. The time limit is long enough for the slowest machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_SECONDS = 90.0  # only a condition that never becomes true takes this long


def wait_until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> bool:
    """Wait until the condition is true, and return whether it is."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


async def wait_until_async(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> bool:
    """Do the same without blocking the event loop."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return bool(condition())

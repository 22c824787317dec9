"""A queue whose tasks go on a few at a time, so that many of them do not stall the event loop.

In one iteration the event loop runs every task that can run before it reads or writes a socket. A
thousand readers of streams would delay a new request, and a burst of requests the tokens of others
and the message that starts the first of them. This module knows nothing but the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque


class TurnQueue:
    """Lets `batch_size` tasks go on in each iteration of the event loop, in order."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.pending = deque[asyncio.Future[None]]()

    def add(self, turn: asyncio.Future[None]) -> None:
        """Complete `turn` after those that were added before it."""
        self.pending.append(turn)
        if len(self.pending) == 1:
            asyncio.get_running_loop().call_soon(self._complete_batch)

    async def wait(self) -> None:
        """Wait until it is the caller's turn."""
        turn = asyncio.get_running_loop().create_future()
        self.add(turn)
        await turn

    def _complete_batch(self) -> None:
        for _ in range(min(len(self.pending), self.batch_size)):
            turn = self.pending.popleft()
            if not turn.done():  # its task may have been cancelled
                turn.set_result(None)
        if self.pending:
            asyncio.get_running_loop().call_soon(self._complete_batch)

"""One engine process as its parent sees it: a child, and the socket pair to it.

This file must not know what is said on the line, nor what to do when a child dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Sequence

from bloomery.engine.birth import Born, bear
from bloomery.engine.wire import Frames, Message, WireError, encode

LAST = 0.5  # seconds in which one that has closed its line may end by itself, and so say how


class Child(asyncio.Protocol):
    def __init__(self, hear: Callable[[Child, Message], None]):
        self.hear = hear
        self.frames = Frames()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process: subprocess.Popen[bytes] | None = None
        self.line: asyncio.Transport | None = None
        self.ready = False  # it has loaded
        self.silent = 0.0  # seconds of watching without a sign of progress
        self.fault = ""  # why it is gone, in words that follow "the engine"

    async def spawn(self, command: Sequence[str], born: Born | None = None) -> None:
        """Start it, or take over one that has been."""
        self.process, line = born or bear(command)
        self.line, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: self, sock=line
        )

    def send(self, message: Message) -> None:
        if self.line is not None:
            self.line.write(encode(message))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.frames.feed(data):
                self.hear(self, message)
        except WireError as error:
            self.fault = f"broke the protocol: {error}"
            if self.line is not None:
                self.line.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    async def end(self, grace: float = 0.0) -> None:
        """Have it gone, asked for if there is grace, and reaped."""
        if self.process is not None:
            try:
                if grace:
                    self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(
                        self.process.wait, grace or (LAST if self.lost.done() else 0.0)
                    )
            finally:
                late = self.process.poll() is None
                self.process.kill()
            code = await asyncio.to_thread(self.process.wait)
            how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            self.fault = self.fault or ("closed its line; its log may say why" if late else how)
        if self.line is not None:
            self.line.abort()

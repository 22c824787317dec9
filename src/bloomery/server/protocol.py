"""uvicorn's HTTP/1.1 connection with what it lacks: bounds on the head of a request, in bytes and time, and a way to
hang up.

The application counts headers too, but sees them only once they are complete: a head that never ends must stop here.
And a connection whose client has stopped reading cannot be closed in an orderly way, as its last bytes never leave.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bloomery.server.limits import Limits
from bloomery.server.streaming import HANG_UP

REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    limit = Limits().header_bytes
    seconds = Limits().body_seconds
    head = -1  # bytes of the head being read; -1 between heads
    due: asyncio.TimerHandle | None = None  # when the head that is awaited must have arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head = 0
        if self.due is None:
            self._await_head()

    def _await_head(self) -> None:
        self.due = self.loop.call_later(self.seconds, self.transport.abort)

    def _head_is_here(self) -> None:
        if self.due is not None:
            self.due.cancel()
            self.due = None

    def on_headers_complete(self) -> None:
        self.head = -1
        self._head_is_here()
        self.scope["extensions"] = {HANG_UP: {"now": self.transport.abort}}
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.head >= 0 and not self.transport.is_closing():
            self.head += len(data)
            if self.head > self.limit:
                self.transport.write(REFUSAL)
                self.transport.close()


def bounded(limits: Limits) -> type[BoundedProtocol]:
    """The same with a server's own limits; uvicorn wants a class."""

    class Bounded(BoundedProtocol):
        limit = limits.header_bytes
        seconds = limits.body_seconds

    return Bounded

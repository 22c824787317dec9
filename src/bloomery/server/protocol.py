"""uvicorn's HTTP/1.1 connection with two things it lacks: a bound on the head of a request, and a way to hang up.

The application counts headers too, but sees them only once they are complete: a head that never ends must stop here.
And a connection whose client has stopped reading cannot be closed in an orderly way, as its last bytes never leave.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bloomery.server.limits import Limits
from bloomery.server.streaming import HANG_UP

REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    limit = Limits().header_bytes
    head = -1  # bytes of the head being read; -1 between heads

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head = 0

    def on_headers_complete(self) -> None:
        self.head = -1
        self.scope["extensions"] = {HANG_UP: {"now": self.transport.abort}}
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.head >= 0 and not self.transport.is_closing():
            self.head += len(data)
            if self.head > self.limit:
                self.transport.write(REFUSAL)
                self.transport.close()

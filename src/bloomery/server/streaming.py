"""Server-sent events, and the watch over whoever waits for an answer.

An event goes out as soon as it exists. Nothing is read from the engine while the socket is full, so a slow reader costs
a bounded buffer; one that has stopped reading, or has left, is dropped and its work aborted. Nothing here knows an API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Self

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Receive, Scope, Send

from bloomery.server.errors import ClientGone, Late, Stalled

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HANG_UP = "bloomery.hang_up"  # an ASGI extension: {"now": a function that drops the connection}


def event(data: Any, name: str | None = None) -> bytes:
    said = b"data: " + encode(data) + b"\n\n"
    return said if name is None else b"event: " + name.encode() + b"\n" + said


class Watch:
    """Ends the work under it when its time is up, when the client has left, or when told to: by that exception."""

    def __init__(self, receive: Receive, deadline: float):
        self._receive = receive
        self._scope = asyncio.timeout_at(deadline)
        self._reason: Exception | None = None  # None: its time is up

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._listener.cancel()
        try:
            await self._scope.__aexit__(*error)
        except TimeoutError:
            raise self._reason or Late() from None

    def end(self, reason: Exception) -> None:
        if not self._scope.expired():
            self._reason = reason
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone())


class EventStream:
    """An ASGI response. The head is sent with the first event or sign of life, so that an error before either has a
    status of its own; a later one becomes an event, and the stream ends there."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[Exception], bytes],
        *,
        deadline: float,
        keepalive: float,
        stall: float,
        headers: Mapping[str, str],
    ):
        self.events = events
        self.failed = failed
        self.deadline = deadline
        self.keepalive = keepalive
        self.stall = stall
        self.headers = MutableHeaders(dict(headers))
        self.status_code = 200
        self.started = self.sending = False
        self.touched = 0.0  # when the last write began or ended
        self.comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send = send
        self.loop = asyncio.get_running_loop()
        self.touched = self.loop.time()
        last = b""
        try:
            async with Watch(receive, self.deadline) as watch, aclosing(self.events) as events:
                self._arm(watch)
                async for data in events:
                    await self._write(data)
        except ClientGone:
            raise
        except Exception as error:
            if not self.started:
                raise
            last = self.failed(error)
        finally:
            self.timer.cancel()
            if self.comment is not None:
                self.comment.cancel()
        try:
            async with asyncio.timeout(self.stall):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            raise Stalled from None

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self.send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.headers.raw,
                }
            )
        self.sending = True
        self.touched = self.loop.time()
        await self.send({"type": "http.response.body", "body": data, "more_body": True})
        self.sending = False
        self.touched = self.loop.time()

    def _arm(self, watch: Watch) -> None:
        """One timer a stream, not one a token: it looks how long ago something happened and comes back when due."""
        due = self.touched + (self.stall if self.sending else self.keepalive)
        now = self.loop.time()
        self.timer = self.loop.call_at(
            max(min(due, now + self.keepalive, now + self.stall), now + 0.001), self._look, watch
        )

    def _look(self, watch: Watch) -> None:
        quiet = self.loop.time() - self.touched
        if self.sending and quiet >= self.stall:
            watch.end(Stalled())
            return
        if not self.sending and quiet >= self.keepalive:
            self.comment = self.loop.create_task(self._write(KEEP_ALIVE))
            self.touched = self.loop.time()
        self._arm(watch)

"""One HTTP request on its way through the server, and the table entry that says who handles it.

A Call knows the connection and the service; a route's handler takes a Call and returns an ASGI response. What a body
means is the route's business.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope

from bloomery.errors import InvalidRequest, RequestFailed
from bloomery.sampling import SamplingParams
from bloomery.server import schema
from bloomery.server.errors import ClientGone, Dialect, Problem, problem
from bloomery.server.limits import Ticket, check_breadth, read_body
from bloomery.server.metrics import Timings
from bloomery.server.service import Service
from bloomery.server.streaming import EventStream, encode, event

log = logging.getLogger("bloomery.server")
T = TypeVar("T", bound=schema.Body)
JSON = ("application/json",)
EVENTS = ("text/event-stream",)
BOTH = JSON + EVENTS
STREAMED = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True)
class Route:
    path: str  # exact, or with one {parameter} that takes the rest
    handler: Callable[[Call], Awaitable[ASGIApp]]
    dialect: Dialect
    body: type[schema.Body] | None = None  # what a POST reads; None: it is a GET
    open: bool = False  # without a key
    generates: bool = False
    quiet: bool = False  # logged only when debugging
    media: tuple[str, ...] = JSON
    answer: Any = "object"  # its shape, see shapes.py

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def about(self) -> str:
        return " ".join((self.handler.__doc__ or "").split())


@dataclass
class Call:
    service: Service
    route: Route
    scope: Scope
    receive: Receive
    headers: Headers
    id: str
    salt: str  # prefixes are shared among the requests of one key only
    parameter: str = ""  # what stands for {parameter} in the path
    cleanup: ExitStack = field(default_factory=ExitStack)
    facts: dict[str, Any] = field(default_factory=dict)  # for the log: counts and times, never text
    params: SamplingParams | None = None  # of its first prompt, once it is known

    def __post_init__(self) -> None:
        self.dialect = self.route.dialect
        self.timings = Timings(time.monotonic())
        self.unique = uuid4().hex
        self.created = int(time.time())
        self.raw: dict[str, Any] | None = None

    # ---- in ----------------------------------------------------------------------------------------

    async def object(self) -> dict[str, Any]:
        """The body's JSON object, however often it is asked for."""
        if self.raw is None:
            limits = self.service.limits
            limit = (
                limits.body_bytes if self.route.path.startswith("/v1/") else limits.tgi_body_bytes
            )
            raw = schema.decode(
                await read_body(self.receive, self.headers, limit, limits.body_seconds)
            )
            check_breadth(raw, limits)
            self.raw = raw
        return self.raw

    async def read(self, kind: type[T]) -> T:
        return self.convert(await self.object(), kind)

    def convert(self, raw: dict[str, Any], kind: type[T]) -> T:
        body, unknown = schema.read(raw, kind)
        if unknown:
            self.service.metrics.unknown[(self.route.path,)] += unknown
        return body

    @property
    def deadline(self) -> float:
        """On the event loop's clock; the client may shorten it, never lengthen it."""
        seconds = self.service.limits.deadline_seconds
        asked = self.headers.get("x-request-deadline-ms")
        if asked is not None:
            if not asked.isdecimal() or not 0 < len(asked) < 12:
                raise InvalidRequest("X-Request-Deadline-Ms must be a whole number of milliseconds")
            seconds = min(seconds, int(asked) / 1000)
        return (
            asyncio.get_running_loop().time() + seconds - (time.monotonic() - self.timings.arrived)
        )

    def admit(self, sequences: int) -> Ticket:
        """A place for so many sequences, given back when the call ends; asked for before any costly work."""
        ticket = self.service.admit(sequences, self.salt)
        self.cleanup.callback(ticket.leave)
        return ticket

    # ---- out ---------------------------------------------------------------------------------------

    def json(
        self, content: Any, headers: Mapping[str, str] | None = None, status: int = 200
    ) -> Response:
        return Response(encode(content), status, headers, "application/json")

    def events(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        failed: Callable[[Problem], bytes] | None = None,
    ) -> EventStream:
        """`failed` words an error after the first event; by default as the dialect words any."""
        limits = self.service.limits

        def said(error: Exception) -> bytes:
            found = self.fail(error)
            return failed(found) if failed else event(self.dialect(found, self.id)[1])

        return EventStream(
            events,
            said,
            deadline=self.deadline,
            keepalive=limits.keepalive_seconds,
            stall=limits.stall_seconds,
            headers=STREAMED | dict(headers or {}),
        )

    def fail(self, error: BaseException) -> Problem:
        """Note what went wrong: in the log if it was our fault, and in the figures."""
        if isinstance(error, ClientGone):
            kind = "dropped"
            found = Problem(499, "the client has left")
        else:
            found = problem(error)
            kind = found.tgi.kind.removesuffix("_error")
        self.facts["error"] = kind
        if self.route.generates:
            self.service.metrics.failures[(kind,)] += 1
        if found.status == 500:
            known = isinstance(error, RequestFailed)
            log.error("request %s failed: %s", self.id, error, exc_info=None if known else error)
        return found


def request_id(headers: Headers) -> str:
    """The client's own, if it can stand in a log and a header; else one of ours."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else f"req_{uuid4().hex}"

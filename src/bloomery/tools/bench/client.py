"""A light HTTP client for many streams at once: one protocol object a connection, time stamps where bytes arrive.

Speaks OpenAI's chat and completions routes and TGI's generate_stream. A request's clock starts when it is written to a
connection that is already open, so that connecting is never counted as waiting.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from bloomery.tools.bench.summary import Record
from bloomery.errors import ConfigError

APIS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "tgi": "/generate_stream"}
SILENCE = 600.0  # seconds without a byte after which a request counts as lost


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    text: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Token(msgspec.Struct):
    text: str = ""


class Details(msgspec.Struct):
    generated_tokens: int = 0


class Event(msgspec.Struct):
    """What any of the dialects may put into one event; everything else is skipped unread."""

    choices: list[Choice] = []
    usage: Usage | None = None
    token: Token | None = None
    details: Details | None = None
    error: Any = None

    def text(self) -> str:
        if self.token is not None:
            return self.token.text
        for choice in self.choices:
            if choice.delta is not None:
                return choice.delta.content or choice.delta.reasoning_content or ""
            return choice.text or ""
        return ""


DECODER = msgspec.json.Decoder(Event)


class Exchange:
    """One request and its answer, event by event."""

    def __init__(self, record: Record, events: bool = True):
        self.record = record
        self.events = events
        self.status = 0
        self.rest = b""
        self.said: list[str] = []
        self.counted = 0  # tokens as the server counts them

    def feed(self, now: float, data: bytes) -> None:
        if self.status != 200 or not self.events:
            self.rest += data
            return
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                self.take(now, data)

    def take(self, now: float, data: bytes) -> None:
        try:
            event = DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.record.error = f"an event that is not understood: {error}"
            return
        if event.error:
            self.record.error = str(event.error)[:200]
        if event.usage is not None:
            self.counted = event.usage.completion_tokens
            self.record.prompt = event.usage.prompt_tokens or self.record.prompt
        if event.details is not None:
            self.counted = event.details.generated_tokens
        if text := event.text():
            self.record.stamps.append(now)
            self.said.append(text)

    def close(self, now: float, error: str | None = None) -> None:
        record = self.record
        if self.status not in (0, 200):
            error = f"HTTP {self.status}: {self.rest[:160].decode(errors='replace').strip()}"
        record.error = record.error or error
        record.done = now
        record.tokens = self.counted or len(record.stamps)


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.now = 0.0
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.now = perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.finish(f"not HTTP: {error}")
            self.abort()

    def on_headers_complete(self) -> None:
        if self.exchange:
            self.exchange.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.exchange:
            self.exchange.feed(self.now, body)

    def on_message_complete(self) -> None:
        self.reusable = self.parser.should_keep_alive()
        self.finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.now = perf_counter()
        self.reusable = False
        self.finish(f"the connection was lost{f': {error}' if error else ''}")

    def finish(self, error: str | None) -> None:
        if self.exchange and self.waiter and not self.waiter.done():
            self.exchange.close(self.now, error)
            self.waiter.set_result(None)
        self.parser = httptools.HttpResponseParser(self)

    async def exchange_over(self, request: bytes, exchange: Exchange) -> None:
        self.exchange = exchange
        self.waiter = asyncio.get_running_loop().create_future()
        exchange.record.sent = perf_counter()
        if self.transport is None or self.transport.is_closing():
            self.connection_lost(None)
        else:
            self.transport.write(request)
        seen = -1
        while not self.waiter.done():
            await asyncio.wait((self.waiter,), timeout=SILENCE)
            if not self.waiter.done() and len(exchange.record.stamps) == seen:
                self.now = perf_counter()
                self.finish(f"nothing came for {SILENCE:.0f} s")
                self.abort()
            seen = len(exchange.record.stamps)
        self.exchange = None

    def abort(self) -> None:
        self.reusable = False
        if self.transport:
            self.transport.abort()


@dataclass(frozen=True)
class Target:
    """Where requests go and how they are written."""

    url: str
    api: str
    model: str
    key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0

    def body(self, messages: Sequence[tuple[str, str]], output: int, priority: int = 0) -> bytes:
        if self.api == "tgi":
            asked = "\n".join(text for _, text in messages)
            parameters: dict[str, Any] = {"max_new_tokens": output, "details": True}
            if priority:
                parameters["priority"] = priority
            return msgspec.json.encode({"inputs": asked, "parameters": parameters})
        common = {
            "model": self.model,
            "stream": True,
            "max_tokens": output,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            common["ignore_eos"] = True
        if priority:
            common["priority"] = priority
        if self.api == "chat":
            common["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            common["prompt"] = "\n".join(text for _, text in messages)
        return msgspec.json.encode(common)


class Client:
    def __init__(self, target: Target):
        self.target = target
        try:
            parts = urlsplit(target.url)
            port = parts.port
        except ValueError:  # not a port, or a bracket too few
            parts = urlsplit("")
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{target.url!r} is not the URL of a server; wanted: http://host:port"
            )
        self.host = parts.hostname
        self.base = parts.path.rstrip("/")
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.name = parts.netloc
        self.idle: list[Connection] = []

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self.tls)
        return connection

    def written(self, method: str, path: str, body: bytes = b"") -> bytes:
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"host: {self.name}", "accept: */*"]
        if self.target.key:
            lines.append(f"authorization: Bearer {self.target.key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(
        self, messages: Sequence[tuple[str, str]], output: int, record: Record, priority: int = 0
    ) -> str:
        """The answer's text; how it went is in the record. A kept connection that proves dead is replaced once."""
        path = APIS[self.target.api]
        written = self.written("POST", path, self.target.body(messages, output, priority))
        for fresh in (False, True):
            try:
                kept = bool(self.idle) and not fresh
                connection = self.idle.pop() if kept else await self.connect()
            except OSError as error:
                record.sent = record.done = perf_counter()
                record.error = f"no connection: {error}"
                return ""
            exchange = Exchange(record)
            await connection.exchange_over(written, exchange)
            if connection.reusable:
                self.idle.append(connection)
            if not (kept and exchange.status == 0 and record.error):
                break
            record.error = None
        return "".join(exchange.said)

    async def get(self, path: str) -> tuple[int, bytes]:
        """A small answer, whole: its status (0: nobody there) and body."""
        try:
            connection = await self.connect()
        except OSError:
            return 0, b""
        exchange = Exchange(Record(0.0), events=False)
        await connection.exchange_over(self.written("GET", path), exchange)
        connection.abort()
        return exchange.status, exchange.rest

    def close(self) -> None:
        for connection in self.idle:
            connection.abort()
        self.idle.clear()

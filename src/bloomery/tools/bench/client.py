"""A light HTTP client for many concurrent streams, which records when each byte arrives.

Supports OpenAI's chat and completions routes and TGI's generate_stream. A request's clock starts
when it is written to an open connection, so connecting does not count as latency.
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

from bloomery.errors import ConfigError
from bloomery.tools.bench.summary import RequestRecord

API_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "tgi": "/generate_stream",
}
SILENCE_SECONDS = 600.0  # a request that gets no byte for this long counts as failed

# ---- events of a stream --------------------------------------------------------------------------


class EventDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class EventChoice(msgspec.Struct):
    delta: EventDelta | None = None
    text: str | None = None


class EventUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class EventToken(msgspec.Struct):
    text: str = ""


class EventDetails(msgspec.Struct):
    generated_tokens: int = 0


class StreamEvent(msgspec.Struct):
    """The fields of one server-sent event, in any of the APIs. Other fields are skipped."""

    choices: list[EventChoice] = []
    usage: EventUsage | None = None
    token: EventToken | None = None
    details: EventDetails | None = None
    error: Any = None

    def text(self) -> str:
        if self.token is not None:
            return self.token.text
        if not self.choices:
            return ""
        choice = self.choices[0]
        if choice.delta is not None:
            return choice.delta.content or choice.delta.reasoning_content or ""
        return choice.text or ""


EVENT_DECODER = msgspec.json.Decoder(StreamEvent)


class BenchExchange:
    """One request and its response, decoded event by event into a record."""

    def __init__(self, record: RequestRecord, is_stream: bool = True):
        self.record = record
        self.is_stream = is_stream
        self.status = 0  # HTTP status; 0: no response yet
        self.buffer = b""  # an incomplete line of a stream, or the whole body
        self.pieces: list[str] = []
        self.num_tokens = 0  # as the server counts them

    def feed(self, now: float, data: bytes) -> None:
        """Add bytes of the body that arrived at `now`."""
        self.buffer += data
        if self.status != 200 or not self.is_stream:
            return
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line.removeprefix(b"data:").strip()
            if event != b"[DONE]":
                self.add_event(now, event)

    def add_event(self, now: float, data: bytes) -> None:
        """Decode one event, and record its time if it has text."""
        try:
            event = EVENT_DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.record.error = f"an event cannot be decoded: {error}"
            return
        if event.error:
            self.record.error = str(event.error)[:200]
        if event.usage is not None:
            self.num_tokens = event.usage.completion_tokens
            self.record.prompt_tokens = event.usage.prompt_tokens or self.record.prompt_tokens
        if event.details is not None:
            self.num_tokens = event.details.generated_tokens
        if text := event.text():
            self.record.piece_times.append(now)
            self.pieces.append(text)

    def close(self, now: float, error: str | None = None) -> None:
        """Complete the record; `error` is a failure of the connection."""
        record = self.record
        if self.status not in (0, 200):
            body = self.buffer[:160].decode(errors="replace").strip()
            error = f"HTTP {self.status}: {body}"
        record.error = record.error or error
        record.done = now
        record.output_tokens = self.num_tokens or len(record.piece_times)


# ---- connections ---------------------------------------------------------------------------------


class BenchConnection(asyncio.Protocol):
    """One connection, which carries one exchange at a time. The on_* methods are httptools'."""

    def __init__(self) -> None:
        self.exchange: BenchExchange | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.now = 0.0  # when the last bytes arrived
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
        reason = f": {error}" if error else ""
        self.finish(f"the connection was lost{reason}")

    def finish(self, error: str | None) -> None:
        """End the current exchange and wake the task that waits for it."""
        if self.exchange and self.waiter and not self.waiter.done():
            self.exchange.close(self.now, error)
            self.waiter.set_result(None)
        self.parser = httptools.HttpResponseParser(self)

    async def run_exchange(self, request: bytes, exchange: BenchExchange) -> None:
        """Send a request and wait until its response is complete or has failed."""
        self.exchange = exchange
        self.waiter = asyncio.get_running_loop().create_future()
        exchange.record.sent = perf_counter()
        if self.transport is None or self.transport.is_closing():
            self.connection_lost(None)
        else:
            self.transport.write(request)
        last_pieces = -1
        while not self.waiter.done():
            await asyncio.wait((self.waiter,), timeout=SILENCE_SECONDS)
            num_pieces = len(exchange.record.piece_times)
            if not self.waiter.done() and num_pieces == last_pieces:
                self.now = perf_counter()
                self.finish(f"no byte arrived for {SILENCE_SECONDS:.0f} s")
                self.abort()
            last_pieces = num_pieces
        self.exchange = None

    def abort(self) -> None:
        self.reusable = False
        if self.transport:
            self.transport.abort()


@dataclass(frozen=True)
class BenchTarget:
    """A server, its API, and the options of every request."""

    url: str
    api: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0

    def encode_request(
        self, messages: Sequence[tuple[str, str]], max_tokens: int, priority: int = 0
    ) -> bytes:
        """The JSON body of a streaming request. Messages are pairs of role and text."""
        if self.api == "tgi":
            return self._encode_tgi_request(messages, max_tokens, priority)
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if priority:
            body["priority"] = priority
        if self.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            body["prompt"] = "\n".join(text for _, text in messages)
        return msgspec.json.encode(body)

    def _encode_tgi_request(
        self, messages: Sequence[tuple[str, str]], max_tokens: int, priority: int
    ) -> bytes:
        prompt = "\n".join(text for _, text in messages)
        parameters: dict[str, Any] = {"max_new_tokens": max_tokens, "details": True}
        if priority:
            parameters["priority"] = priority
        return msgspec.json.encode({"inputs": prompt, "parameters": parameters})


class BenchClient:
    """Sends requests to one server and reuses its open connections."""

    def __init__(self, target: BenchTarget):
        self.target = target
        try:
            parts = urlsplit(target.url)
            port = parts.port
        except ValueError:  # the port is not a number, or a bracket is missing
            parts = urlsplit("")
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{target.url!r} is not the URL of a server; expected: http://host:port"
            )
        self.host = parts.hostname
        self.base_path = parts.path.rstrip("/")
        is_https = parts.scheme == "https"
        default_port = 443 if is_https else 80
        self.port = port or default_port
        self.tls = ssl.create_default_context() if is_https else None
        self.host_header = parts.netloc
        self.idle_connections: list[BenchConnection] = []

    async def connect(self) -> BenchConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            BenchConnection, self.host, self.port, ssl=self.tls
        )
        return connection

    def format_request(self, method: str, path: str, body: bytes = b"") -> bytes:
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            f"host: {self.host_header}",
            "accept: */*",
        ]
        if self.target.api_key:
            lines.append(f"authorization: Bearer {self.target.api_key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(
        self,
        messages: Sequence[tuple[str, str]],
        max_tokens: int,
        record: RequestRecord,
        priority: int = 0,
    ) -> str:
        """Send a request, fill its record, and return the answer's text.

        An idle connection that the server has closed is replaced once.
        """
        path = API_PATHS[self.target.api]
        body = self.target.encode_request(messages, max_tokens, priority)
        request = self.format_request("POST", path, body)
        for is_retry in (False, True):
            reused = bool(self.idle_connections) and not is_retry
            try:
                connection = self.idle_connections.pop() if reused else await self.connect()
            except OSError as error:
                record.sent = perf_counter()
                record.done = record.sent
                record.error = f"no connection: {error}"
                return ""
            exchange = BenchExchange(record)
            await connection.run_exchange(request, exchange)
            if connection.reusable:
                self.idle_connections.append(connection)
            was_closed = reused and exchange.status == 0 and record.error
            if not was_closed:
                break
            record.error = None
        return "".join(exchange.pieces)

    async def get(self, path: str) -> tuple[int, bytes]:
        """GET a small resource: its status (0: no connection) and body."""
        try:
            connection = await self.connect()
        except OSError:
            return 0, b""
        exchange = BenchExchange(RequestRecord(0.0), is_stream=False)
        await connection.run_exchange(self.format_request("GET", path), exchange)
        connection.abort()
        return exchange.status, exchange.buffer

    def close(self) -> None:
        for connection in self.idle_connections:
            connection.abort()
        self.idle_connections.clear()

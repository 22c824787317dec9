"""A server in a process of its own, and a small HTTP client for it.

The client is cheap enough to hold a thousand streams on the same cores as the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
LONG_COMPLETION = {"prompt": "The iron", "ignore_eos": True, "temperature": 0, "stream": True}
MAX_HEADER_BYTES = 1 << 22


def free_port() -> int:
    """Return a free port below the range of outgoing connections.

    No outgoing connection can take it before the server listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class RunningServer:
    """The API process of a server that is ready, and the file with its log."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def children(self, command_part: str) -> list[int]:
        """Process ids of the children whose command line contains `command_part`.

        A child that has just been forked and still has its parent's command line does not count.
        """
        own = Path(f"/proc/{self.process.pid}")
        own_command = (own / "cmdline").read_text()
        pids = []
        for pid in (own / "task" / own.name / "children").read_text().split():
            with contextlib.suppress(OSError):  # the child may have exited meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if command_part in command and command != own_command:
                    pids.append(int(pid))
        return pids

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the API process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def run_server(
    folder: Path,
    *options: str,
    python: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    port: int | None = None,
) -> Iterator[RunningServer]:
    """Run a server until the end of the context; its log is written to `folder`.

    Without `command` this is fake_server.py with `options`, under an interpreter with the options
    `python`. The port is appended to `command` as its last argument.
    """
    port = port or free_port()
    log = folder / "server.log"
    if command:
        arguments = (*command, str(port))
    else:
        arguments = (sys.executable, *python, str(FAKE_SERVER), str(port), *options)
    with log.open("wb") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 240
        while asyncio.run(get_status(port, "/ready")) != 200:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not become ready: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield RunningServer(port, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(30)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return False
    _, fields = stat.read_text().rsplit(")", 1)
    state = fields.split()[0]
    return state != "Z"


@dataclass
class HttpResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def get_status(port: int, path: str) -> int:
    """Return the status of a GET request, or 0 if no connection is possible."""
    try:
        return (await send_request(port, "GET", path)).status
    except OSError:
        return 0


def encode_request(method: str, path: str, data: bytes, **headers: str) -> bytes:
    """Return the bytes of a request with a JSON body."""
    all_headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(data)),
        **headers,
    }
    header_lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"{method} {path} HTTP/1.1\r\n{header_lines}\r\n".encode() + data


async def read_head(reader: asyncio.StreamReader) -> HttpResponse:
    """Read the status line and the headers of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *header_lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in header_lines if ": " in line)
    return HttpResponse(int(status_line.split()[1]), headers, b"")


async def open_request(
    port: int, method: str, path: str, body: Any, headers: dict[str, str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, HttpResponse]:
    """Send a request and read the head of the response; the caller reads the body.

    `body` is encoded as JSON unless it is bytes already.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_HEADER_BYTES)
    if body is None:
        data = b""
    elif isinstance(body, bytes):
        data = body
    else:
        data = json.dumps(body).encode()
    writer.write(encode_request(method, path, data, **headers))
    return reader, writer, await read_head(reader)


async def send_request(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> HttpResponse:
    """Send one request over a new connection and read the complete response."""
    all_headers = {"connection": "close", **headers}
    reader, writer, response = await open_request(port, method, path, body, all_headers)
    try:
        response.body = await reader.read()
    finally:
        writer.close()
    return response


async def read_chunked_body(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + len(b"\r\n"))
        body += chunk[:size]
    await reader.readline()
    return body


class KeepAliveConnection:
    """One connection for many requests; it is opened again after the server closes it."""

    def __init__(self, port: int):
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, data: bytes) -> HttpResponse:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=MAX_HEADER_BYTES
            )
        self.writer.write(encode_request("POST", path, data))
        response = await read_head(self.reader)
        if "content-length" in response.headers:
            length = int(response.headers["content-length"])
            response.body = await self.reader.readexactly(length)
        else:
            response.body = await read_chunked_body(self.reader)
        if response.headers.get("connection") == "close":
            self.close()
        return response

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = None
        self.writer = None


class RefusedError(Exception):
    """A stream was answered with a status other than 200."""

    def __init__(self, response: HttpResponse):
        super().__init__(f"status {response.status}")
        self.response = response


async def stream_events(port: int, path: str, body: Any, **headers: str) -> AsyncIterator[Any]:
    """Yield the data of each server-sent event, and None for [DONE].

    The framing of a chunked body is skipped line by line.
    """
    reader, writer, response = await open_request(port, "POST", path, body, headers)
    try:
        if response.status != 200:
            response.body = await reader.read(4096)
            raise RefusedError(response)
        while line := await reader.readline():
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ")
                yield None if data.startswith(b"[DONE]") else json.loads(data)
            elif line == b"0\r\n":
                return
    finally:
        writer.close()


async def read_completion(
    port: int, body: dict[str, Any], on_event: Callable[[], Any] = lambda: None, **headers: str
) -> str:
    """Return the text of a streamed completion and call `on_event` at each of its events.

    Raises RuntimeError for an error event, and if the stream ends without [DONE].
    """
    parts = []
    is_done = False
    async for event in stream_events(port, "/v1/completions", body, **headers):
        on_event()
        if event is None:
            is_done = True
        elif "error" in event:
            raise RuntimeError(event["error"]["message"])
        else:
            parts.append(event["choices"][0]["text"])
    if not is_done:
        raise RuntimeError("the stream ended without [DONE]")
    return "".join(parts)


async def seconds_until_idle(port: int, api_key: str = "") -> float:
    """Wait until no KV cache block is in use; return the seconds, or infinity after 30 s."""
    begin = time.monotonic()
    while time.monotonic() - begin < 30:
        response = await send_request(port, "GET", "/metrics", **{"x-api-key": api_key})
        lines = response.body.decode().splitlines()
        usage = next(line for line in lines if line.startswith("vllm:kv_cache_usage_perc"))
        if float(usage.split()[-1]) == 0:
            return time.monotonic() - begin
        await asyncio.sleep(0.05)
    return float("inf")

"""A server in a process of its own, and an HTTP client so frugal that it can hold a thousand streams beside it."""

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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("ghost_server.py")


def free_port() -> int:
    """Below those that the system gives to outgoing connections, one of which could take it before its server does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Served:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def children(self, word: str) -> list[int]:
        """Pids of its children whose command line has the word, and is not its own as at the moment of a fork."""
        own = Path(f"/proc/{self.process.pid}")
        found = []
        parent = (own / "cmdline").read_text()
        for pid in (own / "task" / own.name / "children").read_text().split():
            with contextlib.suppress(OSError):  # gone meanwhile
                line = Path(f"/proc/{pid}/cmdline").read_text()
                found += [int(pid)] * (word in line and line != parent)
        return found

    @property
    def resident(self) -> int:
        """Bytes of the API process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )


@contextlib.contextmanager
def served(
    folder: Path,
    *options: str,
    python: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    port: int | None = None,
) -> Iterator[Served]:
    """`command`: another server than the ghost's, given its port last."""
    port = port or free_port()
    log = folder / "server.log"
    line = (
        (*command, str(port))
        if command
        else (sys.executable, *python, str(SERVER), str(port), *options)
    )
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 240
        while asyncio.run(status(port, "/ready")) != 200:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not get ready: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield Served(port, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(30)


async def status(port: int, path: str) -> int:
    try:
        return (await request(port, "GET", path)).status
    except OSError:
        return 0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    port: int, method: str, path: str, body: Any, headers: dict[str, str]
) -> tuple[Any, Any, Answer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(data)),
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    named = dict(line.lower().split(": ", 1) for line in rest if ": " in line)
    return reader, writer, Answer(int(first.split()[1]), named, b"")


async def request(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    reader, writer, answer = await send(
        port, method, path, body, {"connection": "close", **headers}
    )
    try:
        answer.body = await reader.read()
    finally:
        writer.close()
    return answer


class Line:
    """One connection that is kept for request after request, opened again where the server closed it."""

    def __init__(self, port: int):
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, path: str, data: bytes) -> Answer:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=1 << 22
            )
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        first, *rest = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answer = Answer(
            int(first.split()[1]),
            dict(line.lower().split(": ", 1) for line in rest if ": " in line),
            b"",
        )
        if "content-length" in answer.headers:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        else:
            while size := int(await self.reader.readline(), 16):
                answer.body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


class Refused(Exception):
    def __init__(self, answer: Answer):
        super().__init__(f"status {answer.status}")
        self.answer = answer


async def events(port: int, path: str, body: Any, **headers: str) -> AsyncIterator[Any]:
    """Each event's data as it comes, the last [DONE] as None; a chunked body's framing is skipped line by line."""
    reader, writer, answer = await send(port, "POST", path, body, headers)
    try:
        if answer.status != 200:
            answer.body = await reader.read(4096)
            raise Refused(answer)
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield None if line.startswith(b"data: [DONE]") else json.loads(line[6:])
            elif line == b"0\r\n":
                return
    finally:
        writer.close()

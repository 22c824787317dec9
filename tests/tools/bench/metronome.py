"""A server that answers like clockwork: every figure of a run against it is known beforehand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import LONG


@dataclass
class Metronome:
    first: float = 0.06
    gap: float = 0.01
    fail_every: int = 0  # each so-many-th request is answered by 503
    drop_every: int = 0  # each so-many-th request's connection is cut in the middle of the answer
    profiling: str = ""
    together: int = 0  # nobody is answered before so many have asked
    models: bool = True  # whether it speaks OpenAI's dialect
    asked: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    url: str = ""
    open: list[asyncio.StreamWriter] = field(default_factory=list)
    stop: Callable[[], object] = lambda: None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(
                    (
                        int(l.split(":")[1])
                        for l in head.split("\r\n")
                        if l.startswith("content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                await self.answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models" and self.models:
            self.whole(writer, 200, {"data": [{"id": "clock"}]})
        elif path == "/info":
            self.whole(writer, 200, {"profiling": self.profiling} if self.profiling else {})
        elif not body:
            self.whole(writer, 404, {})
        else:
            self.asked.append(json.loads(body))
            number = len(self.asked)
            if self.fail_every and number % self.fail_every == 0:
                self.whole(writer, 503, {"error": "too many"})
            else:
                await self.stream(
                    path, self.asked[-1], writer, self.drop_every and number % self.drop_every == 0
                )

    def whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        out = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(out)}\r\n\r\n".encode() + out)

    async def stream(
        self, path: str, asked: dict[str, Any], writer: asyncio.StreamWriter, drop: Any
    ) -> None:
        tgi = path == "/generate_stream"
        count = asked["parameters"]["max_new_tokens"] if tgi else asked["max_tokens"]
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

        def send(value: Any) -> None:
            data = (
                b"data: "
                + (value if isinstance(value, bytes) else json.dumps(value).encode())
                + b"\n\n"
            )
            half = len(data) // 2  # events do not end where chunks do
            for part in (data[:half], data[half:]):
                writer.write(b"%x\r\n" % len(part) + part + b"\r\n")

        while len(self.asked) < self.together:
            await asyncio.sleep(0.01)
        begun = asyncio.get_running_loop().time()
        if path == "/v1/chat/completions":
            send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(count):
            await asyncio.sleep(
                begun + self.first + self.gap * i - asyncio.get_running_loop().time()
            )
            if drop and i == count // 2:
                writer.transport.abort()
                return
            details = {"generated_tokens": count} if i == count - 1 else None
            if tgi:
                send({"token": {"id": 5, "text": " tick"}, "details": details})
            elif path == "/v1/completions":
                send({"choices": [{"text": " tick"}]})
            else:
                send({"choices": [{"delta": {"content": " tick"}}]})
        if not tgi:
            send({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})
            send(b"[DONE]")
        writer.write(b"0\r\n\r\n")


@contextmanager
def ticking(metronome: Metronome) -> Iterator[Metronome]:
    """The server in a thread of its own."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(metronome.serve, "127.0.0.1", 0)
        metronome.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        metronome.stop = lambda: loop.call_soon_threadsafe(stop.set)
        ready.set()
        await stop.wait()
        server.close()
        for writer in metronome.open:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(LONG)
    yield metronome
    metronome.stop()
    thread.join(LONG)

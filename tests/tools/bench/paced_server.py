"""A fake inference server that sends tokens at exact times, so that every metric is known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import WAIT_SECONDS


@dataclass
class PacedServer:
    """A server of OpenAI's and TGI's streaming APIs. Times are seconds."""

    ttft: float = 0.06
    gap: float = 0.01  # between two tokens
    fail_every: int = 0  # every n-th request is answered by 503
    drop_every: int = 0  # every n-th request's connection is cut in the middle of the answer
    profiling: str = ""  # the profiler that /info reports
    min_requests: int = 0  # requests that must arrive before any is answered
    has_openai_api: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    url: str = ""
    open_writers: list[asyncio.StreamWriter] = field(default_factory=list)
    stop: Callable[[], object] = lambda: None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.open_writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                body = await reader.readexactly(content_length(head))
                path = head.split()[1]
                await self.answer(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models" and self.has_openai_api:
            self.send_json(writer, 200, {"data": [{"id": "clock"}]})
        elif path == "/info":
            info = {"profiling": self.profiling} if self.profiling else {}
            self.send_json(writer, 200, info)
        elif not body:
            self.send_json(writer, 404, {})
        else:
            request = json.loads(body)
            self.requests.append(request)
            number = len(self.requests)
            if self.fail_every and number % self.fail_every == 0:
                self.send_json(writer, 503, {"error": "too many"})
                return
            drop = self.drop_every > 0 and number % self.drop_every == 0
            await self.stream(path, request, writer, drop)

    def send_json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} -\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async def stream(
        self, path: str, request: dict[str, Any], writer: asyncio.StreamWriter, drop: bool
    ) -> None:
        is_tgi = path == "/generate_stream"
        count = request["parameters"]["max_new_tokens"] if is_tgi else request["max_tokens"]
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        while len(self.requests) < self.min_requests:
            await asyncio.sleep(0.01)
        start = loop.time()
        if path == "/v1/chat/completions":
            send_event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(count):
            await asyncio.sleep(start + self.ttft + self.gap * i - loop.time())
            if drop and i == count // 2:
                writer.transport.abort()
                return
            if is_tgi:
                details = {"generated_tokens": count} if i == count - 1 else None
                send_event(writer, {"token": {"id": 5, "text": " tick"}, "details": details})
            elif path == "/v1/completions":
                send_event(writer, {"choices": [{"text": " tick"}]})
            else:
                send_event(writer, {"choices": [{"delta": {"content": " tick"}}]})
        if not is_tgi:
            usage = {"prompt_tokens": 9, "completion_tokens": count}
            send_event(writer, {"choices": [], "usage": usage})
            send_event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")


def content_length(head: str) -> int:
    for line in head.split("\r\n"):
        if line.startswith("content-length"):
            return int(line.split(":")[1])
    return 0


def send_event(writer: asyncio.StreamWriter, value: Any) -> None:
    """Write one event as two HTTP chunks: events need not end where chunks do."""
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    data = b"data: " + payload + b"\n\n"
    half = len(data) // 2
    for chunk in (data[:half], data[half:]):
        writer.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n")


@contextmanager
def run_paced_server(paced: PacedServer) -> Iterator[PacedServer]:
    """Run the server in a thread of its own."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def serve_until_stopped() -> None:
        stopped = asyncio.Event()
        server = await asyncio.start_server(paced.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        paced.url = f"http://127.0.0.1:{port}"
        paced.stop = lambda: loop.call_soon_threadsafe(stopped.set)
        ready.set()
        await stopped.wait()
        server.close()
        for writer in paced.open_writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve_until_stopped())

    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    assert ready.wait(WAIT_SECONDS)
    yield paced
    paced.stop()
    thread.join(WAIT_SECONDS)

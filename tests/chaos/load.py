"""Loads that cost little themselves, for figures of a server on the same cores.

A crowd in a process of its own: `python -m tests.chaos.load PORT STREAMS TOKENS RAMP` holds so many streams at once.

They come in over RAMP seconds. A first line is printed once all are inside, a last one when all have ended: errors, the
longest gap between two reads, and how many events had come in by when, twice a second, on the clock that all processes
share. Whoever measures something else beside a crowd measures it in another process, so that reading a thousand
streams does not delay the clock that is looked at. `knocks` is such a one: requests at given moments, on bare sockets.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from tests.chaos.http import Refused, send

LONG = {"prompt": "The iron", "ignore_eos": True, "temperature": 0, "stream": True}


class Crowd:
    def __init__(self, port: int, tokens: int):
        self.port = port
        self.body = LONG | {"max_tokens": tokens}
        self.inside = self.events = self.complete = 0
        self.longest = 0.0
        self.errors: list[str] = []
        self.seen: list[tuple[float, int]] = []

    async def stream(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await self._read()
            self.complete += 1
        except (Refused, OSError, RuntimeError, asyncio.IncompleteReadError) as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:100])

    async def _read(self) -> None:
        """To its end, without a look into its events: that would take the cores the server needs."""
        reader, writer, answer = await send(self.port, "POST", "/v1/completions", self.body, {})
        try:
            if answer.status != 200:
                raise Refused(answer)
            self.inside += 1
            last = time.monotonic()
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await reader.read(1 << 16)
                now = time.monotonic()
                self.longest = max(self.longest, now - last)
                last = now
                self.events += data.count(b"data: ")
                tail = (tail + data)[-64:]
                if not data or b'"error"' in data:
                    raise RuntimeError("an error event" if data else "the stream was cut")
            if b"data: [DONE]" not in tail:
                raise RuntimeError("the stream ended without [DONE]")
        finally:
            writer.close()

    async def come(self, count: int, ramp: float) -> None:
        tasks = [asyncio.create_task(self.stream(ramp * number / count)) for number in range(count)]
        while not all(task.done() for task in tasks):
            if self.inside + len(self.errors) >= count and not self.seen:
                print(json.dumps({"inside": self.inside}), flush=True)
            if self.inside + len(self.errors) >= count:
                self.seen.append((time.monotonic(), self.events))
            await asyncio.sleep(0.5)
        figures = {
            "complete": self.complete,
            "errors": self.errors[:5],
            "longest_gap": self.longest,
        }
        print(json.dumps(figures | {"failed": len(self.errors), "seen": self.seen}), flush=True)


@dataclass
class Knock:
    begun: float
    line: socket.socket
    seconds: float = 0.0  # from connecting to the first bytes of the answer
    answer: bytes = b""  # none: the connection was lost


def knocks(port: int, delays: Sequence[float]) -> list[Knock]:
    """One request after each delay, whatever became of those before."""
    data = json.dumps(LONG | {"max_tokens": 40}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    message = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    start = time.monotonic()
    waiting = sorted(delays, reverse=True)
    made = list[Knock]()
    open = 0
    with selectors.DefaultSelector() as selector:
        while waiting or open:
            now = time.monotonic()
            while waiting and start + waiting[-1] <= now:
                waiting.pop()
                line = socket.socket()
                line.setblocking(False)
                line.connect_ex(("127.0.0.1", port))
                made.append(Knock(time.monotonic(), line))
                selector.register(line, selectors.EVENT_WRITE, made[-1])
                open += 1
            pause = max(start + waiting[-1] - time.monotonic(), 0.0) if waiting else 1.0
            for key, event in selector.select(pause):
                knock: Knock = key.data
                try:
                    if event & selectors.EVENT_WRITE:
                        knock.line.sendall(message)
                        selector.modify(knock.line, selectors.EVENT_READ, knock)
                        continue
                    knock.seconds = time.monotonic() - knock.begun
                    knock.answer = knock.line.recv(1 << 16)
                except OSError:
                    knock.answer = b""
                selector.unregister(knock.line)
                knock.line.close()
                open -= 1
    return made


def main(port: int, streams: int, tokens: int, ramp: float) -> None:
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(Crowd(port, tokens).come(streams, ramp))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))

"""Loads that cost little processor time, for measuring a server on the same cores.

    python -m tests.chaos.stream_load PORT STREAMS TOKENS RAMP_SECONDS

opens STREAMS streams of TOKENS tokens in a process of its own, spread over RAMP_SECONDS. It prints
one JSON line once all streams have started, and a last one when all have ended: the errors, the
longest gap between two reads, and the number of events so far, twice a second. The times are those
of the monotonic clock, which all processes share. Other measurements run in another process at the
same time, so reading a thousand streams does not delay their clock. `attempt_requests` is such a
measurement: it sends requests at given times over bare sockets.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from tests.chaos.http import LONG_COMPLETION, RefusedError, encode_request, open_request

READ_BYTES = 1 << 16
SAMPLE_SECONDS = 0.5  # between two entries of StreamCrowd.event_counts


async def drain_stream(
    port: int,
    body: dict[str, Any],
    on_read: Callable[[bytes, float], None],
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Read a streamed completion to its end without parsing its events.

    Parsing would take processor time from the server. `on_read` gets the data of each read and the
    seconds since the one before. Raises RefusedError, or RuntimeError for a stream that ends with
    an error or too early.
    """
    reader, writer, response = await open_request(port, "POST", "/v1/completions", body, {})
    try:
        if response.status != 200:
            raise RefusedError(response)
        on_start()
        last_read = time.monotonic()
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(READ_BYTES)
            now = time.monotonic()
            on_read(data, now - last_read)
            last_read = now
            tail = (tail + data)[-64:]
            if not data:
                raise RuntimeError("the stream was cut")
            if b'"error"' in data:
                raise RuntimeError("the stream contains an error event")
        if b"data: [DONE]" not in tail:
            raise RuntimeError("the stream ended without [DONE]")
    finally:
        writer.close()


class StreamCrowd:
    """Many streams at once, with counters over all of them."""

    def __init__(self, port: int, num_tokens: int):
        self.port = port
        self.body = LONG_COMPLETION | {"max_tokens": num_tokens}
        self.num_started = 0
        self.num_events = 0
        self.num_complete = 0
        self.longest_gap_seconds = 0.0  # between two reads of one stream
        self.errors: list[str] = []
        self.event_counts: list[tuple[float, int]] = []  # monotonic seconds, events so far

    async def run(self, num_streams: int, ramp_seconds: float) -> None:
        """Run all streams to their end and print the two JSON lines."""
        delays = [ramp_seconds * number / num_streams for number in range(num_streams)]
        tasks = [asyncio.create_task(self._run_stream(delay)) for delay in delays]
        while not all(task.done() for task in tasks):
            if self.num_started + len(self.errors) >= num_streams:
                if not self.event_counts:
                    print(json.dumps({"started": self.num_started}), flush=True)
                self.event_counts.append((time.monotonic(), self.num_events))
            await asyncio.sleep(SAMPLE_SECONDS)
        figures = {
            "complete": self.num_complete,
            "failed": len(self.errors),
            "errors": self.errors[:5],
            "longest_gap_s": self.longest_gap_seconds,
            "event_counts": self.event_counts,
        }
        print(json.dumps(figures), flush=True)

    async def _run_stream(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await drain_stream(self.port, self.body, self._on_read, self._on_start)
            self.num_complete += 1
        except (RefusedError, OSError, RuntimeError, asyncio.IncompleteReadError) as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:100])

    def _on_start(self) -> None:
        self.num_started += 1

    def _on_read(self, data: bytes, gap_seconds: float) -> None:
        self.longest_gap_seconds = max(self.longest_gap_seconds, gap_seconds)
        self.num_events += data.count(b"data: ")


@dataclass
class RequestAttempt:
    """One request over its own connection, and the first bytes of the response."""

    begin: float  # monotonic seconds
    connection: socket.socket
    seconds: float = 0.0  # from connecting to the first bytes of the response
    response: bytes = b""  # empty if the connection was lost


def attempt_requests(port: int, delays: Sequence[float]) -> list[RequestAttempt]:
    """Send one request after each delay in seconds, without waiting for earlier responses."""
    data = json.dumps(LONG_COMPLETION | {"max_tokens": 40}).encode()
    message = encode_request("POST", "/v1/completions", data)
    start = time.monotonic()
    send_times = sorted((start + delay for delay in delays), reverse=True)
    attempts = list[RequestAttempt]()
    with selectors.DefaultSelector() as selector:
        while send_times or selector.get_map():
            while send_times and send_times[-1] <= time.monotonic():
                send_times.pop()
                attempt = start_attempt(port)
                attempts.append(attempt)
                selector.register(attempt.connection, selectors.EVENT_WRITE, attempt)
            timeout = 1.0
            if send_times:
                timeout = max(send_times[-1] - time.monotonic(), 0.0)
            for key, _ in selector.select(timeout):
                continue_attempt(selector, key, message)
    return attempts


def start_attempt(port: int) -> RequestAttempt:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    return RequestAttempt(time.monotonic(), connection)


def continue_attempt(
    selector: selectors.BaseSelector, key: selectors.SelectorKey, message: bytes
) -> None:
    """Send the request over a connection that is open, or read the beginning of the response."""
    attempt: RequestAttempt = key.data
    try:
        if key.events & selectors.EVENT_WRITE:
            attempt.connection.sendall(message)
            selector.modify(attempt.connection, selectors.EVENT_READ, attempt)
            return
        attempt.seconds = time.monotonic() - attempt.begin
        attempt.response = attempt.connection.recv(READ_BYTES)
    except OSError:
        attempt.response = b""
    selector.unregister(attempt.connection)
    attempt.connection.close()


def main(port: int, num_streams: int, num_tokens: int, ramp_seconds: float) -> None:
    crowd = StreamCrowd(port, num_tokens)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(crowd.run(num_streams, ramp_seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))

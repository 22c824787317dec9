"""The front end alone: HTTP, text and streaming before an engine whose model is a ghost that costs nothing.

    python benchmarks/frontend.py                  # three figures; with target and verdict where there is a target
    python benchmarks/frontend.py --streams 200 --seconds 10
    python benchmarks/frontend.py --profile        # besides, where the server's process spends its time

Server and engine are processes of their own, as in `bloomery serve`; this process is the load. On two cores the three
of them share what there is, so the figures are a lower bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import uvloop

from bloomery.artifacts.locate import locate
from bloomery.config import Config, Plan, ServerConfig, resolve
from bloomery.engine.client import EngineClient
from bloomery.engine.process import serve as run_engine
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    SampledTokens,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
)
from bloomery.serve import run as run_server
from bloomery.server.app import create_app
from bloomery.server.service import Settings
from bloomery.text.load import load_tokenizer

VOCAB = 49152
BLOCK = 16
ROWS = 1280  # more than there are streams: some are kept for short requests
STALL = 2.0  # seconds without a token that count as one
FIRST = 0.003  # seconds that HTTP may add to the time to first token


# ---- the ghost ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spoken:
    """A step's result, there at its time: whoever asks earlier waits."""

    at: float
    output: StepOutput

    def result(self) -> StepOutput:
        time.sleep(max(self.at - time.monotonic(), 0.0))
        return self.output


class Ghost:
    """An executor that says word after word of the vocabulary; each step takes `pace` seconds, one after the other."""

    def __init__(self, pace: float):
        self.pace = pace
        self.free = 0.0

    def start(self, plan: object) -> EngineCapacity:
        return EngineCapacity(1 << 20, BLOCK, ROWS, 1 << 16, 8192, VOCAB)

    def submit(self, step: ScheduledStep) -> Spoken:
        self.free = max(self.free, time.monotonic()) + self.pace
        words = [(item.sequence, item.start + item.count) for item in step.requests if item.samples]
        said = tuple([SampledTokens(sequence, (1000 + end * 7 % 5000,)) for sequence, end in words])
        return Spoken(self.free, StepOutput(said))

    def spare(self) -> int:
        return 0

    def close(self) -> None: ...


def plan() -> Plan:
    artifact = locate(None)
    config = Config(
        device="cpu", threads=1, block_size=BLOCK, max_num_seqs=ROWS, max_num_batched_tokens=1 << 16
    )
    return resolve(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype="float32",
        device="cpu",
        context=8192,
    )


def client(pace: float) -> EngineClient:
    return EngineClient(plan(), (sys.executable, __file__, "--engine", "--pace", str(pace)))


def server(port: int, pace: float, profile: bool) -> int:
    """As `bloomery serve` does it, but for the engine's command."""
    engine = client(pace)
    wishes = ServerConfig(port=port, log_format="human")
    app = create_app(engine, load_tokenizer(locate(None)), Settings(model="ghost"))
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    if not profile:
        return runner.run(run_server(engine, lambda: app, wishes))
    with cProfile.Profile(time.thread_time) as seen:  # neighbours do not spoil it
        status = runner.run(run_server(engine, lambda: app, wishes))
    pstats.Stats(seen).sort_stats("tottime").print_stats(40)
    return status


# ---- the load ----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Of one stream."""

    tokens: int = 0
    first: float = 0.0  # seconds
    stall: float = 0.0  # the longest silence
    error: str = ""


def message(port: int, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def stream(port: int, tokens: int) -> Seen:
    """One stream read to its end; nothing is parsed but the last chunk, with its count."""
    seen = Seen()
    begun = time.monotonic()
    body = {
        "prompt": "The iron bloom",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(message(port, body | {"stream_options": {"include_usage": True}}))
            last = 0.0
            tail = b""
            while b"[DONE]" not in tail:
                data = await asyncio.wait_for(reader.read(65536), 30)
                now = time.monotonic()
                if not data:
                    raise ConnectionError("the stream broke off")
                if not last and not data.startswith(b"HTTP/1.1 200"):
                    raise ConnectionError(data[:80].decode())
                seen.first = seen.first or now - begun
                seen.stall = max(seen.stall, now - last if last else 0.0)
                last = now
                tail = (tail + data)[-1000:]
            seen.tokens = int(tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0])
    except (OSError, ValueError, TimeoutError) as error:
        seen.error = repr(error)
    return seen


async def many(port: int, streams: int, seconds: float, pace: float) -> list[Seen]:
    tokens = round(seconds / pace)

    async def late(number: int) -> Seen:
        await asyncio.sleep(
            number / streams * 2.0
        )  # nobody opens a thousand connections in one moment
        return await stream(port, tokens)

    found = await asyncio.gather(*(late(number) for number in range(streams)))
    for one in found:
        if not one.error and one.tokens != tokens:
            one.error = f"{one.tokens} of {tokens} tokens"
    return found


async def throughput(port: int, seconds: float, connections: int = 32) -> float:
    """Requests a second: short ones, whole, one after the other on each of some connections."""
    body = message(
        port, {"prompt": "The iron bloom", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    )
    end = time.monotonic() + seconds
    count = 0

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            while time.monotonic() < end:
                writer.write(body)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                if not head.startswith(b"HTTP/1.1 200"):
                    raise ConnectionError(head[:80].decode())
                count += 1

    begun = time.monotonic()
    await asyncio.gather(*(one() for _ in range(connections)))
    return count / (time.monotonic() - begun)


async def first_tokens(port: int, rounds: int) -> tuple[float, float]:
    """Median seconds to a first token: by HTTP, and by the engine's client alone, in turns."""
    by_http = []
    alone = []
    engine = client(0.0)
    await engine.start()
    await engine.ready()
    try:
        for number in range(rounds):
            by_http.append((await stream(port, 2)).first)
            request = EngineRequest(
                str(number), (504, 8301, 7719), ResolvedSampling(temperature=0.0), 2
            )
            begun = time.monotonic()
            async with contextlib.aclosing(engine.stream([request])) as news:
                await anext(aiter(news))
                alone.append(time.monotonic() - begun)
    finally:
        await engine.close()
    return statistics.median(by_http), statistics.median(alone)


# ---- together ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(pace: float, profile: bool) -> AsyncIterator[tuple[int, Callable[[], float]]]:
    """Where it listens, and how many seconds of a core its process has had: a figure that neighbours do not spoil."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        __file__,
        "--serve",
        str(port),
        "--pace",
        str(pace),
        *(["--profile"] * profile),
    ]
    process = subprocess.Popen(command, stderr=None if profile else subprocess.DEVNULL)
    try:
        while True:
            seen = await stream(port, 1)
            if not seen.error:
                break
            if process.poll() is not None:
                raise SystemExit("the server does not start")
            await asyncio.sleep(0.1)
        for _ in range(20):
            await stream(port, 4)
        yield port, lambda: cpu_seconds(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def verdict(reached: bool) -> str:
    return "reached" if reached else "SHORT"


async def measure(arguments: argparse.Namespace) -> int:
    print(f"{os.cpu_count()} cores, load average before: {os.getloadavg()[0]:.1f}", flush=True)
    good = []
    async with running(0.0, arguments.profile) as (port, spent):
        before = spent()
        rate = await throughput(port, arguments.seconds / 2)
        each = (spent() - before) / (rate * arguments.seconds / 2)
        print(
            f"requests/s, 4 tokens each: {rate:.0f} ({each * 1e6:.0f} us of a core each); no target",
            flush=True,
        )
        by_http, alone = await first_tokens(port, 100)
        good.append(by_http - alone <= FIRST)
        print(
            f"time to first token: {by_http * 1e3:.2f} ms by HTTP, {alone * 1e3:.2f} ms without: HTTP adds "
            f"{(by_http - alone) * 1e3:.2f} ms; to stay under {FIRST * 1e3:.0f}: {verdict(good[-1])}",
            flush=True,
        )
    async with running(arguments.pace, arguments.profile) as (port, spent):
        before = spent()
        found = await many(port, arguments.streams, arguments.seconds, arguments.pace)
        each = (spent() - before) / max(sum(one.tokens for one in found), 1)
    errors = [one.error for one in found if one.error]
    stall = max(one.stall for one in found)
    good.append(not errors and stall <= STALL)
    print(
        f"{arguments.streams} streams at {1 / arguments.pace:.0f} tokens/s for {arguments.seconds:.0f} s: "
        f"{len(errors)} errors, longest silence {stall:.2f} s, {each * 1e6:.0f} us of a core a token, first token "
        f"after {statistics.median(one.first for one in found):.2f} s (median); to reach no error and no silence over "
        f"{STALL:.0f} s: {verdict(good[-1])}"
    )
    for error in sorted(set(errors))[:5]:
        print(f"  {error}")
    return 0 if all(good) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--pace", type=float, default=0.1, help="seconds between two tokens of a stream"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("descriptor", nargs="?", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return run_engine(
            socket.socket(fileno=arguments.descriptor), lambda plan, report: Ghost(arguments.pace)
        )
    if arguments.serve:
        return server(arguments.serve, arguments.pace, arguments.profile)
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Measures the HTTP front end alone: an engine without a model answers in fixed time.

    python benchmarks/frontend.py              # three results, with a verdict if there is a target
    python benchmarks/frontend.py --streams 200 --seconds 10
    python benchmarks/frontend.py --profile    # also where the server process spends its time

Server and engine are processes of their own, as in `bloomery serve`; this process is the client.
On two cores the three processes compete, so the results are lower bounds.
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
from typing import Any

import uvloop

from bloomery.artifacts.locate import locate_model
from bloomery.config import EngineConfig, EnginePlan, ServerConfig, resolve_plan
from bloomery.engine.client import EngineClient
from bloomery.engine.engine_process import run_engine_process
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    ResolvedSampling,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)
from bloomery.serve import run_server
from bloomery.serve_main import open_listeners
from bloomery.server.app import create_app
from bloomery.server.service import ServerSettings
from bloomery.text.load import load_tokenizer

VOCAB_SIZE = 49152
BLOCK_SIZE = 16
MAX_NUM_SEQS = 1280  # more than there are streams, so that short requests find a free slot
MAX_BATCHED_TOKENS = 1 << 16
MAX_MODEL_LEN = 8192
MAX_SILENCE_SECONDS = 2.0  # target: no stream is without a token for longer
MAX_ADDED_TTFT_SECONDS = 0.003  # target: what HTTP may add to the TTFT
MIN_REQUEST_RATE = 800  # target: requests of one token per second


# ---- the engine ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DelayedStep:
    """A step's output, available at a set time; `result` waits for that time."""

    ready_at: float
    output: StepOutput

    def result(self) -> StepOutput:
        time.sleep(max(self.ready_at - time.monotonic(), 0.0))
        return self.output


class FixedTimeExecutor:
    """An executor whose steps take `step_seconds` each, one after the other."""

    def __init__(self, step_seconds: float):
        self.step_seconds = step_seconds
        self.free_at = 0.0

    def start(self, plan: object) -> EngineCapacity:
        return EngineCapacity(
            1 << 20, BLOCK_SIZE, MAX_NUM_SEQS, MAX_BATCHED_TOKENS, MAX_MODEL_LEN, VOCAB_SIZE
        )

    def submit(self, step: ScheduledStep) -> DelayedStep:
        self.free_at = max(self.free_at, time.monotonic()) + self.step_seconds
        samples = []
        for request in step.requests:
            if request.samples:
                end = request.start + request.count
                token = 1000 + end * 7 % 5000
                samples.append(SampledTokens(request.sequence, (token,)))
        return DelayedStep(self.free_at, StepOutput(tuple(samples)))

    def close(self) -> None: ...


def create_plan() -> EnginePlan:
    artifact = locate_model(None)
    config = EngineConfig(
        device="cpu",
        threads=1,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
    )
    return resolve_plan(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype="float32",
        device="cpu",
        context=MAX_MODEL_LEN,
    )


def create_client(step_seconds: float) -> EngineClient:
    command = (sys.executable, __file__, "--engine", "--step-seconds", str(step_seconds))
    return EngineClient(create_plan(), command)


def run_api_process(port: int, step_seconds: float, profile: bool) -> int:
    """Serve as `bloomery serve` does, but for the engine's command."""
    config = ServerConfig(port=port, log_format="human")
    settings = ServerSettings(model="fixed-time")

    def build_app(engine: Any) -> Callable[[], Any]:
        app = create_app(engine, load_tokenizer(locate_model(None)), settings)
        return lambda: app

    listeners = open_listeners("127.0.0.1", port)
    serving = run_server(lambda: create_client(step_seconds), build_app, config, listeners)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    if not profile:
        return runner.run(serving)
    with cProfile.Profile(time.thread_time) as profiler:  # other processes' time does not count
        status = runner.run(serving)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return status


# ---- the load ------------------------------------------------------------------------------


@dataclass
class StreamResult:
    """What one stream delivered; times are seconds."""

    num_tokens: int = 0
    ttft: float = 0.0
    longest_silence: float = 0.0  # seconds
    error: str = ""


def http_request(port: int, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\n"
        f"host: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def read_stream(port: int, num_tokens: int) -> StreamResult:
    """Read one stream to its end; only its last chunk, with the usage, is parsed."""
    result = StreamResult()
    start = time.monotonic()
    body = {
        "prompt": "The iron bloom",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(http_request(port, body))
            last_read = 0.0
            tail = b""
            while b"[DONE]" not in tail:
                data = await asyncio.wait_for(reader.read(65536), 30)
                now = time.monotonic()
                if not data:
                    raise ConnectionError("the stream broke off")
                if not last_read:
                    if not data.startswith(b"HTTP/1.1 200"):
                        raise ConnectionError(data[:80].decode())
                    result.ttft = now - start
                else:
                    result.longest_silence = max(result.longest_silence, now - last_read)
                last_read = now
                tail = (tail + data)[-1000:]
            count = tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
            result.num_tokens = int(count)
    except (OSError, ValueError, TimeoutError) as error:
        result.error = repr(error)
    return result


async def read_streams(
    port: int, num_streams: int, seconds: float, step_seconds: float
) -> list[StreamResult]:
    """Read many streams at once; their connections are opened over two seconds."""
    num_tokens = round(seconds / step_seconds)

    async def read_after_delay(number: int) -> StreamResult:
        await asyncio.sleep(number / num_streams * 2.0)
        return await read_stream(port, num_tokens)

    results = await asyncio.gather(*(read_after_delay(number) for number in range(num_streams)))
    for result in results:
        if not result.error and result.num_tokens != num_tokens:
            result.error = f"{result.num_tokens} of {num_tokens} tokens"
    return results


async def measure_throughput(
    port: int, seconds: float, num_tokens: int, num_connections: int = 32
) -> float:
    """Requests a second: short ones, not streamed, one after the other on each connection."""
    body = {
        "prompt": "The iron bloom",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = http_request(port, body)
    end = time.monotonic() + seconds
    count = 0

    async def send_requests() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            while time.monotonic() < end:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                if not head.startswith(b"HTTP/1.1 200"):
                    raise ConnectionError(head[:80].decode())
                count += 1

    start = time.monotonic()
    await asyncio.gather(*(send_requests() for _ in range(num_connections)))
    return count / (time.monotonic() - start)


async def measure_ttft(port: int, num_rounds: int) -> tuple[float, float]:
    """Median TTFT in seconds: by HTTP, and by the engine's client alone; measured in turns."""
    by_http = []
    by_client = []
    engine = create_client(0.0)
    await engine.start()
    await engine.ready()
    try:
        for number in range(num_rounds):
            result = await read_stream(port, 2)
            by_http.append(result.ttft)
            sampling = ResolvedSampling(temperature=0.0)
            request = EngineRequest(str(number), (504, 8301, 7719), sampling, 2)
            start = time.monotonic()
            async with contextlib.aclosing(engine.stream([request])) as outputs:
                await anext(aiter(outputs))
                by_client.append(time.monotonic() - start)
    finally:
        await engine.close()
    return statistics.median(by_http), statistics.median(by_client)


# ---- the benchmark -------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running_server(
    step_seconds: float, profile: bool
) -> AsyncIterator[tuple[int, Callable[[], float]]]:
    """The server's port, and a function that reads its CPU seconds.

    CPU seconds do not depend on what else runs on the machine.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), "--step-seconds", str(step_seconds)]
    if profile:
        command.append("--profile")
    process = subprocess.Popen(command, stderr=None if profile else subprocess.DEVNULL)
    try:
        while (await read_stream(port, 1)).error:
            if process.poll() is not None:
                raise SystemExit("the server does not start")
            await asyncio.sleep(0.1)
        for _ in range(20):
            await read_stream(port, 4)
        yield port, lambda: read_cpu_seconds(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def read_cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    user_ticks = int(fields[11])
    system_ticks = int(fields[12])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


def format_verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


async def measure_short_requests(arguments: argparse.Namespace) -> bool:
    """Print request throughput and TTFT. Returns whether their targets are reached."""
    async with running_server(0.0, arguments.profile) as (port, cpu_seconds):
        seconds = arguments.seconds / 4
        rates = {}
        for num_tokens, target in ((1, f"target {MIN_REQUEST_RATE}"), (4, "no target")):
            cpu_before = cpu_seconds()
            rate = await measure_throughput(port, seconds, num_tokens)
            rates[num_tokens] = rate
            cpu_us = (cpu_seconds() - cpu_before) / (rate * seconds) * 1e6
            print(
                f"requests/s, tokens each {num_tokens}: {rate:.0f} ({cpu_us:.0f} us of CPU each); "
                f"{target}",
                flush=True,
            )
        by_http, by_client = await measure_ttft(port, 100)
    added = by_http - by_client
    reached = added <= MAX_ADDED_TTFT_SECONDS
    print(
        f"TTFT: {by_http * 1e3:.2f} ms by HTTP, {by_client * 1e3:.2f} ms without: "
        f"HTTP adds {added * 1e3:.2f} ms; "
        f"target {MAX_ADDED_TTFT_SECONDS * 1e3:.0f} ms: {format_verdict(reached)}",
        flush=True,
    )
    return reached and rates[1] >= MIN_REQUEST_RATE


async def measure_many_streams(arguments: argparse.Namespace) -> bool:
    """Print errors and silences of many streams. Returns whether their target is reached."""
    step_seconds = arguments.step_seconds
    async with running_server(step_seconds, arguments.profile) as (port, cpu_seconds):
        cpu_before = cpu_seconds()
        results = await read_streams(port, arguments.streams, arguments.seconds, step_seconds)
        num_tokens = sum(result.num_tokens for result in results)
        cpu_us = (cpu_seconds() - cpu_before) / max(num_tokens, 1) * 1e6
    errors = [result.error for result in results if result.error]
    silence = max(result.longest_silence for result in results)
    ttft = statistics.median(result.ttft for result in results)
    reached = not errors and silence <= MAX_SILENCE_SECONDS
    print(
        f"{arguments.streams} streams of {1 / step_seconds:.0f} tokens/s "
        f"for {arguments.seconds:.0f} s: {len(errors)} errors, longest silence {silence:.2f} s, "
        f"{cpu_us:.0f} us of CPU a token, median TTFT {ttft:.2f} s; "
        f"target no error and no silence over {MAX_SILENCE_SECONDS:.0f} s: "
        f"{format_verdict(reached)}"
    )
    for error in sorted(set(errors))[:5]:
        print(f"  {error}")
    return reached


async def measure(arguments: argparse.Namespace) -> int:
    print(f"{os.cpu_count()} cores, load average before: {os.getloadavg()[0]:.1f}", flush=True)
    ttft_reached = await measure_short_requests(arguments)
    streams_reached = await measure_many_streams(arguments)
    return 0 if ttft_reached and streams_reached else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--step-seconds", type=float, default=0.1, help="time between two tokens of a stream"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("descriptor", nargs="?", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return run_engine_process(
            arguments.descriptor, lambda plan, report: FixedTimeExecutor(arguments.step_seconds)
        )
    if arguments.serve:
        return run_api_process(arguments.serve, arguments.step_seconds, arguments.profile)
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(arguments))


if __name__ == "__main__":
    sys.exit(main())

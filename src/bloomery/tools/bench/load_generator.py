"""Sends a workload to a server in real time, and shows progress on a terminal.

Refuses to report a run during which a profiler slowed the client or the server.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from bloomery.config import active_profiler
from bloomery.errors import ConfigError
from bloomery.tools.bench.client import BenchClient, BenchTarget
from bloomery.tools.bench.summary import (
    GoodputTargets,
    RequestRecord,
    percentile,
    summarize_records,
)
from bloomery.tools.bench.workload import RequestArrival

# Words that are one token each in most vocabularies.
ONE_TOKEN_TEXT = """
river stone green walk table seven cloud paper north glass field light music train plant house
voice night water bread chair coast cover dance dream earth event final floor force front fruit
grand guard heart horse human image issue judge large layer level local lunch major march metal
model money month motor mouth novel ocean order panel party peace phone piece pilot place plain
plane point power press price pride prize proof queen radio range reply
"""
ONE_TOKEN_WORDS = ONE_TOKEN_TEXT.split()
WARMUP_OUTPUT = 8  # most output tokens of a warm-up request
REFRESH_SECONDS = 0.5  # of the live view
RECENT_REQUESTS = 256  # requests over which the live view shows the TTFT


class LoadGenerator:
    """Sends every request at its arrival time, and those of a session in order."""

    def __init__(self, client: BenchClient, arrivals: Sequence[RequestArrival], seed: int = 0):
        self.client = client
        self.arrivals = arrivals
        self.records = [RequestRecord(0.0, arrival.prompt) for arrival in arrivals]
        self.rng = random.Random(seed)
        self.start_time = 0.0
        self.num_running = 0
        self.num_done = 0

    async def run(self) -> list[RequestRecord]:
        """Send all requests and return their records, in the order of the arrivals."""
        sessions: dict[str, list[int]] = defaultdict(list)
        for i, arrival in enumerate(self.arrivals):
            session = arrival.session or f" {i}"  # a request without a session is one by itself
            sessions[session].append(i)
        self.start_time = time.perf_counter()
        await asyncio.gather(*(self._run_session(indices) for indices in sessions.values()))
        return self.records

    async def _run_session(self, indices: Sequence[int]) -> None:
        """Send the requests of one session, each at its time or after the previous answer."""
        messages: list[tuple[str, str]] = []
        for i in indices:
            arrival = self.arrivals[i]
            if arrival.arrival is not None:
                await asyncio.sleep(self.start_time + arrival.arrival - time.perf_counter())
            elif arrival.after:
                await asyncio.sleep(arrival.after)
            num_new = max(1, arrival.prompt - arrival.prefix)
            message = ("user", " ".join(self.rng.choices(ONE_TOKEN_WORDS, k=num_new)))
            messages = [*messages, message] if arrival.prefix else [message]
            self.num_running += 1
            answer = await self.client.send(
                messages, arrival.output, self.records[i], arrival.priority
            )
            self.num_running -= 1
            self.num_done += 1
            messages.append(("assistant", answer))


async def detect_target(
    url: str, api: str, model: str | None, api_key: str | None, **more: Any
) -> BenchTarget:
    """Ask the server for its API (if `api` is "auto") and the name of its model."""
    client = BenchClient(BenchTarget(url, "chat", "", api_key))
    status, body = await client.get("/v1/models")
    if status == 0:
        raise ConfigError(f"no server answers at {url}; is it up?")
    if api == "auto":
        api = "chat" if status == 200 else "tgi"
    if model is None and status == 200 and api != "tgi":
        try:
            model = str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise ConfigError(f"{url}/v1/models names no model; give --model") from None
    if model is None and api == "tgi":  # TGI's API needs no name; the report shows it
        model = (await fetch_info(client)).get("model_id")
    return BenchTarget(url, api, model or "default", api_key, **more)


async def fetch_info(client: BenchClient) -> dict[str, Any]:
    """The server's /info, or an empty dict if it has none."""
    status, body = await client.get("/info")
    if status != 200:
        return {}
    try:
        info = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return info if isinstance(info, dict) else {}


async def refuse_profilers(client: BenchClient) -> None:
    """Raise ConfigError if a profiler is active in this process or in the server."""
    process = "this process"
    profiler = active_profiler()
    if profiler is None:
        process = "the server"
        profiler = (await fetch_info(client)).get("profiling")
    if profiler:
        raise ConfigError(
            f"{process} is being profiled ({profiler}), so its times would be wrong. "
            "Stop the profiler and run again"
        )


# ---- a run ---------------------------------------------------------------------------------------


async def run_load(
    target: BenchTarget,
    arrivals: Sequence[RequestArrival],
    targets: GoodputTargets,
    num_warmup: int,
    seed: int,
) -> dict[str, Any]:
    """Send the workload and return its summary, with the curves that the report draws."""
    client = BenchClient(target)
    await refuse_profilers(client)
    if num_warmup:
        warmup = [
            RequestArrival(0.0, arrival.prompt, min(WARMUP_OUTPUT, arrival.output))
            for arrival in arrivals[:num_warmup]
        ]
        await LoadGenerator(client, warmup, seed + 1).run()
    generator = LoadGenerator(client, arrivals, seed)
    cpu_before = _cpu_seconds()
    start = time.perf_counter()
    live_view = asyncio.create_task(show_progress(generator)) if sys.stderr.isatty() else None
    records = await generator.run()
    if live_view:
        live_view.cancel()
    cpu_share = (_cpu_seconds() - cpu_before) / (time.perf_counter() - start)
    client.close()
    await refuse_profilers(client)
    return {
        **summarize_records(records, targets),
        "client_cpu_share": round(cpu_share, 3),
        "curves": build_curves(records),
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def build_curves(records: Sequence[RequestRecord]) -> dict[str, list[list[float]]]:
    """The report's curves: distributions as (ms, percent), and tokens of each second."""
    answered = [record for record in records if record.answered]
    return {
        "ttft": _distribution([record.ttft for record in answered]),
        "itl": _distribution(
            [gap for record in answered for gap in record.inter_token_latencies()]
        ),
        "e2e_latency": _distribution([record.e2e_latency for record in answered]),
        "tokens_by_second": _tokens_by_second(records, answered),
    }


def _distribution(seconds: Sequence[float]) -> list[list[float]]:
    if not seconds:
        return []
    ordered = sorted(seconds)
    points = []
    for percent in range(0, 101, 2):
        value = percentile(ordered, percent) or 0.0
        points.append([round(value * 1e3, 3), percent])
    return points


def _tokens_by_second(
    records: Sequence[RequestRecord], answered: Sequence[RequestRecord]
) -> list[list[float]]:
    """(second, tokens) for every second of the run, including seconds without tokens."""
    first_sent = min((record.sent for record in records), default=0.0)
    tokens: dict[int, float] = defaultdict(float)
    for record in answered:
        tokens_per_piece = record.output_tokens / len(record.piece_times)
        for piece_time in record.piece_times:
            tokens[int(piece_time - first_sent)] += tokens_per_piece
    num_seconds = max(tokens, default=-1) + 1
    return [[float(second), round(tokens.get(second, 0.0), 1)] for second in range(num_seconds)]


async def show_progress(generator: LoadGenerator) -> None:
    """The live view on the terminal: a progress bar, pieces per second and recent TTFT."""
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    total = len(generator.arrivals)

    def build_frame(pieces_per_second: float) -> Table:
        num_done = generator.num_done
        num_running = generator.num_running
        recent = generator.records[max(0, num_done - RECENT_REQUESTS) : num_done + num_running]
        ttfts = sorted(record.ttft for record in recent if len(record.piece_times))
        median_ms = (percentile(ttfts, 50) or 0.0) * 1e3
        p99_ms = (percentile(ttfts, 99) or 0.0) * 1e3
        num_failed = sum(record.error is not None for record in generator.records)
        failures = f", {num_failed} failed" if num_failed else ""
        table = Table.grid(padding=(0, 2))
        for width in (16, None, None, None):
            table.add_column(no_wrap=True, width=width)
        table.add_row(
            ProgressBar(total, num_done),
            f"{num_done}/{total} done, {num_running} open{failures}",
            f"{pieces_per_second:,.0f} pieces/s",
            f"TTFT {median_ms:,.0f} ms, p99 {p99_ms:,.0f}",
        )
        return table

    console = Console(stderr=True)
    last_pieces = 0
    with Live(build_frame(0.0), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            num_pieces = sum(len(record.piece_times) for record in generator.records)
            frame = build_frame((num_pieces - last_pieces) / REFRESH_SECONDS)
            live.update(frame, refresh=True)
            last_pieces = num_pieces

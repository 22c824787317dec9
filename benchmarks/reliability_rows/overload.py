"""Rows about load: streams, overload, fairness, idlers, isolation, descriptors, memory.

A busy server must stay ready, refuse quickly and serve its running streams at full speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.reliability_rows.report import (
    print_row,
    quantile,
    show_progress,
    to_milliseconds,
)
from benchmarks.reliability_rows.servers import (
    THREE_RANKS,
    events_per_second,
    listening_addresses,
    open_silent_connection,
    processor_seconds,
    rank_pids,
    read_result,
    run_embedded_model,
    run_fake_server,
    run_server_command,
    start_load,
    start_stream_crowd,
)
from tests.chaos.http import (
    FAKE_SERVER,
    LONG_COMPLETION,
    RefusedError,
    RunningServer,
    get_status,
    read_completion,
    send_request,
    stream_events,
)
from tests.chaos.stream_load import RequestAttempt, attempt_requests, drain_stream

MAX_GAP_SECONDS = 2
MAX_API_BYTES = 600e6
MAX_REFUSAL_SECONDS = 0.05
MIN_THROUGHPUT_SHARE = 0.95
MAX_BYTES_PER_REQUEST = 1024
ALONE_SECONDS = 10.0  # of load before the overload begins


def check_streams(args: argparse.Namespace) -> bool:
    """Hold many streams at once, at 10 tokens a second each."""
    num_tokens = int(10 * args.seconds)
    body = LONG_COMPLETION | {"max_tokens": num_tokens}
    gaps: list[float] = []
    peak_bytes = 0
    num_not_ready = 0

    async def run_streams(server: RunningServer) -> list[BaseException | None]:
        nonlocal peak_bytes, num_not_ready
        streams = [
            asyncio.create_task(
                drain_stream(server.port, body, lambda data, gap_seconds: gaps.append(gap_seconds))
            )
            for _ in range(args.streams)
        ]
        while not all(stream.done() for stream in streams):
            peak_bytes = max(peak_bytes, server.resident_bytes)
            num_not_ready += await get_status(server.port, "/ready") != 200
            await asyncio.sleep(1.0)
        return await asyncio.gather(*streams, return_exceptions=True)

    options = (
        f"--max-num-seqs {args.streams} --max-num-batched-tokens 8192"
        f" --limits requests={args.streams + 24}"
    )
    with run_fake_server("--instant --delay 0.1 --blocks 1000000", options) as server:
        begin = time.monotonic()
        results = asyncio.run(run_streams(server))
        seconds = time.monotonic() - begin
    num_errors = sum(isinstance(result, BaseException) for result in results)
    longest_gap = max(gaps)
    print_row(
        row="streams",
        streams=args.streams,
        tokens=num_tokens,
        errors=num_errors,
        seconds=round(seconds, 1),
        tokens_per_second=round(args.streams * num_tokens / seconds),
        p99_gap_s=round(quantile(gaps, 0.99), 2),
        longest_gap_s=round(longest_gap, 2),
        api_mb=round(peak_bytes / 1e6),
        not_ready=num_not_ready,
    )
    is_healthy = num_errors == 0 and num_not_ready == 0
    return is_healthy and longest_gap < MAX_GAP_SECONDS and peak_bytes < MAX_API_BYTES


def check_overload(args: argparse.Namespace) -> bool:
    """Fill a server, then send several times as many requests, which must be refused.

    Refusals carry a Retry-After header, and the running streams must not slow down. Another process
    of lower priority reads the streams. This process only sends requests at random times, so
    reading does not delay its clock. Refusals are timed from the client, connecting included, and
    by the server's own log.
    """
    ramp_seconds = args.admitted / 100
    num_tokens = int(1.3 * 10 * (ramp_seconds + ALONE_SECONDS + args.seconds))

    async def run_load(port: int) -> tuple[dict[str, Any], list[RequestAttempt], float]:
        crowd = await start_stream_crowd(port, args.admitted, num_tokens, ramp_seconds)
        await asyncio.sleep(ALONE_SECONDS)
        begin = time.monotonic()
        num_refused = args.streams - args.admitted
        delays = [random.uniform(0, args.seconds) for _ in range(num_refused)]
        attempts = await asyncio.to_thread(attempt_requests, port, delays)
        return await read_result(crowd), attempts, begin

    options = (
        f"--max-num-seqs {args.admitted} --max-num-batched-tokens 8192 --policy fcfs"
        f" --limits requests={args.admitted}"
    )
    with run_fake_server("--instant --delay 0.1 --blocks 100000", options) as server:
        crowd, attempts, begin = asyncio.run(run_load(server.port))
        log_records = read_log(server, '"status": 429')
    event_counts = crowd["event_counts"]
    rate_alone = events_per_second(event_counts, begin - ALONE_SECONDS, begin)
    rate_overloaded = events_per_second(event_counts, begin, begin + args.seconds)
    statuses = Counter(parse_status(attempt.response) for attempt in attempts)
    statuses[200] += crowd["complete"]
    num_without_advice = sum(b"retry-after: " not in attempt.response for attempt in attempts)
    refusal_seconds = [attempt.seconds for attempt in attempts]
    refusal_p99 = quantile(refusal_seconds, 0.99)
    server_p99 = quantile([record["seconds"] for record in log_records], 0.99)
    print_row(
        row="overload",
        offered=args.streams,
        statuses=dict(statuses),
        without_retry_after=num_without_advice,
        refused_p50_ms=to_milliseconds(quantile(refusal_seconds, 0.5)),
        refused_p99_ms=to_milliseconds(refusal_p99),
        refused_p99_in_server_ms=to_milliseconds(server_p99),
        tokens_per_second=round(rate_overloaded),
        tokens_per_second_alone=round(rate_alone),
        goodput=round(rate_overloaded / rate_alone, 3),
        failed=crowd["failed"],
        errors=crowd["errors"],
        longest_gap_s=round(crowd["longest_gap_s"], 2),
    )
    all_answered = set(statuses) <= {200, 429} and not crowd["failed"]
    is_fast = refusal_p99 < MAX_REFUSAL_SECONDS
    is_full_speed = rate_overloaded >= MIN_THROUGHPUT_SHARE * rate_alone
    return all_answered and not num_without_advice and is_fast and is_full_speed


def parse_status(response: bytes) -> int:
    """Return the status of the bytes of a response, 0 if there are none."""
    return int(response[9:12] or 0)


def read_log(server: RunningServer, text: str, offset: int = 0) -> list[dict[str, Any]]:
    """Return the records of the server's JSON log that contain `text`, after `offset` bytes."""
    log = server.log.read_bytes()[offset:].decode()
    return [json.loads(line) for line in log.splitlines() if text in line]


def check_fairness(args: argparse.Namespace) -> bool:
    """One API key offers twenty times the load of another, whose TTFT may at most double."""
    api_keys = {"light": "one-key", "heavy": "another-key"}
    body = LONG_COMPLETION | {"max_tokens": 12}
    statuses: Counter[tuple[str, int]] = Counter()

    async def run_request(port: int, user: str, ttft_seconds: list[float]) -> None:
        """Send one request at a random time; append its TTFT unless it is refused."""
        await asyncio.sleep(random.uniform(0, args.seconds))
        begin = time.monotonic()
        headers = {"x-api-key": api_keys[user], "x-request-id": user}
        is_first = True
        try:
            async for _ in stream_events(port, "/v1/completions", body, **headers):
                if is_first:
                    ttft_seconds.append(time.monotonic() - begin)
                is_first = False
            statuses[user, 200] += 1
        except RefusedError as error:
            statuses[user, error.response.status] += 1

    async def measure_ttft(port: int, heavy_ratio: int) -> float:
        """Return the TTFT p99 of the light user beside `heavy_ratio` times as many requests."""
        ttft_seconds: list[float] = []
        num_requests = int(4 * args.seconds)
        light = [run_request(port, "light", ttft_seconds) for _ in range(num_requests)]
        heavy = [run_request(port, "heavy", []) for _ in range(heavy_ratio * num_requests)]
        await asyncio.gather(*light, *heavy)
        return quantile(ttft_seconds, 0.99)

    keys_option = ",".join(api_keys.values())
    options = f"--max-num-seqs 16 --limits requests=128 --api-key {keys_option}"
    with run_fake_server("--instant --delay 0.05 --blocks 4000", options) as server:
        ttft_alone = asyncio.run(measure_ttft(server.port, heavy_ratio=0))
        log_offset = server.log.stat().st_size
        ttft_contended = asyncio.run(measure_ttft(server.port, heavy_ratio=20))
        log_records = read_log(server, '"queue": ', log_offset)
    light_records = [record for record in log_records if record["request"] == "light"]
    queue_p99 = quantile([record["queue"] for record in light_records], 0.99)
    server_ttft_p99 = quantile([record["ttft"] for record in light_records], 0.99)
    print_row(
        row="fairness",
        ttft_p99_alone_ms=to_milliseconds(ttft_alone, 0),
        ttft_p99_contended_ms=to_milliseconds(ttft_contended, 0),
        ratio=round(ttft_contended / ttft_alone, 2),
        queue_p99_in_server_ms=to_milliseconds(queue_p99, 0),
        ttft_p99_in_server_ms=to_milliseconds(server_ttft_p99, 0),
        statuses={f"{user} {status}": count for (user, status), count in sorted(statuses.items())},
    )
    return ttft_contended <= 2 * ttft_alone and not statuses["light", 429]


def check_idlers(args: argparse.Namespace) -> bool:
    """Fifty peers request a stream and never read it, and fifty send nothing.

    The throughput of other readers must not drop. Then strangers connect to the sockets of the
    ranks and send noise: the text must not change.
    """
    alone_seconds = args.seconds / 2
    num_tokens = int(20 * (alone_seconds + args.seconds + 5))
    unread_body = LONG_COMPLETION | {"max_tokens": 2000}
    idle_bodies = [unread_body] * 50 + [None] * 50

    async def run_load(port: int) -> tuple[dict[str, Any], float]:
        crowd = await start_stream_crowd(port, 100, num_tokens, 1.0)
        await asyncio.sleep(alone_seconds)
        idle_connections = [open_silent_connection(port, body) for body in idle_bodies]
        begin = time.monotonic()
        await asyncio.sleep(args.seconds)
        for connection in idle_connections:
            connection.close()
        return await read_result(crowd), begin

    options = "--max-num-seqs 256 --policy fcfs --limits stall_seconds=600"
    with run_fake_server("--instant --delay 0.05 --blocks 100000", options) as server:
        crowd, begin = asyncio.run(run_load(server.port))
    event_counts = crowd["event_counts"]
    rate_alone = events_per_second(event_counts, begin - alone_seconds, begin)
    rate_with_idlers = events_per_second(event_counts, begin, begin + args.seconds)
    is_text_same, num_rank_sockets = connect_strangers_to_ranks()
    print_row(
        row="idlers",
        seconds=args.seconds,
        tokens_per_second=round(rate_with_idlers),
        tokens_per_second_alone=round(rate_alone),
        share=round(rate_with_idlers / rate_alone, 3),
        failed=crowd["failed"],
        rank_sockets=num_rank_sockets,
        text_is_same=is_text_same,
    )
    is_full_speed = rate_with_idlers >= MIN_THROUGHPUT_SHARE * rate_alone
    return not crowd["failed"] and is_full_speed and is_text_same


def connect_strangers_to_ranks() -> tuple[bool, int]:
    """Send noise to every listening socket of three ranks.

    Returns whether the text and the ranks stay the same, and the number of sockets.
    """
    body = LONG_COMPLETION | {"prompt": "The history of iron", "max_tokens": 40}
    with run_embedded_model(THREE_RANKS) as server, contextlib.ExitStack() as connections:
        ranks = rank_pids(server)
        expected = asyncio.run(read_completion(server.port, body))
        addresses = [address for pid in ranks for address in listening_addresses(pid)]
        for host, port in addresses:
            if not host.startswith("127."):
                return False, len(addresses)
            connection = connections.enter_context(socket.create_connection((host, port)))
            connection.sendall(random.randbytes(64))
        texts = [asyncio.run(read_completion(server.port, body)) for _ in range(3)]
        is_unharmed = rank_pids(server) == ranks
        return texts == [expected] * 3 and is_unharmed, len(addresses)


def check_isolation(args: argparse.Namespace) -> bool:
    """Fifty connections send megabytes of text, deep bodies and long lists.

    The ITL p99 of a stream at the same time may at most double.
    """
    warm_up_seconds = 3
    num_tokens = int(20 * 2.5 * args.seconds)
    body = LONG_COMPLETION | {"max_tokens": num_tokens}

    async def measure_gaps(port: int) -> tuple[list[float], list[float], dict[str, int]]:
        """Return the gaps between tokens before and during the flood, and its statuses."""
        gaps_alone: list[float] = []
        gaps_flooded: list[float] = []
        flood = None
        begin = time.monotonic()
        last_event = begin
        async for _ in stream_events(port, "/v1/completions", body):
            now = time.monotonic()
            elapsed = now - begin
            if 1 < elapsed < args.seconds:
                gaps_alone.append(now - last_event)
            elif args.seconds + warm_up_seconds < elapsed < 2 * args.seconds:
                gaps_flooded.append(now - last_event)
            last_event = now
            if flood is None and elapsed > args.seconds:
                flood = await start_load("flood", port, args.seconds + warm_up_seconds, 50)
                last_event = time.monotonic()
        assert flood is not None
        return gaps_alone, gaps_flooded, await read_result(flood)

    engine = "--scripted --delay 0.05 --blocks 100000 --context 65536"
    with run_fake_server(engine, "--limits requests=256") as server:
        engine_pids = server.children("engine")
        gaps_alone, gaps_flooded, statuses = asyncio.run(measure_gaps(server.port))
        is_ready = asyncio.run(get_status(server.port, "/ready")) == 200
        is_unharmed = is_ready and server.children("engine") == engine_pids
    itl_alone = quantile(gaps_alone, 0.99)
    itl_flooded = quantile(gaps_flooded, 0.99)
    print_row(
        row="isolation",
        itl_p99_alone_ms=to_milliseconds(itl_alone),
        itl_p99_flooded_ms=to_milliseconds(itl_flooded),
        ratio=round(itl_flooded / itl_alone, 2),
        longest_ms=to_milliseconds(max(gaps_flooded), 0),
        statuses=statuses,
        unharmed=is_unharmed,
    )
    has_server_error = any(int(status) >= 500 for status in statuses)
    return itl_flooded < 2 * itl_alone and is_unharmed and not has_server_error


def check_descriptors(args: argparse.Namespace) -> bool:
    """Open 400 connections to a server that may have 256 open files.

    A stream continues, retrying to accept does not take a core, and the server recovers when the
    connections are gone.
    """
    body = LONG_COMPLETION | {"max_tokens": 200}

    async def exhaust_descriptors(server: RunningServer) -> tuple[str, str, float]:
        """Return the expected text, that of a stream meanwhile, and processor seconds of 3 s."""
        expected = await read_completion(server.port, body)
        stream = asyncio.create_task(read_completion(server.port, body))
        await asyncio.sleep(0.1)
        connections = [open_silent_connection(server.port) for _ in range(400)]
        text = await stream
        seconds_before = processor_seconds(server.process.pid)
        await asyncio.sleep(3.0)
        spent_seconds = processor_seconds(server.process.pid) - seconds_before
        for connection in connections:
            connection.close()
        return expected, text, spent_seconds

    with_few_files = ("bash", "-c", 'ulimit -n 256 && exec "$0" "$@"')
    with run_server_command(*with_few_files, sys.executable, str(FAKE_SERVER)) as server:
        expected, text, spent_seconds = asyncio.run(exhaust_descriptors(server))
        begin = time.monotonic()
        while asyncio.run(get_status(server.port, "/ready")) != 200:
            if time.monotonic() - begin > 30:
                break
            time.sleep(0.1)
        serves_again = asyncio.run(read_completion(server.port, body)) == expected
    is_stream_complete = text == expected
    print_row(
        row="descriptors",
        stream_complete=is_stream_complete,
        processor_seconds_of_3=round(spent_seconds, 2),
        serves_again=serves_again,
        after_s=round(time.monotonic() - begin, 1),
    )
    return is_stream_complete and serves_again and spent_seconds < 1.0


def check_memory(args: argparse.Namespace) -> bool:
    """Measure the growth of the API process per request, after a warm-up of a tenth."""
    all_passed = True
    for kind in ("mixed", "aborted", "refused", "schemas"):
        samples = measure_growth(kind, args.times)
        num_requests, resident_bytes = zip(*samples, strict=True)
        slope, _ = statistics.linear_regression(num_requests, resident_bytes)
        print_row(
            row="memory",
            kind=kind,
            requests=args.times,
            bytes_per_request=round(slope),
            mb=round(resident_bytes[-1] / 1e6),
        )
        all_passed &= slope < MAX_BYTES_PER_REQUEST
    return all_passed


def measure_growth(kind: str, times: int) -> list[tuple[int, int]]:
    """Send requests of one kind; return (requests so far, resident bytes) after the warm-up."""
    batch_size = 50

    async def run_requests(server: RunningServer) -> list[tuple[int, int]]:
        samples = []
        for first in range(0, times * 11 // 10, batch_size):
            numbers = range(first, first + batch_size)
            await asyncio.gather(*(run_request(server.port, kind, number) for number in numbers))
            show_progress(f"memory: {kind}", times, batch_size)
            if first >= times // 10:
                samples.append((first, server.resident_bytes))
        return samples

    with run_fake_server("--instant", "--limits stored_responses=50") as server:
        return asyncio.run(run_requests(server))


async def run_request(port: int, kind: str, number: int) -> None:
    """Send one request of the row `memory`; `number` makes its content unique."""
    body = {"prompt": f"The iron {number}", "max_tokens": 4, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": f"iron {number}"}], "max_tokens": 4}
    if kind == "refused":
        unknown_model = {"model": f"unknown-{number}"}
        await send_request(port, "POST", "/v1/completions", body | unknown_model)
    elif kind == "schemas":
        schema = {"type": "object", "properties": {f"p{number}": {}}}
        json_schema = {"name": f"s{number}", "schema": schema}
        response_format = {"type": "json_schema", "json_schema": json_schema}
        constrained = chat | {"response_format": response_format}
        await send_request(port, "POST", "/v1/chat/completions", constrained)
    elif kind == "aborted":
        long_stream = body | {"max_tokens": 500, "stream": True}
        async for _ in stream_events(port, "/v1/completions", long_stream):
            return
    elif number % 4 == 0:
        await send_request(port, "POST", "/v1/chat/completions", chat)
    elif number % 4 == 1:
        async for _ in stream_events(port, "/v1/completions", body | {"stream": True}):
            pass
    else:
        await send_request(port, "POST", "/v1/completions", body)

"""Rows about hostile input: bad, invalid, files.

Wrong requests and damaged files must be refused, quickly, with an error that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections import Counter

from benchmarks.reliability_rows.report import print_row, show_progress
from benchmarks.reliability_rows.servers import ROOT, run_fake_server
from tests.chaos.http import (
    LONG_COMPLETION,
    KeepAliveConnection,
    RunningServer,
    get_status,
    read_completion,
)
from tests.chaos.invalid_bodies import random_invalid_body
from tests.server.test_errors import INTERNAL_DETAIL

NUM_CONNECTIONS = 16
MAX_REFUSAL_SECONDS = 1


def check_bad(args: argparse.Namespace) -> bool:
    """Run tests/chaos/test_bad_requests.py in four ways."""
    results = [
        run_bad_requests("one at a time"),
        run_bad_requests("python -O", python=("-O",)),
        run_bad_requests("16 at a time", pytest_options=("-n", "16")),
        run_bad_requests("64 streams", num_streams=64),
    ]
    return all(results)


def run_bad_requests(
    way: str,
    python: tuple[str, ...] = (),
    pytest_options: tuple[str, ...] = (),
    num_streams: int = 0,
) -> bool:
    """Run the bad requests against a server, with `num_streams` good streams at the same time."""
    body = LONG_COMPLETION | {"max_tokens": 60}
    test_command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    test_file = "tests/chaos/test_bad_requests.py"

    async def run_tests(server: RunningServer) -> tuple[int, list[str]]:
        """Return the exit code of the tests and the texts of the streams."""
        server_option = ("--server", str(server.port))
        process = await asyncio.create_subprocess_exec(
            *test_command,
            test_file,
            *server_option,
            *pytest_options,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        tests = asyncio.create_task(process.wait())
        texts = list[str]()
        while num_streams and not tests.done():
            streams = (read_completion(server.port, body) for _ in range(num_streams))
            texts += await asyncio.gather(*streams)
        return await tests, texts

    engine = "--scripted --delay 0.002 --blocks 4000 --context 512"
    with run_fake_server(engine, python=python) as server:
        engine_pids = server.children("engine")
        expected = asyncio.run(read_completion(server.port, body))
        exit_code, texts = asyncio.run(run_tests(server))
        is_unharmed = server.children("engine") == engine_pids
    num_wrong = len(texts) - texts.count(expected)
    print_row(
        row="bad",
        way=way,
        as_listed=exit_code == 0,
        engine_unharmed=is_unharmed,
        streams=len(texts),
        streams_wrong=num_wrong,
    )
    return exit_code == 0 and is_unharmed and num_wrong == 0


def check_invalid(args: argparse.Namespace) -> bool:
    """Send random invalid bodies over 16 connections: no status above 499, no slow refusal."""
    body_random = random.Random(args.seed)
    statuses: Counter[int] = Counter()
    slowest_seconds = 0.0
    num_leaks = 0

    async def run_connection(port: int) -> None:
        nonlocal slowest_seconds, num_leaks
        connection = KeepAliveConnection(port)
        while statuses.total() - statuses[200] < args.times:
            path, data = random_invalid_body(body_random)
            begin = time.monotonic()
            response = await connection.post(path, data)
            statuses[response.status] += 1
            if response.status == 200:  # the changes left the body valid
                continue
            slowest_seconds = max(slowest_seconds, time.monotonic() - begin)
            if INTERNAL_DETAIL.search(response.body.decode("utf-8", "replace")):
                num_leaks += 1
            show_progress("invalid", args.times)
        connection.close()

    async def run_connections(port: int) -> None:
        await asyncio.gather(*(run_connection(port) for _ in range(NUM_CONNECTIONS)))

    with run_fake_server("--scripted") as server:
        engine_pids = server.children("engine")
        begin = time.monotonic()
        asyncio.run(run_connections(server.port))
        ready_status = asyncio.run(get_status(server.port, "/ready"))
        is_unharmed = server.children("engine") == engine_pids
    print_row(
        row="invalid",
        bodies=statuses.total(),
        statuses=dict(sorted(statuses.items())),
        slowest_s=round(slowest_seconds, 3),
        ready=ready_status,
        engine_unharmed=is_unharmed,
        leaks=num_leaks,
        seconds=round(time.monotonic() - begin, 1),
    )
    is_refused = max(statuses) < 500 and slowest_seconds <= MAX_REFUSAL_SECONDS
    return is_refused and num_leaks == 0 and ready_status == 200 and is_unharmed


def check_files(args: argparse.Namespace) -> bool:
    """Open damaged checkpoints in a process of its own; see tests/chaos/damaged_files.py."""
    module = "tests.chaos.damaged_files"
    command = [sys.executable, "-m", module, str(args.times), str(args.seed)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(result.stdout.strip() or result.stderr[-500:], flush=True)
    return result.returncode == 0

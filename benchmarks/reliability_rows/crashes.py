"""Rows about crashes and faults: kills, text, faults, poison, storm, seeds.

Streams must continue with the same tokens after an engine, a rank or a connection is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.reliability_rows.report import print_row, show_progress
from benchmarks.reliability_rows.servers import (
    THREE_RANKS,
    TOLERANT_LIMITS,
    open_silent_connection,
    rank_pids,
    run_embedded_model,
    run_fake_server,
    wait_for_readiness,
)
from bloomery.engine.client import EngineClient, EngineTimeouts
from tests.chaos.fake_engine import POISON, fake_engine_command, fake_plan
from tests.chaos.http import (
    LONG_COMPLETION,
    RefusedError,
    RunningServer,
    is_alive,
    read_completion,
    seconds_until_idle,
    send_request,
    stream_events,
)
from tests.chaos.test_engine_crashes import (
    MANY_RESTARTS,
    kill_engines,
    random_requests,
    read_stream,
    test_one_bad_request_among_many_fails_alone,
)
from tests.simulation.simulated_engine import FaultRates, find_failure

Result = TypeVar("Result")

NUM_STREAMS = 8  # under most faults
NUM_DRAINED_STREAMS = 200
NUM_FAILING_CALLS = 200
MAX_SECONDS_UNTIL_NOT_READY = 10
MAX_ORPHAN_SECONDS = 5
MAX_SECONDS_UNTIL_IDLE = 2


def check_kills(args: argparse.Namespace) -> bool:
    """Kill engines under streams and compare every token of every stream with the reference."""
    begin = time.monotonic()
    num_engines = asyncio.run(kill_engines(args.times, args.streams, args.seed))
    print_row(
        row="kills",
        kills=args.times,
        streams=args.times * args.streams,
        engines=num_engines,
        lost=0,
        doubled=0,
        seconds=round(time.monotonic() - begin, 1),
    )
    return True


def check_text(args: argparse.Namespace) -> bool:
    """Kill the embedded model's engine in deterministic mode: the text must not change."""
    properties = ("history", "price", "colour", "sound", "weight", "smell")
    things = ("iron", "river", "city", "machine", "winter", "road")
    pairs = itertools.product(properties, things)
    prompts = [f"The {name} of the {thing}" for name, thing in pairs][: args.streams]
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": args.tokens,
            "temperature": number % 2,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
        for number, prompt in enumerate(prompts)
    ]
    num_same = 0

    async def read_all(server: RunningServer) -> list[str]:
        return await asyncio.gather(*(read_completion(server.port, body) for body in bodies))

    async def read_all_with_kill(server: RunningServer, run_seconds: float) -> list[str]:
        task = asyncio.create_task(read_all(server))
        await asyncio.sleep(random.uniform(0.1, 0.9) * run_seconds)
        for pid in server.children("engine_main"):
            os.kill(pid, signal.SIGKILL)
        return await task

    with run_embedded_model(f"--threads 2 {TOLERANT_LIMITS}") as server:
        begin = time.monotonic()
        expected = asyncio.run(read_all(server))
        run_seconds = time.monotonic() - begin
        for _ in range(args.times):
            texts = asyncio.run(read_all_with_kill(server, run_seconds))
            num_same += sum(text == want for text, want in zip(texts, expected, strict=True))
            show_progress("text", args.times)
    num_texts = args.times * len(expected)
    print_row(
        row="text",
        kills=args.times,
        streams=num_texts,
        identical=num_same,
        seconds=round(time.monotonic() - begin),
    )
    return num_same == num_texts


def check_poison(args: argparse.Namespace) -> bool:
    """Run one bad request among 31 good ones; only the bad one may fail."""
    test_one_bad_request_among_many_fails_alone(POISON, EngineTimeouts())
    print_row(row="poison", succeeded=31, failed=1, restarts="at most 3")
    return True


def check_storm(args: argparse.Namespace) -> bool:
    """Clients that leave, several answers per request, deadlines and kills at the same time.

    All KV cache blocks must be free within 2 s.
    """

    async def run_client(port: int) -> None:
        body = LONG_COMPLETION | {
            "max_tokens": random.randrange(1, 80),
            "n": random.choice([1, 1, 3]),
        }
        headers = {}
        if random.random() < 0.2:
            headers["x-request-deadline-ms"] = "300"
        last_event = random.choice([None, random.randrange(1, 20)])
        num_events = 0
        try:
            async for _ in stream_events(port, "/v1/completions", body, **headers):
                num_events += 1
                if num_events == last_event:
                    return
        except (RefusedError, OSError):
            pass

    async def run_storm(server: RunningServer) -> float:
        tasks = [asyncio.create_task(run_client(server.port)) for _ in range(60)]
        await asyncio.sleep(random.random())
        num_kills = random.randrange(2)
        # There is no engine while the last one is being replaced.
        for engine in server.children("engine")[:num_kills]:
            os.kill(engine, signal.SIGKILL)
        await asyncio.gather(*tasks)
        return await seconds_until_idle(server.port)

    engine = "--scripted --delay 0.005 --blocks 4000"
    with run_fake_server(engine, TOLERANT_LIMITS) as server:
        idle_seconds = [asyncio.run(run_storm(server)) for _ in range(args.times)]
    slowest = max(idle_seconds)
    print_row(row="storm", storms=args.times, slowest_free_s=round(slowest, 2))
    return slowest <= MAX_SECONDS_UNTIL_IDLE


def check_seeds(args: argparse.Namespace) -> bool:
    """One seed gives the same four answers in any batch and across crashes."""
    body = {
        "prompt": "The iron",
        "max_tokens": 30,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 42,
        "n": 4,
    }
    answers: Counter[tuple[str, ...]] = Counter()

    async def run_once(server: RunningServer, with_kill: bool) -> None:
        lengths = [random.randrange(5, 60) for _ in range(8)]
        other_bodies = [
            LONG_COMPLETION | {"max_tokens": length, "temperature": 1.0} for length in lengths
        ]
        others = [
            asyncio.create_task(read_completion(server.port, other_body))
            for other_body in other_bodies
        ]
        request = asyncio.create_task(send_request(server.port, "POST", "/v1/completions", body))
        if with_kill:
            await asyncio.sleep(0.03)
            os.kill(server.children("engine")[0], signal.SIGKILL)
        response = await request
        texts = tuple(choice["text"] for choice in response.json["choices"])
        answers[texts] += 1
        await asyncio.gather(*others)

    with run_fake_server("--scripted --delay 0.002", TOLERANT_LIMITS) as server:
        for number in range(args.times):
            asyncio.run(run_once(server, with_kill=number % 5 == 4))
    num_distinct_texts = len(set(next(iter(answers))))
    print_row(
        row="seeds",
        runs=args.times,
        different_answers=len(answers),
        distinct_of_four=num_distinct_texts,
    )
    return len(answers) == 1 and num_distinct_texts == 4


# ---- the faults of the row `faults` --------------------------------------------------------


@dataclass
class FaultResult:
    passed: bool
    figures: dict[str, Any]


def check_faults(args: argparse.Namespace) -> bool:
    """Try every fault of FAULTS and print a line for each."""
    all_passed = True
    for name, try_fault in FAULTS.items():
        begin = time.monotonic()
        result = try_fault(args)
        all_passed &= result.passed
        seconds = round(time.monotonic() - begin, 1)
        print_row(row="faults", fault=name, seconds=seconds, **result.figures)
    return all_passed


def repeat_in_parallel(
    times: int, repeat: Callable[[int], list[Result]], num_servers: int = 4
) -> list[Result]:
    """Divide the repetitions among a few servers that run at the same time.

    Most of the time of a fault is spent waiting until it is noticed. `repeat` takes a number of
    repetitions, starts its own server and returns one result per repetition.
    """
    shares = [times // num_servers + (index < times % num_servers) for index in range(num_servers)]
    with ThreadPoolExecutor(num_servers) as pool:
        results = pool.map(repeat, [share for share in shares if share])
        return list(itertools.chain.from_iterable(results))


def stop_engine(args: argparse.Namespace) -> FaultResult:
    """SIGSTOP the engine under 8 streams.

    The server must not be ready within 10 s. The engine is replaced and all streams complete.
    """
    body = LONG_COMPLETION | {"max_tokens": 100}

    async def stop_once(server: RunningServer, expected: str) -> tuple[int, float]:
        streams = [
            asyncio.create_task(read_completion(server.port, body)) for _ in range(NUM_STREAMS)
        ]
        await asyncio.sleep(0.3)
        os.kill(server.children("engine")[0], signal.SIGSTOP)
        begin = time.monotonic()
        await wait_for_readiness(server.port, is_ready=False)
        seconds = time.monotonic() - begin
        texts = await asyncio.gather(*streams)
        await wait_for_readiness(server.port, is_ready=True)
        show_progress("stop", args.times)
        return texts.count(expected), seconds

    def repeat(times: int) -> list[tuple[int, float]]:
        options = f"--step-timeout 3 {TOLERANT_LIMITS}"
        with run_fake_server("--scripted --delay 0.01", options) as server:
            expected = asyncio.run(read_completion(server.port, body))
            return [asyncio.run(stop_once(server, expected)) for _ in range(times)]

    results = repeat_in_parallel(args.times, repeat)
    num_complete = sum(count for count, _ in results)
    slowest = max(seconds for _, seconds in results)
    all_complete = num_complete == NUM_STREAMS * args.times
    figures = {
        "times": args.times,
        "complete": num_complete,
        "not_ready_after_s": round(slowest, 1),
    }
    return FaultResult(all_complete and slowest <= MAX_SECONDS_UNTIL_NOT_READY, figures)


def kill_rank(args: argparse.Namespace) -> FaultResult:
    """Kill one of three ranks of the embedded model under 4 streams: the text must not change."""
    num_streams = 4
    body = LONG_COMPLETION | {"prompt": "The history of iron", "max_tokens": 40}
    num_same = 0

    async def kill_once(server: RunningServer) -> list[str]:
        tasks = [
            asyncio.create_task(read_completion(server.port, body)) for _ in range(num_streams)
        ]
        await asyncio.sleep(random.uniform(0.5, 3.0))
        while not (ranks := rank_pids(server)):  # they may be restarting
            await asyncio.sleep(0.05)
        os.kill(random.choice(ranks), signal.SIGKILL)
        return await asyncio.gather(*tasks)

    with run_embedded_model(f"{THREE_RANKS} {TOLERANT_LIMITS}") as server:
        expected = asyncio.run(read_completion(server.port, body))
        for _ in range(args.times):
            texts = asyncio.run(kill_once(server))
            num_same += texts.count(expected)
            show_progress("rank", args.times)
    figures = {"times": args.times, "complete": num_same}
    return FaultResult(num_same == num_streams * args.times, figures)


def cut_connection(args: argparse.Namespace) -> FaultResult:
    """Cut the connection between client and engine under 8 streams."""

    async def cut_once(client: EngineClient, seed: int) -> int:
        await client.ready()
        requests = random_requests(random.Random(seed), NUM_STREAMS, 80)
        tasks = [asyncio.create_task(read_stream(client, request)) for request in requests]
        await asyncio.sleep(0.05 + random.random() * 0.2)
        if client.child is not None and client.child.transport is not None:
            client.child.transport.abort()
        outputs = await asyncio.gather(*tasks)
        return sum(output.finish in ("stop", "length") for output in outputs)

    async def cut_repeatedly() -> int:
        client = EngineClient(fake_plan(), fake_engine_command("--delay", "0.004"), MANY_RESTARTS)
        await client.start()
        num_complete = 0
        for number in range(args.times):
            num_complete += await cut_once(client, number)
        await client.close()
        return num_complete

    num_complete = asyncio.run(cut_repeatedly())
    figures = {"times": args.times, "complete": num_complete}
    return FaultResult(num_complete == NUM_STREAMS * args.times, figures)


def kill_api_process(args: argparse.Namespace) -> FaultResult:
    """Kill the API process under streams and while a text is tokenized.

    Within 5 s none of its child processes may be left, and another server can listen on the same
    port.
    """
    stream_body = LONG_COMPLETION | {"max_tokens": 500}
    tokenized_body = LONG_COMPLETION | {"prompt": "Iron, ash and slag! " * 1500}
    bodies = [stream_body] * NUM_STREAMS + [tokenized_body] * 4

    def kill_once(server: RunningServer) -> tuple[int, float]:
        connections = [open_silent_connection(server.port, body) for body in bodies]
        time.sleep(random.uniform(0.0, 0.3))
        pids = server.children("")
        server.process.kill()
        begin = time.monotonic()
        server.process.wait()
        while any(map(is_alive, pids)) and time.monotonic() - begin < MAX_ORPHAN_SECONDS:
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        for connection in connections:
            connection.close()
        show_progress("orphans", args.times)
        return sum(map(is_alive, pids)), seconds

    def repeat(times: int) -> list[tuple[int, float]]:
        results = []
        port = None
        for _ in range(times):
            with run_fake_server("--instant --delay 0.01", port=port) as server:
                port = server.port
                results.append(kill_once(server))
        with run_fake_server("--instant", port=port):  # the port is free
            return results

    results = repeat_in_parallel(args.times, repeat)
    num_orphans = sum(count for count, _ in results)
    slowest = max(seconds for _, seconds in results)
    figures = {"times": args.times, "orphans": num_orphans, "slowest_s": round(slowest, 2)}
    return FaultResult(num_orphans == 0, figures)


def terminate_server(args: argparse.Namespace) -> FaultResult:
    """SIGTERM under 200 streams, half of which cannot end in time.

    Every stream must complete or get the shutdown event, and the exit status must be 0.
    """

    async def run_stream(number: int, port: int, running: set[int]) -> str:
        max_tokens = 60 if number % 2 else 1500
        body = LONG_COMPLETION | {"max_tokens": max_tokens}
        try:
            await read_completion(port, body, on_event=lambda: running.add(number))
        except RuntimeError as error:
            if str(error) == "the server is shutting down":
                return "shutdown event"
            return f"broken: {error}"
        return "complete"

    async def terminate_once(server: RunningServer) -> list[str]:
        running = set[int]()
        streams = [
            asyncio.create_task(run_stream(number, server.port, running))
            for number in range(NUM_DRAINED_STREAMS)
        ]
        while len(running) < NUM_DRAINED_STREAMS:
            await asyncio.sleep(0.05)
        server.process.terminate()
        return await asyncio.gather(*streams)

    def repeat(times: int) -> list[tuple[list[str], int]]:
        results = []
        options = "--max-num-seqs 256 --drain-seconds 3 --policy fcfs"
        for _ in range(times):
            with run_fake_server("--instant --delay 0.05 --blocks 20000", options) as server:
                stream_ends = asyncio.run(terminate_once(server))
                results.append((stream_ends, server.process.wait(60)))
            show_progress("terminate", args.times)
        return results

    results = repeat_in_parallel(args.times, repeat, num_servers=2)
    ends = Counter(end for stream_ends, _ in results for end in stream_ends)
    exit_codes = Counter(exit_code for _, exit_code in results)
    all_ended = ends["complete"] + ends["shutdown event"] == NUM_DRAINED_STREAMS * args.times
    figures = {"times": args.times, "ends": dict(ends), "exit_codes": dict(exit_codes)}
    return FaultResult(all_ended and set(exit_codes) == {0}, figures)


def fail_calls(args: argparse.Namespace) -> FaultResult:
    """Let the k-th call fail, for k from 1 to 200: an engine start, a message or a step."""
    broken = []
    logging.disable(logging.CRITICAL)
    for number in range(1, NUM_FAILING_CALLS + 1):
        rates = FaultRates(failing_call=number)
        if find_failure(11, rates, 12):
            broken.append(number)
    logging.disable(logging.NOTSET)
    return FaultResult(not broken, {"calls": NUM_FAILING_CALLS, "broken": broken})


FAULTS: dict[str, Callable[[argparse.Namespace], FaultResult]] = {
    "stop": stop_engine,
    "rank": kill_rank,
    "orphans": kill_api_process,
    "unplug": cut_connection,
    "calls": fail_calls,
    "terminate": terminate_server,
}

"""Promises about faults, overload and hostile input, each as a command: what was tried, what came out, and whether that
is what docs/reliability.md promises.

    PYTHONPATH=src python benchmarks/reliability.py ROW                      at its full length
    PYTHONPATH=src python benchmarks/reliability.py kills --times 10         or a shorter one
    PYTHONPATH=src python benchmarks/reliability.py all [--rows a,b,c]       one after another, a line each

The server is the real one, two processes; the model behind it is a ghost unless said otherwise. The client runs on the
same cores. Exit status 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.chaos.http import (
    SERVER,
    Line,
    Refused,
    Served,
    events,
    free_port,
    request,
    send,
    served,
    status,
)
from tests.chaos.load import LONG, Knock, knocks

# more deaths a minute than a server in earnest puts up with, and time to get over them on a busy machine
OFTEN = ("--limits", "restarts=1000,queue_seconds=600,deadline_seconds=3600")


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bloomery-"))


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


@functools.cache
def bar() -> Any:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    return Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@functools.cache
def task(name: str, total: int) -> Any:
    bar().start()
    return bar().add_task(name, total=total)


def progress(name: str, total: int, step: int = 1) -> None:
    """A bar for whoever sits at a terminal."""
    if sys.stderr.isatty():
        bar().advance(task(name, total), step)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


async def text_of(
    port: int, body: dict[str, Any], begun: Callable[[], Any] = lambda: None, **headers: str
) -> str:
    """The text of a stream; raises unless it ends as it should. `begun` is called at every event."""
    parts = []
    done = False
    async for event in events(port, "/v1/completions", body, **headers):
        begun()
        if event is None:
            done = True
        elif "error" in event:
            raise RuntimeError(event["error"]["message"])
        else:
            parts.append(event["choices"][0]["text"])
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return "".join(parts)


async def tally(port: int, body: dict[str, Any], gaps: list[float] | None = None) -> None:
    """Read a stream to its end without looking into its events: a client that takes little from the server's cores."""
    reader, writer, answer = await send(port, "POST", "/v1/completions", body, {})
    last = time.monotonic()
    tail = b""
    try:
        if answer.status != 200:
            raise Refused(answer)
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            now = time.monotonic()
            if gaps is not None:
                gaps.append(now - last)
            last = now
            tail = (tail + data)[-64:]
            if not data or b'"error"' in data:
                raise RuntimeError("the stream was cut" if not data else "an error event")
    finally:
        writer.close()
    if b"data: [DONE]" not in tail:
        raise RuntimeError("the stream ended without [DONE]")


async def idle(port: int, key: str = "") -> float:
    """Seconds until no block is held."""
    begun = time.monotonic()
    while time.monotonic() - begun < 30:
        text = (await request(port, "GET", "/metrics", **{"x-api-key": key})).body.decode()
        line = next(
            line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc")
        )
        if float(line.split()[-1]) == 0:
            return time.monotonic() - begun
        await asyncio.sleep(0.05)
    return float("inf")


# ---- faults ------------------------------------------------------------------------------------------


def kills(args: argparse.Namespace) -> bool:
    """kills() reads every id of every stream and compares them with the plain loop."""
    from tests.chaos.test_kill import kills

    begun = time.monotonic()
    engines = asyncio.run(kills(args.times, args.streams, args.seed))
    tell(
        row="kills",
        kills=args.times,
        streams=args.times * args.streams,
        engines=engines,
        lost=0,
        doubled=0,
        seconds=round(time.monotonic() - begun, 1),
    )
    return True


def text(args: argparse.Namespace) -> bool:
    """The embedded model in deterministic mode, killed in the middle: the text of an undisturbed run."""
    command = (
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--deterministic",
        "--threads",
        "2",
        *OFTEN,
        "--port",
    )
    prompts = [
        f"The {word} of the {thing}"
        for word in ("history", "price", "colour", "sound", "weight", "smell")
        for thing in ("iron", "river", "city", "machine", "winter", "road")
    ][: args.streams]
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": args.tokens,
            "temperature": i % 2,
            "seed": i,
            "ignore_eos": True,
            "stream": True,
        }
        for i, prompt in enumerate(prompts)
    ]
    same = total = 0
    with served(folder(), command=command) as server:

        async def all_of() -> list[str]:
            return await asyncio.gather(*(text_of(server.port, body) for body in bodies))

        async def killed() -> list[str]:
            task = asyncio.create_task(all_of())
            await asyncio.sleep(random.uniform(0.1, 0.9) * took)
            for pid in server.children("engine_main"):
                os.kill(pid, signal.SIGKILL)
            return await task

        begun = time.monotonic()
        want = asyncio.run(all_of())
        took = time.monotonic() - begun
        for _ in range(args.times):
            got = asyncio.run(killed())
            progress("text", args.times)
            same += sum(a == b for a, b in zip(got, want, strict=True))
            total += len(want)
    tell(
        row="text",
        kills=args.times,
        streams=total,
        identical=same,
        seconds=round(time.monotonic() - begun),
    )
    return same == total


def ranks_of(server: Any) -> list[int]:
    """The processes that are ranks of a server's engine."""
    try:
        pids = [
            pid
            for engine in server.children("engine_main")
            for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        ]
        return [
            int(pid) for pid in pids if "executors.rank" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
    except FileNotFoundError:  # one of them has just ended
        return []


def faults(args: argparse.Namespace) -> bool:
    good = True
    for fault in (stop, rank, orphans, unplug, calls, terminate):
        begun = time.monotonic()
        found = fault(args)
        good &= found.pop("good")
        tell(
            row="faults", fault=fault.__name__, seconds=round(time.monotonic() - begun, 1), **found
        )
    return good


def lanes(times: int, work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """So many repetitions on a few servers at a time: most of a fault's time is waiting for somebody to notice."""
    shares = [times // count + (lane < times % count) for lane in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [share for share in shares if share]))


def stop(args: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP to the engine in the middle of 8 streams: not ready within 10 s, replaced, all streams complete."""

    async def once(server: Served, want: str) -> tuple[int, float]:
        streams = [
            asyncio.create_task(text_of(server.port, LONG | {"max_tokens": 100})) for _ in range(8)
        ]
        await asyncio.sleep(0.3)
        os.kill(server.children("engine")[0], signal.SIGSTOP)
        begun = time.monotonic()
        while await status(server.port, "/ready") == 200:
            await asyncio.sleep(0.1)
        waited = time.monotonic() - begun
        done = sum(text == want for text in await asyncio.gather(*streams))
        while await status(server.port, "/ready") != 200:
            await asyncio.sleep(0.1)
        progress("stop", args.times)
        return done, waited

    def lane(times: int) -> list[tuple[int, float]]:
        with served(
            folder(), "--engine", "--speaker --delay 0.01", "--silence", "3", *OFTEN
        ) as server:
            want = asyncio.run(text_of(server.port, LONG | {"max_tokens": 100}))
            return [asyncio.run(once(server, want)) for _ in range(times)]

    found = [one for lane_ in lanes(args.times, lane) for one in lane_]
    complete = sum(done for done, _ in found)
    slowest = max(waited for _, waited in found)
    good = complete == 8 * args.times and slowest <= 10
    return {
        "good": good,
        "times": args.times,
        "complete": complete,
        "not_ready_after_s": round(slowest, 1),
    }


def rank(args: argparse.Namespace) -> dict[str, Any]:
    """The embedded model on three ranks, one of which is killed in the middle of four streams: the text as ever."""
    serve = (
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--deterministic",
        "--tp",
        "3",
        "--threads",
        "1",
    )
    body = LONG | {"prompt": "The history of iron", "max_tokens": 40}
    same = 0
    with served(folder(), command=(*serve, *OFTEN, "--port")) as server:

        async def once() -> list[str]:
            tasks = [asyncio.create_task(text_of(server.port, body)) for _ in range(4)]
            await asyncio.sleep(random.uniform(0.5, 3.0))
            while not (
                members := ranks_of(server)
            ):  # they may be starting again, after the last time
                await asyncio.sleep(0.05)
            os.kill(random.choice(members), signal.SIGKILL)
            return await asyncio.gather(*tasks)

        want = asyncio.run(text_of(server.port, body))
        for _ in range(args.times):
            same += sum(text == want for text in asyncio.run(once()))
            progress("rank", args.times)
    return {"good": same == 4 * args.times, "times": args.times, "complete": same}


def unplug(args: argparse.Namespace) -> dict[str, Any]:
    """The line between the processes is cut, in the middle of 8 streams. It has no name that could be removed."""
    from bloomery.engine.client import EngineClient
    from tests.chaos.ghost_engine import command, plan
    from tests.chaos.test_kill import OFTEN, read, requests

    async def main() -> int:
        client = EngineClient(plan(), command("--delay", "0.004"), OFTEN)
        await client.start()
        complete = 0
        for number in range(args.times):
            await client.ready()
            tasks = [
                asyncio.create_task(read(client, one))
                for one in requests(random.Random(number), 8, 80)
            ]
            await asyncio.sleep(0.05 + random.random() * 0.2)
            if client.child is not None and client.child.line is not None:
                client.child.line.abort()
            complete += sum(
                end.finish in ("stop", "length") for end in await asyncio.gather(*tasks)
            )
        await client.close()
        return complete

    complete = asyncio.run(main())
    return {"good": complete == 8 * args.times, "times": args.times, "complete": complete}


def orphans(args: argparse.Namespace) -> dict[str, Any]:
    """The API process is killed, under streams and while a text is worked on: within 5 s nothing of it is left, and
    its successor listens on the same port."""
    text = "Iron, ash and slag! " * 1500

    def lane(times: int) -> list[tuple[int, float]]:
        found = []
        port = None
        for _ in range(times):
            with served(folder(), "--engine", "--quick --delay 0.01", port=port) as server:
                lines = [connect(server.port, LONG | {"max_tokens": 500}) for _ in range(8)]
                lines += [connect(server.port, LONG | {"prompt": text}) for _ in range(4)]
                time.sleep(random.uniform(0.0, 0.3))
                port = server.port
                pids = server.children("")
                server.process.kill()
                begun = time.monotonic()
                server.process.wait()
                while any(map(alive, pids)) and time.monotonic() - begun < 5:
                    time.sleep(0.02)
                found.append((sum(map(alive, pids)), time.monotonic() - begun))
                for line in lines:
                    line.close()
            progress("orphans", args.times)
        with served(folder(), "--engine=--quick", port=port):
            return found

    found = [one for lane_ in lanes(args.times, lane) for one in lane_]
    left = sum(count for count, _ in found)
    slowest = max(seconds for _, seconds in found)
    return {"good": left == 0, "times": args.times, "orphans": left, "slowest_s": round(slowest, 2)}


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def terminate(args: argparse.Namespace) -> dict[str, Any]:
    """SIGTERM under 200 streams, half of which cannot end in time: all end or get the event that says so; exit is 0."""

    async def one(number: int, port: int, running: set[int]) -> str:
        try:
            body = LONG | {"max_tokens": 60 if number % 2 else 1500}
            await text_of(port, body, begun=lambda: running.add(number))
        except RuntimeError as error:
            return (
                "error event" if str(error) == "the server is shutting down" else f"broken: {error}"
            )
        return "complete"

    async def all_of(server: Served) -> list[str]:
        running = set[int]()
        tasks = [asyncio.create_task(one(number, server.port, running)) for number in range(200)]
        while len(running) < 200:
            await asyncio.sleep(0.05)
        server.process.terminate()
        return await asyncio.gather(*tasks)

    def lane(times: int) -> list[tuple[list[str], int]]:
        found = []
        for _ in range(times):
            options = (
                "--engine",
                "--quick --delay 0.05 --blocks 20000",
                "--sequences",
                "256",
                "--drain",
                "3",
                "--policy",
                "fcfs",
            )
            with served(folder(), *options) as server:
                found.append((asyncio.run(all_of(server)), server.process.wait(60)))
            progress("terminate", args.times)
        return found

    found = [one for lane_ in lanes(args.times, lane, 2) for one in lane_]
    ends = Counter(end for texts, _ in found for end in texts)
    codes = Counter(code for _, code in found)
    good = (
        set(ends) <= {"complete", "error event"}
        and set(codes) == {0}
        and sum(ends.values()) == 200 * args.times
    )
    return {"good": good, "times": args.times, "ends": dict(ends), "exit": dict(codes)}


def calls(args: argparse.Namespace) -> dict[str, Any]:
    """The k-th call fails, k from 1 to 200: a start, a message either way, a step of the device."""
    from tests.simulation.world import Faults, failure

    logging.disable(logging.CRITICAL)
    broken = [k for k in range(1, 201) if failure(11, Faults(nth=k), 12)]
    logging.disable(logging.NOTSET)
    return {"good": not broken, "calls": 200, "broken": broken}


def poison(args: argparse.Namespace) -> bool:
    from tests.chaos.test_kill import POISON, Patience, test_one_bad_request_among_many_fails_alone

    test_one_bad_request_among_many_fails_alone(POISON, Patience())
    tell(row="poison", good=31, failed=1, restarts="at most 3")
    return True


# ---- load --------------------------------------------------------------------------------------------


def streams(args: argparse.Namespace) -> bool:
    """As many streams at once as asked for, of 10 tokens a second each."""
    tokens = int(10 * args.seconds)
    options = (
        "--engine",
        "--quick --delay 0.1 --blocks 1000000",
        "--sequences",
        str(args.streams),
        "--tokens",
        "8192",
        "--limits",
        f"requests={args.streams + 24}",
    )
    gaps: list[float] = []
    with served(folder(), *options) as server:
        peak = unready = 0

        async def main() -> list[BaseException | None]:
            nonlocal peak, unready
            body = LONG | {"max_tokens": tokens}
            tasks = [
                asyncio.create_task(tally(server.port, body, gaps)) for _ in range(args.streams)
            ]
            while not all(task.done() for task in tasks):
                peak = max(peak, server.resident)
                unready += await status(server.port, "/ready") != 200  # load is no illness
                await asyncio.sleep(1.0)
            return await asyncio.gather(*tasks, return_exceptions=True)

        begun = time.monotonic()
        errors = sum(isinstance(one, BaseException) for one in asyncio.run(main()))
        took = time.monotonic() - begun
    tell(
        row="streams",
        streams=args.streams,
        tokens=tokens,
        errors=errors,
        seconds=round(took, 1),
        rate=round(args.streams * tokens / took),
        p99_gap_s=round(quantile(gaps, 0.99), 2),
        longest_gap_s=round(max(gaps), 2),
        api_mb=round(peak / 1e6),
        not_ready=unready,
    )
    return errors == 0 and max(gaps) < 2 and peak < 600e6 and not unready


def overload(args: argparse.Namespace) -> bool:
    """A house full of streams, and several times as many who knock: told to come back, and those inside do not suffer.

    The crowd inside is another process's, and steps back where cores are few: it stands for machines of its own. This
    process only knocks, so that its clock is not delayed by what it reads.
    Arrivals are spread at random. Seen from outside, connecting included, and by the server's own log.
    """
    inside = args.inside
    alone = 10.0
    ramp = args.inside / 100
    options = (
        "--engine",
        "--quick --delay 0.1 --blocks 100000",
        "--sequences",
        str(inside),
        "--tokens",
        "8192",
        "--policy",
        "fcfs",
        "--limits",
        f"requests={inside}",
    )

    async def main(port: int) -> tuple[dict[str, Any], list[Knock], float]:
        lines = await crowd_inside(
            port, inside, int(10 * (ramp + alone + args.seconds) * 1.3), ramp
        )
        await asyncio.sleep(alone)
        begun = time.monotonic()
        delays = [random.uniform(0, args.seconds) for _ in range(args.streams - inside)]
        made = await asyncio.to_thread(knocks, port, delays)
        return json.loads(await lines.readline()), made, begun

    with served(folder(), *options) as server:
        crowd, made, begun = asyncio.run(main(server.port))
        lines = [
            json.loads(line)
            for line in server.log.read_text().splitlines()
            if '"status": 429' in line
        ]
    quiet = pace(crowd["seen"], begun - alone, begun)
    busy = pace(crowd["seen"], begun, begun + args.seconds)
    seen = Counter(int(knock.answer[9:12] or 0) for knock in made)
    without_advice = sum(b"retry-after: " not in knock.answer for knock in made)
    refusals = [knock.seconds for knock in made]
    seen[200] += crowd["complete"]
    within = quantile([line["seconds"] for line in lines], 0.99)
    late = quantile(refusals, 0.99)
    tell(
        row="overload",
        offered=args.streams,
        answers=dict(seen),
        without_retry_after=without_advice,
        refused_p50_ms=round(1000 * quantile(refusals, 0.5), 1),
        refused_p99_ms=round(1000 * late, 1),
        within_server_p99_ms=round(1000 * within, 1),
        tokens_a_second=round(busy),
        alone=round(quiet),
        goodput=round(busy / quiet, 3),
        failed=crowd["failed"],
        errors=crowd["errors"],
        longest_gap_s=round(crowd["longest_gap"], 2),
    )
    kept = set(seen) <= {200, 429} and not crowd["failed"] and not without_advice
    return kept and late < 0.05 and busy >= 0.95 * quiet


async def crowd_inside(port: int, streams: int, tokens: int, ramp: float) -> asyncio.StreamReader:
    """Once so many streams have begun, in a process that steps back; its last line tells what became of them."""
    crowd = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.load",
        *map(str, (port, streams, tokens, ramp)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        limit=1 << 22,
        preexec_fn=lambda: os.nice(10),
    )
    assert crowd.stdout is not None
    await crowd.stdout.readline()
    return crowd.stdout


def pace(seen: list[tuple[float, int]], begun: float, ended: float) -> float:
    """Events a second between two moments."""
    within = [(when, count) for when, count in seen if begun <= when <= ended]
    (first, before) = within[0]
    (last, after) = within[-1]
    return (after - before) / (last - first)


def fairness(args: argparse.Namespace) -> bool:
    """A key that offers twenty times as much as another: the other's first tokens are at most twice as late."""
    keys = {"polite": "one-key", "greedy": "another-key"}
    options = (
        "--engine",
        "--quick --delay 0.05 --blocks 4000",
        "--sequences",
        "16",
        "--limits",
        "requests=128",
        "--api-key",
        ",".join(keys.values()),
    )
    body = LONG | {"max_tokens": 12}
    seen: Counter[tuple[str, int]] = Counter()

    async def first(port: int, who: str, delay: float, waits: list[float]) -> None:
        """One request after a while; how long it waited for its first token, if it was let in."""
        await asyncio.sleep(delay)
        begun = time.monotonic()
        try:
            got = 0
            name = {"x-api-key": keys[who], "x-request-id": who}
            async for _ in events(port, "/v1/completions", body, **name):
                got += 1
                if got == 1:
                    waits.append(time.monotonic() - begun)
            seen[who, 200] += 1
        except Refused as error:
            seen[who, error.answer.status] += 1

    async def offered(port: int, greed: int) -> float:
        waits: list[float] = []
        tasks = [
            first(port, "polite", random.uniform(0, args.seconds), waits)
            for _ in range(int(4 * args.seconds))
        ]
        others = [
            first(port, "greedy", random.uniform(0, args.seconds), [])
            for _ in range(greed * len(tasks))
        ]
        await asyncio.gather(*tasks, *others)
        return quantile(waits, 0.99)

    with served(folder(), *options) as server:
        alone = asyncio.run(offered(server.port, 0))
        begun = server.log.stat().st_size
        beside = asyncio.run(offered(server.port, 20))
        lines = [
            json.loads(line)
            for line in server.log.read_text()[begun:].splitlines()
            if '"queue": ' in line
        ]
    phases = {
        f"{name}_p99_ms": round(
            1000 * quantile([line[name] for line in lines if line["request"] == "polite"], 0.99)
        )
        for name in (
            "queue",
            "first_token",
        )  # within the engine's queue; within the server, all in all
    }
    told = {f"{who} {code}": count for (who, code), count in sorted(seen.items())}
    tell(
        row="fairness",
        first_token_p99_alone_ms=round(1000 * alone),
        beside_greedy_ms=round(1000 * beside),
        ratio=round(beside / alone, 2),
        **phases,
        answers=told,
    )
    return beside <= 2 * alone and not seen["polite", 429]


def secrecy(args: argparse.Namespace) -> bool:
    """One key's prompts leave no trace in another's waits: a prefix of 2,000 tokens that one key has warmed is, to the
    other, like one that nobody has ever sent. Its own owner does see the difference, or the test could not."""
    options = (
        "--engine",
        "--speaker --delay 0.002 --blocks 100000",
        "--tokens",
        "64",
        "--sequences",
        "4",
        "--api-key",
        "one-key,another-key",
    )
    chance = random.Random(args.seed)
    waits: dict[str, list[float]] = {"cold": [], "warmed by another": [], "warmed by itself": []}

    async def wait(port: int, key: str, prompt: list[int]) -> float:
        begun = time.monotonic()
        body = LONG | {"prompt": prompt, "max_tokens": 1}
        async for _ in events(port, "/v1/completions", body, **{"x-api-key": key}):
            return time.monotonic() - begun
        raise RuntimeError("no event")

    async def main(port: int) -> None:
        for _ in range(args.times):
            warmed, fresh = ([chance.randrange(3, 400) for _ in range(2000)] for _ in range(2))
            await wait(port, "one-key", warmed)
            for kind, prompt in chance.sample([("cold", fresh), ("warmed by another", warmed)], 2):
                waits[kind].append(await wait(port, "another-key", prompt))
            waits["warmed by itself"].append(await wait(port, "one-key", warmed))
            progress("secrecy", args.times)

    with served(folder(), *options) as server:
        asyncio.run(main(server.port))
    other, own = (
        chance_of(waits["cold"], waits[f"warmed by {who}"]) for who in ("another", "itself")
    )
    medians = {
        f"{kind}_ms": round(1000 * statistics.median(found), 1) for kind, found in waits.items()
    }
    tell(
        row="secrecy",
        prompts=args.times,
        p_of_another=round(other, 3),
        p_of_itself=float(f"{own:.1g}"),
        **medians,
    )
    return other > 0.01 and own < 0.001


def chance_of(one: list[float], other: list[float]) -> float:
    """Mann and Whitney's: how likely two samples of the same thing differ in rank by as much; no ties, normal in the
    limit."""
    ranks = {value: rank for rank, value in enumerate(sorted(one + other), 1)}
    n = len(one)
    m = len(other)
    u = sum(ranks[value] for value in one) - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def idlers(args: argparse.Namespace) -> bool:
    """Peers that never read: fifty that ask for a stream and fifty that say nothing. A crowd of readers beside them
    gets as many tokens a second as before. Then strangers at every other socket, those of ranks, that say what nobody
    expects: the text stays as it is."""
    readers = 100
    alone = args.seconds / 2
    options = (
        "--engine",
        "--quick --delay 0.05 --blocks 100000",
        "--sequences",
        "256",
        "--policy",
        "fcfs",
        "--limits",
        "stall_seconds=600",
    )

    async def main(port: int) -> tuple[dict[str, Any], float]:
        lines = await crowd_inside(port, readers, int(20 * (alone + args.seconds + 5)), 1.0)
        await asyncio.sleep(alone)
        idle = [
            connect(port, LONG | {"max_tokens": 2000} if number % 2 else None)
            for number in range(100)
        ]
        begun = time.monotonic()
        await asyncio.sleep(args.seconds)
        for line in idle:
            line.close()
        return json.loads(await lines.readline()), begun

    with served(folder(), *options) as server:
        crowd, begun = asyncio.run(main(server.port))
    quiet = pace(crowd["seen"], begun - alone, begun)
    beside = pace(crowd["seen"], begun, begun + args.seconds)
    same, ports = strangers()
    tell(
        row="idlers",
        seconds=args.seconds,
        tokens_a_second=round(beside),
        before=round(quiet),
        failed=crowd["failed"],
        share=round(beside / quiet, 3),
        sockets_of_ranks=ports,
        text_the_same=same,
    )
    return not crowd["failed"] and beside >= 0.95 * quiet and same


def connect(port: int, body: dict[str, Any] | None) -> socket.socket:
    """A connection on which nothing is read, and perhaps a request for it."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", port))
    if body is not None:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        line.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return line


def strangers() -> tuple[bool, int]:
    """Whether the embedded model on three ranks says the same while strangers hold a line to each rank's sockets."""
    serve = (
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--deterministic",
        "--tp",
        "3",
        "--threads",
        "1",
        "--port",
    )
    body = LONG | {"prompt": "The history of iron", "max_tokens": 40}
    with served(folder(), command=serve) as server, contextlib.ExitStack() as exit:
        members = ranks_of(server)
        want = asyncio.run(text_of(server.port, body))
        addresses = [address for pid in members for address in listening(pid)]
        for address, port in addresses:
            if not address.startswith("127."):
                return False, len(addresses)
            line = exit.enter_context(socket.create_connection((address, port)))
            line.sendall(random.randbytes(64))
        got = [asyncio.run(text_of(server.port, body)) for _ in range(3)]
        return got == [want] * 3 and ranks_of(server) == members, len(addresses)


def isolation(args: argparse.Namespace) -> bool:
    """Fifty connections full of texts of a megabyte, deep bodies and long lists: the tokens of a stream beside them
    come as before, a few at most twice as late."""
    options = (
        "--engine",
        "--speaker --delay 0.05 --blocks 100000 --context 65536",
        "--limits",
        "requests=256",
    )
    tokens = int(20 * 2.5 * args.seconds)

    async def main(port: int) -> tuple[list[float], list[float], dict[str, int]]:
        line = [sys.executable, "-m", "tests.chaos.flood", *map(str, (port, args.seconds + 3, 50))]
        begun = last = time.monotonic()
        flood = None
        gaps = dict[bool, list[float]]({False: [], True: []})
        async for _ in events(port, "/v1/completions", LONG | {"max_tokens": tokens}):
            now = time.monotonic()
            if 1 < now - begun < args.seconds or args.seconds + 3 < now - begun < 2 * args.seconds:
                gaps[flood is not None].append(now - last)
            last = now
            if flood is None and now - begun > args.seconds:
                flood = await asyncio.create_subprocess_exec(
                    *line, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=lambda: os.nice(10)
                )
                last = time.monotonic()
        assert flood is not None
        return gaps[False], gaps[True], json.loads((await flood.communicate())[0])

    with served(folder(), *options) as server:
        engine = server.children("engine")
        quiet, beside, answers = asyncio.run(main(server.port))
        unharmed = (
            server.children("engine") == engine
            and asyncio.run(status(server.port, "/ready")) == 200
        )
    alone = quantile(quiet, 0.99)
    late = quantile(beside, 0.99)
    tell(
        row="isolation",
        p99_gap_alone_ms=round(1000 * alone, 1),
        beside_ms=round(1000 * late, 1),
        ratio=round(late / alone, 2),
        longest_ms=round(1000 * max(beside)),
        answers=answers,
        unharmed=unharmed,
    )
    return late < 2 * alone and unharmed and all(int(code) < 500 for code in answers)


def descriptors(args: argparse.Namespace) -> bool:
    """A server that may open 256 files and 400 who connect: a stream goes on, no core is lost to trying again, and once
    they are gone it serves."""
    limited = ("bash", "-c", 'ulimit -n 256 && exec "$0" "$@"', sys.executable, str(SERVER))

    async def main(server: Served) -> tuple[str, str, float]:
        want = await text_of(server.port, LONG | {"max_tokens": 200})
        stream = asyncio.create_task(text_of(server.port, LONG | {"max_tokens": 200}))
        await asyncio.sleep(0.1)
        lines = [connect(server.port, None) for _ in range(400)]
        got = await stream
        before = processor_seconds(server.process.pid)
        await asyncio.sleep(3.0)
        spent = processor_seconds(server.process.pid) - before
        for line in lines:
            line.close()
        return want, got, spent

    with served(folder(), command=limited) as server:
        want, got, spent = asyncio.run(main(server))
        begun = time.monotonic()
        while asyncio.run(status(server.port, "/ready")) != 200 and time.monotonic() - begun < 30:
            time.sleep(0.1)
        serves = asyncio.run(text_of(server.port, LONG | {"max_tokens": 200})) == want
    tell(
        row="descriptors",
        stream_whole=got == want,
        core_seconds_of_3=round(spent, 2),
        serves_again=serves,
        after_s=round(time.monotonic() - begun, 1),
    )
    return got == want and serves and spent < 1.0


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def storm(args: argparse.Namespace) -> bool:
    """Clients that leave, several answers a request, deadlines and kills at once: all blocks are free soon after."""
    waits: list[float] = []
    with served(folder(), "--engine", "--speaker --delay 0.005 --blocks 4000", *OFTEN) as server:

        async def one() -> None:
            body = LONG | {"max_tokens": random.randrange(1, 80), "n": random.choice([1, 1, 3])}
            headers = {"x-request-deadline-ms": "300"} if random.random() < 0.2 else {}
            try:
                count = 0
                leaves = random.choice([None, random.randrange(1, 20)])
                async for _ in events(server.port, "/v1/completions", body, **headers):
                    count += 1
                    if count == leaves:
                        return
            except (Refused, OSError):
                pass

        async def once() -> float:
            tasks = [asyncio.create_task(one()) for _ in range(60)]
            await asyncio.sleep(random.random())
            for engine in server.children("engine")[
                : random.randrange(2)
            ]:  # none while the last one is being replaced
                os.kill(engine, signal.SIGKILL)
            await asyncio.gather(*tasks)
            return await idle(server.port)

        waits += [asyncio.run(once()) for _ in range(args.times)]
    tell(row="storm", storms=args.times, slowest_free_s=round(max(waits), 2))
    return max(waits) <= 2


def memory(args: argparse.Namespace) -> bool:
    """Bytes the API process grows by a request, from a line through its size after a warm-up of a tenth."""
    good = True
    for kind in ("mixed", "aborted", "refused", "schemas"):
        sizes = growth(kind, args.times)
        slope = statistics.linear_regression(*zip(*sizes, strict=True)).slope
        tell(
            row="memory",
            kind=kind,
            requests=args.times,
            bytes_a_request=round(slope),
            mb=round(sizes[-1][1] / 1e6),
        )
        good &= slope < 1024
    return good


def growth(kind: str, times: int) -> list[tuple[int, int]]:
    """Requests so far and bytes held, from after the warm-up on."""
    with served(folder(), "--engine=--quick", "--limits", "stored_responses=50") as server:

        async def one(number: int) -> None:
            body = {"prompt": f"The iron {number}", "max_tokens": 4, "ignore_eos": True}
            chat = {"messages": [{"role": "user", "content": f"iron {number}"}], "max_tokens": 4}
            if kind == "refused":
                await request(
                    server.port, "POST", "/v1/completions", body | {"model": f"unknown-{number}"}
                )
            elif kind == "schemas":
                schema = {
                    "name": f"s{number}",
                    "schema": {"type": "object", "properties": {f"p{number}": {}}},
                }
                wanted = {"response_format": {"type": "json_schema", "json_schema": schema}}
                await request(server.port, "POST", "/v1/chat/completions", chat | wanted)
            elif kind == "aborted":
                async for _ in events(
                    server.port, "/v1/completions", body | {"max_tokens": 500, "stream": True}
                ):
                    return
            elif number % 4 == 0:
                await request(server.port, "POST", "/v1/chat/completions", chat)
            elif number % 4 == 1:
                async for _ in events(server.port, "/v1/completions", body | {"stream": True}):
                    pass
            else:
                await request(server.port, "POST", "/v1/completions", body)

        async def main() -> list[tuple[int, int]]:
            sizes = []
            for first in range(0, times * 11 // 10, 50):
                await asyncio.gather(*(one(first + i) for i in range(50)))
                if first >= times // 10:
                    sizes.append((first, server.resident))
            return sizes

        return asyncio.run(main())


def seeds(args: argparse.Namespace) -> bool:
    """The same seed among random neighbours, and in engines one after another; four answers differ and stay."""
    body = {
        "prompt": "The iron",
        "max_tokens": 30,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 42,
        "n": 4,
    }
    found: Counter[tuple[str, ...]] = Counter()
    with served(folder(), "--engine", "--speaker --delay 0.002", *OFTEN) as server:

        async def once(kill: bool) -> None:
            others = [
                LONG | {"max_tokens": random.randrange(5, 60), "temperature": 1.0} for _ in range(8)
            ]
            tasks = [asyncio.create_task(text_of(server.port, other)) for other in others]
            asked = asyncio.create_task(request(server.port, "POST", "/v1/completions", body))
            if kill:
                await asyncio.sleep(0.03)
                os.kill(server.children("engine")[0], signal.SIGKILL)
            answer = (await asked).json
            found[tuple(choice["text"] for choice in answer["choices"])] += 1
            await asyncio.gather(*tasks)

        for number in range(args.times):
            asyncio.run(once(kill=number % 5 == 4))
    (texts,) = list(found)[:1]
    tell(row="seeds", runs=args.times, kinds=len(found), distinct_of_four=len(set(texts)))
    return len(found) == 1 and len(set(texts)) == 4


# ---- hostile input -----------------------------------------------------------------------------------


def bad(args: argparse.Namespace) -> bool:
    """The list of bad requests against a server of its own: plain, under python -O, 16 at a time, beside 64 streams."""
    ways = (
        ("plain", (), ()),
        ("python -O", ("-O",), ()),
        ("16 at a time", (), ("-n", "16")),
        ("64 streams", (), ()),
    )
    kept = [bad_way(way, python, options) for way, python, options in ways]
    return all(kept)


def bad_way(way: str, python: tuple[str, ...], options: tuple[str, ...]) -> bool:
    with served(
        folder(), "--engine", "--speaker --delay 0.002 --blocks 4000 --context 512", python=python
    ) as server:
        line = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "tests/chaos/test_bad_ways.py",
            "--server",
            str(server.port),
            *options,
        ]
        engine = server.children("engine")
        body = LONG | {"max_tokens": 60}
        golden = asyncio.run(text_of(server.port, body))

        async def main() -> tuple[int | None, int, int]:
            suite = await asyncio.create_subprocess_exec(*line, cwd=ROOT, stdout=subprocess.DEVNULL)
            ending = asyncio.create_task(suite.wait())
            wrong = 0
            count = 0
            while way == "64 streams" and not ending.done():
                texts = await asyncio.gather(*(text_of(server.port, body) for _ in range(64)))
                wrong = wrong + sum(text != golden for text in texts)
                count = count + 64
            return await ending, wrong, count

        code, wrong, count = asyncio.run(main())
        unharmed = server.children("engine") == engine
    tell(
        row="bad",
        way=way,
        as_listed=code == 0,
        engine_unharmed=unharmed,
        streams=count,
        streams_wrong=wrong,
    )
    return code == 0 and unharmed and not wrong


def invalid(args: argparse.Namespace) -> bool:
    """Bodies made wrong at random, 16 at a time, until so many were refused: nothing above 499, no refusal slow."""
    from tests.chaos.bodies import body
    from tests.server.test_bad_requests import LEAK

    chance = random.Random(args.seed)
    seen: Counter[int] = Counter()
    slowest = 0.0
    leaks = 0

    async def worker(port: int) -> None:
        nonlocal slowest, leaks
        line = Line(port)
        while sum(seen.values()) - seen[200] < args.times:
            path, data = body(chance)
            begun = time.monotonic()
            answer = await line.ask(path, data)
            seen[answer.status] += 1
            if answer.status != 200:  # some changes leave a body right, and then it is answered
                slowest = max(slowest, time.monotonic() - begun)
                leaks += LEAK.search(answer.body.decode("utf-8", "replace")) is not None
                progress("invalid", args.times)
        line.close()

    async def main(port: int) -> None:
        await asyncio.gather(*(worker(port) for _ in range(16)))

    with served(folder(), "--engine=--speaker") as server:
        engine = server.children("engine")
        begun = time.monotonic()
        asyncio.run(main(server.port))
        ready = asyncio.run(status(server.port, "/ready"))
        unharmed = server.children("engine") == engine
    tell(
        row="invalid",
        bodies=sum(seen.values()),
        statuses=dict(sorted(seen.items())),
        slowest_s=round(slowest, 3),
        ready=ready,
        engine_unharmed=unharmed,
        leaks=leaks,
        seconds=round(time.monotonic() - begun, 1),
    )
    return (
        all(code < 500 for code in seen)
        and slowest <= 1
        and ready == 200
        and unharmed
        and not leaks
    )


def files(args: argparse.Namespace) -> bool:
    """Damaged weight files, in a process whose memory is bounded; see tests/chaos/files.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.files", str(args.times), str(args.seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout.strip() or done.stderr[-500:], flush=True)
    return done.returncode == 0


def exposure(args: argparse.Namespace) -> bool:
    """Sockets, open routes, what is in the package, pickles, what is logged, and whether it runs as nobody on a root it
    cannot write to, and where there is no room left."""
    from bloomery.server.routes import table
    from bloomery.server.service import Settings

    key = "a-key-that-no-process-list-shows"
    said = "a-word-that-no-log-shows"
    secret = folder() / "key"
    secret.write_text(key)
    routes = table(Settings(model="speaker"))
    with served(folder(), "--engine=--speaker", "--api-key", f"@{secret}") as server:
        pids = [server.process.pid, *server.children("")]
        sockets = [address for pid in pids for address in listening(pid)]
        shown = sum(
            key.encode() in Path(f"/proc/{pid}/{name}").read_bytes()
            for pid in pids
            for name in ("environ", "cmdline")
        )
        without_key = {
            asyncio.run(
                request(
                    server.port, route.method, route.path, {} if route.method == "POST" else None
                )
            ).status
            for route in routes
            if not route.open
        }
        taken = pickles(server.port, [route.path for route in routes], key)
        asyncio.run(mention(server.port, said, key))
        log = server.log.read_text()
    word = re.compile(r"\b(c?pickle|cloudpickle|marshal)\b|torch\.load\(|(?<![.\w])(eval|exec)\(")
    texts = [path for kind in ("py", "c", "h") for path in (ROOT / "src").rglob(f"*.{kind}")]
    found = {
        "listening": len(sockets),
        "open_routes": sorted({route.path for route in routes if route.open}),
        "others_without_key": sorted(without_key),
        "key_in_processes": shown,
        "secrets_in_log": sum(log.count(secret) for secret in (key, said)),
        "words": sum(len(word.findall(path.read_text(encoding="utf-8"))) for path in texts),
        "pickles_taken": taken,
        "nobody_on_read_only_root": confined(READ_ONLY),
        "no_room_left": confined(FULL),
    }
    tell(row="exposure", **found)
    wanted = {
        "listening": 1,
        "open_routes": OPEN,
        "others_without_key": [401],
        "key_in_processes": 0,
        "secrets_in_log": 0,
        "words": 0,
        "pickles_taken": 0,
    }
    places = {found["nobody_on_read_only_root"], found["no_room_left"]}
    return found | wanted == found and places <= {"serves", "not tried: no unshare"}


OPEN = ["/", "/assets/{file}", "/health", "/live", "/ping", "/ready"]


def pickles(port: int, paths: list[str], key: str) -> int:
    """A megabyte that makes a file for whoever unpickles it, raw and in a body's fields, to every route; how many were
    not refused, or made the file."""
    canary = folder() / "canary"
    raw = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode().ljust(1 << 20, b"0")
    worded = base64.b64encode(raw).decode()
    wrong = 0
    for path in paths:
        chat = [{"role": "user", "content": worded}]
        for body in (
            {"inputs": worded},
            {"prompt": worded},
            {"messages": chat},
            {"prompt_embeds": worded},
        ):
            wrong += not 400 <= refusal(port, path, json.dumps(body).encode(), key) < 500
        wrong += not 400 <= refusal(port, path, raw, key) < 500
    return wrong + canary.exists()


def refusal(port: int, path: str, data: bytes, key: str) -> int:
    """The status of an answer that may come, and the connection be closed, before all of the body was sent."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return int(line.recv(12)[9:])


async def mention(port: int, word: str, key: str) -> None:
    """In prompts, names and fields, of requests that are answered and of such that are not."""
    few = {"max_tokens": 2}
    bodies = (
        ("/v1/completions", {"prompt": word, **few}),
        ("/v1/completions", {"prompt": word, "n": -1, "user": word}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": word}], **few}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": word, "content": word}], "model": word, word: word},
        ),
        (
            "/v1/chat/completions",
            {"messages": [], "tools": [{"type": "function", "function": {"name": word}}]},
        ),
        ("/generate", {"inputs": word, "parameters": {"max_new_tokens": 2, "stop": [word]}}),
        (f"/{word}", {}),
    )
    for path, body in bodies:
        await request(
            port,
            "POST",
            path,
            body,
            **{"x-api-key": key, "user-agent": word, "x-request-id": word + " \x7f"},
        )


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process listens. Several descriptors of one socket count once."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in links:
                address, port = local.split(":")
                packed = b"".join(
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                )
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


READ_ONLY = (
    "mount -o remount,bind,ro / 2>/dev/null || mount --bind / / && mount -o remount,bind,ro /"
)
FULL = "; ".join(
    f"mount -t tmpfs -o size=64k none {place} && head -c 64k /dev/zero > {place}/full || true"
    for place in ("/tmp", "/dev/shm", "/var/tmp")
)


def confined(place: str) -> str:
    """A server as an unprivileged user in a namespace of its own, where these mounts were made."""
    port = free_port()
    inner = f"{place}; exec unshare --user --map-user=65534 --map-group=65534 {sys.executable} -B {SERVER} {port}"
    try:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", inner],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent"},
        )
    except OSError:
        return "not tried: no unshare"
    end = time.monotonic() + 60
    try:
        while asyncio.run(status(port, "/ready")) != 200:
            if process.poll() is not None or time.monotonic() > end:
                assert process.stderr is not None
                return f"fails: {process.stderr.read()[-300:]}"
            time.sleep(0.2)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        answer = asyncio.run(request(port, "POST", "/v1/chat/completions", chat))
        return "serves" if answer.status == 200 else f"answers {answer.status}"
    finally:
        process.kill()
        process.wait()


def world(seed: int) -> tuple[int, Any]:
    """A played world and what came of it: its report, or what was wrong."""
    from tests.simulation.test_world import STORM
    from tests.simulation.world import story

    logging.disable(logging.CRITICAL)
    try:
        return seed, story(seed, STORM)
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}"


def points(args: argparse.Namespace) -> bool:
    """A played scene struck at every moment of its life, in every way; see tests/simulation/points.py."""
    from tests.simulation.points import POINTS, moments, scene

    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    seen = Counter[str]()
    wrong = list[str]()
    every = list(moments())
    for event, at in every:
        try:
            scene(event, at, seen)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
        progress("points", len(every))
    tell(
        row="points",
        scenes=len(every),
        wrong=wrong[:3],
        struck=dict(seen),
        seconds=round(time.monotonic() - begun),
    )
    return not wrong and set(seen) == POINTS


def simulation(args: argparse.Namespace) -> bool:
    """Worlds of consecutive seeds, on two cores, until they have seen so many steps."""
    begun = time.monotonic()
    steps = 0
    seed = args.seed
    total = Counter[str]()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        while steps < args.steps:
            for number, report in pool.imap(world, range(seed, seed + 50)):
                if isinstance(report, str):
                    tell(row="simulation", failing_seed=number, error=report)
                    return False
                steps += report.steps
                total.update(
                    engines=report.engines,
                    finished=report.finished,
                    given_up=report.given_up,
                    left=report.left,
                    late=report.late,
                    preemptions=report.preemptions,
                )
                progress("simulation", args.steps, report.steps)
            seed += 50
    tell(
        row="simulation",
        steps=steps,
        worlds=seed - args.seed,
        first_seed=args.seed,
        violations=0,
        **total,
        seconds=round(time.monotonic() - begun),
    )
    return True


def engines(args: argparse.Namespace) -> bool:
    """Random engines, with drafts, chunks, preemption, prefix hits and aborts, against the plain loop."""
    return command(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ghost", "--engines", str(args.times)
    )


def deterministic(args: argparse.Namespace) -> bool:
    """The embedded model: every prompt alone, in batches, in chunks, behind warm prefixes, preempted: the same bits."""
    return command(
        "benchmarks/deterministic.py",
        "check",
        "--model",
        "embedded",
        "--device",
        "cpu",
        "--prompts",
        str(args.times),
        "--tokens",
        str(args.tokens),
    )


def command(*line: str) -> bool:
    done = subprocess.run([sys.executable, *line], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for said in done.stdout.strip().splitlines()[-9:]:
        print(said, flush=True)
    return done.returncode == 0


Row = Callable[[argparse.Namespace], bool]
# each with its full length
ROWS: dict[str, tuple[Row, dict[str, Any]]] = {
    "kills": (kills, {"times": 100, "streams": 32}),
    "text": (text, {"times": 20, "streams": 32, "tokens": 40}),
    "faults": (faults, {"times": 20}),
    "poison": (poison, {}),
    "streams": (streams, {"streams": 1000, "seconds": 300.0}),
    "overload": (overload, {"streams": 5000, "inside": 1000, "seconds": 30.0}),
    "fairness": (fairness, {"seconds": 60.0}),
    "secrecy": (secrecy, {"times": 50}),
    "idlers": (idlers, {"seconds": 60.0}),
    "isolation": (isolation, {"seconds": 60.0}),
    "descriptors": (descriptors, {}),
    "bad": (bad, {}),
    "invalid": (invalid, {"times": 100_000}),
    "memory": (memory, {"times": 10_000}),
    "storm": (storm, {"times": 20}),
    "seeds": (seeds, {"times": 20}),
    "exposure": (exposure, {}),
    "files": (files, {"times": 10_000}),
    "points": (points, {}),
    "simulation": (simulation, {"steps": 1_000_000}),
    "engines": (engines, {"times": 12_000}),
    "deterministic": (deterministic, {"times": 500, "tokens": 16}),
}
LONGEST = 7200  # seconds a row may take


def every(rows: list[str]) -> bool:
    """One row after another, each in a process of its own; what a row says, in one line."""
    broken = 0
    for row in rows:
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, __file__, row], capture_output=True, text=True, timeout=LONGEST
            )
            kept = done.returncode == 0
            said = done.stdout.splitlines()[:-1] or done.stderr.splitlines()[-1:]
        except subprocess.TimeoutExpired:
            kept = False
            said = [f"did not end within {LONGEST} s"]
        broken += not kept
        print(
            f"{row:14}{'kept' if kept else 'short':6}{time.monotonic() - begun:6.0f} s  {' '.join(said)}",
            flush=True,
        )
    print(f"{len(rows) - broken} of {len(rows)} rows kept", flush=True)
    return not broken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=[*ROWS, "all"])
    parser.add_argument("--rows", default=",".join(ROWS), help="which of all, in this order")
    for name, what in LENGTHS.items():
        parser.add_argument(f"--{name}", type=float if name == "seconds" else int, help=what)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.row == "all":
        if unknown := set(names := args.rows.split(",")) - set(ROWS):
            parser.error(
                f"there is no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}"
            )
        return 0 if every(names) else 1
    row, full = ROWS[args.row]
    for name, value in full.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    random.seed(args.seed)
    kept = row(args)
    print("kept" if kept else "short", flush=True)
    return 0 if kept else 1


LENGTHS = {
    "times": "repetitions",
    "streams": "at once",
    "inside": "how many the server lets in (overload)",
    "seconds": "of load",
    "tokens": "an answer",
    "steps": "of simulated engines",
}


if __name__ == "__main__":
    sys.exit(main())

"""Promises about faults, overload and hostile input, each as a command: what was tried, what came out, and whether that
is what docs/reliability.md promises.

    PYTHONPATH=src python benchmarks/reliability.py kills --times 100 --streams 32
    PYTHONPATH=src python benchmarks/reliability.py text --times 5 --streams 32     (the embedded model, deterministic)
    PYTHONPATH=src python benchmarks/reliability.py ranks --times 20
    PYTHONPATH=src python benchmarks/reliability.py faults --times 20
    PYTHONPATH=src python benchmarks/reliability.py poison
    PYTHONPATH=src python benchmarks/reliability.py streams --streams 1000 --seconds 60
    PYTHONPATH=src python benchmarks/reliability.py overload --streams 5000
    PYTHONPATH=src python benchmarks/reliability.py fairness
    PYTHONPATH=src python benchmarks/reliability.py secrecy --times 50
    PYTHONPATH=src python benchmarks/reliability.py bad                                (section by section, four ways)
    PYTHONPATH=src python benchmarks/reliability.py invalid --times 100000
    PYTHONPATH=src python benchmarks/reliability.py memory --times 10000
    PYTHONPATH=src python benchmarks/reliability.py storm --times 20
    PYTHONPATH=src python benchmarks/reliability.py seeds --times 20
    PYTHONPATH=src python benchmarks/reliability.py exposure
    PYTHONPATH=src python benchmarks/reliability.py files --times 10000
    PYTHONPATH=src python benchmarks/reliability.py simulation --steps 1000000

The server is the real one, two processes; the model behind it is a ghost unless said otherwise. The client runs on the
same cores. Exit status 1 if a promise is broken.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
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

from tests.chaos.http import SERVER, Line, Refused, Served, events, free_port, request, send, served, status
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

    return Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(),
                    console=Console(stderr=True), transient=True)  # fmt: skip


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


async def text_of(port: int, body: dict[str, Any], begun: Callable[[], Any] = lambda: None, **headers: str) -> str:
    """The text of a stream; raises unless it ends as it should. `begun` is called at every event."""
    parts, done = [], False
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
    last, tail = time.monotonic(), b""
    try:
        if answer.status != 200:
            raise Refused(answer)
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            now = time.monotonic()
            if gaps is not None:
                gaps.append(now - last)
            last, tail = now, (tail + data)[-64:]
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
        line = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc"))
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
    tell(row="kills", kills=args.times, streams=args.times * args.streams, engines=engines, lost=0, doubled=0,
         seconds=round(time.monotonic() - begun, 1))  # fmt: skip
    return True


def text(args: argparse.Namespace) -> bool:
    """The embedded model in deterministic mode, killed in the middle: the text of an undisturbed run."""
    command = (sys.executable, "-m", "bloomery", "serve", "--deterministic", "--threads", "2", *OFTEN, "--port")
    prompts = [f"The {word} of the {thing}" for word in ("history", "price", "colour", "sound", "weight", "smell")
               for thing in ("iron", "river", "city", "machine", "winter", "road")][: args.streams]  # fmt: skip
    bodies = [{"prompt": prompt, "max_tokens": args.tokens, "temperature": i % 2, "seed": i, "ignore_eos": True,
               "stream": True} for i, prompt in enumerate(prompts)]  # fmt: skip
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
    tell(row="text", kills=args.times, streams=total, identical=same, seconds=round(time.monotonic() - begun))
    return same == total


def ranks_of(server: Any) -> list[int]:
    """The processes that are ranks of a server's engine."""
    try:
        pids = [pid for engine in server.children("engine_main")
                for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]  # fmt: skip
        return [int(pid) for pid in pids if "executors.rank" in Path(f"/proc/{pid}/cmdline").read_text()]
    except FileNotFoundError:  # one of them has just ended
        return []


def ranks(args: argparse.Namespace) -> bool:
    """The embedded model on three ranks, one of which is killed in the middle of four streams: all complete."""
    serve = (sys.executable, "-m", "bloomery", "serve", "--deterministic", "--tp", "3", "--threads", "1")
    command = (*serve, *OFTEN, "--port")
    body = LONG | {"prompt": "The history of iron", "max_tokens": args.tokens}
    same = 0
    with served(folder(), command=command) as server:

        async def once() -> list[str]:
            tasks = [asyncio.create_task(text_of(server.port, body)) for _ in range(4)]
            await asyncio.sleep(random.uniform(0.5, 3.0))
            while not (members := ranks_of(server)):  # they may be starting again, after the last time
                await asyncio.sleep(0.05)
            os.kill(random.choice(members), signal.SIGKILL)
            return await asyncio.gather(*tasks)

        want = asyncio.run(text_of(server.port, body))
        for _ in range(args.times):
            same += sum(text == want for text in asyncio.run(once()))
            progress("ranks", args.times)
    tell(row="ranks", kills=args.times, streams=4 * args.times, identical=same)
    return same == 4 * args.times


def faults(args: argparse.Namespace) -> bool:
    good = True
    for fault in (stop, unplug, orphans, terminate, calls):
        begun = time.monotonic()
        found = fault(args)
        good &= found.pop("good")
        tell(row="faults", fault=fault.__name__, seconds=round(time.monotonic() - begun, 1), **found)
    return good


def lanes(times: int, work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """So many repetitions on a few servers at a time: most of a fault's time is waiting for somebody to notice."""
    shares = [times // count + (lane < times % count) for lane in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [share for share in shares if share]))


def stop(args: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP to the engine in the middle of 8 streams: not ready within 10 s, replaced, all streams complete."""

    async def once(server: Served, want: str) -> tuple[int, float]:
        streams = [asyncio.create_task(text_of(server.port, LONG | {"max_tokens": 100})) for _ in range(8)]
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
        with served(folder(), "--engine", "--speaker --delay 0.01", "--silence", "3", *OFTEN) as server:
            want = asyncio.run(text_of(server.port, LONG | {"max_tokens": 100}))
            return [asyncio.run(once(server, want)) for _ in range(times)]

    found = [one for lane_ in lanes(args.times, lane) for one in lane_]
    complete, slowest = sum(done for done, _ in found), max(waited for _, waited in found)
    good = complete == 8 * args.times and slowest <= 10
    return {"good": good, "times": args.times, "complete": complete, "not_ready_after_s": round(slowest, 1)}


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
            tasks = [asyncio.create_task(read(client, one)) for one in requests(random.Random(number), 8, 80)]
            await asyncio.sleep(0.05 + random.random() * 0.2)
            if client.child is not None and client.child.line is not None:
                client.child.line.abort()
            complete += sum(end.finish in ("stop", "length") for end in await asyncio.gather(*tasks))
        await client.close()
        return complete

    complete = asyncio.run(main())
    return {"good": complete == 8 * args.times, "times": args.times, "complete": complete}


def orphans(args: argparse.Namespace) -> dict[str, Any]:
    """The API process is killed: within 5 s nothing it started is left, and its successor listens on the same port."""

    def lane(times: int) -> list[tuple[int, float]]:
        found, port = [], None
        for _ in range(times):
            with served(folder(), "--engine", "--quick --delay 0.01", port=port) as server:
                port, pids = server.port, server.children("engine") + server.children("apart")
                server.process.kill()
                begun = time.monotonic()
                server.process.wait()
                while any(map(alive, pids)) and time.monotonic() - begun < 5:
                    time.sleep(0.02)
                found.append((sum(map(alive, pids)), time.monotonic() - begun))
            progress("orphans", args.times)
        with served(folder(), "--engine=--quick", port=port):
            return found

    found = [one for lane_ in lanes(args.times, lane) for one in lane_]
    left, slowest = sum(count for count, _ in found), max(seconds for _, seconds in found)
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
            return "error event" if str(error) == "the server is shutting down" else f"broken: {error}"
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
            options = ("--engine", "--quick --delay 0.05 --blocks 20000", "--sequences", "256", "--drain", "3",
                       "--policy", "first-come")  # fmt: skip
            with served(folder(), *options) as server:
                found.append((asyncio.run(all_of(server)), server.process.wait(60)))
            progress("terminate", args.times)
        return found

    found = [one for lane_ in lanes(args.times, lane, 2) for one in lane_]
    ends, codes = Counter(end for texts, _ in found for end in texts), Counter(code for _, code in found)
    good = set(ends) <= {"complete", "error event"} and set(codes) == {0} and sum(ends.values()) == 200 * args.times
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
    options = ("--engine", "--quick --delay 0.1 --blocks 1000000", "--sequences", str(args.streams), "--tokens", "8192",
               "--limits", f"requests={args.streams + 24}")  # fmt: skip
    gaps: list[float] = []
    with served(folder(), *options) as server:
        peak = 0

        async def main() -> list[BaseException | None]:
            nonlocal peak
            body = LONG | {"max_tokens": tokens}
            tasks = [asyncio.create_task(tally(server.port, body, gaps)) for _ in range(args.streams)]
            while not all(task.done() for task in tasks):
                peak = max(peak, server.resident)
                await asyncio.sleep(1.0)
            return await asyncio.gather(*tasks, return_exceptions=True)

        begun = time.monotonic()
        errors = sum(isinstance(one, BaseException) for one in asyncio.run(main()))
        took = time.monotonic() - begun
    tell(row="streams", streams=args.streams, tokens=tokens, errors=errors, seconds=round(took, 1),
         rate=round(args.streams * tokens / took), p99_gap_s=round(quantile(gaps, 0.99), 2),
         longest_gap_s=round(max(gaps), 2), api_mb=round(peak / 1e6))  # fmt: skip
    return errors == 0 and max(gaps) < 2 and peak < 600e6


def overload(args: argparse.Namespace) -> bool:
    """A house full of streams, and several times as many who knock: told to come back, and those inside do not suffer.

    The crowd inside is another process's, and steps back where cores are few: it stands for machines of its own. This
    process only knocks, so that its clock is not delayed by what it reads.
    Arrivals are spread at random. Seen from outside, connecting included, and by the server's own log.
    """
    inside, alone, ramp = args.inside, 10.0, args.inside / 100
    options = ("--engine", "--quick --delay 0.1 --blocks 100000", "--sequences", str(inside), "--tokens", "8192",
               "--policy", "first-come", "--limits", f"requests={inside}")  # fmt: skip

    async def main(port: int) -> tuple[dict[str, Any], list[Knock], float]:
        tokens = int(10 * (ramp + alone + args.seconds) * 1.3)
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.chaos.load", *map(str, (port, inside, tokens, ramp)), cwd=ROOT,
            stdout=subprocess.PIPE, limit=1 << 22, preexec_fn=lambda: os.nice(10),
        )  # fmt: skip
        assert crowd.stdout is not None
        await crowd.stdout.readline()  # all are inside
        await asyncio.sleep(alone)
        begun = time.monotonic()
        delays = [random.uniform(0, args.seconds) for _ in range(args.streams - inside)]
        made = await asyncio.to_thread(knocks, port, delays)
        return json.loads(await crowd.stdout.readline()), made, begun

    with served(folder(), *options) as server:
        crowd, made, begun = asyncio.run(main(server.port))
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if '"status": 429' in line]
    quiet, busy = pace(crowd["seen"], begun - alone, begun), pace(crowd["seen"], begun, begun + args.seconds)
    seen = Counter(int(knock.answer[9:12] or 0) for knock in made)
    without_advice = sum(b"retry-after: " not in knock.answer for knock in made)
    refusals = [knock.seconds for knock in made]
    seen[200] += crowd["complete"]
    within = quantile([line["seconds"] for line in lines], 0.99)
    late = quantile(refusals, 0.99)
    tell(row="overload", offered=args.streams, answers=dict(seen), without_retry_after=without_advice,
         refused_p50_ms=round(1000 * quantile(refusals, 0.5), 1), refused_p99_ms=round(1000 * late, 1),
         within_server_p99_ms=round(1000 * within, 1), tokens_a_second=round(busy), alone=round(quiet),
         goodput=round(busy / quiet, 3), failed=crowd["failed"], errors=crowd["errors"],
         longest_gap_s=round(crowd["longest_gap"], 2))  # fmt: skip
    kept = set(seen) <= {200, 429} and not crowd["failed"] and not without_advice
    return kept and late < 0.05 and busy >= 0.95 * quiet


def pace(seen: list[tuple[float, int]], begun: float, ended: float) -> float:
    """Events a second between two moments."""
    within = [(when, count) for when, count in seen if begun <= when <= ended]
    (first, before), (last, after) = within[0], within[-1]
    return (after - before) / (last - first)


def fairness(args: argparse.Namespace) -> bool:
    """A key that offers twenty times as much as another: the other's first tokens are at most twice as late."""
    keys = {"polite": "one-key", "greedy": "another-key"}
    options = ("--engine", "--quick --delay 0.05 --blocks 4000", "--sequences", "16", "--limits", "requests=128",
               "--api-key", ",".join(keys.values()))  # fmt: skip
    body = LONG | {"max_tokens": 12}
    seen: Counter[tuple[str, int]] = Counter()

    async def first(port: int, who: str, delay: float, waits: list[float]) -> None:
        """One request after a while; how long it waited for its first token, if it was let in."""
        await asyncio.sleep(delay)
        begun = time.monotonic()
        try:
            got = 0
            async for _ in events(port, "/v1/completions", body, **{"x-api-key": keys[who]}):
                got += 1
                if got == 1:
                    waits.append(time.monotonic() - begun)
            seen[who, 200] += 1
        except Refused as error:
            seen[who, error.answer.status] += 1

    async def offered(port: int, greed: int) -> float:
        waits: list[float] = []
        tasks = [first(port, "polite", random.uniform(0, args.seconds), waits) for _ in range(int(4 * args.seconds))]
        others = [first(port, "greedy", random.uniform(0, args.seconds), []) for _ in range(greed * len(tasks))]
        await asyncio.gather(*tasks, *others)
        return quantile(waits, 0.99)

    with served(folder(), *options) as server:
        alone = asyncio.run(offered(server.port, 0))
        beside = asyncio.run(offered(server.port, 20))
    told = {f"{who} {code}": count for (who, code), count in sorted(seen.items())}
    tell(row="fairness", first_token_p99_alone_ms=round(1000 * alone), beside_greedy_ms=round(1000 * beside),
         ratio=round(beside / alone, 2), answers=told)  # fmt: skip
    return beside <= 2 * alone and not seen["polite", 429]


def secrecy(args: argparse.Namespace) -> bool:
    """One key's prompts leave no trace in another's waits: a prefix of 2,000 tokens that one key has warmed is, to the
    other, like one that nobody has ever sent. Its own owner does see the difference, or the test could not."""
    options = ("--engine", "--speaker --delay 0.002 --blocks 100000", "--tokens", "64", "--sequences", "4",
               "--api-key", "one-key,another-key")  # fmt: skip
    chance = random.Random(args.seed)
    waits: dict[str, list[float]] = {"cold": [], "warmed by another": [], "warmed by itself": []}

    async def wait(port: int, key: str, prompt: list[int]) -> float:
        begun, body = time.monotonic(), LONG | {"prompt": prompt, "max_tokens": 1}
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
    other, own = (chance_of(waits["cold"], waits[f"warmed by {who}"]) for who in ("another", "itself"))
    medians = {f"{kind}_ms": round(1000 * statistics.median(found), 1) for kind, found in waits.items()}
    tell(row="secrecy", prompts=args.times, p_of_another=round(other, 3), p_of_itself=float(f"{own:.1g}"), **medians)
    return other > 0.01 and own < 0.001


def chance_of(one: list[float], other: list[float]) -> float:
    """Mann and Whitney's: how likely two samples of the same thing differ in rank by as much; no ties, normal in the
    limit."""
    ranks = {value: rank for rank, value in enumerate(sorted(one + other), 1)}
    n, m = len(one), len(other)
    u = sum(ranks[value] for value in one) - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def storm(args: argparse.Namespace) -> bool:
    """Clients that leave, several answers a request, deadlines and kills at once: all blocks are free soon after."""
    waits: list[float] = []
    with served(folder(), "--engine", "--speaker --delay 0.005 --blocks 4000", *OFTEN) as server:

        async def one() -> None:
            body = LONG | {"max_tokens": random.randrange(1, 80), "n": random.choice([1, 1, 3])}
            headers = {"x-request-deadline-ms": "300"} if random.random() < 0.2 else {}
            try:
                count, leaves = 0, random.choice([None, random.randrange(1, 20)])
                async for _ in events(server.port, "/v1/completions", body, **headers):
                    count += 1
                    if count == leaves:
                        return
            except (Refused, OSError):
                pass

        async def once() -> float:
            tasks = [asyncio.create_task(one()) for _ in range(60)]
            await asyncio.sleep(random.random())
            if random.random() < 0.5:
                os.kill(server.children("engine")[0], signal.SIGKILL)
            await asyncio.gather(*tasks)
            return await idle(server.port)

        waits += [asyncio.run(once()) for _ in range(args.times)]
    tell(row="storm", storms=args.times, slowest_free_s=round(max(waits), 2))
    return max(waits) <= 2


def memory(args: argparse.Namespace) -> bool:
    """Bytes the API process grows by a request, from a line through its size after a warm-up of a tenth."""
    good = True
    for kind in ("mixed", "aborted", "refused"):
        sizes = growth(kind, args.times)
        slope = statistics.linear_regression(*zip(*sizes, strict=True)).slope
        tell(row="memory", kind=kind, requests=args.times, bytes_a_request=round(slope), mb=round(sizes[-1][1] / 1e6))
        good &= slope < 1024
    return good


def growth(kind: str, times: int) -> list[tuple[int, int]]:
    """Requests so far and bytes held, from after the warm-up on."""
    with served(folder(), "--engine=--quick", "--limits", "stored_responses=50") as server:

        async def one(number: int) -> None:
            body = {"prompt": f"The iron {number}", "max_tokens": 4, "ignore_eos": True}
            chat = {"messages": [{"role": "user", "content": f"iron {number}"}], "max_tokens": 4}
            if kind == "refused":
                await request(server.port, "POST", "/v1/completions", body | {"model": f"unknown-{number}"})
            elif kind == "aborted":
                async for _ in events(server.port, "/v1/completions", body | {"max_tokens": 500, "stream": True}):
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
    body = {"prompt": "The iron", "max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 42, "n": 4}
    found: Counter[tuple[str, ...]] = Counter()
    with served(folder(), "--engine", "--speaker --delay 0.002", *OFTEN) as server:

        async def once(kill: bool) -> None:
            others = [LONG | {"max_tokens": random.randrange(5, 60), "temperature": 1.0} for _ in range(8)]
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
    ways = (("plain", (), ()), ("python -O", ("-O",), ()), ("16 at a time", (), ("-n", "16")), ("64 streams", (), ()))
    kept = [bad_way(way, python, options) for way, python, options in ways]
    return all(kept)


def bad_way(way: str, python: tuple[str, ...], options: tuple[str, ...]) -> bool:
    with served(folder(), "--engine", "--speaker --delay 0.002 --blocks 4000 --context 512", python=python) as server:
        line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/chaos/test_bad_ways.py", "--server",
                str(server.port), *options]  # fmt: skip
        engine, body = server.children("engine"), LONG | {"max_tokens": 60}
        golden = asyncio.run(text_of(server.port, body))

        async def main() -> tuple[int | None, int, int]:
            suite = await asyncio.create_subprocess_exec(*line, cwd=ROOT, stdout=subprocess.DEVNULL)
            ending, wrong, count = asyncio.create_task(suite.wait()), 0, 0
            while way == "64 streams" and not ending.done():
                texts = await asyncio.gather(*(text_of(server.port, body) for _ in range(64)))
                wrong, count = wrong + sum(text != golden for text in texts), count + 64
            return await ending, wrong, count

        code, wrong, count = asyncio.run(main())
        unharmed = server.children("engine") == engine
    tell(row="bad", way=way, as_listed=code == 0, engine_unharmed=unharmed, streams=count, streams_wrong=wrong)
    return code == 0 and unharmed and not wrong


def invalid(args: argparse.Namespace) -> bool:
    """Bodies made wrong at random, 16 at a time, until so many were refused: nothing above 499, no refusal slow."""
    from tests.chaos.bodies import body

    chance = random.Random(args.seed)
    seen: Counter[int] = Counter()
    slowest = 0.0

    async def worker(port: int) -> None:
        nonlocal slowest
        line = Line(port)
        while sum(seen.values()) - seen[200] < args.times:
            path, data = body(chance)
            begun = time.monotonic()
            answer = await line.ask(path, data)
            seen[answer.status] += 1
            if answer.status != 200:  # some changes leave a body right, and then it is answered
                slowest = max(slowest, time.monotonic() - begun)
                progress("invalid", args.times)
        line.close()

    async def main(port: int) -> None:
        await asyncio.gather(*(worker(port) for _ in range(16)))

    with served(folder(), "--engine=--speaker") as server:
        engine, begun = server.children("engine"), time.monotonic()
        asyncio.run(main(server.port))
        ready, unharmed = asyncio.run(status(server.port, "/ready")), server.children("engine") == engine
    tell(row="invalid", bodies=sum(seen.values()), statuses=dict(sorted(seen.items())), slowest_s=round(slowest, 3),
         ready=ready, engine_unharmed=unharmed, seconds=round(time.monotonic() - begun, 1))  # fmt: skip
    return all(code < 500 for code in seen) and slowest <= 1 and ready == 200 and unharmed


def files(args: argparse.Namespace) -> bool:
    """Damaged weight files, in a process whose memory is bounded; see tests/chaos/files.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.files", str(args.times), str(args.seed)], cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    print(done.stdout.strip() or done.stderr[-500:], flush=True)
    return done.returncode == 0


def exposure(args: argparse.Namespace) -> bool:
    """Sockets, open routes, what is in the package, and whether it runs as nobody on a root it cannot write to."""
    key = "a-key-that-no-process-list-shows"
    secret = folder() / "key"
    secret.write_text(key)
    with served(folder(), "--engine=--speaker", "--api-key", f"@{secret}") as server:
        pids = [server.process.pid, *server.children("")]
        listening = sum(map(listeners, pids))
        shown = sum(
            key.encode() in Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("environ", "cmdline")
        )
        from bloomery.server.routes import table
        from bloomery.server.service import Settings

        routes = table(Settings(model="speaker"))
        open_routes = sorted({route.path for route in routes if route.open})
        statuses = {
            asyncio.run(request(server.port, route.method, route.path, {} if route.method == "POST" else None)).status
            for route in routes
            if not route.open
        }
        written = key in server.log.read_text()
    word = re.compile(r"\b(c?pickle|cloudpickle|marshal)\b|torch\.load\(|(?<![.\w])(eval|exec)\(")
    hits = sum(len(word.findall(path.read_text(encoding="utf-8"))) for path in (ROOT / "src").rglob("*.py"))
    readonly = read_only()
    tell(row="exposure", listening=listening, open_routes=open_routes, others_without_key=sorted(statuses),
         key_in_processes=shown, key_in_log=written, words=hits, nobody_on_read_only_root=readonly)  # fmt: skip
    return (
        listening == 1
        and not shown
        and statuses == {401}
        and not hits
        and readonly in ("serves", "not tried: no unshare")
    )


def listeners(pid: int) -> int:
    """TCP sockets on which a process listens."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(line[3] == "0A" and f"socket:[{line[9]}]" in links for line in lines)


def read_only() -> str:
    """A server as an unprivileged user in a namespace whose whole tree is mounted read-only, /tmp included."""
    port = free_port()
    inner = (
        "mount -o remount,bind,ro / 2>/dev/null || mount --bind / / && mount -o remount,bind,ro /; "
        f"exec unshare --user --map-user=65534 --map-group=65534 {sys.executable} -B {SERVER} {port}"
    )
    try:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", inner], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent"},
        )  # fmt: skip
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


def simulation(args: argparse.Namespace) -> bool:
    """Worlds of consecutive seeds, on two cores, until they have seen so many steps."""
    begun, steps, seed, total = time.monotonic(), 0, args.seed, Counter[str]()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        while steps < args.steps:
            for number, report in pool.imap(world, range(seed, seed + 50)):
                if isinstance(report, str):
                    tell(row="simulation", failing_seed=number, error=report)
                    return False
                steps += report.steps
                total.update(engines=report.engines, finished=report.finished, given_up=report.given_up,
                             left=report.left, late=report.late, preemptions=report.preemptions)  # fmt: skip
                progress("simulation", args.steps, report.steps)
            seed += 50
    tell(row="simulation", steps=steps, worlds=seed - args.seed, first_seed=args.seed, violations=0, **total,
         seconds=round(time.monotonic() - begun))  # fmt: skip
    return True


ROWS: dict[str, Callable[[argparse.Namespace], bool]] = {
    row.__name__: row
    for row in (
        kills, text, ranks, faults, poison, streams, overload, fairness, secrecy, bad, invalid, memory, storm, seeds,
        exposure, files, simulation,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--inside", type=int, default=1000, help="how many the server lets in (overload)")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    kept = ROWS[args.row](args)
    print("kept" if kept else "BROKEN", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

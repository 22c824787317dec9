"""Promises about faults, overload and hostile input, each as a command: what was tried, what came out, and whether that
is what docs/reliability.md promises.

    PYTHONPATH=src python benchmarks/reliability.py kills --times 100 --streams 32
    PYTHONPATH=src python benchmarks/reliability.py text --times 5 --streams 32     (the embedded model, deterministic)
    PYTHONPATH=src python benchmarks/reliability.py ranks --times 20
    PYTHONPATH=src python benchmarks/reliability.py faults --times 20
    PYTHONPATH=src python benchmarks/reliability.py poison
    PYTHONPATH=src python benchmarks/reliability.py streams --streams 1000 --seconds 60
    PYTHONPATH=src python benchmarks/reliability.py overload --streams 5000
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
import json
import logging
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.chaos.http import SERVER, Refused, Served, events, free_port, request, send, served, status

LONG = {"prompt": "The iron", "ignore_eos": True, "temperature": 0, "stream": True}


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bloomery-"))


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


async def text_of(port: int, body: dict[str, Any], **headers: str) -> str:
    """The text of a stream; raises unless it ends as it should."""
    parts, done = [], False
    async for event in events(port, "/v1/completions", body, **headers):
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
    command = (sys.executable, "-m", "bloomery", "serve", "--deterministic", "--threads", "2", "--port")
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
            await asyncio.sleep(random.uniform(0.5, args.seconds))
            for pid in server.children("engine_main"):
                os.kill(pid, signal.SIGKILL)
            return await task

        want = asyncio.run(all_of())
        for _ in range(args.times):
            got = asyncio.run(killed())
            same += sum(a == b for a, b in zip(got, want, strict=True))
            total += len(want)
    tell(row="text", kills=args.times, streams=total, identical=same)
    return same == total


def ranks(args: argparse.Namespace) -> bool:
    """The embedded model on three ranks, one of which is killed in the middle of four streams: all complete."""
    command = (sys.executable, "-m", "bloomery", "serve", "--deterministic", "--tp", "3", "--threads", "1", "--port")
    body = LONG | {"prompt": "The history of iron", "max_tokens": args.tokens}
    same = 0
    with served(folder(), command=command) as server:

        async def once() -> list[str]:
            tasks = [asyncio.create_task(text_of(server.port, body)) for _ in range(4)]
            await asyncio.sleep(random.uniform(0.5, 3.0))
            (engine,) = server.children("engine_main")
            pids = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
            members = [int(pid) for pid in pids if "executors.rank" in Path(f"/proc/{pid}/cmdline").read_text()]
            os.kill(random.choice(members), signal.SIGKILL)
            return await asyncio.gather(*tasks)

        want = asyncio.run(text_of(server.port, body))
        for _ in range(args.times):
            same += sum(text == want for text in asyncio.run(once()))
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


def stop(args: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP to the engine in the middle of 8 streams: not ready within 10 s, replaced, all streams complete."""
    complete, waits = 0, []
    with served(folder(), "--engine", "--speaker --delay 0.01", "--silence", "4") as server:

        async def once() -> int:
            want = await text_of(server.port, LONG | {"max_tokens": 100})
            streams = [asyncio.create_task(text_of(server.port, LONG | {"max_tokens": 100})) for _ in range(8)]
            await asyncio.sleep(0.3)
            os.kill(server.children("engine")[0], signal.SIGSTOP)
            begun = time.monotonic()
            while await status(server.port, "/ready") == 200:
                await asyncio.sleep(0.1)
            waits.append(time.monotonic() - begun)
            done = sum(text == want for text in await asyncio.gather(*streams))
            while await status(server.port, "/ready") != 200:
                await asyncio.sleep(0.1)
            return done

        for _ in range(args.times):
            complete += asyncio.run(once())
    good = complete == 8 * args.times and max(waits) <= 10
    return {"good": good, "times": args.times, "complete": complete, "not_ready_after_s": round(max(waits), 1)}


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
    """The API process is killed: nothing it started is left, and its port is free again, within 5 s."""
    left, slowest = 0, 0.0
    for _ in range(args.times):
        with served(folder(), "--engine", "--quick --delay 0.01") as server:
            pids = server.children("engine") + server.children("apart")
            server.process.kill()
            begun = time.monotonic()
            server.process.wait()
            while any(map(alive, pids)) and time.monotonic() - begun < 5:
                time.sleep(0.02)
            left += sum(map(alive, pids))
            slowest = max(slowest, time.monotonic() - begun)
            with served(folder(), "--engine=--quick"):
                pass
    return {"good": left == 0, "times": args.times, "orphans": left, "slowest_s": round(slowest, 2)}


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def terminate(args: argparse.Namespace) -> dict[str, Any]:
    """SIGTERM under 200 streams, half of which cannot end in time: all end or get an error event, and the exit is 0."""
    ends: Counter[str] = Counter()
    codes: Counter[int] = Counter()
    for _ in range(args.times):
        options = ("--engine", "--quick --delay 0.02 --blocks 20000", "--sequences", "256", "--drain", "3")
        with served(folder(), *options) as server:

            async def one(number: int, port: int) -> str:
                try:
                    await text_of(port, LONG | {"max_tokens": 60 if number % 2 else 1500})
                except RuntimeError as error:
                    return "error event" if "event" not in str(error) and "without" not in str(error) else "cut"
                return "complete"

            async def all_of(server: Served) -> list[str]:
                tasks = [asyncio.create_task(one(number, server.port)) for number in range(200)]
                await asyncio.sleep(1.0)
                server.process.terminate()
                return await asyncio.gather(*tasks)

            ends.update(asyncio.run(all_of(server)))
            codes[server.process.wait(60)] += 1
    good = not ends["cut"] and set(codes) == {0} and sum(ends.values()) == 200 * args.times
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
    """Arrivals far beyond what fits, over half a minute: in, or told to come back; those inside do not suffer."""
    seconds, inside = 30.0, args.inside
    options = ("--engine", "--quick --delay 0.1 --blocks 100000", "--sequences", str(inside), "--tokens", "8192",
               "--limits", f"requests={inside}")  # fmt: skip
    body = LONG | {"max_tokens": 40}
    seen: Counter[int] = Counter()
    refusals: list[float] = []
    without_advice = 0
    with served(folder(), *options) as server:

        async def one(delay: float) -> None:
            nonlocal without_advice
            await asyncio.sleep(delay)
            begun = time.monotonic()
            try:
                await tally(server.port, body)
                seen[200] += 1
            except Refused as error:
                seen[error.answer.status] += 1
                refusals.append(time.monotonic() - begun)
                without_advice += "retry-after" not in error.answer.headers
            except (OSError, RuntimeError, asyncio.IncompleteReadError):
                seen[0] += 1

        async def solo() -> float:
            begun = time.monotonic()
            await asyncio.gather(*(tally(server.port, body) for _ in range(inside)))
            return inside / (time.monotonic() - begun)

        async def offered() -> float:
            begun = time.monotonic()
            await asyncio.gather(*(one(random.uniform(0, seconds)) for _ in range(args.streams)))
            return seen[200] / (time.monotonic() - begun)

        best = asyncio.run(solo())
        rate = asyncio.run(offered())
    tell(row="overload", offered=args.streams, answers=dict(seen), without_retry_after=without_advice,
         refused_p99_ms=round(1000 * quantile(refusals, 0.99), 1), goodput=round(rate / best, 2))  # fmt: skip
    return set(seen) <= {200, 429} and not without_advice and quantile(refusals, 0.99) < 0.05 and rate >= 0.95 * best


def storm(args: argparse.Namespace) -> bool:
    """Clients that leave, several answers a request, deadlines and kills at once: all blocks are free soon after."""
    waits: list[float] = []
    with served(folder(), "--engine", "--speaker --delay 0.005 --blocks 4000") as server:

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
    with served(folder(), "--engine", "--speaker --delay 0.002") as server:

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
    """Bodies made wrong at random, until so many were refused: nothing above 499, no refusal slow."""
    from tests.chaos.bodies import body

    chance = random.Random(args.seed)
    seen: Counter[int] = Counter()
    slowest = 0.0
    with served(folder(), "--engine=--speaker") as server:

        async def one() -> None:
            nonlocal slowest
            path, data = body(chance)
            begun = time.monotonic()
            answer = await request(server.port, "POST", path, data)
            seen[answer.status] += 1
            if answer.status != 200:  # some changes leave a body right, and then it is answered
                slowest = max(slowest, time.monotonic() - begun)

        async def main() -> None:
            while sum(seen.values()) - seen[200] < args.times:
                await asyncio.gather(*(one() for _ in range(8)))

        begun = time.monotonic()
        asyncio.run(main())
        ready = asyncio.run(status(server.port, "/ready"))
    tell(row="invalid", bodies=sum(seen.values()), statuses=dict(sorted(seen.items())), slowest_s=round(slowest, 3),
         ready=ready, seconds=round(time.monotonic() - begun, 1))  # fmt: skip
    return all(code < 500 for code in seen) and slowest <= 1 and ready == 200


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


def simulation(args: argparse.Namespace) -> bool:
    from tests.simulation.test_world import STORM
    from tests.simulation.world import story

    logging.disable(logging.CRITICAL)
    begun, steps, total = time.monotonic(), 0, Counter[str]()
    seed = args.seed
    while steps < args.steps:
        try:
            report = story(seed, STORM)
        except Exception as error:
            tell(row="simulation", failing_seed=seed, error=f"{type(error).__name__}: {error}")
            return False
        steps += report.steps
        total.update(engines=report.engines, finished=report.finished, given_up=report.given_up, left=report.left,
                     late=report.late, preemptions=report.preemptions)  # fmt: skip
        seed += 1
    tell(row="simulation", steps=steps, worlds=seed - args.seed, first_seed=args.seed, violations=0, **total,
         seconds=round(time.monotonic() - begun))  # fmt: skip
    return True


ROWS: dict[str, Callable[[argparse.Namespace], bool]] = {
    row.__name__: row
    for row in (
        kills, text, ranks, faults, poison, streams, overload, bad, invalid, memory, storm, seeds, exposure, files,
        simulation,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--inside", type=int, default=1000, help="how many the server lets in (overload)")
    parser.add_argument("--seconds", type=float, default=10.0)
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

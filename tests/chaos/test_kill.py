"""Engines die, hang and break; streams go on: no id lost, none twice, the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.journal import PROBATION, Entry
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from tests.chaos.ghost_engine import POISON, ROOT, STALL, command, plan
from tests.ghost.ghost import plain
from tests.waiting import LONG, eventually, until

OFTEN = Patience(restarts=10**6, pause=0.0)
SHORT = Patience(silence=3.0, first=3.0)


def requests(random: Random, count: int, tokens: int) -> list[EngineRequest]:
    """Of many lengths, some with a stop id, some that share a beginning."""
    stem = [random.randrange(5) for _ in range(20)]
    made = []
    for number in range(count):
        prompt = stem[: random.choice([0, 20])] + [
            random.randrange(5) for _ in range(random.randrange(1, 30))
        ]
        length = random.randrange(tokens // 2, tokens)
        stop = random.choice([(), (3,)])
        made.append(
            EngineRequest(
                str(number), tuple(prompt), ResolvedSampling(min_tokens=tokens // 2), length, stop
            )
        )
    return made


async def read(client: EngineClient, request: EngineRequest) -> TokenOutput:
    """Read to the end, as a client that minds every id; the last news."""
    got = list(request.prompt)
    async for news in client.stream([request]):
        assert news.position == len(got) - len(request.prompt), "a gap or a duplicate"
        got += news.ids
        if news.finish == "error":
            return news
    assert got == plain(request)
    return news


async def kills(count: int, streams: int, seed: int) -> int:
    """One engine after the other is killed at a random moment while it serves `streams`; how many it took."""
    random = Random(seed)
    client = EngineClient(plan(), command("--delay", "0.004"), OFTEN)
    await client.start()
    done = 0
    for _ in range(count):
        await client.ready()
        readers = [asyncio.create_task(read(client, one)) for one in requests(random, streams, 80)]
        await asyncio.sleep(random.random() * 0.4)
        if client.pid is not None:
            os.kill(client.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*readers), LONG)
        done += sum(end.finish in ("stop", "length") for end in ends)
    assert done == count * streams
    assert not client.journal.entries
    await client.close()
    return client.epoch


def test_twenty_kills_of_eight_streams() -> None:
    assert (
        asyncio.run(kills(20, 8, seed=1)) >= 15
    )  # a few hit an engine that had nothing left to do


@pytest.mark.slow
def test_a_hundred_kills_of_thirty_two_streams() -> None:
    assert asyncio.run(kills(100, 32, seed=2)) >= 90


def beyond_suspicion(entry: Entry) -> bool:
    return entry.fresh >= PROBATION


def test_the_same_streams_outlive_one_engine_after_another() -> None:
    async def main() -> None:
        client = EngineClient(plan(), command("--delay", "0.004"), OFTEN)
        await client.start()
        readers = [asyncio.create_task(read(client, one)) for one in requests(Random(3), 8, 400)]
        for _ in range(5):
            await client.ready()
            assert await eventually(
                lambda: all(map(beyond_suspicion, client.journal.entries.values()))
            )
            before = client.epoch
            if client.pid is not None:
                os.kill(client.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
            if client.pid is not None:
                os.kill(client.pid, signal.SIGKILL)  # and its successor, still loading
            assert await eventually(lambda: client.epoch > before)
        ends = await asyncio.wait_for(asyncio.gather(*readers), LONG)
        assert {end.finish for end in ends} <= {"stop", "length"}
        stats = client.stats
        assert stats.tokens_out == sum(end.position + len(end.ids) for end in ends), (
            "counted once, over all engines"
        )
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("trap", "patience"),
    [(POISON, Patience()), (STALL, SHORT)],
    ids=["poison", "stall"],
)
def test_one_bad_request_among_many_fails_alone(trap: tuple[int, ...], patience: Patience) -> None:
    async def main() -> None:
        client = EngineClient(plan(max_num_seqs=32), command("--delay", "0.002"), patience)
        await client.start()
        await client.ready()
        good = [asyncio.create_task(read(client, one)) for one in requests(Random(4), 31, 60)]
        bad = asyncio.create_task(
            read(client, EngineRequest("bad", (*trap, 1, 2), ResolvedSampling(), 10))
        )
        end = await asyncio.wait_for(bad, LONG)
        assert (
            end.finish == "error"
            and end.error == "given up: the engine stopped 3 times while it ran this request"
        )
        ends = await asyncio.wait_for(asyncio.gather(*good), LONG)
        assert {end.finish for end in ends} <= {"stop", "length"}
        assert client.epoch <= 4 and client.status.state == "ready"
        await client.close()

    asyncio.run(main())


def test_a_stopped_engine_is_replaced_busy_or_idle() -> None:
    async def main() -> None:
        client = EngineClient(plan(), command("--delay", "0.004"), SHORT)
        await client.start()
        await client.ready()
        readers = [asyncio.create_task(read(client, one)) for one in requests(Random(5), 8, 400)]
        assert await eventually(lambda: client.stats.tokens_out)
        os.kill(client.pid or 0, signal.SIGSTOP)
        ends = await asyncio.wait_for(asyncio.gather(*readers), LONG)
        assert {end.finish for end in ends} <= {"stop", "length"} and client.epoch == 2
        os.kill(client.pid or 0, signal.SIGSTOP)
        assert await eventually(lambda: client.epoch == 3)
        assert "made no progress for 3 seconds" in client.status.detail
        await client.ready()
        await client.close()

    asyncio.run(main())


def test_a_stall_of_our_own_process_kills_nobody() -> None:
    async def main() -> None:
        client = EngineClient(plan(), command("--delay", "0.004"), SHORT)
        await client.start()
        await client.ready()
        readers = [asyncio.create_task(read(client, one)) for one in requests(Random(6), 4, 400)]
        assert await eventually(lambda: client.stats.tokens_out)
        os.kill(client.pid or 0, signal.SIGSTOP)
        time.sleep(SHORT.silence + 1)  # nobody watches meanwhile
        await asyncio.sleep(0.3)
        assert await eventually(lambda: client.silent > 0) and client.silent < SHORT.silence
        os.kill(client.pid or 0, signal.SIGCONT)
        await asyncio.gather(*readers)
        assert client.epoch == 1
        await client.close()

    asyncio.run(main())


PARENT = """
import asyncio, sys
sys.path[:0] = [{root!r}]
from bloomery.engine.client import EngineClient
from bloomery.messages import Request, Sampling
from tests.chaos.ghost_engine import command, plan

async def main():
    client = EngineClient(plan(), command())
    await client.start()
    await client.ready()
    print(client.pid, flush=True)
    async for _ in client.stream([Request("a", {prompt!r}, Sampling(), 2000)]):
        pass
    await asyncio.sleep(60)

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends a child in the middle of a step"
)
@pytest.mark.parametrize("prompt", [(1, 2), (*STALL, 1)], ids=["stepping", "stuck"])
def test_no_orphan_when_the_parent_is_killed(prompt: tuple[int, ...]) -> None:
    code = PARENT.format(root=str(ROOT), prompt=prompt)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)  # it is in the middle of its steps, or in the one that has no end
        assert alive(pid)
        parent.kill()
    assert until(lambda: not alive(pid))

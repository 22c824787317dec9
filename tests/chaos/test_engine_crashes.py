"""Engines crash, hang and break; streams continue with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from random import Random

import pytest

from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.engine.journal import CLEARING_TOKENS, GIVEN_UP, JournalEntry
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from tests.chaos.fake_engine import POISON, ROOT, STALL, fake_engine_command, fake_plan
from tests.chaos.http import is_alive
from tests.engine.fake_executor import reference_tokens
from tests.waiting import WAIT_SECONDS, wait_until, wait_until_async

MANY_RESTARTS = EngineTimeouts(max_restarts=10**6, restart_delay_seconds=0.0)
SHORT_TIMEOUTS = EngineTimeouts(step_seconds=3.0, first_step_seconds=3.0)


def random_requests(random: Random, count: int, max_tokens: int) -> list[EngineRequest]:
    """Requests of many lengths, some with a stop id, some that share a prefix."""
    prefix = [random.randrange(5) for _ in range(20)]
    requests = []
    for number in range(count):
        prompt = prefix[: random.choice([0, 20])]
        prompt = prompt + [random.randrange(5) for _ in range(random.randrange(1, 30))]
        length = random.randrange(max_tokens // 2, max_tokens)
        stop_ids = random.choice([(), (3,)])
        sampling = ResolvedSampling(min_tokens=max_tokens // 2)
        requests.append(EngineRequest(str(number), tuple(prompt), sampling, length, stop_ids))
    return requests


async def read_stream(client: EngineClient, request: EngineRequest) -> TokenOutput:
    """Read a request to its end, check every token, and return the last output."""
    tokens = list(request.prompt)
    async for output in client.stream([request]):
        assert output.position == len(tokens) - len(request.prompt), "a gap or a duplicate"
        tokens += output.ids
        if output.finish == "error":
            return output
    assert tokens == reference_tokens(request)
    return output


async def kill_engines(num_kills: int, num_streams: int, seed: int) -> int:
    """Kill one engine after the other while it serves streams; return how many were started."""
    random = Random(seed)
    client = EngineClient(fake_plan(), fake_engine_command("--delay", "0.002"), MANY_RESTARTS)
    await client.start()
    num_finished = 0
    for _ in range(num_kills):
        await client.ready()
        requests = random_requests(random, num_streams, 80)
        readers = [asyncio.create_task(read_stream(client, request)) for request in requests]
        await asyncio.sleep(random.random() * 0.2)  # undisturbed, streams take 0.08 to 0.16 s
        if client.pid is not None:
            os.kill(client.pid, signal.SIGKILL)
        outputs = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
        num_finished += sum(output.finish in ("stop", "length") for output in outputs)
    assert num_finished == num_kills * num_streams
    assert not client.journal.entries
    await client.close()
    return client.epoch


def test_eight_streams_survive_twenty_kills() -> None:
    num_engines = asyncio.run(kill_engines(20, 8, seed=1))
    assert num_engines >= 15  # a few kills hit an engine that had nothing left to do


@pytest.mark.slow
def test_thirty_two_streams_survive_a_hundred_kills() -> None:
    assert asyncio.run(kill_engines(100, 32, seed=2)) >= 90


def is_cleared(entry: JournalEntry) -> bool:
    return entry.num_new_tokens >= CLEARING_TOKENS


def test_the_same_streams_survive_several_engines() -> None:
    async def main() -> None:
        client = EngineClient(fake_plan(), fake_engine_command("--delay", "0.004"), MANY_RESTARTS)
        await client.start()
        requests = random_requests(Random(3), 8, 400)
        readers = [asyncio.create_task(read_stream(client, request)) for request in requests]
        entries = client.journal.entries
        for _ in range(5):
            await client.ready()
            assert await wait_until_async(lambda: all(map(is_cleared, entries.values())))
            epoch_before = client.epoch
            if client.pid is not None:
                os.kill(client.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
            if client.pid is not None:
                os.kill(client.pid, signal.SIGKILL)  # the next engine, which is still loading
            assert await wait_until_async(lambda: client.epoch > epoch_before)
        outputs = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
        assert {output.finish for output in outputs} <= {"stop", "length"}
        num_tokens = sum(output.position + len(output.ids) for output in outputs)
        assert client.stats.tokens_out == num_tokens, "counted once, over all engines"
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bad_prefix", "timeouts"),
    [(POISON, EngineTimeouts()), (STALL, SHORT_TIMEOUTS)],
    ids=["poison", "stall"],
)
def test_one_bad_request_among_many_fails_alone(
    bad_prefix: tuple[int, ...], timeouts: EngineTimeouts
) -> None:
    async def main() -> None:
        plan = fake_plan(max_num_seqs=32)
        client = EngineClient(plan, fake_engine_command("--delay", "0.002"), timeouts)
        await client.start()
        await client.ready()
        requests = random_requests(Random(4), 31, 60)
        good = [asyncio.create_task(read_stream(client, request)) for request in requests]
        bad_request = EngineRequest("bad", (*bad_prefix, 1, 2), ResolvedSampling(), 10)
        bad = asyncio.create_task(read_stream(client, bad_request))
        output = await asyncio.wait_for(bad, WAIT_SECONDS)
        assert output.finish == "error"
        expected = "given up: the engine stopped 3 times while it ran this request"
        assert output.error == expected
        outputs = await asyncio.wait_for(asyncio.gather(*good), WAIT_SECONDS)
        assert {output.finish for output in outputs} <= {"stop", "length"}
        assert client.epoch <= 4 and client.status.state == "ready"
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
def test_requests_that_kill_engines_never_end_an_idle_server(leaves: bool) -> None:
    """Each harmful request has the server to itself; its client waits for the error or leaves."""

    async def send_harmful_request(client: EngineClient, number: int) -> None:
        request = EngineRequest(f"bad {number}", (*POISON, number), ResolvedSampling(), 10)
        reader = asyncio.create_task(read_stream(client, request))
        if leaves:
            epoch_before = client.epoch
            entries = client.journal.entries
            # Before its admission, the abort could keep the request from running at all.
            assert await wait_until_async(
                lambda: (
                    any(entry.admitted for entry in entries.values()) or client.epoch > epoch_before
                )
            )
            reader.cancel()
            await asyncio.wait([reader])
            assert await wait_until_async(lambda: client.epoch > epoch_before)
            await client.ready()
        else:
            output = await asyncio.wait_for(reader, WAIT_SECONDS)
            assert output.error == GIVEN_UP

    async def main() -> None:
        timeouts = EngineTimeouts(max_restarts=2, restart_delay_seconds=0.0)
        client = EngineClient(fake_plan(), fake_engine_command(), timeouts)
        await client.start()
        await client.ready()
        for number in range(4):
            await send_harmful_request(client, number)
        request = EngineRequest("good", (1, 2), ResolvedSampling(), 20)
        output = await asyncio.wait_for(read_stream(client, request), WAIT_SECONDS)
        assert output.finish == "length"
        assert client.status.state == "ready"
        assert client.num_restarts >= 4
        await client.close()

    asyncio.run(main())


def test_a_stopped_engine_is_replaced_busy_or_idle() -> None:
    async def main() -> None:
        client = EngineClient(fake_plan(), fake_engine_command("--delay", "0.004"), SHORT_TIMEOUTS)
        await client.start()
        await client.ready()
        requests = random_requests(Random(5), 8, 400)
        readers = [asyncio.create_task(read_stream(client, request)) for request in requests]
        assert await wait_until_async(lambda: client.stats.tokens_out)
        os.kill(client.pid or 0, signal.SIGSTOP)
        outputs = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
        assert {output.finish for output in outputs} <= {"stop", "length"}
        assert client.epoch == 2
        os.kill(client.pid or 0, signal.SIGSTOP)
        assert await wait_until_async(lambda: client.epoch == 3)
        assert "made no progress for 3 seconds" in client.status.detail
        await client.ready()
        await client.close()

    asyncio.run(main())


def test_a_stall_of_the_client_process_kills_no_engine() -> None:
    async def main() -> None:
        client = EngineClient(fake_plan(), fake_engine_command("--delay", "0.004"), SHORT_TIMEOUTS)
        await client.start()
        await client.ready()
        requests = random_requests(Random(6), 4, 400)
        readers = [asyncio.create_task(read_stream(client, request)) for request in requests]
        assert await wait_until_async(lambda: client.stats.tokens_out)
        os.kill(client.pid or 0, signal.SIGSTOP)
        time.sleep(SHORT_TIMEOUTS.step_seconds + 1)  # blocks the event loop: nothing is supervised
        await asyncio.sleep(0.3)
        assert await wait_until_async(lambda: client.idle_seconds > 0)
        assert client.idle_seconds < SHORT_TIMEOUTS.step_seconds
        os.kill(client.pid or 0, signal.SIGCONT)
        await asyncio.gather(*readers)
        assert client.epoch == 1
        await client.close()

    asyncio.run(main())


PARENT_PROGRAM = """
import asyncio, sys
sys.path[:0] = [{root!r}]
from bloomery.engine.client import EngineClient
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.chaos.fake_engine import fake_engine_command, fake_plan

async def main():
    client = EngineClient(fake_plan(), fake_engine_command())
    await client.start()
    await client.ready()
    print(client.pid, flush=True)
    async for _ in client.stream([EngineRequest("a", {prompt!r}, ResolvedSampling(), 2000)]):
        pass
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child within a step")
@pytest.mark.parametrize("prompt", [(1, 2), (*STALL, 1)], ids=["stepping", "stuck"])
def test_an_engine_dies_with_its_parent(prompt: tuple[int, ...]) -> None:
    code = PARENT_PROGRAM.format(root=str(ROOT), prompt=prompt)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)  # the engine runs steps, or is in the endless one
        assert is_alive(pid)
        parent.kill()
    assert wait_until(lambda: not is_alive(pid))

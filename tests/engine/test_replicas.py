"""Several engines as one: requests go where their prompt is known, and on when their engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace

from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.replicas import GRAIN, SLACK, Affinity, Replicas, share
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from tests.chaos.ghost_engine import POISON, command, plan
from tests.ghost.ghost import plain
from tests.waiting import LONG, eventually

OFTEN = Patience(restarts=10**6, pause=0.0)


def asked(prompt: list[int], name: str = "r", tokens: int = 12, salt: str = "") -> EngineRequest:
    return EngineRequest(name, tuple(prompt), ResolvedSampling(), tokens, salt=salt)


def replicas(count: int, *options: str) -> Replicas:
    return Replicas([EngineClient(plan(), command(*options), OFTEN) for _ in range(count)])


async def read(engines: Replicas, request: EngineRequest) -> TokenOutput:
    got = list(request.prompt)
    async for news in engines.stream([request]):
        assert news.position == len(got) - len(request.prompt), "a gap or a duplicate"
        got += news.ids
    if news.finish != "error":
        assert got == plain(request)
    return news


def test_each_replica_has_devices_of_its_own() -> None:
    gpus = replace(plan(), device="cuda", memory=0.9)
    assert [share(gpus, number, 3).device for number in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [share(replace(gpus, tp=2, pp=2), number, 2).first_device for number in range(2)] == [
        0,
        4,
    ]
    assert share(replace(gpus, device="cuda:0"), 1, 3).memory == 0.3, (
        "they share the one that was named"
    )
    assert share(replace(plan(), threads=64), 1, 2).threads <= 32
    on_ray = replace(gpus, executor="ray")
    assert share(on_ray, 1, 2) == replace(on_ray, shared=True), "which GPU is whose is Ray's affair"


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    routing = Affinity(3)
    idle = {0: 0, 1: 0, 2: 0}
    stem = list(range(3 * GRAIN))
    first = routing.pick(asked(stem), idle)
    assert routing.pick(asked([*stem, 1, 2, 3]), {**idle, first: SLACK}) == first
    assert routing.pick(asked(stem), {**idle, first: SLACK + 1}) != first, "too much to do there"
    assert routing.pick(asked(stem, salt="other"), {**idle, first: 1}) != first, (
        "another salt shares nothing"
    )
    elsewhere = routing.pick(asked([9] * 50), {**idle, first: 1})
    assert elsewhere != first
    routing.forget(first)
    assert routing.pick(asked(stem), {first: 2, elsewhere: 1}) == elsewhere


def test_without_a_known_beginning_load_decides() -> None:
    routing = Affinity(3)
    loads = Counter({0: 0, 1: 0, 2: 0})
    for number in range(30):
        loads[routing.pick(asked([number] * 40), loads)] += 1
    assert set(loads.values()) == {10}


def test_streams_go_on_at_the_others_when_an_engine_dies() -> None:
    async def main() -> None:
        engines = replicas(2, "--delay", "0.004", "--load", "2")
        await engines.start()
        await asyncio.gather(*(client.ready() for client in engines.clients))
        readers = [
            asyncio.create_task(read(engines, asked([i % 5], str(i), 400))) for i in range(8)
        ]
        assert await eventually(lambda: all(client.stats.tokens_out for client in engines.clients))
        one, other = (client.pid or 0 for client in engines.clients)
        os.kill(other, signal.SIGSTOP)  # so that nobody comes to an end there before all are there
        assert [len(open) for open in engines.open] == [4, 4]
        os.kill(one, signal.SIGKILL)
        assert await eventually(lambda: len(engines.open[1]) == 8)
        assert engines.status.state == "ready" and engines.clients[0].status.state != "ready"
        os.kill(other, signal.SIGCONT)
        ends = await asyncio.wait_for(asyncio.gather(*readers), LONG)
        assert {end.finish for end in ends} == {"length"}
        await engines.clients[0].ready()
        assert engines.clients[0].epoch == 2 and engines.clients[1].epoch == 1
        assert (
            engines.stats.tokens_out >= 8 * 400 - 8
        )  # what died with its engine is counted by none
        await engines.close()

    asyncio.run(main())


def test_a_request_that_kills_engines_is_found_out() -> None:
    async def main() -> None:
        engines = replicas(2, "--delay", "0.002")
        await engines.start()
        await asyncio.gather(*(client.ready() for client in engines.clients))
        good = [asyncio.create_task(read(engines, asked([i % 5], str(i), 60))) for i in range(4)]
        bad = await asyncio.wait_for(read(engines, asked([*POISON, 1], "bad")), LONG)
        assert bad.finish == "error" and "stopped 3 times" in (bad.error or "")
        assert {end.finish for end in await asyncio.wait_for(asyncio.gather(*good), LONG)} == {
            "length"
        }
        await engines.close()

    asyncio.run(main())


def test_requests_that_come_together_stay_together_and_end_apart() -> None:
    async def main() -> None:
        engines = replicas(2)
        await engines.start()
        await asyncio.gather(*(client.ready() for client in engines.clients))
        pair = [asked([1, 2], "a", 3), asked([1, 2], "b", 9)]
        got: dict[str, list[int]] = {"a": [], "b": []}
        async for news in engines.stream(pair):
            got[news.request] += news.ids
        assert [len(ids) for ids in got.values()] == [3, 9] and not any(engines.open)
        stream = engines.stream([asked([3], "c", 2000)])
        await anext(stream)
        assert engines.abort("c") and not engines.abort("d")
        assert [news.finish async for news in stream][-1] == "abort"
        await engines.close()

    asyncio.run(main())

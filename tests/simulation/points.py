"""One short scene, struck at every moment of its life: engines killed, once and twice, clients that leave, deadlines,
and a server that drains.

Six answers in five streams, in a batch of two rows, with chunks, a shared beginning, preemption and a request of two
answers; a step takes 10 ms of the world's time. A scene is right if everybody who stayed has the ids of the plain loop,
or the reason why not, once; and if nothing is held in the end. `seen` says where the requests were when it was struck.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random

from bloomery.engine.client import EngineClient, Patience
from bloomery.messages import FinishReason, EngineRequest, ResolvedSampling
from tests.chaos.ghost_engine import plan
from tests.ghost.ghost import plain
from tests.simulation.world import Fate, Faults, Played, Report, World, _idle

EVENTS = ("kill", "kill twice", "leave", "deadline", "drain")
SHAPE = {"blocks": 11, "block_size": 4, "rows": 2, "tokens": 8}
# seconds of the world's time: between two moments, and when all have their answers
TICK = 0.002
END = 0.5
POINTS = {
    "not sent",
    "queued",
    "first chunk",
    "middle chunk",
    "before the first token",
    "decoding",
    "preempted",
    "ended and not told",
    "one of two ended",
    "no engine",
}


@dataclass
class Reader:
    requests: list[EngineRequest]
    slow: bool  # takes its news now and then
    got: dict[str, list[int]]
    ends: dict[str, FinishReason]
    left: bool = False


def readers() -> list[Reader]:
    stem = (1, 2, 3, 4, 1, 2, 3, 4)
    prompts = ((4, 3) * 12, (*stem, 1), (*stem, 2), (2, 2, 2), (3, 1, 4, 1))
    made = []
    for number, prompt in enumerate(prompts):
        length = 12 if number else 18
        one = EngineRequest(
            str(number), prompt, ResolvedSampling(min_tokens=4), length, (3,) if number == 3 else ()
        )
        requests = [one, replace(one, id="second", max_tokens=6)] if number == 2 else [one]
        made.append(Reader(requests, number == 1, {request.id: [] for request in requests}, {}))
    return made


def scene(event: str, at: float, seen: Counter[str]) -> None:
    """Raises if it is not right."""
    with asyncio.Runner(loop_factory=World) as runner:
        runner.run(asyncio.wait_for(_scene(event, at, seen), 3600))


async def _scene(event: str, at: float, seen: Counter[str]) -> None:
    report = Report()
    fate = Fate(Random(1), Faults(), report)
    everybody = readers()
    leaving = everybody[:3] if event == "leave" else []
    if event == "deadline":
        for reader in everybody[:3]:
            reader.requests = [
                replace(request, deadline=max(at, TICK)) for request in reader.requests
            ]
    patience = Patience(restarts=10**9, pause=0.05, queue=3600.0)
    client = EngineClient(
        plan(depth=2, block_size=4), (), patience, lambda hear: Played(hear, fate, SHAPE)
    )
    await client.start()
    tasks = [asyncio.create_task(_read(client, reader)) for reader in everybody]
    await asyncio.sleep(at)
    seen.update(where(client, everybody))
    closing = _strike(event, client, [tasks[everybody.index(reader)] for reader in leaving])
    for reader in leaving:
        reader.left = True
    if event == "kill twice":
        await asyncio.sleep(0.08)  # its successor may be loading, or have just begun
        seen.update(where(client, everybody))
        _strike("kill", client, [])
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    for reader in everybody:
        _judge(reader, event)
    if closing is None:
        await _idle(client)
        await client.close()
    else:
        await closing
    journal = client.journal
    if (
        journal.entries
        or journal.by_request
        or journal.unsent
        or journal.suspects
        or journal.trial
        or report.leaks
    ):
        raise AssertionError(
            f"{event} at {at:.3f}: something is held that nobody wants: {report.leaks}"
        )


def _strike(
    event: str, client: EngineClient, leaving: list[asyncio.Task[None]]
) -> asyncio.Task[None] | None:
    if event.startswith("kill") and isinstance(client.child, Played):
        client.child._die()
    for task in leaving:
        task.cancel()
    return asyncio.create_task(client.close(0.1)) if event == "drain" else None


async def _read(client: EngineClient, reader: Reader) -> None:
    async with aclosing(client.stream(reader.requests)) as stream:
        async for news in stream:
            got = reader.got[news.request]
            if news.position != len(got) or news.request in reader.ends:
                raise AssertionError(
                    f"position {news.position} after {len(got)} ids, or news after the end"
                )
            got += news.ids
            if news.finish is not None:
                reader.ends[news.request] = news.finish
            if reader.slow:
                await asyncio.sleep(0.15)


def _judge(reader: Reader, event: str) -> None:
    for request in reader.requests:
        want = plain(request)[len(request.prompt) :]
        got = reader.got[request.id]
        end = reader.ends.get(request.id)
        excused = reader.left or (event, end) in (("deadline", "deadline"), ("drain", "error"))
        if got != want[: len(got)] or not (excused or (got == want and end in ("stop", "length"))):
            raise AssertionError(
                f"{event}: request {request.id} has {got} of {want} and ended with {end}"
            )


def where(client: EngineClient, everybody: list[Reader]) -> Iterator[str]:
    """Of every request that is not done, by the names of POINTS."""
    child = client.child
    engine = child.engine if isinstance(child, Played) else None
    if engine is None:
        yield "no engine"
        return
    for entry in client.journal.entries.values():
        sequence = engine.scheduler.by_request.get(entry.serial)
        if not entry.sent:
            yield "not sent"
        elif sequence is None:
            yield "ended and not told" if entry.admitted else "not sent"  # or under way
        elif sequence.waiting:
            yield "preempted" if sequence.losses else "queued"
        elif sequence.computed < len(sequence.request.prompt):
            yield "middle chunk" if sequence.computed > SHAPE["tokens"] else "first chunk"
        else:
            yield "decoding" if entry.emitted else "before the first token"
    if any(0 < len(reader.ends) < len(reader.requests) for reader in everybody):
        yield "one of two ended"


def moments(every: int = 1) -> Iterator[tuple[str, float]]:
    for event in EVENTS:
        for number in range(0, int(END / TICK), every):
            yield event, number * TICK

"""Client, journal, engine, scheduler and blocks in one world: one clock that jumps, one seed, faults at every point.

The code is the real one; what is played is the way between the processes, the model (a ghost whose cache holds token
ids) and time itself: the event loop never waits, it jumps to what is due next. Messages are delayed, dropped and
doubled, engines are killed, hang, fail to start and fail in the middle of a call; requests come, leave early, have
deadlines and may be poison. A history is right if every reader got ids without gap or duplicate that begin as those of
the plain loop do, one end each, and if no block is held once there is nobody to hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bloomery.engine.child import Child
from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.process import HEARTBEAT, Engine
from bloomery.engine.wire import Hello, Message, WireError
from bloomery.errors import RequestFailed
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    ResolvedSampling,
    EngineStatus,
    ScheduledStep,
    StepOutput,
)
from tests.chaos.ghost_engine import plan
from tests.ghost.ghost import VOCAB, Ghost, plain
from tests.ghost.trial import sound

POISON = (6, 6, 6, 6, 6)
HOURS = 50 * 3600.0  # of the world's time; a story that takes longer is stuck
GIVEN_UP = "given up: the engine stopped 3 times while it ran this request"


class Jumping(selectors.SelectSelector):
    """Time passes by being asked for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the world stands still: nobody will ever do anything again")
        self.now += max(timeout, 0.0)
        return []


class World(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@dataclass(frozen=True)
class Faults:
    """How often, of a thousand, and which call is made to fail."""

    kill: float = 0.0  # before a step
    hang: float = 0.0
    drop: float = 0.0  # of messages, as the next two
    double: float = 0.0
    delay: float = 0.0
    stillborn: float = 0.0  # of starts
    poison: float = 0.0  # of requests
    nth: int | None = None  # the call that fails, counted over all kinds


@dataclass
class Report:
    steps: int = 0
    engines: int = 0
    calls: int = 0
    finished: int = 0
    given_up: int = 0
    left: int = 0
    late: int = 0
    preemptions: int = 0
    leaks: list[str] = field(default_factory=list)


class Fate:
    """Who is struck when; everything random comes from here."""

    def __init__(self, random: Random, faults: Faults, report: Report):
        self.random = random
        self.faults = faults
        self.report = report

    def strikes(self, share: float) -> bool:
        return share > 0 and self.random.random() * 1000 < share

    def call(self) -> bool:
        """Count a call; whether it is the one that fails."""
        self.report.calls += 1
        return self.report.calls == self.faults.nth


class Frail(Ghost):
    def __init__(self, size: int, fate: Fate):
        super().__init__(size)
        self.fate = fate

    def run(self, step: ScheduledStep) -> StepOutput:
        if self.fate.call():
            raise RuntimeError("the device is gone")
        if any(
            item.new_request is not None and item.new_request.tokens[:5] == POISON
            for item in step.requests
        ):
            raise RuntimeError("a step that cannot be computed")
        return super().run(step)


class Played(Child):
    """An engine process as the client sees it, living in the same event loop."""

    def __init__(self, hear: Callable[[Child, Message], None], fate: Fate, shape: dict[str, int]):
        super().__init__(hear)
        self.fate = fate
        self.shape = shape
        self.inbox: list[Message] = []
        self.arrived = asyncio.Event()
        self.due = 0.0  # when the last message under way arrives: a line keeps their order
        self.life: asyncio.Task[None] | None = None
        self.engine: Engine | None = None

    # ---- what a Child does ----

    async def spawn(self, command: Any, born: Any = None) -> None:
        self.fate.report.engines += 1
        if self.fate.call() or self.fate.strikes(self.fate.faults.stillborn):
            raise OSError("no more processes")
        self.life = asyncio.create_task(self._live())

    def send(self, message: Message) -> None:
        self._carry(message, self._receive)

    async def end(self, grace: float = 0.0) -> None:
        self._die()
        self.fault = self.fault or "was killed by signal 9"

    # ---- the way ----

    def _carry(self, message: Message, deliver: Callable[[Message], None]) -> None:
        fate = self.fate
        faults = self.fate.faults
        loop = asyncio.get_running_loop()
        if fate.call() or fate.strikes(faults.drop):
            return
        delay = fate.random.random() * (5.0 if fate.strikes(faults.delay) else 0.002)
        self.due = max(
            self.due + 1e-9, loop.time() + delay
        )  # a heap does not keep the order of equals
        for _ in range(1 + fate.strikes(faults.double)):
            loop.call_at(self.due, deliver, message)

    def _receive(self, message: Message) -> None:
        self.inbox.append(message)
        self.arrived.set()

    def _tell(self, message: Message) -> None:
        """Also after death: what was under way arrives."""
        try:
            self.hear(self, message)
        except WireError as error:
            self.fault = f"broke the protocol: {error}"
            self._die()

    # ---- an engine's line ----

    def receive(self, seconds: float | None) -> list[Message]:
        found = self.inbox
        self.inbox = []
        self.arrived.clear()
        return found

    # ---- life ----

    async def _live(self) -> None:
        fate = self.fate
        random = self.fate.random
        line = Line(lambda message: self._carry(message, self._tell), self.receive)
        try:
            await self.arrived.wait()
            hello, *early = self.receive(None)
            if not isinstance(hello, Hello):
                raise WireError("no Hello")
            for part in range(random.randrange(4)):
                await asyncio.sleep(random.random())
                line.send(EngineStatus("loading", part / 4, "ectoplasm"))
            size = self.shape["block_size"]
            capacity = EngineCapacity(
                self.shape["blocks"], size, self.shape["rows"], self.shape["tokens"], 256, VOCAB
            )
            self.engine = Engine(
                line, hello, Frail(size, fate), capacity, asyncio.get_running_loop().time
            )
            line.send(capacity)
            self.engine.take(early)
            while True:
                await self._turn(self.engine)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # as in a process of its own: it ends
            self.fault = f"ended on {error}"
            self._die()

    async def _turn(self, engine: Engine) -> None:
        fate = self.fate
        if not engine.loop.busy and not self.inbox:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), HEARTBEAT)
        if fate.strikes(fate.faults.kill):
            raise RuntimeError("killed")
        if fate.strikes(fate.faults.hang):
            await asyncio.Event().wait()
        before = engine.stats.steps
        engine.turn()
        sound(engine.blocks)
        fate.report.steps += engine.stats.steps - before
        await asyncio.sleep(fate.random.random() * 0.02)

    def _die(self) -> None:
        if self.life is not None:
            self.life.cancel()
        if self.engine is not None:
            self.fate.report.preemptions += self.engine.scheduler.preemptions
            self._inspect(self.engine)
            self.engine = None
        if not self.lost.done():
            self.lost.set_result(None)

    def _inspect(self, engine: Engine) -> None:
        if not engine.loop.busy and engine.blocks.available != engine.blocks.count:
            self.fate.report.leaks.append(
                f"{engine.blocks.count - engine.blocks.available} blocks held by nobody"
            )


@dataclass(frozen=True)
class Line:
    send: Callable[[Message], None]
    receive: Callable[[float | None], list[Message]]


def story(seed: int, faults: Faults, requests: int = 40) -> Report:
    """One world from its beginning to its end; raises if anything that was promised is broken."""
    random = Random(seed)
    report = Report()
    with asyncio.Runner(loop_factory=World) as runner:
        runner.run(asyncio.wait_for(_story(random, faults, report, requests), HOURS))
    return report


async def _story(random: Random, faults: Faults, report: Report, count: int) -> None:
    fate = Fate(random, faults, report)
    shape = {
        "blocks": random.choice([32, 48, 200]),
        "block_size": random.choice([2, 4]),
        "rows": random.choice([2, 5, 16]),
        "tokens": random.choice([3, 16, 64]),
    }
    patience = Patience(restarts=10**9, pause=0.1, queue=HOURS)
    made = plan(depth=random.choice([1, 2, 3]), prefix_cache=random.random() < 0.8)
    client = EngineClient(made, (), patience, lambda hear: Played(hear, fate, shape))
    await client.start()
    stem = [random.randrange(5) for _ in range(12)]
    readers = []
    for number in range(count):
        await asyncio.sleep(random.expovariate(2.0))
        readers.append(
            asyncio.create_task(_read(client, _request(random, number, stem, fate), random, report))
        )
    await asyncio.gather(*readers)
    journal = client.journal
    if journal.entries or journal.by_request or journal.unsent or journal.suspects or journal.trial:
        raise AssertionError("the journal remembers what is over")
    await _idle(client)
    await client.close()
    if report.leaks:
        raise AssertionError(report.leaks[0])


async def _idle(client: EngineClient) -> None:
    """Until an engine has nothing to do and holds nothing; its blocks are looked at when it ends."""
    while True:
        child = client.child
        if (
            isinstance(child, Played)
            and child.engine is not None
            and not child.engine.loop.busy
            and not child.inbox
        ):
            return
        await asyncio.sleep(1.0)


def _request(random: Random, number: int, stem: list[int], fate: Fate) -> EngineRequest:
    prompt = stem[: random.choice([0, 12])] + [
        random.randrange(5) for _ in range(random.randrange(1, 12))
    ]
    if fate.strikes(fate.faults.poison):
        prompt = [*POISON, *prompt]
    length = random.randrange(1, 30)
    deadline = random.uniform(0.01, 5.0) if random.random() < 0.1 else None
    stops = random.choice([(), (3,)])
    return EngineRequest(
        str(number),
        tuple(prompt),
        ResolvedSampling(min_tokens=length // 2),
        length,
        stops,
        salt=random.choice(["", "other"]),
        deadline=deadline,
        tenant=random.choice(["", "other"]),
    )


async def _read(
    client: EngineClient, request: EngineRequest, random: Random, report: Report
) -> None:
    want = plain(request)[len(request.prompt) :]
    got = list[int]()
    leaves = random.randrange(len(want) + 1) if random.random() < 0.1 else None
    ends = []
    async with aclosing(client.stream([request])) as stream:
        async for news in stream:
            if news.position != len(got):
                raise AssertionError(f"position {news.position} after {len(got)} ids")
            got += news.ids
            ends += [news.finish] if news.finish is not None else []
            if leaves is not None and len(got) >= leaves and not ends:
                report.left += 1
                return
            if random.random() < 0.1:
                await asyncio.sleep(random.random())
    if got != want[: len(got)] or len(ends) != 1:
        raise AssertionError(
            f"request {request.id}: {got} is not the beginning of {want}, or ended {ends}"
        )
    poison = request.prompt[:5] == POISON
    if ends == ["deadline"] and request.deadline is not None:
        report.late += 1
    elif ends == ["error"] and news.error == GIVEN_UP and report.engines > 2:
        report.given_up += 1
    elif poison or ends[0] not in ("stop", "length") or got != want:
        raise AssertionError(
            f"request {request.id} ended with {ends} {news.error} after {len(got)} of {len(want)}"
        )
    else:
        report.finished += 1


def failure(seed: int, faults: Faults, requests: int = 40) -> str | None:
    """What is wrong with that story, if anything."""
    try:
        story(seed, faults, requests)
    except (AssertionError, RuntimeError, TimeoutError, WireError, RequestFailed) as error:
        return f"{type(error).__name__}: {error}"
    return None

"""The pace is the device's: a host that comes late for results must not make steps seem to cost nothing."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Result
from bloomery.engine.loop import Loop
from bloomery.engine.pace import Pace, Work
from bloomery.engine.policy import FairPolicy
from bloomery.engine.process import Engine
from bloomery.engine.scheduler import Scheduler, work_of
from bloomery.engine.wire import Hello, Message
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
    StepTiming,
)
from tests.chaos.ghost_engine import plan
from tests.ghost.ghost import Ghost

ROWS = 16


def true_seconds(work: Work) -> float:
    return 4e-3 + 2.4e-5 * max(work.tokens - 128, 0) + 3e-8 * work.attended + 1e-9 * work.pairs


class Device(Ghost):
    """A device works through queued steps by itself; the host now and then sleeps through the end of a few."""

    def __init__(self, stalls: float = 0.2) -> None:
        super().__init__(16)
        self.stalls = stalls
        self.now = self.free = 0.0
        self.queue: deque[tuple[StepOutput, float]] = deque()  # with when it is done
        self.chance = random.Random(5)

    def clock(self) -> float:
        return self.now

    def submit(self, step: ScheduledStep) -> Device:  # type: ignore[override]
        took = true_seconds(work_of(step.requests))
        idle = max(self.now - self.free, 0.0) if self.free else 0.0
        self.free = max(self.free, self.now) + took
        self.queue.append(
            (replace(self.run(step), timing=StepTiming(steps=1, device=took, idle=idle)), self.free)
        )
        return self

    def result(self) -> StepOutput:
        output, done = self.queue.popleft()
        self.now = max(self.now, done)
        if self.chance.random() < self.stalls:
            self.now += 0.05
        return output


@pytest.mark.parametrize("told", [True, False])
def test_a_late_host_does_not_spoil_the_pace(told: bool) -> None:
    device = Device(stalls=0.6)
    policy = FairPolicy(ROWS, 4000)
    loop = Loop(Scheduler(Blocks(4000, 16), 2048, ROWS, policy), device, 2, device.clock)
    if not told:  # what the pace would be if it had nothing but the host's clock
        result = device.result
        device.result = lambda: replace(result(), timing=None)  # type: ignore[method-assign]
    chance = random.Random(1)
    for i in range(120):
        prompt = tuple(chance.randrange(7) for _ in range(chance.choice((10, 300, 1500))))
        loop.add(EngineRequest(str(i), prompt, ResolvedSampling(), 40))
    while loop.busy:
        loop.step()
    tried = [
        Work(1, 500),
        Work(ROWS, 10_000),
        Work(500, 5_000, 100_000),
        Work(1500, 5_000, 1_000_000),
    ]
    worst = max(abs(policy.pace.seconds(work) / true_seconds(work) - 1) for work in tried)
    assert (worst < 0.15) is told


def test_the_next_step_is_left_open_for_who_comes() -> None:
    device = Device(stalls=0.0)
    policy = FairPolicy(ROWS, 4000)
    loop = Loop(Scheduler(Blocks(4000, 16), 2048, ROWS, policy), device, 2, device.clock)
    late = 0.0
    for i in range(ROWS // 2):
        loop.add(EngineRequest(str(i), (1, 2, 3) * 2000, ResolvedSampling(), 400))
    for turn in range(300):
        patience = loop.patience()
        device.now += patience
        late = max(late, device.now - device.free if device.queue else 0.0)
        if turn == 250:
            loop.add(EngineRequest("newcomer", (1, 2), ResolvedSampling(), 4))
        news = loop.step()
        if (
            turn == 251
        ):  # the step that was under way has ended, and the newcomer was in the one behind it
            assert "newcomer" in [entry.request for entry in news]
    assert patience > 0 and late <= 0, f"the device waited for {late} s"


class Line:
    """Messages that come at their time; whoever waits for them lets time pass."""

    def __init__(self, device: Device):
        self.device = device
        self.coming = deque[tuple[float, Message]]()

    def send(self, message: Message) -> None:
        pass

    def receive(self, seconds: float | None) -> list[Message]:
        until = self.device.now + (seconds or 0.0)
        if self.coming and self.coming[0][0] <= until:
            when, message = self.coming.popleft()
            self.device.now = max(self.device.now, when)
            return [message]
        self.device.now = until
        return []


def test_who_comes_early_does_not_make_the_next_step_come_early() -> None:
    """Two of one moment: were the next step queued for the first, the second would wait for the one behind it."""
    device = Device(stalls=0.0)
    line = Line(device)
    begun = list[tuple[float, float, int]]()
    engine = Engine(
        line, Hello(1, plan()), device, EngineCapacity(4000, 16, ROWS, 2048, 8000, 7), device.clock
    )
    submit = engine.loop.executor.submit

    def watched(step: ScheduledStep) -> Result:
        begun.append((device.now, device.free, len(step.chunks)))
        return submit(step)

    engine.loop.executor.submit = watched  # type: ignore[method-assign]
    engine.take(
        [EngineRequest(str(i), (1, 2, 3) * 2000, ResolvedSampling(), 400) for i in range(ROWS // 2)]
    )
    while len(begun) < 250:
        engine.turn()
    under_way = device.free
    line.coming += [
        (device.now + 1e-4 * i, EngineRequest(f"newcomer {i}", (1, 2), ResolvedSampling(), 4))
        for i in (1, 2)
    ]
    before = len(begun)
    while line.coming or len(begun) < before + 3:
        engine.turn()
    joined = next(entry for entry in begun[before:] if entry[2])
    assert joined[2] == 2 and joined[0] <= max(joined[1], under_way)


@pytest.mark.parametrize("slower", [0.2, 1.0, 50.0])
def test_what_was_never_measured_is_believed_in_proportion(slower: float) -> None:
    """A plan that is wrong about the machine is right about how steps compare; one it knows by heart is not spoilt."""

    def true(work: Work) -> float:
        return 4e-3 + 2e-5 * work.tokens + 3e-8 * work.attended + 1e-9 * work.pairs

    known = [
        Work(1, 100),
        Work(64, 64000),
        Work(128, 0, 9e4),
        Work(512, 0, 4e5),
        Work(4096, 0, 2e7),
    ]
    pace = Pace([(*work, true(work)) for work in known])
    chance = random.Random(3)
    for _ in range(2000):
        work = Work(lines := chance.randint(2, 64), lines * chance.randint(100, 1000))
        pace.learn(work, slower * true(work) * chance.uniform(0.95, 1.05))
    for work in known:
        assert pace.seconds(work) == pytest.approx(slower * true(work), rel=0.15)
    assert pace.lone == pytest.approx(slower * true(Work(1)), rel=0.15)
    for _ in range(100):  # of whom there is much to read: a lone one who has little is not like him
        pace.learn(Work(1, 200_000), slower * true(Work(1, 200_000)))
    assert pace.lone == pytest.approx(slower * true(Work(1)), rel=0.3)


def test_a_lone_step_that_never_was_is_not_read_off_batches() -> None:
    """Where steps of dozens rise steeply, the line through them meets one position far below what it takes."""

    def true(work: Work) -> float:
        rising = 8e-5 * max(work.tokens - 32, 0)
        return 4e-3 + rising + 3e-8 * work.attended + 2e-9 * work.pairs

    known = [Work(1, 100), Work(8, 800), Work(64, 6400), Work(256, 0, 3e4), Work(2048, 0, 2e6)]
    pace = Pace([(*work, true(work)) for work in known])
    chance = random.Random(3)
    for _ in range(2000):
        work = Work(lines := chance.randint(40, 64), lines * chance.randint(100, 300))
        pace.learn(work, true(work) * chance.uniform(0.95, 1.05))
    assert pace.seconds(Work(1)) < 0.7 * true(Work(1))  # or nothing is shown
    assert pace.lone == pytest.approx(true(Work(1)), rel=0.15)


@pytest.mark.parametrize("stalled", [0, 300])
def test_one_stall_changes_little_of_a_lone_step_that_never_was(stalled: int) -> None:
    """Nor do prompts that take a hundred times what was planned."""
    known = [Work(1, 100), Work(64, 6400), Work(2048, 0, 2e6)]
    pace = Pace([(*work, true_seconds(work)) for work in known])
    for step in range(600):
        pace.learn(Work(40, 8000), 20.0 if step == stalled else 1.5 * true_seconds(Work(40, 8000)))
        if step % 5 == 0:
            pace.learn(Work(512, 0, 1e5), 100 * true_seconds(Work(512, 0, 1e5)))
    assert pace.lone == pytest.approx(1.5 * true_seconds(Work(1)), rel=0.1)


def test_the_first_lone_step_is_held_against_what_batches_say() -> None:
    """It may stall, and what its keys cost may not be known well: one of them changes little."""
    pace = Pace(
        [(*work, true_seconds(work)) for work in (Work(1, 100), Work(64, 6400), Work(2048, 0, 2e6))]
    )
    for _ in range(300):
        pace.learn(Work(40, 8000), true_seconds(Work(40, 8000)))
    pace.learn(Work(1, 100), 2 * true_seconds(Work(1, 100)))
    assert pace.lone == pytest.approx(true_seconds(Work(1)), rel=0.15)
    for _ in range(100):
        pace.learn(Work(1, 100), 2 * true_seconds(Work(1, 100)))
    assert pace.lone == pytest.approx(2 * true_seconds(Work(1)), rel=0.1)


def test_one_stall_changes_little_of_a_lone_step_that_was_measured() -> None:
    """A machine that slept, say: nothing may come for long that would put it right."""
    pace = Pace(
        [(*work, true_seconds(work)) for work in (Work(1, 100), Work(64, 6400), Work(2048, 0, 2e6))]
    )
    for step in range(60):
        pace.learn(Work(1, 100), 20.0 if step == 50 else true_seconds(Work(1, 100)))
    assert pace.lone == pytest.approx(true_seconds(Work(1)), rel=0.15)
    for _ in range(60):  # a machine that has become ten times slower is believed in the end
        pace.learn(Work(1, 100), 10 * true_seconds(Work(1, 100)))
    assert pace.lone == pytest.approx(10 * true_seconds(Work(1)), rel=0.15)

"""Fair: what it promises to short requests, what it takes from long ones, that nobody starves. All in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from benchmarks.policy import (
    Arrival,
    Crowd,
    Device,
    alone,
    mixed,
    percentile,
    produced,
    rough,
    waits,
)
from bloomery.engine.blocks import Blocks
from bloomery.engine.pace import Pace, Work
from bloomery.engine.policy import Aims, FairPolicy, FcfsPolicy, Policy
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.sequence import Sequence
from bloomery.messages import (
    ScheduledRequest,
    EngineRequest,
    SampledTokens,
    ResolvedSampling,
    StepOutput,
)

MIXED: dict[str, float] = {"longs": 32, "rows": 32, "blocks": 2000, "seconds": 15.0, "rate": 3.0}


def test_pace_learns_what_steps_take() -> None:
    chance = random.Random(0)
    pace = Pace()
    for _ in range(3000):
        streams = chance.randint(1, 200)
        chunk = chance.choice([0, 0, 100, 400, 1500])
        work = Work(
            streams + chunk, streams * chance.randint(100, 3000), chunk * chance.randint(50, 2000)
        )
        pace.learn(work, truth(work) * chance.uniform(0.95, 1.05))
    for work in (Work(1, 500), Work(64, 64_000), Work(200, 400_000), Work(1200, 100_000, 1e6)):
        assert pace.seconds(work) == pytest.approx(truth(work), rel=0.15)
    room = pace.room(Work(100, 100_000), 0.03, 1000)
    assert truth(Work(100 + room, 100_000, room * 1000)) == pytest.approx(0.03, rel=0.15)


def truth(work: Work) -> float:
    return 1e-3 + max(4e-3, 24e-6 * work.tokens) + 3e-8 * work.attended + 6e-10 * work.pairs


def test_pace_survives_stalls_and_follows_a_slower_machine() -> None:
    pace = Pace()
    for i in range(400):
        pace.learn(Work(8, 800), 30.0 if i % 50 == 49 else 0.01)
    assert pace.seconds(Work(8, 800)) == pytest.approx(0.01, rel=0.1)
    for _ in range(2000):
        pace.learn(Work(8, 800), 0.03)
    assert pace.seconds(Work(8, 800)) == pytest.approx(0.03, rel=0.1)


def test_short_requests_among_long_ones() -> None:
    """The rows are all taken and the queue is long: short ones are answered in a few times what they take alone, long
    ones keep their pace, and what they give is within the bound."""
    fair = FairPolicy(32, 2000)
    crowds = {"fair": mixed(fair, **MIXED), "fcfs": mixed(FcfsPolicy(), **MIXED)}  # type: ignore[arg-type]
    single = alone(FcfsPolicy(), 32, 16)
    short = {
        name: [life.last - life.arrived for life in crowd.done("short")]
        for name, crowd in crowds.items()
    }
    assert percentile(short["fair"], 0.5) < 3 * single and max(short["fair"]) < 6 * single
    assert percentile(short["fcfs"], 0.5) > 20 * single
    tokens = {name: produced(crowd, "long", MIXED["seconds"]) for name, crowd in crowds.items()}
    assert tokens["fair"] > 0.9 * tokens["fcfs"]
    assert (
        0 < fair.tax / crowds["fair"].now <= fair.aims.tax
        and not crowds["fair"].scheduler.preemptions
    )
    gaps = [
        gap for life in crowds["fair"].lives.values() if life.kind == "long" for gap in life.gaps
    ]
    assert percentile(gaps, 0.99) < 1.2 * fair.aims.target(fair.pace.lone)


def test_a_promise_is_what_a_lone_request_takes_whatever_fills_the_batch() -> None:
    """Prices fitted to full batches say less and less of lone steps: promises made late are those made early."""
    crowd: list[tuple[float, float]] = []

    class Told(FairPolicy):
        def enqueue(self, sequence: Sequence, now: float) -> None:
            super().enqueue(sequence, now)
            if sequence.short:
                crowd.append((sequence.arrived, sequence.due - sequence.arrived))

    fair = Told(256, 12000)
    mixed(fair, 20.0)
    single = alone(FcfsPolicy(), 32, 16)
    early, late = (
        [due for at, due in crowd if low < at < high] for low, high in ((0.0, 5.0), (15.0, 20.0))
    )
    assert abs(fair.pace.seconds(Work(1, 32)) / fair.pace.lone - 1) > 0.02  # or nothing is shown
    assert max(late) / min(early) < 1.03 and max(late) < 1.05 * fair.aims.stretch * single


def test_256_long_requests_hardly_notice_the_short_ones() -> None:
    """On an H200, by measured times of steps: short ones within four times their time alone, long ones within 7 % of
    first come, first served, and 65 ms between their tokens, all at once."""
    fair = FairPolicy(272, 12000)
    crowd = mixed(fair, 40.0)
    plain = mixed(FcfsPolicy(), 40.0)
    single = alone(FcfsPolicy(), 32, 16)
    shorts = [life.last - life.arrived for life in crowd.done("short")]
    assert percentile(shorts, 0.99) < 4 * single
    speed = produced(crowd, "long", crowd.now) / crowd.now
    assert speed > 4636 and speed > 0.93 * produced(plain, "long", plain.now) / plain.now
    gaps = [gap for life in crowd.lives.values() if life.kind == "long" for gap in life.gaps]
    assert percentile(gaps, 0.99) < 0.065
    assert 0 < fair.tax / crowd.now < fair.aims.tax and not crowd.scheduler.preemptions


@pytest.mark.parametrize("prompt, answer", [(32, 16), (200, 51), (2000, 16)])
def test_nothing_but_short_ones_are_as_fast_as_in_any_other_order(prompt: int, answer: int) -> None:
    """Their promises cannot all be kept: that is no reason to compute their prompts in crumbs."""

    def speed(policy: Policy) -> float:
        again: Callable[[str, float], Arrival | None]
        again = lambda kind, now: (now, "short", prompt, answer, "", 0) if now < 5.0 else None  # noqa: E731
        crowd = Crowd(policy, iter([(0.0, "short", prompt, answer, "", 0)] * 256), again)
        crowd.run(10**6)
        return produced(crowd, "short", crowd.now) / crowd.now

    assert speed(FairPolicy(272, 12000)) > 0.9 * speed(FcfsPolicy())


def test_a_tax_that_is_bounded_lower_is_lower() -> None:
    """And short ones wait for it: the promise and the bound are two ends of a rope."""
    taxes = list[float]()
    times = list[float]()
    for bound in (0.05, 0.0003):
        fair = FairPolicy(272, 12000, Aims(tax=bound))
        crowd = mixed(fair, 12.0)
        taxes.append(fair.tax / crowd.now)
        times.append(percentile([life.last - life.arrived for life in crowd.done("short")], 0.5))
    assert taxes[1] < 0.7 * taxes[0] and times[1] > times[0]


@pytest.mark.parametrize("streams", [32, 64])
@pytest.mark.parametrize("answer", [4, 200])
def test_streams_keep_their_pace_while_long_prompts_arrive(answer: int, streams: int) -> None:
    """Whether such a request counts as a short one, for its few tokens, or not."""

    def arrivals() -> list[Arrival]:
        going = [(0.0, "stream", 50, 3000, "", 0)] * streams
        return [*going, *((2.0 + 0.5 * i, "prompt", 8000, answer, "", 0) for i in range(16))]  # type: ignore[list-item]

    fair = FairPolicy(2 * streams, 12000)
    crowd = Crowd(fair, iter(arrivals()), rows=2 * streams)
    crowd.run(10**6, until=12.0)
    gaps = [gap for life in crowd.lives.values() if life.kind == "stream" for gap in life.gaps]
    assert len(crowd.done("prompt")) == 16
    assert percentile(gaps, 0.99) < 1.5 * fair.aims.target(fair.pace.lone)
    assert max(gaps) < 1.8 * fair.aims.target(fair.pace.lone)


def test_a_flood_of_short_prompts_is_not_computed_in_crumbs() -> None:
    """Nobody's promise can be kept then; and streams wait for no more than a lap."""
    fair = FairPolicy(272, 12000)
    for _ in range(13):
        alone(fair, 32, 16)  # it knows what lone steps take
    arrivals: list[Arrival] = [(0.0, "stream", 500, 10000, "", 0)] * 64
    arrivals += [(3.0 + 2.0 * i, "short", 1100, 8, "", 0) for i in range(4) for _ in range(40)]
    crowd = Crowd(fair, iter(arrivals))
    crowd.run(10**6, until=12.0)
    shorts = [life.last - life.arrived for life in crowd.done("short")]
    gaps = [
        gap for life in crowd.lives.values() if life.kind == "stream" for gap in life.gaps[20:]
    ]  # they flow
    assert len(shorts) == 160 and percentile(shorts, 0.99) < 1.4
    assert max(gaps) < 2 * fair.aims.target(fair.pace.lone)


@pytest.mark.parametrize("seed", range(2))
def test_nobody_starves_in_a_rough_crowd(seed: int) -> None:
    """benchmarks/policy.py --steps 1000000 is the long form."""
    crowd = rough(FairPolicy(16, 400), 6_000, seed)
    found = waits(crowd)
    assert all(count > 20 for count, _, _ in found.values())
    assert found["short"][2] < 1.0 and max(longest for _, _, longest in found.values()) < 8.0
    assert crowd.policy.tax / crowd.now < 0.05
    assert crowd.scheduler.preemptions < 0.3 * len(crowd.lives)


def test_a_full_house_makes_room_for_a_short_one() -> None:
    """Every row is taken by a long one and none is kept: the one with least to lose gives way, and nobody twice."""
    arrivals: list[Arrival] = [(0.0, "long", 300, 400, "", 0), (0.0, "long", 100, 400, "", 0)]
    arrivals += [(0.5 + 0.1 * i, "short", 10, 5, "", 0) for i in range(3)]
    crowd = Crowd(FairPolicy(2, 400), iter(arrivals), rows=2, blocks=400)
    assert crowd.scheduler.policy.spare_rows == 0  # type: ignore[attr-defined]
    crowd.run(10**6)
    assert not crowd.open and all(life.count == life.asked for life in crowd.lives.values())
    assert 1 <= crowd.scheduler.preemptions <= 2
    first = crowd.done("short")[0]
    assert first.first - first.arrived < 0.2


class Drive:
    """A scheduler and a worker that needs no time; the test says what time it is."""

    def __init__(self, rows: int = 8, tokens: int = 64, aims: Aims | None = None):
        self.scheduler = Scheduler(Blocks(64, 16), tokens, rows, FairPolicy(rows, 64, aims))
        self.order: list[str] = []

    def step(self, now: float) -> list[str]:
        """Who was admitted."""
        ended = self.scheduler.expire(now)
        step = self.scheduler.schedule(now)
        assert step is not None
        names = [
            self.scheduler.running[item.sequence].request.id
            for item in step.requests
            if item.new_request is not None
        ]
        output = StepOutput(
            tuple(SampledTokens(item.sequence, (1,)) for item in step.requests if item.samples)
        )
        news = [*ended, *self.scheduler.update(step, output, 0.01)]
        self.order += [entry.request for entry in news if entry.finish]
        return names


def asked(name: str, length: int = 600, **more: object) -> EngineRequest:
    return replace(EngineRequest(name, (1,) * length, ResolvedSampling(), 50), **more)  # type: ignore[arg-type]


def test_priority_is_worth_seconds_of_waiting() -> None:
    drive = Drive(rows=1)
    drive.scheduler.add(asked("first"), 0.0)
    drive.scheduler.add(asked("late", priority=1), 0.0)
    drive.scheduler.add(asked("early", priority=-1), 5.0)
    drive.scheduler.add(asked("plain"), 15.0)
    admitted: list[str] = []
    for i in range(400):
        if drive.scheduler.busy:
            admitted += drive.step(15.0 + 0.01 * i)
    assert admitted == ["early", "first", "late", "plain"]


def test_tenants_share_equally() -> None:
    drive = Drive(rows=1)
    for i in range(6):
        drive.scheduler.add(asked(f"a{i}", tenant="a"), 0.0)
    for i in range(2):
        drive.scheduler.add(asked(f"b{i}", tenant="b"), 0.1)
    admitted: list[str] = []
    for i in range(900):
        if drive.scheduler.busy:
            admitted += drive.step(0.2 + 0.01 * i)
    assert admitted == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_deadlines_end_requests_wherever_they_are() -> None:
    drive = Drive(rows=1)
    drive.scheduler.add(asked("running", deadline=1.0), 0.0)
    drive.scheduler.add(asked("queued", deadline=0.5), 0.0)
    drive.scheduler.add(asked("patient"), 0.0)
    for i in range(20):
        drive.step(0.01 * i)
    (queued,) = drive.scheduler.expire(0.6)
    assert (queued.request, queued.finish) == ("queued", "deadline")
    assert queued.error == "the deadline of 500 ms passed in the queue"
    (running,) = drive.scheduler.expire(2.0)
    assert running.request == "running" and running.error is not None and "tokens" in running.error
    assert drive.step(2.0) == ["patient"]
    assert drive.scheduler.blocks.available < 64  # only the patient one holds blocks
    drive.scheduler.abort("patient")
    assert drive.scheduler.blocks.available == 64


def test_steps_that_cost_the_same_whatever_they_hold_are_filled() -> None:
    """A small model, or a ghost: nobody waits for room that costs nothing."""

    class Even(Device):
        def seconds(self, items: Collection[ScheduledRequest], chance: random.Random) -> float:
            return 0.1

    arrivals = iter([(0.02 * i, "long", 40, 100, "", 0) for i in range(100)])
    crowd = Crowd(
        FairPolicy(100, 10_000), arrivals, device=Even(), rows=100, blocks=10_000, size=16
    )
    crowd.run(10**6)
    lives = list(crowd.lives.values())
    assert len(lives) == 100 and max(life.first - life.arrived for life in lives) < 0.5
    assert max(gap for life in lives for gap in life.gaps) < 0.25


def test_a_key_that_offers_twenty_times_as_much_hardly_delays_another() -> None:
    """Equal requests would fill the rows and leave them all at once, and who comes in between would wait for that."""

    class Even(Device):
        def seconds(self, items: Collection[ScheduledRequest], chance: random.Random) -> float:
            return 0.05 * chance.uniform(0.9, 1.3)

    def first_tokens(rates: dict[str, float], seed: int) -> tuple[list[float], int]:
        chance = random.Random(seed)
        arrivals: list[Arrival] = [
            (chance.uniform(0, 40), key, 4, 12, key, 0)
            for key, rate in rates.items()
            for _ in range(int(40 * rate))
        ]
        crowd = Crowd(
            FairPolicy(16, 4000),
            iter(sorted(arrivals)),
            device=Even(),
            rows=16,
            blocks=4000,
            size=8,
        )
        crowd.run(10**6, until=40.0)
        modest = [
            life for life in crowd.done("modest") if life.arrived > 3
        ]  # by then both are known
        return [life.first - life.arrived for life in modest], len(crowd.done("greedy"))

    quiet = list[float]()
    beside = list[float]()
    answered = 0
    for seed in range(3):
        quiet += first_tokens({"modest": 4.0}, seed)[0]
        waits, count = first_tokens({"modest": 4.0, "greedy": 80.0}, seed)
        beside = beside + waits
        answered = answered + count
    assert percentile(beside, 0.99) < 2 * percentile(quiet, 0.99)
    assert (
        answered * 12 * 0.055 > 0.6 * 3 * 40 * 16
    )  # of the rows' time; the modest one takes a sixth

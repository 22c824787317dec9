"""Steps queued ahead: more than two only while they are short and no row can change; the tokens are always the same."""

from __future__ import annotations

from random import Random

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import MOST, QUEUED, Loop
from bloomery.engine.policy import Aims, FairPolicy, FcfsPolicy
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineRequest, ResolvedSampling, ScheduledStep, StepOutput
from tests.ghost.ghost import VOCAB, Ghost, plain
from tests.ghost.trial import sound


class Device(Ghost):
    """A ghost in virtual time: steps run one after another, each computed when its result is asked for."""

    def __init__(self, size: int, seconds: float):
        super().__init__(size)
        self.seconds = seconds
        self.now = 0.0
        self.free = 0.0
        self.flight: list[tuple[ScheduledStep, float]] = []  # with its end
        self.begun: dict[int, float] = {}  # by sequence: when the first step that holds it began
        self.deepest = 0

    def clock(self) -> float:
        return self.now

    def submit(self, step: ScheduledStep) -> Device:  # type: ignore[override]
        begun = max(self.now, self.free)
        self.free = begun + self.seconds
        for item in step.requests:
            self.begun.setdefault(item.sequence, begun)
        self.flight.append((step, self.free))
        self.deepest = max(self.deepest, len(self.flight))
        return self

    def result(self) -> StepOutput:
        step, end = self.flight.pop(0)
        self.now = max(self.now, end)
        return self.run(step)


class Watched(Scheduler):
    """Asserts that nobody gives way for a step beyond the usual ones."""

    usual = 2

    def schedule(self, now: float = 0.0) -> ScheduledStep | None:
        ahead = len(self.scheduled) >= self.usual
        before = (self.preemptions, self.leaving)
        step = super().schedule(now)
        assert not ahead or before == (self.preemptions, self.leaving)
        return step


def loop_over(
    device: Device, depth: int = 2, blocks: int = 400, rows: int = 4, fair: bool = False
) -> Loop:
    policy = FairPolicy(rows, blocks, Aims()) if fair else FcfsPolicy()
    scheduler = Watched(Blocks(blocks, device.size), 64, rows, policy)
    scheduler.usual = depth
    return Loop(scheduler, device, depth, device.clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize(
    ("seconds", "most"), [(1e-4, MOST), (0.8e-3, 5), (1.3e-3, 3), (1.5e-3, 2), (3e-3, 2), (0.05, 2)]
)
def test_as_many_as_are_done_in_time(seconds: float, most: int, fair: bool) -> None:
    device = Device(4, seconds)
    loop = loop_over(device, fair=fair)
    for name in "abc":
        loop.add(EngineRequest(name, (1, 2, 3), ResolvedSampling(), 60))
    for _ in range(30):
        loop.step()
    assert device.deepest == most


@pytest.mark.parametrize(
    "why", ["one step in flight", "may end", "somebody waits", "a prompt goes in chunks"]
)
def test_no_more_than_usual_where(why: str) -> None:
    device = Device(4, 1e-4)
    depth = 1 if why == "one step in flight" else 2
    loop = loop_over(device, depth, 600, 2 if why == "somebody waits" else 4)
    for name in "abc":
        stops = (VOCAB,) if why == "may end" and name == "b" else ()  # a token that never comes
        prompt = (1, 2, 3) * (500 if why == "a prompt goes in chunks" and name == "c" else 1)
        loop.add(EngineRequest(name, prompt, ResolvedSampling(), 30, stops))
    for _ in range(20):
        loop.step()
        assert device.deepest <= depth


def test_who_comes_waits_no_longer_for_them_than_for_the_bound() -> None:
    device = Device(4, 0.7e-3)
    loop = loop_over(device)
    loop.add(EngineRequest("a", (1, 2, 3), ResolvedSampling(), 200))
    for turn in range(60):
        if turn == 40:
            arrived = device.now
            loop.add(EngineRequest("b", (4, 5), ResolvedSampling(), 5))
        loop.step()
    assert device.deepest == 5
    assert 2 * device.seconds < device.begun[1] - arrived <= QUEUED + 1e-9


def asked(random: Random) -> list[tuple[int, EngineRequest, int | None]]:
    """When each comes, what it wants, and after how many tokens it is aborted."""
    made = []
    for number in range(random.randrange(2, 9)):
        prompt = tuple(random.randrange(VOCAB) for _ in range(random.randrange(1, 30)))
        request = EngineRequest(
            str(number),
            prompt,
            ResolvedSampling(),
            random.randrange(1, 40),
            stop_ids=random.choice([(), (), (), (3,)]),
            deadline=random.choice([None, None, None, 0.02]),
        )
        made.append(
            (random.randrange(60), request, random.choice([None, None, random.randrange(1, 20)]))
        )
    return made


def served(seed: int, depth: int) -> tuple[Device, int]:
    """A crowd to its end: every answer is the plain loop's, or as much of it as there was time for."""
    random = Random(seed)
    device = Device(random.choice([1, 2, 4]), random.choice([2e-4, 8e-4]))
    blocks = random.choice([72, 90, 400]) // device.size
    loop = loop_over(device, depth, blocks, random.choice([2, 4, 8]), random.random() < 0.5)
    coming = asked(random)
    requests = {request.id: request for _, request, _ in coming}
    cuts = {request.id: cut for _, request, cut in coming}
    got = {name: [] for name in requests}
    ends = dict[str, str]()
    turn = 0
    while coming or loop.busy:
        for one in [one for one in coming if one[0] <= turn]:
            coming.remove(one)
            loop.add(one[1])
        for news in loop.step():
            assert news.request not in ends and news.position == len(got[news.request])
            got[news.request] += news.ids
            if news.finish:
                ends[news.request] = news.finish
            elif cuts[news.request] == len(got[news.request]):
                assert loop.abort(news.request)
                ends[news.request] = "abort"
        sound(loop.scheduler.blocks)
        turn += 1
    for name, request in requests.items():
        want = plain(request)[len(request.prompt) :]
        assert got[name] == (
            want[: len(got[name])] if ends[name] in ("abort", "deadline") else want
        )
    assert loop.scheduler.blocks.available == loop.scheduler.blocks.count
    return device, loop.scheduler.preemptions


def test_random_crowds_get_the_same_tokens() -> None:
    for depth, most in ((1, 1), (2, MOST), (MOST, MOST)):
        found = [served(seed, depth) for seed in range(80)]
        assert max(device.deepest for device, _ in found) == most
        assert sum(preemptions for _, preemptions in found) > 10, (
            "crowds with room for all show little"
        )

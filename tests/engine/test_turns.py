"""A pipeline's stages stay busy: groups of sequences take turns, and none is begun before its token is back."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineRequest, ResolvedSampling, ScheduledStep, StepOutput
from tests.ghost.ghost import Ghost, plain

STAGES = 3


class Pipeline:
    """A ghost whose steps are computed when they are asked for: until then they are in flight."""

    def __init__(self, size: int):
        self.ghost = Ghost(size)
        self.flight: list[ScheduledStep] = []
        self.deepest = 0
        self.sizes: list[int] = []

    def submit(self, step: ScheduledStep) -> Awaited:
        waiting = {item.sequence for one in self.flight for item in one.requests if item.samples}
        assert not waiting & {item.sequence for item in step.requests}, (
            "begun before its token was known"
        )
        self.flight.append(step)
        self.deepest = max(self.deepest, len(self.flight))
        self.sizes.append(len(step.requests))
        return Awaited(self.next)

    def next(self) -> StepOutput:
        return self.ghost.run(self.flight.pop(0))


class Awaited:
    def __init__(self, result: Callable[[], StepOutput]):
        self.result = result


def test_groups_take_turns_and_the_tokens_are_the_same() -> None:
    executor = Pipeline(4)
    scheduler = Scheduler(Blocks(200, 4), 64, 16, stages=STAGES)
    loop = Loop(scheduler, executor, STAGES)  # type: ignore[arg-type]
    requests = [EngineRequest(str(i), (i % 5, 1, 2), ResolvedSampling(), 30) for i in range(9)]
    got: dict[str, list[int]] = {request.id: list(request.prompt) for request in requests}
    for request in requests:
        loop.add(request)
    while loop.busy:
        for news in loop.step():
            got[news.request] += news.ids
    assert all(got[request.id] == plain(request) for request in requests)
    assert executor.deepest == STAGES
    steady = executor.sizes[5:-5]
    assert sum(size == 3 for size in steady) > 0.8 * len(steady), "thirds of nine"


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    executor = Pipeline(4)
    loop = Loop(Scheduler(Blocks(200, 4), 16, 4, stages=STAGES), executor, STAGES)  # type: ignore[arg-type]
    loop.add(EngineRequest("0", tuple(i % 5 for i in range(100)), ResolvedSampling(), 2))
    while loop.busy:
        loop.step()
    assert executor.deepest == STAGES, "a chunk need not wait for the one before it"

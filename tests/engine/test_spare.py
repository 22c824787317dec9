"""Work that may wait: done at once while nobody does, and in small portions among requests; the tokens are the same."""

from __future__ import annotations

import itertools

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import REST, Loop
from bloomery.engine.process import Engine
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.wire import Hello, Message
from bloomery.messages import (
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
)
from tests.chaos.ghost_engine import plan
from tests.ghost.ghost import Ghost, plain

# seconds
STEP = 0.01
PIECE = 0.2


class Slow(Ghost):
    """Steps and pieces of spare work take their time."""

    def __init__(self, pieces: int):
        super().__init__(4)
        self.pieces = pieces
        self.now = 0.0
        self.done: list[float] = []  # when a piece was begun

    def clock(self) -> float:
        return self.now

    def run(self, step: ScheduledStep) -> StepOutput:
        self.now += STEP
        return super().run(step)

    def spare(self) -> int:
        self.done.append(self.now)
        self.now += PIECE
        return super().spare()


def loop_over(ghost: Slow) -> Loop:
    return Loop(Scheduler(Blocks(200, 4), 16, 4), ghost, 2, ghost.clock)


def test_an_idle_executor_goes_through_all_of_it() -> None:
    ghost = Slow(5)
    loop = loop_over(ghost)
    for left in (4, 3, 2, 1, 0, 0):
        loop.spare()
        assert loop.left == left
    assert len(ghost.done) == 5


def test_requests_lose_little_and_their_tokens_are_the_same() -> None:
    ghost = Slow(3)
    loop = loop_over(ghost)
    asked = [EngineRequest(str(i), (1, 2, i), ResolvedSampling(), 150) for i in range(3)]
    for request in asked:
        loop.add(request)
    found: dict[str, list[int]] = {request.id: list(request.prompt) for request in asked}
    while loop.busy:
        loop.spare()
        for news in loop.step():
            found[news.request] += news.ids
    assert found == {request.id: plain(request) for request in asked}
    assert len(ghost.done) >= 1
    assert all(b - a >= (1 + REST) * PIECE - 1e-9 for a, b in itertools.pairwise(ghost.done))


class Line:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.waits: list[float | None] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, seconds: float | None) -> list[Message]:
        self.waits.append(seconds)
        return []


def test_an_engine_prepares_before_it_rests_and_says_how_much_is_left() -> None:
    ghost = Slow(9)
    line = Line()
    engine = Engine(
        line, Hello(1, plan()), ghost, EngineCapacity(200, 4, 4, 16, 100, 7), ghost.clock
    )
    while engine.loop.left:
        engine.turn()
    told = [message.stats.unprepared for message in line.sent if isinstance(message, EngineOutput)]
    assert told == sorted(told, reverse=True) and told[0] > told[-1] and set(line.waits) == {0}
    ghost.now += 10
    engine.turn()
    last = line.sent[-1]
    assert isinstance(last, EngineOutput) and last.stats.unprepared == 0 and line.waits[-1]

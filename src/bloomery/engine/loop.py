"""The engine's heartbeat: schedule, run, fold the result back in; as many steps in flight as the executor likes.

Where it likes several, there are more of them while they are short and no row can change: a host that is held up for a
moment is not noticed then, and who comes meanwhile waits no longer than `QUEUED`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import inf

from bloomery.engine.executor import Executor, Result
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineRequest, ScheduledStep, StepTiming, TokenOutput

# seconds, and part of the step under way, before whose end the next one should be queued
AHEAD = 3e-3
SHARE = 0.07
QUEUED = 4e-3  # seconds of short steps in flight
LONGEST = 0.1  # seconds: no foretelling is good enough to let a device stand idle for longer
PROMPT = 3e-4  # seconds: a result that takes no longer was there before
MOST = 8  # steps in flight
REST = 10  # times as long as a piece of spare work took, until the next one while requests wait


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.clock = clock
        self.flight: deque[tuple[ScheduledStep, Result, float]] = (
            deque()
        )  # with the time it was begun
        self.latest = 0.0  # when a step last ended, as far as is known
        self.took = inf  # seconds of that step
        self.timing = StepTiming()  # of all steps
        self.left = 1  # pieces of work the executor would do in its spare time; until it is asked, perhaps one
        self.rested = 0.0  # from when on such a piece may delay requests

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request, self.clock())

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    @property
    def busy(self) -> bool:
        return bool(self.flight) or self.scheduler.busy

    def spare(self) -> None:
        """Have a piece of work done that may wait: now if nobody does, else at most so much that few notice."""
        now = self.clock()
        if not self.left or (self.busy and now < self.rested):
            return
        self.left = self.executor.spare()
        self.latest = self.clock()  # what is in flight is not the slower for it
        self.rested = self.latest + REST * (self.latest - now)

    def patience(self) -> float:
        """Seconds for which the next step may be left open, since the one under way is expected to last: who comes
        until then is part of it, and does not wait for a step that was queued too early."""
        if len(self.flight) != 1 or self.depth != 2 or self.scheduler.stages > 1:
            return 0.0
        expected = self.scheduler.expected()
        begun = max(self.flight[0][2], self.latest)
        return min(
            max(begun + expected - max(AHEAD, SHARE * expected) - self.clock(), 0.0), LONGEST
        )

    def step(self) -> list[TokenOutput]:
        """Keep `depth` steps in flight or more, wait for the oldest, and tell what it brought."""
        now = self.clock()
        news = self.scheduler.expire(now)
        while self._wants_more() and (step := self.scheduler.schedule(now)) is not None:
            self.flight.append((step, self.executor.submit(step), now))
        if not self.flight:
            return news
        step, pending, begun = self.flight.popleft()
        asked = self.clock()
        output = pending.result()
        now = self.clock()
        begun = max(begun, self.latest)
        seconds = now - begun
        self.latest = now
        if output.timing is not None:
            self.timing = total(self.timing, output.timing)
            if output.timing.steps == 1 and self.scheduler.stages == 1:
                # A host that is late would see this step take too long and the next, already done, no time at all;
                # and would wait for the end of the one after it when that is long past. Nor is what the device waited
                # before it any part of it: a pace that is too slow leaves steps open for too long, and would come true.
                seconds = output.timing.device
                if now - asked < PROMPT:
                    self.latest = min(now, begun + seconds)
        self.took = seconds
        return news + self.scheduler.update(step, output, seconds)

    def _wants_more(self) -> bool:
        """Who joins comes with a prompt: the step that ended last is no shorter than steady ones behind it."""
        count = len(self.flight)
        if count < self.depth or self.depth < 2:
            return count < self.depth
        return count < MOST and (count + 1) * self.took <= QUEUED and self.scheduler.steady


def total(one: StepTiming, other: StepTiming) -> StepTiming:
    return StepTiming(*(getattr(one, name) + getattr(other, name) for name in StepTiming.__slots__))

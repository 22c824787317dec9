"""The engine's heartbeat: schedule, run, fold the result back in; as many steps in flight as the executor likes."""

from __future__ import annotations

from collections import deque

from bloomery.engine.executor import Executor, Result
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import Request, Step, Tokens


class Loop:
    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int = 1):
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self.flight: deque[tuple[Step, Result]] = deque()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    @property
    def busy(self) -> bool:
        return bool(self.flight) or self.scheduler.busy

    def step(self) -> list[Tokens]:
        """Keep `depth` steps in flight, wait for the oldest, and tell what it brought."""
        while len(self.flight) < self.depth and (step := self.scheduler.schedule()) is not None:
            self.flight.append((step, self.executor.submit(step)))
        if not self.flight:
            return []
        step, pending = self.flight.popleft()
        return self.scheduler.update(step, pending.result())

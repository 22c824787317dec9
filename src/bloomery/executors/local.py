"""The worker in this very process: what one device needs.

Python's collector, when it looks through all that is imported and loaded, takes a fifth of a second in which no step
is begun. All that is there to stay, so the collector is told to leave it alone.
"""

from __future__ import annotations

import atexit
import gc

from bloomery.config import Plan
from bloomery.engine.executor import Report
from bloomery.messages import EngineCapacity, ScheduledStep
from bloomery.runtime.worker import Pending, Worker


class Local:
    def __init__(self, progress: bool = False, report: Report | None = None):
        self.progress = progress
        self.report = report
        self.worker: Worker | None = None

    def start(self, plan: Plan) -> EngineCapacity:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)
        self.worker = Worker(plan, self.progress, self.report)
        return self.worker.capacity

    def submit(self, step: ScheduledStep) -> Pending:
        if self.worker is None:
            raise RuntimeError("submit before start")
        return self.worker.run(step)

    def spare(self) -> int:
        left = 0 if self.worker is None else self.worker.spare()
        if not left:
            gc.freeze()
        return left

    def close(self) -> None:
        self.worker = None

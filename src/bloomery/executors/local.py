"""The worker in this very process: what one device needs."""

from __future__ import annotations

from bloomery.config import Plan
from bloomery.engine.executor import Report
from bloomery.messages import Capacity, Step
from bloomery.runtime.worker import Pending, Worker


class Local:
    def __init__(self, progress: bool = False, report: Report | None = None):
        self.progress, self.report = progress, report
        self.worker: Worker | None = None

    def start(self, plan: Plan) -> Capacity:
        self.worker = Worker(plan, self.progress, self.report)
        return self.worker.capacity

    def submit(self, step: Step) -> Pending:
        if self.worker is None:
            raise RuntimeError("submit before start")
        return self.worker.run(step)

    def close(self) -> None:
        self.worker = None

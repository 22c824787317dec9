"""The worker in this very process: what one device needs."""

from __future__ import annotations

from concurrent.futures import Future

from bloomery.config import Plan
from bloomery.messages import Capacity, Step, StepOutput
from bloomery.runtime.worker import Worker


class Local:
    def __init__(self, progress: bool = False):
        self.progress = progress
        self.worker: Worker | None = None

    def start(self, plan: Plan) -> Capacity:
        self.worker = Worker(plan, self.progress)
        return self.worker.capacity

    def submit(self, step: Step) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        if self.worker is None:
            raise RuntimeError("submit before start")
        try:
            future.set_result(self.worker.run(step))
        except BaseException as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self.worker = None

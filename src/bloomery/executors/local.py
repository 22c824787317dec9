"""The executor for one device: a worker in this process.

A full run of Python's garbage collector over all imported and loaded objects takes a fifth of a
second, and no step starts meanwhile. These objects are never freed, so they are frozen: the
collector then skips them.
"""

from __future__ import annotations

import atexit
import gc
from concurrent.futures import Future

from bloomery.config import EnginePlan
from bloomery.engine.executor import LoadProgress, PendingStep
from bloomery.messages import AdapterInfo, EngineCapacity, ScheduledStep
from bloomery.runtime.worker import Worker


class LocalExecutor:
    """Runs one worker in this process.

    `progress` shows the load progress as a bar in the terminal. `report` receives it.
    """

    def __init__(self, progress: bool = False, report: LoadProgress | None = None):
        self.progress = progress
        self.report = report
        self.worker: Worker | None = None

    def start(self, plan: EnginePlan) -> EngineCapacity:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)
        self.worker = Worker(plan, self.progress, self.report)
        self.worker.capture_graphs(self.progress, self.report)
        gc.freeze()  # the model and its CUDA graphs are never freed either
        return self.worker.capacity

    def submit(self, step: ScheduledStep) -> PendingStep:
        if self.worker is None:
            raise RuntimeError("submit before start")
        return self.worker.run(step)

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        if self.worker is None:
            raise RuntimeError("load_adapter before start")
        return self.worker.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        if self.worker is not None:
            self.worker.unload_adapter(name)

    def close(self) -> None:
        self.worker = None

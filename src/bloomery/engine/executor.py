"""The bridge to the compute tower: four methods, so that a model, two processes or a ghost can stand behind it; and one
who tells of every step that goes over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bloomery.messages import EngineCapacity, ScheduledStep, StepOutput

Report = Callable[
    [str, int, int], None
]  # what is being loaded, how much is done, how much there is


class Result(Protocol):
    def result(self) -> StepOutput:
        """What the step gave; waits for it if need be."""
        ...


class Executor(Protocol):
    def start(self, plan: Any) -> EngineCapacity:
        """Load the model and say what fits."""
        ...

    def submit(self, step: ScheduledStep) -> Result:
        """Queue a step; results come in the order of submission."""
        ...

    def spare(self) -> int:
        """There is time: do a piece of what may wait; how many pieces are left."""
        ...

    def close(self) -> None: ...


class Announced:
    """An executor whose every step is announced before it runs."""

    def __init__(self, executor: Executor, announce: Callable[[ScheduledStep], None]):
        self.executor = executor
        self.announce = announce

    def start(self, plan: Any) -> EngineCapacity:
        return self.executor.start(plan)

    def submit(self, step: ScheduledStep) -> Result:
        self.announce(step)
        return self.executor.submit(step)

    def spare(self) -> int:
        return self.executor.spare()

    def close(self) -> None:
        self.executor.close()

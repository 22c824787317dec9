"""The interface between the engine and the executor that computes its steps.

An executor may be a worker in this process, several tensor parallel ranks, a Ray cluster, or a fake
of the tests. This module holds protocol types only; the implementations are in bloomery.executors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bloomery.messages import EngineCapacity, ScheduledStep, StepOutput

# Reports load progress. Its arguments are a description, the amount done and the total amount.
LoadProgress = Callable[[str, int, int], None]


class PendingStep(Protocol):
    """A submitted step. If it has masked sequences, it waits for their masks before it samples."""

    def provide_masks(self, masks: Any) -> None:
        """Take the masks [masked sequences, words] int32: bit i of word w is token 32 w + i.

        They must come before the next step is submitted.
        """
        ...

    def result(self) -> StepOutput:
        """Wait for the output of the step and return it."""
        ...


class Executor(Protocol):
    """Runs steps on one or several workers."""

    def start(self, plan: Any) -> EngineCapacity:
        """Load the model, prepare every step, and report what fits into memory."""
        ...

    def submit(self, step: ScheduledStep) -> PendingStep:
        """Queue a step; results come in the order of submission."""
        ...

    def close(self) -> None: ...

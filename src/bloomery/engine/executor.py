"""The interface between the engine and the executor that computes its steps.

An executor may be a worker in this process, several tensor parallel ranks, a Ray cluster, or a fake
of the tests. This module holds protocol types only; the implementations are in bloomery.executors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from bloomery.errors import InvalidRequest
from bloomery.messages import AdapterInfo, EngineCapacity, ScheduledStep, StepOutput

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

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        """Read a LoRA adapter into the host memory of all ranks while steps go on.

        Steps may name it in `lora_loads` once the future is done. Its exception is InvalidRequest
        if the adapter cannot be used. A name is loaded once until it is unloaded.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Drop the host copy of an adapter. No later step loads it into a slot.

        Its device slot stays as it is until another adapter is loaded into it.
        """
        ...

    def close(self) -> None: ...


def refuse_adapter(reason: str) -> Future[AdapterInfo]:
    """Return what `load_adapter` of an executor returns that cannot load the adapter."""
    refusal: Future[AdapterInfo] = Future()
    refusal.set_exception(InvalidRequest(reason, "model"))
    return refusal

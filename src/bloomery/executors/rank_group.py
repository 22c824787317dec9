"""Code that all executors with several ranks share.

It adds up the capacities of the ranks and forwards sampled tokens from the last pipeline stage to
the other stages. This module knows no processes and no Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from bloomery.errors import BloomeryError, InvalidRequest
from bloomery.messages import (
    AdapterInfo,
    AdapterRefusal,
    EngineCapacity,
    ScheduledStep,
    StepOutput,
)


class RankLostError(BloomeryError):
    """A rank is gone, and the other ranks cannot continue without it."""


@dataclass(frozen=True)
class DeferredResult:
    """A pending step. `result` fetches its output; calls must be in the order of submission.

    `provide_masks` sends the masks of its masked sequences to the ranks.
    """

    result: Callable[[], StepOutput]
    provide_masks: Callable[[np.ndarray], None]


AdapterAnswer = AdapterInfo | AdapterRefusal


class AdapterLoadFuture(Future[AdapterInfo]):
    """The load of an adapter on several ranks.

    The engine's thread reads what ranks send only when it waits for a step. `done` therefore calls
    `poll`, which looks for answers.
    """

    def __init__(self, num_ranks: int, poll: Callable[[], None]):
        super().__init__()
        self.num_ranks = num_ranks
        self.poll = poll
        self.answers: list[AdapterAnswer] = []

    def done(self) -> bool:
        if not super().done():
            self.poll()
        return super().done()

    def add_answer(self, answer: AdapterAnswer) -> bool:
        """Take the answer of one rank; returns whether that was the last one."""
        self.answers.append(answer)
        if len(self.answers) < self.num_ranks:
            return False
        for entry in self.answers:
            if isinstance(entry, AdapterRefusal):
                self.set_exception(InvalidRequest(entry.error, "model"))
                return True
        self.set_result(combine_adapters([a for a in self.answers if isinstance(a, AdapterInfo)]))
        return True

    @property
    def is_refused(self) -> bool:
        """Whether a rank could not load the adapter."""
        return any(isinstance(answer, AdapterRefusal) for answer in self.answers)


def combine_adapters(parts: list[AdapterInfo]) -> AdapterInfo:
    """Combine what the ranks hold of an adapter."""
    return AdapterInfo(
        parts[0].name,
        max(part.rank for part in parts),
        sum(part.num_bytes for part in parts),
        max(part.num_targets for part in parts),
    )


class PipelineTokens:
    """The last sampled token of each sequence, for pipeline stages that do not sample.

    A token is sent with the next step that needs it. The executor always knows it by then, because
    with pipeline stages the scheduler skips sequences whose last token is pending.
    """

    def __init__(self, num_stages: int = 1) -> None:
        self.is_needed = num_stages > 1
        # None while a sequence has only the tokens it started with.
        self.last_token: dict[int, int | None] = {}
        self.decodes_in_flight: deque[tuple[int, ...]] = deque()  # sequences, by step in flight

    def record(self, output: StepOutput) -> None:
        """Record the tokens of the oldest step in flight."""
        if not self.is_needed:
            return
        samples = [
            (sample.sequence, sample.tokens[-1]) for sample in output.samples if sample.tokens
        ]
        decodes = zip(self.decodes_in_flight.popleft(), output.tokens)
        for sequence, token in (*samples, *decodes):
            if sequence in self.last_token:  # False if the sequence has ended meanwhile
                self.last_token[sequence] = token

    def select_last_tokens(self, step: ScheduledStep) -> tuple[tuple[int, int], ...]:
        """Return (sequence, last token) for the step. New sequences are sent with their tokens."""
        if not self.is_needed:
            return ()
        for sequence in step.finished:
            self.last_token.pop(sequence, None)
        self.decodes_in_flight.append(step.decodes)
        for chunk in step.chunks:
            if chunk.new_request is not None:
                self.last_token[chunk.sequence] = None
        sequences = (*step.decodes, *(chunk.sequence for chunk in step.chunks))
        last_tokens = ((sequence, self.last_token[sequence]) for sequence in sequences)
        return tuple((sequence, token) for sequence, token in last_tokens if token is not None)


def find_driver_rank(tensor_parallel_size: int, pipeline_parallel_size: int) -> int:
    """Return the rank that samples: the first tensor parallel rank of the last stage."""
    return tensor_parallel_size * (pipeline_parallel_size - 1)


def combine_capacities(capacities: list[EngineCapacity], driver: int) -> EngineCapacity:
    """Combine what all ranks hold. The other fields are those of the driver rank."""
    reported = capacities[driver]
    all_notes = (note for capacity in capacities for note in capacity.notes)
    return replace(
        reported,
        weights_bytes=sum(capacity.weights_bytes for capacity in capacities),
        kv_bytes=sum(capacity.kv_bytes for capacity in capacities),
        notes=tuple(dict.fromkeys(all_notes)),
        device=f"{len(capacities)} x {reported.device.partition(':')[0]}",
    )

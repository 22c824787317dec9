"""What every owner of ranks must do: add up what they hold, and carry tokens from a pipeline's end to its beginning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from bloomery.errors import BloomeryError
from bloomery.messages import EngineCapacity, ScheduledStep, StepOutput


class RankLost(BloomeryError):
    """A rank is gone; the others cannot go on."""


@dataclass(frozen=True)
class Awaited:
    """A step's result, in its turn."""

    result: Callable[[], StepOutput]


class Drawn:
    """Tokens go with the next order that needs them. No step of a sequence is begun before the token of its former one
    is known here, so nothing waits for this detour."""

    def __init__(self, wanted: bool = False) -> None:
        self.wanted = wanted  # there is more than one stage
        self.last: dict[
            int, int | None
        ] = {}  # by sequence; None while it has only what it began with
        self.going: deque[tuple[int, ...]] = deque()  # of the steps in flight

    def note(self, output: StepOutput) -> None:
        if not self.wanted:
            return
        told = [(entry.sequence, entry.tokens[-1]) for entry in output.samples if entry.tokens]
        for sequence, token in (*told, *zip(self.going.popleft(), output.tokens)):
            if sequence in self.last:  # others have been ended meanwhile
                self.last[sequence] = token

    def of(self, step: ScheduledStep) -> tuple[tuple[int, int], ...]:
        """Last tokens of the step's sequences, none of those that begin: these bring their own."""
        if not self.wanted:
            return ()
        for sequence in step.finished:
            self.last.pop(sequence, None)
        self.going.append(step.decodes)
        self.last.update(
            (item.sequence, None) for item in step.chunks if item.new_request is not None
        )
        every = (*step.decodes, *(item.sequence for item in step.chunks))
        return tuple(
            (sequence, token) for sequence in every if (token := self.last[sequence]) is not None
        )


def total(capacities: list[EngineCapacity], speaker: EngineCapacity) -> EngineCapacity:
    """What all ranks hold together."""
    weights = sum(capacity.weights_bytes for capacity in capacities)
    kv = sum(capacity.kv_bytes for capacity in capacities)
    notes = tuple(dict.fromkeys(note for capacity in capacities for note in capacity.notes))
    device = f"{len(capacities)} x {speaker.device.partition(':')[0]}"
    return replace(speaker, weights_bytes=weights, kv_bytes=kv, notes=notes, device=device)

"""Every step against its floor: what the hardware cannot beat, what the step took, and where the rest went.

On a GPU time is taken by events around each step: recorded on its stream, kept in a pool, read when they are complete,
so that nothing waits for them. The gap between one step's end and the next one's beginning is time the device stood
idle because the host was late. On a CPU the clock does all that. What cannot be told apart by looking is said by the
roofline: what padded lines and messages between devices cost. A pause between requests is nobody's loss.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from bloomery.messages import ScheduledStep, StepTiming
from bloomery.roofline import Machine, Precision, Roofline, parameters
from bloomery.spec import Model

PAUSE = (
    5e-3  # seconds between the last result and the next step from which on there was nothing to do
)


def roofline(
    model: Model,
    machine: Machine,
    weights: int,
    dtype: torch.dtype,
    kv: torch.dtype,
    tp: int,
    pp: int,
) -> Roofline:
    """Of a model as it was loaded: `weights` bytes in all. Tables beside the weights make them no wider than they are,
    and those that stand twice no narrower."""
    bits = 8 * weights / max(parameters(model).total, 1)
    whole = 8.0 * dtype.itemsize
    bits = whole if bits > 0.9 * whole else bits
    wide = "fp32" if dtype == torch.float32 else "bf16"
    return Roofline(
        model, machine, Precision("as loaded", bits, bits, wide), 8 * kv.itemsize, tp, pp
    )


@dataclass(slots=True)
class Reading:
    """A step under way."""

    step: ScheduledStep
    begun: float  # the host's clock
    follows: bool  # there was work all the time since the step before
    host: float = 0.0  # seconds until it was queued
    padded: int = 0  # lines it was computed for beyond its own
    drawing: float = 0.0  # seconds of choosing tokens, where the clock sees them
    marks: tuple[torch.cuda.Event, ...] = ()  # begin, perhaps where tokens are chosen, end


class Meter:
    def __init__(self, limit: Roofline, device: torch.device):
        self.limit = limit
        self.cuda = device.type == "cuda"
        self.pool: list[torch.cuda.Event] = []
        self.open: deque[Reading] = deque()
        self.current: Reading | None = None
        self.last: torch.cuda.Event | None = None  # the end of the step before
        self.ended = self.resulted = time.perf_counter()

    # ---- around a step ---------------------------------------------------------------------------

    def begin(self, step: ScheduledStep) -> None:
        now = time.perf_counter()
        self.current = Reading(step, now, bool(self.open) or now - self.resulted < PAUSE)
        self.mark()

    def mark(self) -> None:
        """The moment at which the stream comes here."""
        if self.cuda and self.current is not None:
            event = self.pool.pop() if self.pool else torch.cuda.Event(enable_timing=True)
            event.record()
            self.current.marks += (event,)

    def choosing(self) -> None:
        """From here on tokens are chosen."""
        if self.current is not None:
            self.current.drawing = time.perf_counter()
            self.mark()

    def end(self, padded: int = 0) -> Reading | None:
        reading = self.current
        if reading is None:
            return None
        self.mark()
        now = time.perf_counter()
        reading.host = now - reading.begun
        reading.padded = padded
        reading.drawing = now - reading.drawing if reading.drawing else 0.0
        self.open.append(reading)
        self.current = None
        return reading

    # ---- what it came to -------------------------------------------------------------------------

    def collect(self, last: Reading) -> StepTiming:
        """Sums over the steps up to this one, whose result is in: there is next to nothing to wait for."""
        total = [0.0] * 9
        while self.open and self.open[0].begun <= last.begun:
            reading = self.open.popleft()
            if self.cuda:
                reading.marks[-1].synchronize()
            for i, value in enumerate(self._read(reading)):
                total[i] += value
        self.resulted = time.perf_counter()
        return StepTiming(int(total[0]), *total[1:])

    def _read(self, reading: Reading) -> tuple[float, ...]:
        """As Timing has it."""
        tokens, attended, sampled, pairs = counts(reading.step)
        floor = self.limit.step(tokens, attended, sampled, pairs)
        more = reading.padded
        padding = (
            self.limit.step(tokens + more, attended, sampled + more, pairs) - floor if more else 0.0
        )
        if self.cuda:
            device, idle, drawing = self._between(reading)
        else:
            device = reading.host
            drawing = reading.drawing
            idle = max(reading.begun - self.ended, 0.0) if reading.follows else 0.0
            self.ended = reading.begun + reading.host
        expected = self.limit.expected(tokens, attended, sampled, pairs)
        told = self.limit.communication(tokens, sampled)
        return 1, floor, expected, device, idle, reading.host, drawing, padding, told

    def _between(self, reading: Reading) -> tuple[float, float, float]:
        first, *middle, end = reading.marks
        device = first.elapsed_time(end) / 1000
        drawing = middle[0].elapsed_time(end) / 1000 if middle else 0.0
        idle = 0.0
        if self.last is not None:
            idle = max(self.last.elapsed_time(first) / 1000, 0.0) if reading.follows else 0.0
            self.pool.append(self.last)
        self.pool += (first, *middle)
        self.last = end
        return device, idle, drawing


def counts(step: ScheduledStep) -> tuple[int, int, int, int]:
    """Positions computed, cache positions read, tokens drawn, pairs of query and key."""
    tokens = sampled = len(step.decodes)
    attended = pairs = tokens + sum(step.decode_positions)
    for item in step.chunks:
        count = item.count + len(item.drafts)
        end = item.start + count
        tokens += count
        attended += end
        sampled += item.samples
        pairs += end if count == 1 else count * item.start + count * (count + 1) // 2
    return tokens, attended, sampled, pairs

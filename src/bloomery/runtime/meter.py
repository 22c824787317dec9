"""Measures how long every step takes compared with its roofline floor, and why it takes longer.

On a GPU, CUDA events around each step measure the time. They are recorded on the step's stream,
come from a pool, and are read when they are complete, so nothing waits for them. In the gap between
the end of one step and the start of the next the device was idle because the host was late. On a
CPU the host clock measures all of that. The roofline estimates what cannot be measured
separately: the cost of padding rows and of communication between ranks. A pause between requests is
not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bloomery.hardware import HardwareSpec
from bloomery.messages import ScheduledStep, StepTiming
from bloomery.roofline import Roofline, StepAdapter, WeightPrecision, count_parameters
from bloomery.spec import ModelSpec

# Seconds between the last result and the next step. After a longer pause there was no work to do.
MAX_GAP_SECONDS = 5e-3
# Weights of at least this fraction of their type's size count as unquantized.
UNQUANTIZED_FRACTION = 0.9
NUM_TIMING_FIELDS = 10  # of StepTiming


def build_roofline(
    model: ModelSpec,
    hardware: HardwareSpec,
    weights_bytes: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    tp: int,
    pp: int,
    expert_bytes: int = 0,
) -> Roofline:
    """The roofline of a model as it was loaded, with `weights_bytes` on all ranks together.

    `expert_bytes` of them are experts, which may have other bits than the rest. The precision is
    that of `dtype` unless the bytes are clearly fewer: tables besides the weights or tied weights
    change the bytes a little.
    """
    dtype_bits = 8.0 * dtype.itemsize

    def measure_bits(nbytes: int, count: int) -> float:
        bits = 8 * nbytes / max(count, 1)
        return dtype_bits if bits > UNQUANTIZED_FRACTION * dtype_bits else bits

    counts = count_parameters(model)
    expert_values = counts.experts if expert_bytes else 0
    bits = measure_bits(weights_bytes - expert_bytes, counts.total - expert_values)
    expert_bits = measure_bits(expert_bytes, counts.experts) if expert_bytes else 0.0
    compute_format = "fp32" if dtype == torch.float32 else "bf16"
    precision = WeightPrecision(
        "as loaded",
        bits,
        bits,
        compute_format,
        expert_bits=expert_bits if expert_bits != bits else 0,
    )
    return Roofline(model, hardware, precision, 8 * kv_cache_dtype.itemsize, tp, pp)


@dataclass(slots=True)
class StepReading:
    """The measurement of one step in flight."""

    step: ScheduledStep
    start: float  # host clock, seconds
    follows_work: bool  # there was work without a pause since the previous step
    host_seconds: float = 0.0  # until the step was queued
    num_padding: int = 0  # padding rows
    forward_end: float = 0.0  # host clock; 0: the step did not wait for masks
    sampling_start: float = 0.0  # host clock; 0: sampling was not measured separately
    sampling_seconds: float = 0.0
    adapters: Sequence[StepAdapter] = ()
    # On a GPU: "start", "end", and where they were measured "forward end" and "sampling".
    events: dict[str, torch.cuda.Event] = field(default_factory=dict)


class StepMeter:
    """Measures steps in the order in which they are queued."""

    def __init__(self, roofline: Roofline, device: torch.device):
        self.roofline = roofline
        self.on_gpu = device.type == "cuda"
        self.event_pool: list[torch.cuda.Event] = []
        self.in_flight: deque[StepReading] = deque()
        self.current: StepReading | None = None
        self.last_end_event: torch.cuda.Event | None = None
        now = time.perf_counter()
        self.last_end = now  # of a step on a CPU
        self.last_result = now

    # ---- around a step ---------------------------------------------------------------------------

    def begin(self, step: ScheduledStep) -> None:
        """Start the measurement of a step."""
        now = time.perf_counter()
        follows_work = bool(self.in_flight) or now - self.last_result < MAX_GAP_SECONDS
        self.current = StepReading(step, now, follows_work)
        self._record_event("start")

    def _record_event(self, name: str) -> None:
        """Record the moment at which the CUDA stream arrives here."""
        if self.on_gpu and self.current is not None:
            if self.event_pool:
                event = self.event_pool.pop()
            else:
                event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.current.events[name] = event

    def count_adapters(self, adapters: Sequence[StepAdapter]) -> None:
        """Note the LoRA adapters of the step's tokens."""
        if self.current is not None:
            self.current.adapters = adapters

    def end_forward(self) -> None:
        """Mark where the forward pass ends, if the step then waits for masks."""
        if self.current is not None:
            self.current.forward_end = time.perf_counter()
            self._record_event("forward end")

    def begin_sampling(self) -> None:
        """Mark where sampling starts, if it is not part of the forward pass's CUDA graph."""
        if self.current is not None and not self.current.sampling_start:
            self.current.sampling_start = time.perf_counter()
            self._record_event("sampling")

    def end(self, num_padding: int = 0) -> StepReading | None:
        """End the measurement of the step; its device time is read later."""
        reading = self.current
        if reading is None:
            return None
        self._record_event("end")
        now = time.perf_counter()
        reading.host_seconds = now - reading.start
        reading.num_padding = num_padding
        if reading.sampling_start:
            reading.sampling_seconds = now - reading.sampling_start
        self.in_flight.append(reading)
        self.current = None
        return reading

    # ---- results ---------------------------------------------------------------------------------

    def collect(self, last: StepReading) -> StepTiming:
        """Sum up the steps up to this one. Its result has arrived, so this hardly waits."""
        totals = [0.0] * NUM_TIMING_FIELDS
        while self.in_flight and self.in_flight[0].start <= last.start:
            reading = self.in_flight.popleft()
            if self.on_gpu:
                reading.events["end"].synchronize()
            for i, value in enumerate(self._read_fields(reading)):
                totals[i] += value
        self.last_result = time.perf_counter()
        return StepTiming(int(totals[0]), *totals[1:])

    def _read_fields(self, reading: StepReading) -> tuple[float, ...]:
        """The fields of StepTiming for one step, in their order."""
        num_tokens, attended, num_sampled, pairs = count_scheduled_work(reading.step)
        floor = self.roofline.floor_seconds(num_tokens, attended, num_sampled, pairs)
        expected = self.roofline.expected_seconds(num_tokens, attended, num_sampled, pairs)
        communication = self.roofline.communication_seconds(num_tokens, num_sampled)
        adapter_seconds = self.roofline.adapter_seconds(reading.adapters)
        padding = 0.0
        if reading.num_padding:
            padded_floor = self.roofline.floor_seconds(
                num_tokens + reading.num_padding,
                attended,
                num_sampled + reading.num_padding,
                pairs,
            )
            padding = padded_floor - floor
        floor += adapter_seconds
        expected += adapter_seconds
        if self.on_gpu:
            device, idle, sampling, masks = self._read_events(reading)
        else:
            device = reading.host_seconds
            sampling = reading.sampling_seconds
            masks = reading.sampling_start - reading.forward_end if reading.forward_end else 0.0
            idle = max(reading.start - self.last_end, 0.0) if reading.follows_work else 0.0
            self.last_end = reading.start + reading.host_seconds
        host = reading.host_seconds
        return 1, floor, expected, device, idle, host, sampling, padding, communication, masks

    def _read_events(self, reading: StepReading) -> tuple[float, float, float, float]:
        """Seconds on the device: of the step, idle before it, of sampling, of waiting for masks."""
        events = reading.events
        start = events.pop("start")
        end = events.pop("end")
        device = start.elapsed_time(end) / 1000
        sampling = 0.0
        masks = 0.0
        if "sampling" in events:
            sampling = events["sampling"].elapsed_time(end) / 1000
            if "forward end" in events:
                masks = events["forward end"].elapsed_time(events["sampling"]) / 1000
        idle = 0.0
        if self.last_end_event is not None:
            if reading.follows_work:
                idle = max(self.last_end_event.elapsed_time(start) / 1000, 0.0)
            self.event_pool.append(self.last_end_event)
        self.event_pool += (start, *events.values())
        self.last_end_event = end
        return device, idle, sampling, masks


def count_scheduled_work(step: ScheduledStep) -> tuple[int, int, int, int]:
    """Positions computed, KV cache positions read, tokens sampled, query-key pairs."""
    num_tokens = len(step.decodes)
    num_sampled = num_tokens
    attended = num_tokens + sum(step.decode_positions)
    pairs = attended
    for chunk in step.chunks:
        count = chunk.count + len(chunk.drafts)
        end = chunk.start + count
        num_tokens += count
        attended += end
        num_sampled += chunk.samples
        if count == 1:
            pairs += end
        else:
            pairs += count * chunk.start + count * (count + 1) // 2
    return num_tokens, attended, num_sampled, pairs

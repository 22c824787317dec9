"""The real scheduler and policies on a virtual device: requests, steps and clock in virtual time.

The tests of the policies and `benchmarks/policy.py` use this module. A simulation is deterministic:
the seed determines arrivals, lengths and jitter. The time of a step comes from a model of a device:
  - H200: an 8B model in 16 bits, fitted to measured steps; the planner was tuned on it.
  - SLOWER_H200: every step takes 20 % longer.
  - TWO_CORES: the embedded model (SmolLM2-135M) on two CPU cores, from measured rates.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.loop import QUEUE_AHEAD_FRACTION, QUEUE_AHEAD_SECONDS
from bloomery.engine.policy import FairPolicy, FcfsPolicy, Policy
from bloomery.engine.scheduler import Scheduler, compute_step_features
from bloomery.messages import (
    EngineRequest,
    ResolvedSampling,
    SampledTokens,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
)

# ---- devices -------------------------------------------------------------------------------------

# Milliseconds that the matrix products of an 8B model in 16 bits take on an H200, by the number of
# tokens of a captured step. Measured; the command is not recorded.
STEP_MILLISECONDS = {
    32: 4.1,
    64: 4.17,
    128: 4.57,
    192: 5.45,
    256: 6.46,
    384: 8.14,
    512: 10.54,
    640: 13.52,
    768: 16.09,
    896: 18.6,
    1024: 21.24,
    1280: 26.1,
    1536: 31.1,
    1792: 36.7,
    2048: 42.25,
}
LARGEST_CAPTURED_TOKENS = max(STEP_MILLISECONDS)


class VirtualDevice(Protocol):
    """A model of a device: how many seconds a step takes."""

    def step_seconds(self, requests: Collection[ScheduledRequest], rng: random.Random) -> float: ...


@dataclass(frozen=True)
class VirtualGpu:
    """An 8B model on an H200, fitted to 3,700 measured steps under the mixed load.

    The mean error is 2.4 %; one step in twenty is off by 6 % or more. Decode-only steps take as
    long as the next larger size with prefill: 257 rows count as 384, which adds 1.2 ms and makes
    the fcfs policy about 1 % slower than on the real device.
    """

    batch1_seconds: float = 3.9e-3
    token_seconds: float = 21e-6  # per token beyond the largest captured size
    min_eager_seconds: float = 16e-3  # a step that is not captured launches its kernels one by one
    sampling_seconds: float = 1.25e-3  # for more than eight rows
    key_seconds: float = 27e-9  # per key that decodes attend to
    first_chunk_seconds: float = 1.16e-3  # for the first prefill chunk of a step
    other_chunk_seconds: float = 0.25e-3  # for each further one, up to three
    pair_seconds: float = 1.9e-9  # per query-key pair of prefill
    jitter: float = 0.03
    slowdown: float = 1.0

    def step_seconds(self, requests: Collection[ScheduledRequest], rng: random.Random) -> float:
        jitter = rng.uniform(1 - self.jitter, 1 + self.jitter)
        return self.mean_step_seconds(requests) * jitter * self.slowdown

    def mean_step_seconds(self, requests: Collection[ScheduledRequest]) -> float:
        features = compute_step_features(requests)
        num_tokens = features.num_tokens
        num_decodes = sum(request.count == 1 for request in requests)
        if num_tokens == 1:
            return self.batch1_seconds + self.key_seconds * features.decode_keys
        captured = next((size for size in STEP_MILLISECONDS if size >= num_tokens), None)
        size = captured or LARGEST_CAPTURED_TOKENS
        extra_tokens = 0 if captured else num_tokens - LARGEST_CAPTURED_TOKENS
        seconds = 1e-3 * STEP_MILLISECONDS[size] + self.token_seconds * extra_tokens
        sampling_seconds = self.sampling_seconds * (num_decodes > 8)
        seconds += sampling_seconds + self.key_seconds * features.decode_keys
        if features.prefill_pairs:
            num_other_chunks = min(len(requests) - num_decodes - 1, 3)
            chunk_seconds = self.first_chunk_seconds + self.other_chunk_seconds * num_other_chunks
            seconds += chunk_seconds + self.pair_seconds * features.prefill_pairs
        return seconds if captured else max(seconds, self.min_eager_seconds)


@dataclass(frozen=True)
class VirtualCpu:
    """A rough model of the embedded model on two CPU cores. It was not fitted to measured steps.

    A batch-1 step took 7.8 to 8.6 ms of CPU time. Prefill of 512 and of 2,048 tokens at 775 and 464
    tokens a second (`benchmarks/laptop.py`) gives 1.0 ms per token and 1.1 us per pair. Assumed:
    decodes cost as much per token as prefill, a key as much as a pair, and the host costs nothing.
    """

    batch1_seconds: float = 8e-3
    token_seconds: float = 1.1e-3  # per token beyond the first
    key_seconds: float = 1.1e-6
    pair_seconds: float = 1.1e-6
    jitter: float = 0.05

    def step_seconds(self, requests: Collection[ScheduledRequest], rng: random.Random) -> float:
        features = compute_step_features(requests)
        seconds = (
            self.batch1_seconds
            + self.token_seconds * (features.num_tokens - 1)
            + self.key_seconds * features.decode_keys
            + self.pair_seconds * features.prefill_pairs
        )
        return seconds * rng.uniform(1 - self.jitter, 1 + self.jitter)


@dataclass(frozen=True)
class ConstantTimeDevice:
    """A device on which all steps take the same time, up to a random factor."""

    seconds: float
    min_factor: float = 1.0
    max_factor: float = 1.0

    def step_seconds(self, requests: Collection[ScheduledRequest], rng: random.Random) -> float:
        if self.min_factor == self.max_factor:
            return self.seconds
        return self.seconds * rng.uniform(self.min_factor, self.max_factor)


H200 = VirtualGpu()
SLOWER_H200 = replace(H200, slowdown=1.2)
TWO_CORES = VirtualCpu()


# ---- simulation ----------------------------------------------------------------------------------


class SimulatedArrival(NamedTuple):
    """A request of a simulation."""

    time: float
    kind: str
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0


@dataclass
class RequestTimeline:
    """The times of a simulated request, in virtual seconds."""

    kind: str
    arrival_time: float
    max_tokens: int
    first_token_time: float = 0.0  # 0: none yet
    last_token_time: float = 0.0
    num_tokens: int = 0
    token_gaps: list[float] = field(default_factory=list)  # inter-token latencies

    @property
    def total_seconds(self) -> float:
        return self.last_token_time - self.arrival_time

    @property
    def first_token_seconds(self) -> float:
        return self.first_token_time - self.arrival_time


def end_without_next_request(kind: str, now: float) -> SimulatedArrival | None:
    """Return None: no request follows one that ends (an open loop)."""
    return None


class VirtualEngine:
    """Runs a scheduler and a policy on a virtual device, as the engine loop does.

    Requests come from `arrivals`, in order of time. `next_request(kind, now)` may return another
    one whenever a request ends (a closed loop).
    """

    def __init__(
        self,
        policy: Policy,
        arrivals: Iterator[SimulatedArrival],
        next_request: Callable[[str, float], SimulatedArrival | None] = end_without_next_request,
        *,
        device: VirtualDevice = H200,
        max_num_seqs: int = 272,
        num_blocks: int = 12000,
        block_size: int = 64,
        max_tokens: int = 8192,
        max_in_flight: int = 2,
        seed: int = 0,
    ):
        self.policy = policy
        self.device = device
        self.rng = random.Random(seed)
        self.max_in_flight = max_in_flight
        block_pool = BlockPool(num_blocks, block_size, prefix_cache=False)
        self.scheduler = Scheduler(block_pool, max_tokens, max_num_seqs, policy)
        self.arrivals = arrivals
        self.next_request = next_request
        self.future_arrivals: list[tuple[float, int, SimulatedArrival]] = []  # heap
        self.timelines: dict[str, RequestTimeline] = {}  # by request id
        self.unfinished: set[str] = set()
        # (step, time of submission, time of its end)
        self.in_flight: deque[tuple[ScheduledStep, float, float]] = deque()
        self.now = 0.0  # the host's time
        self.device_free_time = 0.0
        self.last_result_time = 0.0
        self.num_steps = 0
        self.num_arrivals = 0
        self._pull_arrival()

    def _pull_arrival(self) -> None:
        arrival = next(self.arrivals, None)
        if arrival is not None:
            self.expect(arrival)

    def expect(self, arrival: SimulatedArrival) -> None:
        """Add a future request."""
        self.num_arrivals += 1
        heapq.heappush(self.future_arrivals, (arrival.time, self.num_arrivals, arrival))

    def run(self, max_steps: int, until: float = float("inf")) -> None:
        """Simulate until all requests have ended, or until one of the limits."""
        while self.num_steps < max_steps and self.now < until:
            self._add_arrived()
            self._wait_for_batching_window()
            self._submit_steps()
            if self.in_flight:
                self._finish_step(*self.in_flight.popleft())
            elif self.future_arrivals:
                self.now = max(self.now, self.future_arrivals[0][0])
            else:
                return

    def _submit_steps(self) -> None:
        while len(self.in_flight) < self.max_in_flight:
            step = self.scheduler.schedule(self.now)
            if step is None:
                return
            begin = max(self.device_free_time, self.now)
            self.device_free_time = begin + self.device.step_seconds(step.requests, self.rng)
            self.in_flight.append((step, self.now, self.device_free_time))

    def _wait_for_batching_window(self) -> None:
        """Leave the next step open until shortly before the step in flight ends."""
        if len(self.in_flight) != 1:
            return
        expected_seconds = self.scheduler.predict_oldest_step_seconds()
        if not expected_seconds:
            return
        lead = max(QUEUE_AHEAD_SECONDS, QUEUE_AHEAD_FRACTION * expected_seconds)
        submitted = self.in_flight[0][1]
        window_end = max(submitted, self.last_result_time) + expected_seconds - lead
        while self.future_arrivals and self.now < self.future_arrivals[0][0] <= window_end:
            self.now = self.future_arrivals[0][0]
            self._add_arrived()
        self.now = max(self.now, window_end)

    def _add_arrived(self) -> None:
        while self.future_arrivals and self.future_arrivals[0][0] <= self.now:
            _, number, arrival = heapq.heappop(self.future_arrivals)
            request_id = f"{arrival.kind}-{number}"
            self.timelines[request_id] = RequestTimeline(
                arrival.kind, arrival.time, arrival.output_tokens
            )
            self.unfinished.add(request_id)
            request = EngineRequest(
                request_id,
                (1,) * arrival.prompt_tokens,
                ResolvedSampling(),
                arrival.output_tokens,
                priority=arrival.priority,
                tenant=arrival.tenant,
            )
            # The engine sees arrivals between two steps, so this may be later than arrival.time.
            self.scheduler.add(request, self.now)
            self._pull_arrival()

    def _finish_step(self, step: ScheduledStep, submitted: float, end: float) -> None:
        self.num_steps += 1
        self.now = max(self.now, end)
        samples = [
            SampledTokens(request.sequence, (2,)) for request in step.requests if request.samples
        ]
        step_seconds = self.now - max(submitted, self.last_result_time)
        self.last_result_time = self.now
        for output in self.scheduler.update(step, StepOutput(tuple(samples)), step_seconds):
            timeline = self.timelines[output.request]
            if timeline.first_token_time:
                timeline.token_gaps.append(self.now - timeline.last_token_time)
            else:
                timeline.first_token_time = self.now
            timeline.last_token_time = self.now
            timeline.num_tokens += len(output.ids)
            if output.finish:
                self.unfinished.remove(output.request)
                arrival = self.next_request(timeline.kind, self.now)
                if arrival is not None:
                    self.expect(arrival)

    # ---- results -------------------------------------------------------------------------------

    def timelines_of(self, kind: str) -> list[RequestTimeline]:
        return [timeline for timeline in self.timelines.values() if timeline.kind == kind]

    def finished(self, kind: str) -> list[RequestTimeline]:
        return [
            timeline
            for request_id, timeline in self.timelines.items()
            if timeline.kind == kind and request_id not in self.unfinished
        ]

    def latencies(self, kind: str) -> list[float]:
        """Seconds from arrival to the last token of each finished request."""
        return [timeline.total_seconds for timeline in self.finished(kind)]

    def token_gaps(self, kind: str) -> list[float]:
        """All inter-token latencies of a kind, in seconds."""
        return [gap for timeline in self.timelines_of(kind) for gap in timeline.token_gaps]

    def tokens_until(self, kind: str, end: float) -> int:
        """Count the output tokens of a kind up to a moment."""
        total = 0
        for timeline in self.timelines_of(kind):
            if timeline.first_token_time:
                times = accumulate(timeline.token_gaps, initial=timeline.first_token_time)
                total += sum(time <= end for time in times)
        return total

    def throughput(self, kind: str) -> float:
        """Output tokens of a kind per second of the simulation."""
        return self.tokens_until(kind, self.now) / self.now


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of all values lie. NaN without values."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- loads ---------------------------------------------------------------------------------------


class MixedLoad(NamedTuple):
    """Long requests in a closed loop, and short ones that arrive at random."""

    num_long: int
    long_tokens: tuple[int, int]  # prompt, output
    short_tokens: tuple[int, int]
    short_rate: float  # requests per second


GPU_MIXED_LOAD = MixedLoad(256, (2000, 512), (32, 16), 5.0)
CPU_MIXED_LOAD = MixedLoad(6, (160, 48), (8, 6), 0.4)


def simulate_mixed_load(
    policy: Policy,
    seconds: float = 40.0,
    load: MixedLoad = GPU_MIXED_LOAD,
    seed: int = 1,
    *,
    device: VirtualDevice = H200,
    max_num_seqs: int = 272,
    num_blocks: int = 12000,
) -> VirtualEngine:
    """Simulate a mixed load. Requests arrive for `seconds`, and all of them are answered."""
    rng = random.Random(seed)
    short_prompt, short_output = load.short_tokens
    if isinstance(policy, FairPolicy):
        # benchmarks/mixed_latency.py begins with 13 single requests, too. They measure batch-1
        # steps.
        for _ in range(13):
            simulate_solo(policy, short_prompt, short_output, device=device)

    def short_arrivals() -> Iterator[SimulatedArrival]:
        now = rng.expovariate(load.short_rate)
        while now < seconds:
            yield SimulatedArrival(now, "short", short_prompt, short_output)
            now += rng.expovariate(load.short_rate)

    def next_long(kind: str, now: float) -> SimulatedArrival | None:
        if kind != "long" or now >= seconds:
            return None
        return SimulatedArrival(now, "long", *load.long_tokens)

    engine = VirtualEngine(
        policy,
        short_arrivals(),
        next_long,
        device=device,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
    )
    for _ in range(load.num_long):
        engine.expect(SimulatedArrival(0.0, "long", *load.long_tokens))
    engine.run(10**9)
    return engine


def simulate_solo(
    policy: Policy, prompt_tokens: int, output_tokens: int, *, device: VirtualDevice = H200
) -> float:
    """Return how many seconds a request takes if nothing else runs."""
    arrival = SimulatedArrival(0.0, "solo", prompt_tokens, output_tokens)
    engine = VirtualEngine(policy, iter([arrival]), device=device)
    engine.run(10**6)
    return engine.finished("solo")[0].total_seconds


class MixedLoadResult(NamedTuple):
    """The latencies and throughput of a policy under a mixed load."""

    short_slowdown_p50: float  # times the solo time
    short_slowdown_p99: float
    long_throughput: float  # tokens per second
    long_itl_p50: float  # seconds
    long_itl_p99: float
    overhead: float  # share of the time that the policy counts as overhead
    num_short: int
    num_preemptions: int
    num_steps: int


def measure_mixed_load(engine: VirtualEngine, load: MixedLoad) -> MixedLoadResult:
    solo_seconds = simulate_solo(FcfsPolicy(), *load.short_tokens, device=engine.device)
    latencies = engine.latencies("short")
    gaps = engine.token_gaps("long")
    return MixedLoadResult(
        short_slowdown_p50=percentile(latencies, 0.5) / solo_seconds,
        short_slowdown_p99=percentile(latencies, 0.99) / solo_seconds,
        long_throughput=engine.throughput("long"),
        long_itl_p50=percentile(gaps, 0.5),
        long_itl_p99=percentile(gaps, 0.99),
        overhead=engine.policy.overhead_seconds / engine.now,
        num_short=len(latencies),
        num_preemptions=engine.scheduler.num_preemptions,
        num_steps=engine.num_steps,
    )


# (kind, least and most prompt tokens, least and most output tokens)
ROUGH_KINDS = (
    ("short", (4, 60), (1, 12)),
    ("middle", (20, 400), (20, 120)),
    ("long", (500, 2000), (100, 600)),
)


def simulate_rough_load(
    policy: Policy,
    max_steps: int,
    seed: int = 0,
    rate: float = 1.5,
    max_num_seqs: int = 16,
    num_blocks: int = 400,
) -> VirtualEngine:
    """Simulate all lengths, bursts, three tenants, priorities, and a KV cache that is too small."""
    rng = random.Random(seed)

    def arrivals() -> Iterator[SimulatedArrival]:
        now = 0.0
        while True:
            is_busy = rng.random() < 0.9
            current_rate = rate * 4.0 if is_busy else rate / 5
            now += rng.expovariate(current_rate)
            burst = 1 if rng.random() < 0.95 else 12
            for _ in range(burst):
                kind, prompt_range, output_range = rng.choices(ROUGH_KINDS, (6, 3, 2))[0]
                tenant = rng.choice(("", "a", "b"))
                priority = rng.choice((0, 0, 0, 1, -1))
                prompt_tokens = rng.randint(*prompt_range)
                output_tokens = rng.randint(*output_range)
                yield SimulatedArrival(now, kind, prompt_tokens, output_tokens, tenant, priority)

    engine = VirtualEngine(
        policy,
        arrivals(),
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=16,
        max_tokens=2048,
        seed=seed,
    )
    engine.run(max_steps)
    return engine


class FirstTokenWaits(NamedTuple):
    """Times to the first token (TTFT) of one kind, in seconds. Unfinished requests count too."""

    num_finished: int
    median: float
    longest: float


def measure_first_token_waits(engine: VirtualEngine) -> dict[str, FirstTokenWaits]:
    """Return the TTFT of each kind of the rough load."""
    waits = {}
    for kind, _, _ in ROUGH_KINDS:
        times = [
            (timeline.first_token_time or engine.now) - timeline.arrival_time
            for timeline in engine.timelines_of(kind)
        ]
        waits[kind] = FirstTokenWaits(
            len(engine.finished(kind)), percentile(times, 0.5), max(times, default=0.0)
        )
    return waits

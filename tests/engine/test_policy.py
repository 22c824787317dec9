"""FairPolicy in virtual time: deadlines of short requests, overhead, fair shares, no starvation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.chunk_planner import LatencyTargets
from bloomery.engine.policy import FairPolicy, FcfsPolicy, Policy
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.sequence import Sequence
from bloomery.engine.step_time import StepFeatures
from bloomery.messages import EngineRequest, ResolvedSampling, SampledTokens, StepOutput
from tests.engine.virtual_device import (
    GPU_MIXED_LOAD,
    ConstantTimeDevice,
    SimulatedArrival,
    VirtualEngine,
    measure_first_token_waits,
    percentile,
    simulate_mixed_load,
    simulate_rough_load,
    simulate_solo,
)

# A mixed load that fills 32 rows.
SMALL_LOAD = GPU_MIXED_LOAD._replace(num_long=32, short_rate=3.0)
SMALL_SECONDS = 15.0


def simulate_small_load(policy: Policy) -> VirtualEngine:
    return simulate_mixed_load(policy, SMALL_SECONDS, SMALL_LOAD, max_num_seqs=32, num_blocks=2000)


def test_short_requests_are_fast_among_long_ones() -> None:
    """All rows are taken and the queue is long.

    Short requests take a few times their solo time, long ones keep their throughput and ITL, and
    the overhead stays within its bound.
    """
    fair_policy = FairPolicy(32, 2000)
    fair = simulate_small_load(fair_policy)
    fcfs = simulate_small_load(FcfsPolicy())
    solo_seconds = simulate_solo(FcfsPolicy(), 32, 16)
    fair_latencies = fair.latencies("short")
    assert percentile(fair_latencies, 0.5) < 3 * solo_seconds
    assert max(fair_latencies) < 6 * solo_seconds
    assert percentile(fcfs.latencies("short"), 0.5) > 20 * solo_seconds
    fair_tokens = fair.tokens_until("long", SMALL_SECONDS)
    assert fair_tokens > 0.9 * fcfs.tokens_until("long", SMALL_SECONDS)
    assert 0 < fair_policy.overhead_seconds / fair.now <= fair_policy.targets.max_overhead
    assert not fair.scheduler.num_preemptions
    gaps = fair.token_gaps("long")
    assert percentile(gaps, 0.99) < 1.2 * fair_policy.planner.inter_token_target


def test_a_deadline_does_not_depend_on_what_fills_the_batch() -> None:
    """A model fitted to full batches drifts away from batch-1 steps; deadlines must not."""
    deadlines: list[tuple[float, float]] = []  # (arrival, seconds allowed)

    class RecordingPolicy(FairPolicy):
        """Records the deadlines of short requests."""

        def enqueue(self, sequence: Sequence, now: float) -> None:
            super().enqueue(sequence, now)
            if sequence.is_short:
                allowed = sequence.deadline - sequence.arrival_time
                deadlines.append((sequence.arrival_time, allowed))

    fair = RecordingPolicy(256, 12000)
    simulate_mixed_load(fair, 20.0)
    solo_seconds = simulate_solo(FcfsPolicy(), 32, 16)
    early = [allowed for arrival, allowed in deadlines if 0.0 < arrival < 5.0]
    late = [allowed for arrival, allowed in deadlines if 15.0 < arrival < 20.0]
    drift = fair.step_time.predict(StepFeatures(1, 32)) / fair.step_time.batch1_seconds - 1
    assert abs(drift) > 0.02, "the model must have drifted"
    assert max(late) / min(early) < 1.03
    assert max(late) < 1.05 * fair.targets.slowdown_target * solo_seconds


def test_256_long_requests_keep_throughput_and_itl_beside_short_ones() -> None:
    """The step times were measured on an H200.

    Short requests take at most four times their solo time. Long requests lose at most 7 % of their
    throughput with fcfs, and their ITL stays below 65 ms.
    """
    fair_policy = FairPolicy(272, 12000)
    fair = simulate_mixed_load(fair_policy, 40.0)
    fcfs = simulate_mixed_load(FcfsPolicy(), 40.0)
    solo_seconds = simulate_solo(FcfsPolicy(), 32, 16)
    assert percentile(fair.latencies("short"), 0.99) < 4 * solo_seconds
    throughput = fair.throughput("long")
    assert throughput > 4636
    assert throughput > 0.93 * fcfs.throughput("long")
    assert percentile(fair.token_gaps("long"), 0.99) < 0.065
    assert 0 < fair_policy.overhead_seconds / fair.now < fair_policy.targets.max_overhead
    assert not fair.scheduler.num_preemptions


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(32, 16), (200, 51), (2000, 16)])
def test_only_short_requests_reach_the_throughput_of_fcfs(
    prompt_tokens: int, output_tokens: int
) -> None:
    """Not all deadlines can be met. Prompts must not be split into small chunks because of that."""

    def throughput(policy: Policy) -> float:
        def next_short(kind: str, now: float) -> SimulatedArrival | None:
            if now >= 5.0:
                return None
            return SimulatedArrival(now, "short", prompt_tokens, output_tokens)

        first = SimulatedArrival(0.0, "short", prompt_tokens, output_tokens)
        engine = VirtualEngine(policy, iter([first] * 256), next_short)
        engine.run(10**6)
        return engine.throughput("short")

    assert throughput(FairPolicy(272, 12000)) > 0.9 * throughput(FcfsPolicy())


def test_a_lower_overhead_bound_lowers_the_overhead_and_slows_short_requests() -> None:
    overheads: list[float] = []
    latencies: list[float] = []
    for bound in (0.05, 0.0003):
        fair = FairPolicy(272, 12000, LatencyTargets(max_overhead=bound))
        engine = simulate_mixed_load(fair, 12.0)
        overheads.append(fair.overhead_seconds / engine.now)
        latencies.append(percentile(engine.latencies("short"), 0.5))
    assert overheads[1] < 0.7 * overheads[0]
    assert latencies[1] > latencies[0]


@pytest.mark.parametrize("num_streams", [32, 64])
@pytest.mark.parametrize("output_tokens", [4, 200])
def test_streams_keep_their_itl_while_long_prompts_arrive(
    output_tokens: int, num_streams: int
) -> None:
    """A request with a long prompt counts as short with 4 output tokens, but not with 200."""
    arrivals = [SimulatedArrival(0.0, "stream", 50, 3000)] * num_streams
    arrivals += [SimulatedArrival(2.0 + 0.5 * i, "prompt", 8000, output_tokens) for i in range(16)]
    fair = FairPolicy(2 * num_streams, 12000)
    engine = VirtualEngine(fair, iter(arrivals), max_num_seqs=2 * num_streams)
    engine.run(10**6, until=12.0)
    gaps = engine.token_gaps("stream")
    target = fair.planner.inter_token_target
    assert len(engine.finished("prompt")) == 16
    assert percentile(gaps, 0.99) < 1.5 * target
    assert max(gaps) < 1.8 * target


def test_a_flood_of_short_prompts_is_not_computed_in_small_chunks() -> None:
    """No deadline can be met. Decode streams still wait for no more than one round."""
    fair = FairPolicy(272, 12000)
    for _ in range(13):
        simulate_solo(fair, 32, 16)  # measures batch-1 steps
    arrivals = [SimulatedArrival(0.0, "stream", 500, 10000)] * 64
    for i in range(4):
        arrivals += [SimulatedArrival(3.0 + 2.0 * i, "short", 1100, 8)] * 40
    engine = VirtualEngine(fair, iter(arrivals))
    engine.run(10**6, until=12.0)
    latencies = engine.latencies("short")
    # The first tokens of the streams come while their own prompts are computed.
    gaps = [gap for stream in engine.timelines_of("stream") for gap in stream.token_gaps[20:]]
    assert len(latencies) == 160
    assert percentile(latencies, 0.99) < 1.4
    assert max(gaps) < 2 * fair.planner.inter_token_target


@pytest.mark.parametrize("seed", range(2))
def test_no_request_starves_under_a_rough_load(seed: int) -> None:
    """`benchmarks/policy.py --steps 1000000` simulates the same load for longer."""
    engine = simulate_rough_load(FairPolicy(16, 400), 6_000, seed)
    waits = measure_first_token_waits(engine)
    assert all(wait.num_finished > 20 for wait in waits.values())
    assert waits["short"].longest < 1.0
    assert max(wait.longest for wait in waits.values()) < 8.0
    assert engine.policy.overhead_seconds / engine.now < 0.05
    assert engine.scheduler.num_preemptions < 0.3 * len(engine.timelines)


def test_a_full_batch_makes_room_for_a_short_request() -> None:
    """Long requests hold every row, and no row is reserved for short ones.

    The long request that loses the least is preempted. No request is preempted twice.
    """
    arrivals = [SimulatedArrival(0.0, "long", 300, 400), SimulatedArrival(0.0, "long", 100, 400)]
    arrivals += [SimulatedArrival(0.5 + 0.1 * i, "short", 10, 5) for i in range(3)]
    fair = FairPolicy(2, 400)
    engine = VirtualEngine(fair, iter(arrivals), max_num_seqs=2, num_blocks=400)
    assert fair.reserved_rows == 0
    engine.run(10**6)
    assert not engine.unfinished
    timelines = engine.timelines.values()
    assert all(timeline.num_tokens == timeline.max_tokens for timeline in timelines)
    assert 1 <= engine.scheduler.num_preemptions <= 2
    assert engine.finished("short")[0].first_token_seconds < 0.2


class InstantEngine:
    """A scheduler with FairPolicy whose steps take no time. The test passes the time."""

    def __init__(self, max_num_seqs: int = 8, max_tokens: int = 64):
        policy = FairPolicy(max_num_seqs, 64)
        self.scheduler = Scheduler(BlockPool(64, 16), max_tokens, max_num_seqs, policy)

    def step(self, now: float) -> list[str]:
        """Run one step and return the requests it admitted."""
        self.scheduler.finish_expired(now)
        step = self.scheduler.schedule(now)
        assert step is not None
        admitted = [
            self.scheduler.running[request.sequence].request.id
            for request in step.requests
            if request.new_request is not None
        ]
        samples = [
            SampledTokens(request.sequence, (1,)) for request in step.requests if request.samples
        ]
        self.scheduler.update(step, StepOutput(tuple(samples)), 0.01)
        return admitted

    def run(self, start: float, max_steps: int) -> list[str]:
        """Run steps of 10 ms until all requests have ended. Return the order of admission."""
        admitted: list[str] = []
        for i in range(max_steps):
            if self.scheduler.busy:
                admitted += self.step(start + 0.01 * i)
        return admitted


def make_request(name: str, **options: object) -> EngineRequest:
    request = EngineRequest(name, (1,) * 600, ResolvedSampling(), 50)
    return replace(request, **options)  # type: ignore[arg-type]


def test_priority_is_worth_seconds_of_waiting() -> None:
    engine = InstantEngine(max_num_seqs=1)
    engine.scheduler.add(make_request("first"), 0.0)
    engine.scheduler.add(make_request("late", priority=1), 0.0)
    engine.scheduler.add(make_request("early", priority=-1), 5.0)
    engine.scheduler.add(make_request("default"), 15.0)
    assert engine.run(15.0, 400) == ["early", "first", "late", "default"]


def test_tenants_share_equally() -> None:
    engine = InstantEngine(max_num_seqs=1)
    for i in range(6):
        engine.scheduler.add(make_request(f"a{i}", tenant="a"), 0.0)
    for i in range(2):
        engine.scheduler.add(make_request(f"b{i}", tenant="b"), 0.1)
    assert engine.run(0.2, 900) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_deadlines_end_waiting_and_running_requests() -> None:
    engine = InstantEngine(max_num_seqs=1)
    scheduler = engine.scheduler
    scheduler.add(make_request("running", deadline=1.0), 0.0)
    scheduler.add(make_request("queued", deadline=0.5), 0.0)
    scheduler.add(make_request("patient"), 0.0)
    for i in range(20):
        engine.step(0.01 * i)
    (queued,) = scheduler.finish_expired(0.6)
    assert (queued.request, queued.finish) == ("queued", "deadline")
    assert queued.error == "the deadline of 500 ms passed in the queue"
    (running,) = scheduler.finish_expired(2.0)
    assert running.request == "running"
    assert running.error is not None and "tokens" in running.error
    assert engine.step(2.0) == ["patient"]
    assert scheduler.block_pool.num_free_blocks < 64  # only the last request holds blocks
    scheduler.abort("patient")
    assert scheduler.block_pool.num_free_blocks == 64


def test_steps_of_constant_time_are_filled() -> None:
    """With a very small model a larger step costs nothing, so no request waits for a later one."""
    arrivals = iter([SimulatedArrival(0.02 * i, "long", 40, 100) for i in range(100)])
    engine = VirtualEngine(
        FairPolicy(100, 10_000),
        arrivals,
        device=ConstantTimeDevice(0.1),
        max_num_seqs=100,
        num_blocks=10_000,
        block_size=16,
    )
    engine.run(10**6)
    timelines = engine.timelines_of("long")
    assert len(timelines) == 100
    assert max(timeline.first_token_seconds for timeline in timelines) < 0.5
    assert max(engine.token_gaps("long")) < 0.25


def test_a_tenant_that_offers_twenty_times_as_much_hardly_delays_another() -> None:
    """Equal requests of the greedy tenant would fill all rows and free them all at once.

    A request of the modest tenant that arrives meanwhile would wait for that moment.
    """
    seconds = 40.0
    step_seconds = 0.05
    max_num_seqs = 16

    def simulate(rates: dict[str, float], seed: int) -> VirtualEngine:
        rng = random.Random(seed)
        arrivals = [
            SimulatedArrival(rng.uniform(0, seconds), tenant, 4, 12, tenant)
            for tenant, rate in rates.items()
            for _ in range(int(seconds * rate))
        ]
        engine = VirtualEngine(
            FairPolicy(max_num_seqs, 4000),
            iter(sorted(arrivals)),
            device=ConstantTimeDevice(step_seconds, 0.9, 1.3),
            max_num_seqs=max_num_seqs,
            num_blocks=4000,
            block_size=8,
        )
        engine.run(10**6, until=seconds)
        return engine

    def modest_waits(engine: VirtualEngine) -> list[float]:
        """Return the TTFTs of the modest tenant, from the moment both tenants are known."""
        modest = engine.finished("modest")
        return [request.first_token_seconds for request in modest if request.arrival_time > 3]

    waits_alone: list[float] = []
    waits_beside_greedy: list[float] = []
    num_greedy = 0
    for seed in range(3):
        waits_alone += modest_waits(simulate({"modest": 4.0}, seed))
        both = simulate({"modest": 4.0, "greedy": 80.0}, seed)
        waits_beside_greedy += modest_waits(both)
        num_greedy += len(both.finished("greedy"))
    assert percentile(waits_beside_greedy, 0.99) < 2 * percentile(waits_alone, 0.99)
    # The greedy tenant uses most of the rows' time; the modest one needs a sixth of it.
    greedy_row_seconds = num_greedy * 12 * 0.055
    assert greedy_row_seconds > 0.6 * 3 * seconds * max_num_seqs


@pytest.mark.parametrize("policy", [FcfsPolicy(), FairPolicy(4, 100)], ids=["fcfs", "fair"])
def test_a_sequence_may_enter_the_queue_again_before_it_was_dropped(policy: Policy) -> None:
    """It waits for an adapter or a state in between, and the queue forgets it only at its turn."""
    sequences = [
        Sequence.from_request(id, EngineRequest(str(id), (1, 2), ResolvedSampling(), 4))
        for id in range(3)
    ]
    for _ in range(3):
        for sequence in sequences:
            sequence.is_waiting = True
            policy.enqueue(sequence, 0.0)
    order = []
    while (selected := policy.select_next(4)) is not None:
        selected.is_waiting = False
        order.append(selected.id)
    assert order == [0, 1, 2]

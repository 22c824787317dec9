"""The chunk planner: single decisions, and its constants on devices they were not tuned on."""

from __future__ import annotations

import pytest

from bloomery.engine.chunk_planner import (
    IGNORE_FROM,
    MAX_IDLE_ROUND_SECONDS,
    MAX_SHORT_STEPS,
    MAX_URGENT_DEADLINES,
    BatchStats,
    ChunkPlanner,
    LatencyTargets,
    PrefillBacklog,
    RequestDeadline,
    StepPlan,
    collect_batch_stats,
    select_urgent_deadlines,
)
from bloomery.engine.policy import FairPolicy, FcfsPolicy
from bloomery.engine.sequence import Sequence
from bloomery.engine.step_time import StepFeatures, StepTimeModel
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.engine.virtual_device import (
    CPU_MIXED_LOAD,
    GPU_MIXED_LOAD,
    SLOWER_H200,
    TWO_CORES,
    MixedLoad,
    VirtualDevice,
    measure_mixed_load,
    simulate_mixed_load,
)

MAX_TOKENS = 8192


# ---- devices the constants were not tuned on -----------------------------------------------------


@pytest.mark.parametrize(
    ("device", "load", "max_num_seqs", "seconds", "max_slowdown", "max_loss", "max_itl_ratio"),
    [
        pytest.param(SLOWER_H200, GPU_MIXED_LOAD, 272, 25.0, 4.0, 0.1, 1.9, id="slower, 25 s"),
        pytest.param(SLOWER_H200, GPU_MIXED_LOAD, 272, 40.0, 4.0, 0.07, 1.7, id="slower, 40 s"),
        pytest.param(
            SLOWER_H200,
            GPU_MIXED_LOAD,
            272,
            120.0,
            7.0,  # the overhead bound relaxes the deadlines
            0.06,
            2.1,
            id="slower, 120 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(TWO_CORES, CPU_MIXED_LOAD, 32, 200.0, 4.3, 0.04, 1.7, id="two CPU cores"),
        pytest.param(
            TWO_CORES, CPU_MIXED_LOAD, 8, 200.0, 4.3, 0.04, 1.7, id="two CPU cores, 8 rows"
        ),
    ],
)
def test_stated_bounds_hold_on_devices_the_constants_were_not_tuned_on(
    device: VirtualDevice,
    load: MixedLoad,
    max_num_seqs: int,
    seconds: float,
    max_slowdown: float,
    max_loss: float,
    max_itl_ratio: float,
) -> None:
    """Slowdown of short requests, throughput loss and ITL of long ones stay within stated bounds.

    The bounds were set above the figures in chunk_planner.py, for several durations of the load.
    The slowdown target itself does not hold for 120 seconds. test_policy.py tests the device that
    the constants were tuned on.
    """
    num_blocks = 12000
    fair = FairPolicy(max_num_seqs, num_blocks)
    results = [
        measure_mixed_load(
            simulate_mixed_load(
                policy,
                seconds,
                load,
                device=device,
                max_num_seqs=max_num_seqs,
                num_blocks=num_blocks,
            ),
            load,
        )
        for policy in (fair, FcfsPolicy())
    ]
    fair_result, fcfs_result = results
    assert fair_result.short_slowdown_p50 < fair.targets.slowdown_target
    assert fair_result.short_slowdown_p99 < max_slowdown
    assert fcfs_result.short_slowdown_p99 > 20, "the load must need a policy"
    assert fair_result.long_throughput > (1 - max_loss) * fcfs_result.long_throughput
    assert fair_result.long_itl_p99 < max_itl_ratio * fair.planner.inter_token_target
    assert 0 < fair_result.overhead < fair.targets.max_overhead


# ---- single decisions ----------------------------------------------------------------------------


def linear_step_time(step_seconds: float, token_seconds: float, free_tokens: int) -> StepTimeModel:
    """Create the model of a device whose steps take longer from a number of tokens on."""
    step_time = StepTimeModel()
    for _ in range(200):
        for num_tokens in (1, 8, 64, 128, 256, 512, 1024, 2048):
            seconds = step_seconds + token_seconds * max(num_tokens - free_tokens, 0)
            step_time.observe(StepFeatures(num_tokens), seconds)
    return step_time


def make_sequence(
    id: int, prompt_tokens: int, num_computed: int, is_short: bool = False
) -> Sequence:
    request = EngineRequest(str(id), (1,) * prompt_tokens, ResolvedSampling(), 16)
    sequence = Sequence.from_request(id, request)
    sequence.num_computed = num_computed
    sequence.is_short = is_short
    return sequence


def make_batch(num_streams: int = 64, num_short: int = 0, num_prefills: int = 0) -> BatchStats:
    """Decode streams with 500 tokens, decoding short requests with 32, prompts of 2,000 tokens."""
    shapes = [(501, 500, False)] * num_streams
    shapes += [(33, 32, True)] * num_short
    shapes += [(2000, 0, False)] * num_prefills
    sequences = [make_sequence(i, *shape) for i, shape in enumerate(shapes)]
    return collect_batch_stats({sequence.id: sequence for sequence in sequences})


def make_backlog(batch: BatchStats) -> PrefillBacklog:
    return PrefillBacklog(
        batch.short_prefill_tokens, batch.long_prefill_tokens, batch.longest_prefill_tokens
    )


def plan_steps(
    planner: ChunkPlanner,
    batch: BatchStats,
    deadlines: list[RequestDeadline],
    count: int,
    overhead_used: float = 0.0,
) -> list[StepPlan]:
    return [
        planner.plan_step(
            batch,
            make_backlog(batch),
            deadlines,
            overhead_used=overhead_used,
            has_free_rows=True,
            max_tokens=MAX_TOKENS,
        )
        for _ in range(count)
    ]


@pytest.fixture
def planner() -> ChunkPlanner:
    return ChunkPlanner(128, LatencyTargets(), linear_step_time(4e-3, 2e-5, 128))


def test_batch_stats_sort_requests_by_kind() -> None:
    batch = make_batch(num_streams=3, num_short=2, num_prefills=1)
    assert [len(kind) for kind in batch[:3]] == [2, 3, 1]
    assert (batch.short_keys, batch.stream_keys) == (2 * 32, 3 * 500)
    assert (batch.short_prefill_tokens, batch.long_prefill_tokens) == (0, 2000)
    assert (batch.context_tokens, batch.longest_prefill_tokens) == (0, 2000)


def test_a_round_without_short_requests_is_one_step(planner: ChunkPlanner) -> None:
    batch = make_batch(num_prefills=2)
    for step in plan_steps(planner, batch, [], 5):
        assert step.includes_streams and step.includes_long_prefills
        assert step.prefill_tokens > 0 and not step.overhead_seconds


def test_a_step_without_prefill_is_open_to_arrivals(planner: ChunkPlanner) -> None:
    (step,) = plan_steps(planner, make_batch(), [], 1)
    assert step.prefill_tokens == MAX_TOKENS


def test_the_chunk_of_an_unsplit_round_fills_the_round(planner: ChunkPlanner) -> None:
    batch = make_batch(num_prefills=4)
    (step,) = plan_steps(planner, batch, [], 1)
    seconds = planner.step_time.predict(
        StepFeatures(64 + step.prefill_tokens, 64 * 500, step.prefill_tokens**2 / 2)
    )
    target = planner.inter_token_target
    assert 0.8 * target < seconds < 1.6 * target


def test_a_single_prompt_has_long_chunks_only_where_short_ones_are_slow() -> None:
    """A laptop reads the weights for 60 ms in each step; a large GPU computes meanwhile."""
    only_prefill = make_batch(num_streams=0, num_prefills=1)
    laptop = ChunkPlanner(8, LatencyTargets(), linear_step_time(60e-3, 9e-3, 1))
    (step,) = plan_steps(laptop, only_prefill, [], 1)
    assert 96 <= step.prefill_tokens <= 128
    (step,) = plan_steps(laptop, make_batch(num_streams=1, num_prefills=1), [], 1)
    assert step.prefill_tokens <= 32
    large_gpu = ChunkPlanner(128, LatencyTargets(), linear_step_time(35e-3, 1.5e-4, 230))
    (step,) = plan_steps(large_gpu, only_prefill, [], 1)
    assert 512 <= step.prefill_tokens <= 768


def test_a_single_prompt_on_a_slow_device_lets_a_newcomer_in_soon() -> None:
    """16 batch-1 steps of this device are 8 seconds."""
    step_time = linear_step_time(0.5, 4e-3, 1)
    slow_device = ChunkPlanner(8, LatencyTargets(), step_time)
    (step,) = plan_steps(slow_device, make_batch(num_streams=0, num_prefills=1), [], 1)
    assert step.prefill_tokens >= 96, "nothing is left of the gain of longer chunks"
    seconds = step_time.predict(StepFeatures(step.prefill_tokens))
    assert seconds < 1.2 * MAX_IDLE_ROUND_SECONDS


def test_an_urgent_deadline_splits_the_round(planner: ChunkPlanner) -> None:
    """Streams wait for a few short steps; the short request is part of every step."""
    batch = make_batch(num_short=1, num_prefills=2)
    tight = [RequestDeadline(16, 16 * 2.5 * planner.step_time.batch1_seconds)]
    steps = plan_steps(planner, batch, tight, 10)
    with_streams = [i for i, step in enumerate(steps) if step.includes_streams]
    distances = [b - a for a, b in zip(with_streams, with_streams[1:], strict=False)]
    assert max(distances) > 1
    assert max(distances) <= MAX_SHORT_STEPS + 1
    (unsplit,) = plan_steps(planner, batch, [], 1)
    assert max(step.prefill_tokens for step in steps) < unsplit.prefill_tokens


def test_an_easy_deadline_costs_less_than_a_tight_one(planner: ChunkPlanner) -> None:
    batch = make_batch(num_short=1, num_prefills=2)
    batch1_seconds = planner.step_time.batch1_seconds
    overheads = []
    for steps_allowed in (2.5, 1000.0):
        deadline = RequestDeadline(16, 16 * steps_allowed * batch1_seconds)
        steps = plan_steps(planner, batch, [deadline], 10)
        overheads.append(sum(step.overhead_seconds for step in steps))
    assert overheads[0] > overheads[1]


def test_no_deadline_counts_when_the_overhead_is_used_up(planner: ChunkPlanner) -> None:
    batch = make_batch(num_short=1, num_prefills=2)
    tight = [RequestDeadline(16, 0.0)]
    for step in plan_steps(planner, batch, tight, 5, overhead_used=IGNORE_FROM):
        assert step.includes_streams and not step.overhead_seconds


def test_a_flood_of_short_prompts_is_not_split(planner: ChunkPlanner) -> None:
    batch = make_batch(num_short=1)
    backlog = PrefillBacklog(100_000, 0, 1000)
    for _ in range(5):
        step = planner.plan_step(
            batch,
            backlog,
            [RequestDeadline(16, 0.0)],
            overhead_used=0.0,
            has_free_rows=True,
            max_tokens=MAX_TOKENS,
        )
        assert step.includes_streams and step.prefill_tokens > planner.find_efficient_step_tokens()


def test_the_efficient_step_takes_two_batch1_steps(planner: ChunkPlanner) -> None:
    size = planner.find_efficient_step_tokens()
    predict = planner.step_time.predict
    batch1_seconds = planner.step_time.batch1_seconds
    assert predict(StepFeatures(size // 2)) < 2 * batch1_seconds <= predict(StepFeatures(size))


def test_deadlines_are_relaxed_as_the_overhead_approaches_its_bound() -> None:
    deadlines = [RequestDeadline(10, 1.0), RequestDeadline(1, 0.5)]
    assert select_urgent_deadlines(deadlines, 0.05, 0.9) == deadlines
    halfway = select_urgent_deadlines(deadlines, 0.05, 1.0)
    assert [deadline.seconds for deadline in halfway] == pytest.approx([1.25, 0.525])
    assert select_urgent_deadlines(deadlines, 0.05, IGNORE_FROM) == []


def test_only_the_most_urgent_deadlines_count() -> None:
    deadlines = [RequestDeadline(1, float(seconds)) for seconds in (5, 1, 4, 2, 3)]
    urgent = select_urgent_deadlines(deadlines, 0.05, 0.0)
    assert [deadline.seconds for deadline in urgent] == [1.0, 2.0, 3.0][:MAX_URGENT_DEADLINES]

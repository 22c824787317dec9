"""The engine loop: CUDA graph capture in the background, and the reported utilization."""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.engine_process import EngineProcess
from bloomery.engine.loop import (
    CAPTURE_REST_FACTOR,
    MAX_SLOW_SPANS,
    PLAN_CHECK_STEPS,
    SLOW_FACTOR,
    WARMUP_STEPS,
    EngineLoop,
    UtilizationMonitor,
    add_timings,
    break_down_time,
    compute_utilization,
    describe_timing,
)
from bloomery.engine.scheduler import Scheduler
from bloomery.ipc import EngineHello, EngineMessage
from bloomery.messages import (
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    ResolvedSampling,
    ScheduledStep,
    StepOutput,
    StepTiming,
)
from tests.chaos.fake_engine import fake_plan
from tests.engine.fake_executor import FakeExecutor, reference_tokens

STEP_SECONDS = 0.01
CAPTURE_SECONDS = 0.2

# ---- background graph capture --------------------------------------------------------------------


class CapturingExecutor(FakeExecutor):
    """A fake executor in virtual time: steps and graph captures advance its clock."""

    def __init__(self, num_captures: int):
        super().__init__(4)
        self.num_captures = num_captures
        self.now = 0.0
        self.capture_times: list[float] = []  # when each capture began

    def clock(self) -> float:
        return self.now

    def run(self, step: ScheduledStep) -> StepOutput:
        self.now += STEP_SECONDS
        return super().run(step)

    def capture_next_graph(self) -> int:
        self.capture_times.append(self.now)
        self.now += CAPTURE_SECONDS
        return super().capture_next_graph()


def create_loop(executor: CapturingExecutor) -> EngineLoop:
    return EngineLoop(Scheduler(BlockPool(200, 4), 16, 4), executor, 2, executor.clock)


def test_an_idle_engine_captures_all_graphs_at_once() -> None:
    executor = CapturingExecutor(5)
    loop = create_loop(executor)
    for pending in (4, 3, 2, 1, 0, 0):
        loop.capture_in_background()
        assert loop.pending_captures == pending
    assert len(executor.capture_times) == 5


def test_captures_take_little_time_from_requests_and_change_no_token() -> None:
    executor = CapturingExecutor(3)
    loop = create_loop(executor)
    requests = [EngineRequest(str(i), (1, 2, i), ResolvedSampling(), 150) for i in range(3)]
    for request in requests:
        loop.add(request)
    tokens = {request.id: list(request.prompt) for request in requests}
    while loop.busy:
        loop.capture_in_background()
        for output in loop.step():
            tokens[output.request] += output.ids
    assert tokens == {request.id: reference_tokens(request) for request in requests}
    assert len(executor.capture_times) >= 1
    rest_seconds = (1 + CAPTURE_REST_FACTOR) * CAPTURE_SECONDS - 1e-9
    gaps = [later - earlier for earlier, later in itertools.pairwise(executor.capture_times)]
    assert all(gap >= rest_seconds for gap in gaps)


class RecordingChannel:
    """Records what an engine sends and its timeouts. No message ever arrives."""

    def __init__(self) -> None:
        self.sent: list[EngineMessage] = []
        self.timeouts: list[float | None] = []

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)

    def receive(self, timeout_seconds: float | None) -> list[EngineMessage]:
        self.timeouts.append(timeout_seconds)
        return []


def test_an_engine_captures_before_it_waits_and_reports_pending_captures() -> None:
    executor = CapturingExecutor(9)
    channel = RecordingChannel()
    hello = EngineHello(1, fake_plan())
    capacity = EngineCapacity(200, 4, 4, 16, 100, 7)
    engine = EngineProcess(channel, hello, executor, capacity, executor.clock)
    while engine.loop.pending_captures:
        engine.run_once()
    outputs = [message for message in channel.sent if isinstance(message, EngineOutput)]
    reported = [output.stats.pending_captures for output in outputs]
    assert reported == sorted(reported, reverse=True) and reported[0] > reported[-1]
    assert set(channel.timeouts) == {0}
    executor.now += 10
    engine.run_once()
    last = channel.sent[-1]
    assert isinstance(last, EngineOutput) and last.stats.pending_captures == 0
    assert channel.timeouts[-1]


@pytest.mark.parametrize("has_memory", [True, False])
def test_an_idle_engine_loads_what_grammars_need(has_memory: bool) -> None:
    loaded: list[Future[object]] = []

    def load_vocabulary() -> Future[object]:
        loaded.append(Future())
        return loaded[-1]

    executor = CapturingExecutor(0)
    engine = EngineProcess(
        RecordingChannel(),
        EngineHello(1, fake_plan()),
        executor,
        EngineCapacity(200, 4, 4, 16, 100, 7),
        executor.clock,
        load_vocabulary,
        prepare_grammars=has_memory,
    )
    engine.loop.add(EngineRequest("0", (1, 2, 3), ResolvedSampling(), 4))
    while engine.loop.busy:
        engine.run_once()
    assert not loaded, "a busy engine has better things to do"
    for _ in range(3):
        engine.run_once()
    assert len(loaded) == (1 if has_memory else 0)


# ---- utilization ---------------------------------------------------------------------------------

seconds = st.floats(0, 1e3)


def create_timing(steps: int, slowdown: float = 1.0, floor: float = 0.8) -> StepTiming:
    """Create the timing of steps that take `slowdown` times the millisecond they should take."""
    planned = steps / 1e3
    return StepTiming(steps, floor * planned, planned, slowdown * planned)


@given(seconds, seconds, seconds, seconds, seconds, seconds)
def test_the_time_breakdown_adds_up_to_the_whole_time(
    floor: float,
    device: float,
    idle: float,
    sampling: float,
    padding: float,
    communication: float,
) -> None:
    timing = StepTiming(1, floor, floor, device, idle, device, sampling, padding, communication)
    breakdown = break_down_time(timing)
    assert all(value >= 0 for value in breakdown.values())
    total = sum(breakdown.values()) + min(floor, device)
    assert total == pytest.approx(device + idle)
    assert "of the limit" in describe_timing(timing)


def test_the_utilization_covers_the_last_seconds_only() -> None:
    monitor = UtilizationMonitor()
    assert compute_utilization(StepTiming()) is None
    assert monitor.observe(StepTiming(), 0.0) is None
    assert monitor.observe(create_timing(1000), 1.0) == pytest.approx(0.8)
    for second in range(2, 8):  # from here on half as fast
        timing = add_timings(create_timing(1000), create_timing(second, 2.0))
        utilization = monitor.observe(timing, float(second))
    assert utilization == pytest.approx(0.4)


def collect_plan_verdicts(slowdowns: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about the plan after spans of steps with these slowdowns."""
    monitor = UtilizationMonitor()
    timing = create_timing(WARMUP_STEPS, 50.0)  # warm-up steps do not count
    now = 1.0
    with caplog.at_level(logging.INFO, "bloomery.engine"):
        monitor.observe(timing, now)
        for slowdown in slowdowns:
            timing = add_timings(timing, create_timing(PLAN_CHECK_STEPS, slowdown))
            now += 1
            monitor.observe(timing, now)
    return [
        f"{record.levelname}: {record.getMessage()}"
        for record in caplog.records
        if "plan" in record.getMessage()
    ]


def test_an_engine_as_fast_as_planned_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    (verdict,) = collect_plan_verdicts([3.0, 1.2, 9.0, 9.0, 9.0, 9.0], caplog)
    assert verdict.startswith("INFO: as planned: steps take 1.20 times")


def test_an_engine_much_slower_than_planned_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    assert collect_plan_verdicts([SLOW_FACTOR + 1] * (MAX_SLOW_SPANS - 1), caplog) == []
    (verdict,) = collect_plan_verdicts([SLOW_FACTOR + 1] * (MAX_SLOW_SPANS + 3), caplog)
    assert verdict.startswith("WARNING: steps take 2.5 times")
    assert "bloomery plan --measure" in verdict

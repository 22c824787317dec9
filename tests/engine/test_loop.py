"""The engine loop: what an idle engine prepares, and the reported utilization."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.engine.engine_process import EngineProcess, start_loading
from bloomery.engine.loop import (
    MAX_SLOW_SPANS,
    PLAN_CHECK_STEPS,
    SLOW_FACTOR,
    WARMUP_STEPS,
    UtilizationMonitor,
    add_timings,
    break_down_time,
    compute_utilization,
    describe_timing,
)
from bloomery.ipc import EngineHello, EngineMessage
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    ResolvedSampling,
    StepTiming,
)
from tests.chaos.fake_engine import fake_plan
from tests.engine.fake_executor import FakeExecutor
from tests.waiting import WAIT_SECONDS


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


@pytest.mark.parametrize("has_memory", [True, False])
def test_an_idle_engine_loads_what_grammars_need(has_memory: bool) -> None:
    loaded: list[Future[object]] = []

    def load_vocabulary() -> Future[object]:
        loaded.append(Future())
        return loaded[-1]

    engine = EngineProcess(
        RecordingChannel(),
        EngineHello(1, fake_plan()),
        FakeExecutor(4),
        EngineCapacity(200, 4, 4, 16, 100, 7),
        load_vocabulary=load_vocabulary,
        prepare_grammars=has_memory,
    )
    engine.loop.add(EngineRequest("0", (1, 2, 3), ResolvedSampling(), 4))
    while engine.loop.busy:
        engine.run_once()
    assert not loaded, "a busy engine has better things to do"
    for _ in range(3):
        engine.run_once()
    assert len(loaded) == (1 if has_memory else 0)


@pytest.mark.parametrize("has_spare_cores", [True, False])
def test_spare_cores_load_the_vocabulary_beside_the_weights(has_spare_cores: bool) -> None:
    loaded = threading.Event()
    plan = replace(fake_plan(), device="cpu")
    get_vocabulary = start_loading(lambda plan: loaded.set(), plan, has_spare_cores)
    if has_spare_cores:
        assert loaded.wait(WAIT_SECONDS)
    assert loaded.is_set() == has_spare_cores, "it waits for the first call"
    get_vocabulary().result(WAIT_SECONDS)
    assert loaded.is_set()


# ---- utilization ---------------------------------------------------------------------------------

seconds = st.floats(0, 1e3)


def create_timing(steps: int, slowdown: float = 1.0, floor: float = 0.8) -> StepTiming:
    """Create the timing of steps that take `slowdown` times the millisecond they should take."""
    planned = steps / 1e3
    return StepTiming(steps, floor * planned, planned, slowdown * planned)


@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds)
def test_the_time_breakdown_adds_up_to_the_whole_time(
    floor: float,
    device: float,
    idle: float,
    sampling: float,
    padding: float,
    communication: float,
    masks: float,
) -> None:
    timing = StepTiming(
        1, floor, floor, device, idle, device, sampling, padding, communication, masks
    )
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

"""The meter's words: parts that add up, a share of the last seconds, and one judgement of the plan."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.engine.gauge import ENOUGH, FAR, PATIENCE, WARM, Gauge, less, parts, share, words
from bloomery.messages import StepTiming

seconds = st.floats(0, 1e3)


def some(steps: int, slow: float = 1.0, floor: float = 0.8) -> StepTiming:
    """So many steps of a millisecond as planned, `slow` times as long."""
    return StepTiming(steps, floor * steps / 1e3, steps / 1e3, slow * steps / 1e3)


@given(seconds, seconds, seconds, seconds, seconds, seconds)
def test_parts_are_all_the_time_there_was(
    floor: float, device: float, idle: float, sampling: float, padding: float, told: float
) -> None:
    timing = StepTiming(1, floor, floor, device, idle, device, sampling, padding, told)
    found = parts(timing)
    assert all(value >= 0 for value in found.values())
    assert sum(found.values()) + min(floor, device) == pytest.approx(device + idle)
    assert "of the limit" in words(timing)


def test_the_share_is_of_the_last_seconds() -> None:
    gauge = Gauge()
    assert share(StepTiming()) is None and gauge.look(StepTiming(), 0.0) is None
    assert gauge.look(some(1000), 1.0) == pytest.approx(0.8)
    for second in range(2, 8):  # half as fast from here on; looks older than the span are forgotten
        now = gauge.look(
            StepTiming(*(a + b for a, b in zip(astuple(some(1000)), astuple(some(second, 2.0))))),
            float(second),
        )
    assert now == pytest.approx(0.4)


def astuple(timing: StepTiming) -> tuple[float, ...]:
    return tuple(getattr(timing, name) for name in StepTiming.__slots__)


def judged(spans: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said over spans of steps that take so many times what was planned."""
    # compiling at first, which is not held against it
    gauge = Gauge()
    total = some(WARM, 50.0)
    now = 1.0
    with caplog.at_level(logging.INFO, "bloomery.engine"):
        gauge.look(total, now)
        for slow in spans:
            total = less(total, StepTiming(*(-v for v in astuple(some(ENOUGH, slow)))))
            now = now + 1
            gauge.look(total, now)
    return [
        f"{record.levelname}: {record.getMessage()}"
        for record in caplog.records
        if "plan" in record.getMessage()
    ]


def test_a_server_that_keeps_its_plan_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = judged([3.0, 1.2, 9.0, 9.0, 9.0, 9.0], caplog)
    assert said.startswith("INFO: as planned: steps take 1.20 times")


def test_a_server_far_from_its_plan_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    assert judged([FAR + 1] * (PATIENCE - 1), caplog) == []
    (said,) = judged([FAR + 1] * (PATIENCE + 3), caplog)
    assert said.startswith("WARNING: steps take 2.5 times") and "bloomery plan --measure" in said

"""The dashboard's history: a bounded number of samples, served in columns."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.server import metrics as metrics_module
from bloomery.server.history import (
    HISTORY_SECONDS,
    INTERVAL_SECONDS,
    NUM_SAMPLES,
    PLOTTED,
    PLOTTED_LATENCIES,
    build_columns,
    shorten,
)
from bloomery.server.metrics import ServerMetrics
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer
from tests.server.scripted_engine import InProcessEngine
from tests.waiting import wait_until


class StepClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def time(self) -> float:
        return self.seconds


def test_half_an_hour_is_kept(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    clock = StepClock()
    monkeypatch.setattr(metrics_module, "time", clock)
    metrics = ServerMetrics(InProcessEngine(tokenizer), "speaker")
    for _ in range(HISTORY_SECONDS + 600):
        clock.seconds += 1.0
        metrics.record_sample()
    times = build_columns(metrics.samples)["columns"]["time"]
    assert len(times) == NUM_SAMPLES
    assert times[-1] - times[0] == pytest.approx(HISTORY_SECONDS, abs=2 * INTERVAL_SECONDS)
    assert times == sorted(times)


def test_samples_become_columns() -> None:
    latencies = {"p50": 0.123456, "p90": None, "p99": 2.0}
    numbers: dict[str, Any] = dict.fromkeys(PLOTTED, 3)
    sample = {"time": 1000.04, **numbers, "ttft": latencies, "inter_token": latencies}
    answer = build_columns([sample, {**sample, "running": None}])
    columns = answer["columns"]
    assert answer["interval"] == INTERVAL_SECONDS
    assert columns["time"] == [1000.0, 1000.0]
    assert columns["running"] == [3, None]
    assert columns["ttft"] == {"p50": [0.1235, 0.1235], "p90": [None, None], "p99": [2.0, 2.0]}


def test_numbers_are_as_short_as_a_plot_needs() -> None:
    assert shorten(None) is None
    assert shorten(0.000123456) == 0.0001235
    assert shorten(123456.0) == 123500.0


def test_the_server_samples_without_a_dashboard(server: HttpTestServer) -> None:
    def num_samples() -> int:
        return len(server.get("/stats/history").json()["columns"]["time"])

    assert wait_until(lambda: num_samples() > 0)
    columns = server.get("/stats/history").json()["columns"]
    assert set(columns) == {"time", *PLOTTED, *PLOTTED_LATENCIES}

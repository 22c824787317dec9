"""Latency metrics: percentiles, bands and a summary worked out by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.tools.bench.summary import (
    GoodputTargets,
    RequestRecord,
    count_bands,
    latency_percentiles,
    percentile,
    summarize_records,
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_lie_between_their_neighbours(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    value = percentile(ordered, percent)
    assert value is not None
    assert ordered[0] <= value <= ordered[-1] * (1 + 1e-9) + 1e-9
    assert percentile(ordered, 50) == pytest.approx(statistics.median(values))


def test_metrics_of_nothing() -> None:
    assert latency_percentiles([])["p50"] is None
    assert sum(count_bands([0.1, 0.11, 11]).values()) == 3


def test_a_summary_by_hand() -> None:
    good = RequestRecord(1.0, 10, 3, done=2.0)
    good.piece_times.extend([1.05, 1.25, 1.95])
    late = RequestRecord(1.0, 10, 2, done=14.0)
    late.piece_times.extend([13.0, 13.9])
    failed = RequestRecord(1.0, error="gone", done=1.5)
    summary = summarize_records([good, late, failed], GoodputTargets(ttft=0.1, tpot=0.5))
    assert summary["seconds"] == 13.0
    assert summary["tokens_per_second"] == pytest.approx(5 / 13, abs=1e-3)
    assert summary["answered"] == 2 and summary["errors"] == {"gone": 1}
    assert summary["ttft_bands"] == {"instant": 1, "fast": 0, "slow": 0, "too long": 1}
    assert summary["e2e_latency_bands"] == {"instant": 0, "fast": 1, "slow": 0, "too long": 1}
    assert summary["goodput"]["share"] == pytest.approx(1 / 3, abs=1e-4)
    assert summary["itl_ms"]["max"] == pytest.approx(900)
    assert summary["tpot_ms"]["p50"] == pytest.approx(675)

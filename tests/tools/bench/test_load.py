"""Arrivals: patterns are what they say, lengths too, traces are checked, summaries add up."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.tools.bench.load import lengths, pattern, read
from bloomery.tools.bench.summary import Record, Targets, bands, percentile, spread, summarise
from bloomery.errors import ConfigError


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "missing.jsonl")


def test_patterns() -> None:
    fixed = lengths("10:5")
    closed = pattern("closed:3", 7, fixed)
    assert [a.arrival for a in closed] == [0.0] * 3 + [None] * 4
    assert [a.session for a in closed[::3]] == ["client 0"] * 3
    times = [a.arrival or 0.0 for a in pattern("poisson:20", 4000, fixed)]
    assert times == sorted(times) and times[-1] == pytest.approx(200, rel=0.1)
    burst = pattern("burst:4:2.5", 9, fixed)
    assert [a.arrival for a in burst] == [0.0] * 4 + [2.5] * 4 + [5.0]
    chat = pattern("chat:1:3", 6, fixed)
    assert [(a.prompt, a.prefix) for a in chat] == [(10, 0), (25, 15), (40, 30)] * 2
    assert [a.arrival is None for a in chat] == [False, True, True] * 2
    assert pattern("poisson:5", 50, lengths("sharegpt"), 1) == pattern(
        "poisson:5", 50, lengths("sharegpt"), 1
    )
    for wrong in (
        "closed",
        "poisson:x",
        "flood:3",
        "burst:4",
        "closed:0",
        "poisson:0",
        "burst:0:1",
        "burst:2:0",
        "chat:1:0.5",
        "closed",
    ):
        with pytest.raises(ConfigError, match="wanted"):
            pattern(wrong, 5, fixed)


def test_lengths() -> None:
    drawn = [(a.prompt, a.output) for a in pattern("poisson:1", 4000, lengths("100-200:7"))]
    assert {o for _, o in drawn} == {7} and min(drawn)[0] >= 100 and max(drawn)[0] <= 200
    people = [(a.prompt, a.output) for a in pattern("poisson:1", 4000, lengths("sharegpt"))]
    assert (
        40 < statistics.median(p for p, _ in people) < 80
        and 120 < statistics.median(o for _, o in people) < 180
    )
    for wrong in ("10", "0:5", "9-3:1", "a:b"):
        with pytest.raises(ConfigError):
            lengths(wrong)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": 1, "output": 1}',
        '{"arrival": -1, "prompt": 1, "output": 1}',
        '{"arrival": 0, "prompt": 0}',
        '{"arrival": 0, "prompt": 1, "output": 1, "colour": 3}',
        "[1]",
        "{",
    ],
)
def test_traces_are_checked(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival": 1, "prompt": 3, "output": 2}) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        read(path)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_lie_between_their_neighbours(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert found is not None and ordered[0] <= found <= ordered[-1] * (1 + 1e-9) + 1e-9
    assert percentile(ordered, 50) == pytest.approx(statistics.median(values))


def test_a_summary_by_hand() -> None:
    good = Record(1.0, 10, 3, done=2.0)
    good.stamps.extend([1.05, 1.25, 1.95])
    late = Record(1.0, 10, 2, done=14.0)
    late.stamps.extend([13.0, 13.9])
    lost = Record(1.0, error="gone", done=1.5)
    found = summarise([good, late, lost], Targets(first=0.1, per_token=0.5))
    assert found["seconds"] == 13.0 and found["tokens_per_second"] == pytest.approx(
        5 / 13, abs=1e-3
    )
    assert found["answered"] == 2 and found["errors"] == {"gone": 1}
    assert found["first_token_bands"] == {"instant": 1, "fast": 0, "slow": 0, "too long": 1}
    assert found["end_to_end_bands"] == {"instant": 0, "fast": 1, "slow": 0, "too long": 1}
    assert found["goodput"]["share"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["between_tokens_ms"]["max"] == pytest.approx(900)
    assert found["per_token_ms"]["p50"] == pytest.approx(675)
    assert spread([])["p50"] is None and sum(bands([0.1, 0.11, 11]).values()) == 3

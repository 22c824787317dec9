"""Workloads: patterns and lengths are what they say, and traces are checked."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from bloomery.errors import ConfigError
from bloomery.tools.bench.workload import generate_arrivals, parse_lengths, read_trace


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


def test_closed_clients_send_the_next_request_after_an_answer() -> None:
    closed = generate_arrivals("closed:3", 7, parse_lengths("10:5"))
    assert [request.arrival for request in closed] == [0.0] * 3 + [None] * 4
    assert [request.session for request in closed[::3]] == ["client 0"] * 3


def test_poisson_arrivals_have_the_rate() -> None:
    arrivals = generate_arrivals("poisson:20", 4000, parse_lengths("10:5"))
    times = [request.arrival or 0.0 for request in arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)


def test_bursts_arrive_at_once() -> None:
    burst = generate_arrivals("burst:4:2.5", 9, parse_lengths("10:5"))
    assert [request.arrival for request in burst] == [0.0] * 4 + [2.5] * 4 + [5.0]


def test_conversations_repeat_their_history() -> None:
    chat = generate_arrivals("chat:1:3", 6, parse_lengths("10:5"))
    assert [(request.prompt, request.prefix) for request in chat] == [
        (10, 0),
        (25, 15),
        (40, 30),
    ] * 2
    assert [request.arrival is None for request in chat] == [False, True, True] * 2


def test_the_same_seed_gives_the_same_arrivals() -> None:
    first, second = (
        generate_arrivals("poisson:5", 50, parse_lengths("sharegpt"), 1) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    "pattern",
    [
        "closed",
        "poisson:x",
        "flood:3",
        "burst:4",
        "closed:0",
        "poisson:0",
        "burst:0:1",
        "burst:2:0",
        "chat:1:0.5",
    ],
)
def test_a_wrong_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="expected: closed:CLIENTS"):
        generate_arrivals(pattern, 5, parse_lengths("10:5"))


def test_lengths_follow_their_distribution() -> None:
    uniform = generate_arrivals("poisson:1", 4000, parse_lengths("100-200:7"))
    prompts = [request.prompt for request in uniform]
    assert {request.output for request in uniform} == {7}
    assert min(prompts) >= 100 and max(prompts) <= 200
    sharegpt = generate_arrivals("poisson:1", 4000, parse_lengths("sharegpt"))
    assert 40 < statistics.median(request.prompt for request in sharegpt) < 80
    assert 120 < statistics.median(request.output for request in sharegpt) < 180


@pytest.mark.parametrize("text", ["10", "0:5", "9-3:1", "a:b"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_lengths(text)


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
def test_a_wrong_line_of_a_trace_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival": 1, "prompt": 3, "output": 2}) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_trace(path)

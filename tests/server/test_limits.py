"""The numbers at the door: how they are set, who gets in, and what memory has to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from bloomery.errors import ConfigError
from bloomery.server.errors import Refusal
from bloomery.server.limits import Admission, Limits, Memory, resident
from bloomery.server.service import Settings
from tests.server.conftest import Running


def test_limits_by_name() -> None:
    assert Limits.of(None) == Limits()
    assert Limits.of("requests=5, deadline_seconds=1.5,waiting_tokens=9") == Limits(
        requests=5, deadline_seconds=1.5, waiting_tokens=9
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [("speed=3", "no 'speed'; there are"), ("requests=many", "must be a number"), ("requests=0", "must be positive"),
     ("requests", "must be a number"), ("requests=1.5", "must be a number"), ("stall_seconds=nan", "must be positive")],
)  # fmt: skip
def test_limits_that_are_none(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Limits.of(text)


def test_info_tells_all_of_them(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(stop_strings=3)))
    assert server.get("/info").json()["limits"] == asdict(Limits(stop_strings=3))


def fill(door: Admission, key: str) -> int:
    count = 0
    while True:
        try:
            door.enter(1, 1.0, key)
        except Refusal:
            return count
        count += 1


def test_one_key_of_several_leaves_room_for_others() -> None:
    door = Admission(100, greed=3)
    assert fill(door, "greedy") == 75
    assert fill(door, "second") > 15 and fill(door, "third") > 0
    assert fill(Admission(100), "") == 100, "a lone key has the house to itself"


def test_places_are_given_back() -> None:
    door = Admission(4, greed=3)
    tickets = [door.enter(1, 1.0, "a"), door.enter(2, 1.0, "b")]
    for ticket in tickets:
        ticket.leave()
        ticket.leave()
    assert door.inside == 0 and not door.held


def test_memory_is_looked_at_once_a_second() -> None:
    sizes = iter([50, 95])
    memory = Memory(100, lambda: next(sizes))
    assert [memory.pressure(now) for now in (1.0, 1.5, 2.1)] == [0.5, 0.5, 0.95]
    assert resident() > 10 << 20


def test_under_pressure_stores_are_emptied_and_then_the_door_is_shut(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(memory_bytes=1)))
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    assert server.get("/health").status_code == 200

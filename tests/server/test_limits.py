"""The numbers at the door: how they are set, who gets in, and what memory has to say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import pytest

from bloomery.errors import ConfigError
from bloomery.server.errors import Refusal
from bloomery.server.limits import Admission, Limits, resident
from bloomery.server.service import Settings
from tests.server.conftest import Running
from tests.waiting import until


def test_limits_by_name() -> None:
    assert Limits.of(None) == Limits()
    assert Limits.of("requests=5, deadline_seconds=1.5,waiting_tokens=9") == Limits(
        requests=5, deadline_seconds=1.5, waiting_tokens=9
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("speed=3", "no 'speed'; there are"),
        ("requests=many", "must be a number"),
        ("requests=0", "must be positive"),
        ("requests", "must be a number"),
        ("requests=1.5", "must be a number"),
        ("stall_seconds=nan", "must be positive"),
    ],
)
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


def test_memory_of_this_process_is_seen() -> None:
    assert resident() > 10 << 20


def test_the_newest_who_wait_are_sent_away_first() -> None:
    door = Admission(100)
    ended = []
    tickets = [door.enter(1, 1.0) for _ in range(9)]
    for number, ticket in enumerate(tickets):
        ticket.wait(10, 1000, 1.0, partial(ended.append, number))
    tickets[8].begin()  # it runs, and stays
    door.shed()
    assert ended == [7, 6] and [ticket.dropped for ticket in tickets] == [False] * 6 + [
        True,
        True,
        False,
    ]
    for _ in range(9):
        door.shed()
    assert len(ended) == 8 and not door.queue


def test_under_pressure_the_door_is_shut(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(memory_bytes=1)))
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    assert server.get("/health").status_code == 200


class Rising:
    """A process's memory as the test would have it."""

    used = 0

    def __call__(self) -> int:
        return self.used


def test_under_the_highest_pressure_who_waits_is_told_to_come_back(
    serve: Callable[..., Running],
) -> None:
    """The one that runs goes on; one that waits behind it gets 429, streaming or not."""
    memory = Rising()
    settings = Settings(model="speaker", limits=Limits(memory_bytes=100))
    server = serve(settings, measure=memory, batch=1)
    body = {"prompt": "The iron", "max_tokens": 9, "ignore_eos": True}
    answers: dict[str, int] = {}

    def ask(name: str, **more: bool) -> None:
        answers[name] = server.post("/v1/completions", body | more).status_code

    server.backend.hold = 1
    threads = [threading.Thread(target=ask, args=("runs",))]
    threads[0].start()
    assert until(lambda: server.backend.steps == 1)
    for name, stream in (("waits", False), ("waits and streams", True)):
        threads.append(threading.Thread(target=ask, args=(name,), kwargs={"stream": stream}))
        threads[-1].start()
    assert until(lambda: server.backend.stats.waiting == 2)
    memory.used = 96
    assert until(lambda: len(answers) == 2), "one was not sent away, or the one that runs was"
    memory.used = 0
    server.backend.hold = None
    for thread in threads:
        thread.join()
    assert answers == {"runs": 200, "waits": 429, "waits and streams": 429}
    again = body | {"max_tokens": 1}
    assert until(lambda: server.post("/v1/completions", again).status_code == 200), (
        "the door stays shut"
    )


def test_a_full_house_refuses_before_it_reads_a_body(serve: Callable[..., Running]) -> None:
    """Even of a body that never comes."""
    server = serve(Settings(model="speaker", limits=Limits(requests=1)))
    server.backend.hold = 0
    thread = threading.Thread(
        target=server.post, args=("/v1/completions", {"prompt": "The iron", "max_tokens": 9})
    )
    thread.start()
    assert until(lambda: server.backend.loop.busy)
    with server.raw() as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        connection.sendall(f"{head}content-length: 1000\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 429"
    server.backend.hold = None
    thread.join()

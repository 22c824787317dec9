"""What is captured, and when: by a pool that writes work down as the card would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bloomery.runtime.replay import Captured, Pool


@dataclass
class Tape:
    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


class Written(Pool):
    def __init__(self) -> None:
        self.due = []
        self.written = 0

    def capture(self, work: Callable[[], None]) -> Any:
        self.written += 1
        return Tape(work)


def test_what_came_twice_is_captured_behind_its_second_run() -> None:
    pool = Written()
    done = []
    runs = Captured(pool)
    for turn in range(4):
        runs.run((8, 64), lambda: done.append(8))
        assert len(done) == turn + 1
        assert pool.written == (1 if turn > 1 else 0)  # not in the run itself
        pool.catch_up()
        assert pool.written == (1 if turn > 0 else 0)
    runs.run((16, 64), lambda: done.append(16))
    pool.catch_up()
    assert pool.written == 1 and not pool.due


def test_what_is_prepared_runs_once_for_nobody() -> None:
    pool = Written()
    done = []
    runs = Captured(pool)
    for _ in range(2):
        runs.prepare((8, 1), lambda: done.append(0))
    assert done == [0] and pool.written == 1
    runs.run((8, 1), lambda: done.append(1))
    assert done == [0, 0]  # what was captured, not what was given

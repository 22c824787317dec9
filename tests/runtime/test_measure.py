"""Measuring a machine: what a busy one does is told, and every kind of work the plan asks for is among the tries."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bloomery.native.team import team
from bloomery.roofline import FEW, ROW, WIDER, machine
from bloomery.runtime.measure import LEAST, WIDTH, Probe, Turns, probes


@pytest.fixture(autouse=True)
def torch_alone() -> Iterator[None]:
    yield
    team().stop()


def work() -> int:
    return sum(range(20_000))


def tried(seconds: list[float]) -> Turns:
    """As if one kind of work had been tried so."""
    turns = Turns({"bandwidth": Probe(100.0, work)}, 1)
    turns.all["bandwidth"].seconds = seconds
    return turns


def test_the_quick_ones_of_many_tries_count() -> None:
    seen = tried([1.0, 1.02, 1.0, 1.01, 1.0, 1.0, 9.0, 9.0]).seen()
    assert seen.doubt is None and seen.bandwidth == 100 and seen.rates["fp32" + ROW] == 50


def test_a_machine_that_others_use_is_doubted() -> None:
    seen = tried([1.0, 1.0, 2.0, 2.2, 2.1, 3.0, 2.0]).seen()
    assert seen.bandwidth == 100 and "bandwidth by 100%" in (seen.doubt or "")


def test_short_work_is_done_often_enough_to_be_timed() -> None:
    done = []
    turns = Turns({"bandwidth": Probe(1.0, lambda: done.append(work()))}, 1, by_cpu=True)
    probe = turns.all["bandwidth"]
    before = len(done)
    turns.round()
    assert len(done) - before == probe.times + 1 and len(probe.seconds) == 1
    long = Turns({"bandwidth": Probe(1.0, lambda: time.sleep(2 * LEAST))}, 0)
    assert long.all["bandwidth"].times == 1


def test_every_kind_that_a_processor_has_is_tried() -> None:
    """The kinds of the table's own processor, and each wider one a plan may fall back to."""
    turns = Turns(probes("cpu", 1, values=64 * WIDTH), 1, by_cpu=True)
    for _ in range(3):
        turns.round()
    seen = turns.seen()
    assert seen.bandwidth > 0 and all(rate > 0 for rate in seen.rates.values())
    if team().active:
        assert seen.rates.keys() == machine("zen3-2").rates.keys()
        assert all(machine("zen3-2").rate(kind, how) for kind in WIDER for how in ("", ROW))
        assert "fp32" + FEW in seen.rates

"""Measuring a machine: what a busy one does is refused, and every kind of work the plan asks for is among the tries."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bloomery.native.team import team
from bloomery.roofline import FEW, ROW, WIDER, machine
from bloomery.runtime.measure import WIDTH, Probe, Turns, probes


@pytest.fixture(autouse=True)
def torch_alone() -> Iterator[None]:
    yield
    team().stop()


def work() -> int:
    return sum(range(20_000))


def tried(seconds: list[float], taken: int | None = None) -> Turns:
    """As if one kind of work had been tried so."""
    turns = Turns({"bandwidth": Probe(100.0, work)}, 1)
    turns.all["bandwidth"].seconds = seconds
    turns.all["bandwidth"].taken = len(seconds) if taken is None else taken
    return turns


def test_the_middle_of_many_tries_counts() -> None:
    seen = tried([1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 9.0]).seen()
    assert seen.doubt is None and seen.bandwidth == 100 and seen.rates["fp32" + ROW] == 50


def test_tries_that_disagree_are_doubted() -> None:
    seen = tried([1.0, 1.3, 0.8, 1.5, 1.0, 0.7, 2.0]).seen()
    assert seen.bandwidth == 100 and "bandwidth by" in (seen.doubt or "")


def test_a_machine_that_others_use_has_no_rates() -> None:
    seen = tried([1.0, 1.0, 1.0], taken=16).seen()
    assert seen.rates == {} and "13 of 16 tries" in (seen.doubt or "")


def test_a_try_without_the_cores_does_not_count() -> None:
    turns = Turns({"bandwidth": Probe(1.0, lambda: time.sleep(0.02))}, 1)
    for _ in range(3):
        turns.round()
    assert turns.all["bandwidth"].taken == 3 and turns.all["bandwidth"].seconds == []
    for kept in (Turns({"bandwidth": Probe(1.0, work)}, 0), Turns({"bandwidth": Probe(1.0, work)}, 1, by_cpu=True)):
        kept.round()
        assert len(kept.all["bandwidth"].seconds) == 1


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

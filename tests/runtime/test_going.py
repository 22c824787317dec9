"""Those that go on, as a step names them, and the same step spelled out item by item: a worker gives the same answers,
whichever way the step takes. And what is kept of a step for the next one holds no longer than it is true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from bloomery.engine.loop import Loop
from bloomery.executors.local import Local
from bloomery.messages import (
    ScheduledRequest,
    EngineRequest,
    ResolvedSampling,
    NewRequestData,
    ScheduledStep,
)
from bloomery.native.team import team
from bloomery.runtime.meter import counts
from bloomery.runtime.rows import Rows
from bloomery.runtime.worker import Pending
from tests.parity.cases import CASES, VOCAB, make_checkpoint
from tests.parity.serve import engine, plan, run

WISHES = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "block_size": 4,
    "kv_cache_gib": 0.01,
    "steps_in_flight": 2,
}
START = NewRequestData((1, 2, 3), 3, ResolvedSampling(temperature=0.0), ())


class Spelled(Local):
    def submit(self, step: ScheduledStep) -> Pending:
        return super().submit(ScheduledStep(step.requests, step.finished))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    team().stop()  # other tests see torch alone


def requests(seed: int, special: bool) -> list[EngineRequest]:
    """Greedy ones and drawn ones; with `special` some that a kernel cannot pick for, or that want log-probabilities."""
    random = Random(seed)
    made = []
    for number in range(7):
        wish: dict[str, float] = {"temperature": random.choice((0.0, 0.9)), "seed": number}
        if special and number % 3 == 0:
            wish["repetition_penalty"] = 1.3
        logprobs = 2 if special and number == 4 else None
        prompt = tuple(random.randrange(3, VOCAB) for _ in range(random.randint(1, 20)))
        made.append(
            EngineRequest(
                str(number),
                prompt,
                ResolvedSampling(**wish, logprobs=logprobs),
                random.randint(3, 14),
            )
        )
    return made


def answers(loop: Loop, asked: list[EngineRequest]) -> dict[str, list[tuple[int, int]]]:
    """Ids, and of each how many log-probabilities came with it."""
    found = run(loop, asked)
    return {
        name: [(token, len(entry.logprobs)) for entry in entries for token in entry.ids]
        for name, entries in found.items()
    }


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_spelled_out_or_not(native: bool, special: bool, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    settings = plan(tmp_path, 64, native=native, **WISHES)
    asked = requests(3, special)
    spelled = answers(engine(settings, executor=Spelled()), asked)
    ours = engine(settings)
    assert answers(ours, asked) == spelled
    assert ours.executor.worker.recorded == native  # type: ignore[attr-defined]


@pytest.mark.parametrize("native", [False, True])
def test_however_many_steps_are_in_flight(native: bool, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    asked = [
        *requests(3, True),
        EngineRequest("long", (5, 6, 7), ResolvedSampling(temperature=0.8, seed=1), 40),
    ]
    found = []
    for depth in (1, 2, 8):
        loop = engine(plan(tmp_path, 64, native=native, **WISHES | {"steps_in_flight": depth}))
        deepest = 0
        for request in asked:
            loop.add(request)
        got: dict[str, list[int]] = {request.id: [] for request in asked}
        while loop.busy:
            for news in loop.step():
                got[news.request] += news.ids
            deepest = max(deepest, len(loop.flight) + 1)
        assert depth <= deepest <= max(8 * (depth > 1), depth)
        found.append(got)
    assert found[0] == found[1] == found[2]


def test_a_step_counts_as_much_as_it_does_spelled_out() -> None:
    chunk = ScheduledRequest(8, 4, 6, (2,), None, (), False)
    step = ScheduledStep((chunk,), (1,), (5, 6), (3, 7), ((6, (4,)),))
    going = (
        ScheduledRequest(5, 3, 1, (), None, (), True),
        ScheduledRequest(6, 7, 1, (4,), None, (), True),
    )
    assert step.requests == (*going, chunk)
    assert (
        counts(step)
        == counts(ScheduledStep(step.requests, step.finished))
        == (8, 4 + 8 + 10, 2, 4 + 8 + 45)
    )


def test_a_lineup_holds_until_somebody_joins_or_leaves() -> None:
    rows = Rows(3, 4, 9, torch.device("cpu"))
    for sequence in (5, 6):
        rows.place(ScheduledRequest(sequence, 0, 3, (sequence,), START, (), True))
    first = rows.line_up((5, 6), (3, 7))
    assert first.places == (1, 0) and [row.table for row in first.rows] == [[6], [5]]
    assert rows.line_up((5, 6), (4, 8)) is first
    assert rows.line_up((6,), (9,)).indices == first.indices[:1]
    rows.release(6)
    rows.place(ScheduledRequest(7, 0, 3, (7,), START, (), True))  # takes the row that was 6's
    rows.place(ScheduledRequest(6, 0, 3, (8,), START, (), True))
    again = rows.line_up((6,), (3,))
    assert [row.table for row in again.rows] == [[8]] and again.indices != first.indices[:1]

"""Captures between the steps of a server change nobody's tokens.

A CPU captures nothing: here a capture is the work itself, to be done again. What it shows is that trying a step out for
nobody leaves rows, lines and cache of those under way as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bloomery.engine.loop import Loop
from bloomery.executors.local import Local
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.runtime.decode import buckets
from bloomery.runtime.replay import Captured
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import engine, plan


@dataclass(frozen=True)
class Again:
    replay: Callable[[], None]


class Pool:
    """Counts what is captured."""

    def __init__(self) -> None:
        self.due: list[object] = []
        self.captured = 0

    def capture(self, work: Callable[[], None]) -> Again:
        self.captured += 1
        return Again(work)

    def catch_up(self) -> None:
        self.due.clear()


def tokens(loop: Loop, spare: bool) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, length in enumerate((3, 9, 5, 7)):
        sampling = ResolvedSampling(0.0) if i % 2 else ResolvedSampling(0.9, top_p=0.9, seed=i)
        loop.add(EngineRequest(str(i), tuple(range(4, 4 + length)), sampling, 12 + 4 * i))
        found[str(i)] = []
    while loop.busy:
        loop.rested = 0.0  # after every step
        if spare:
            loop.spare()
        for news in loop.step():
            found[news.request] += news.ids
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_captures_between_steps_change_nothing(name: str, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    wanted = plan(tmp_path, 64, max_num_seqs=6)
    want = tokens(engine(wanted), spare=False)
    loop = engine(wanted)
    assert isinstance(loop.executor, Local) and loop.executor.worker is not None
    worker = loop.executor.worker
    pool = Pool()
    if not worker.recorded:
        pytest.skip("without native kernels a CPU has no steps over static buffers")
    worker.decode.runs = Captured(pool)  # type: ignore[arg-type]
    worker.decode.sizes = buckets(worker.rows.count)
    worker.capturing = worker._capture()
    assert tokens(loop, spare=True) == want
    assert pool.captured == len(buckets(6)) and loop.left == 0
    assert tokens(loop, spare=True) == want

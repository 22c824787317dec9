"""Guessed tokens over ranks: whoever shares layers or stands behind another stage gives the tokens of one process that
guesses nothing, and right guesses are taken."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import Local
from bloomery.executors.processes import Processes
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.parity.cases import CASES, VOCAB, make_checkpoint
from tests.parity.serve import greedy, plan

WISHES = dict(block_size=4, max_num_batched_tokens=16, max_num_seqs=4, kv_cache_gib=0.01)
TOKENS = 24
REQUESTS = [
    greedy("0", list(range(3, 20)), TOKENS),
    EngineRequest(
        "1",
        tuple(range(5, 16)),
        ResolvedSampling(temperature=0.9, seed=5, repetition_penalty=1.2),
        TOKENS,
    ),
    greedy("2", list(range(40, 65)), TOKENS),
]
Answers = dict[str, list[int]]


def answers(executor: Executor, folder: Path, known: Answers, **wishes: int) -> tuple[Answers, int]:
    """What every request gets, and how many guesses were right: two thirds are, of those whose answer is known."""
    wanted = plan(folder, 64, **WISHES, **wishes)
    capacity = executor.start(wanted)
    blocks = Blocks(capacity.blocks, capacity.block_size)
    scheduler = Scheduler(
        blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, stages=capacity.stages
    )
    loop = Loop(scheduler, executor, wanted.depth)
    random = Random(1)
    found: Answers = {request.id: [] for request in REQUESTS}
    right = 0
    for request in REQUESTS:
        loop.add(request)
    while loop.busy:
        for news in loop.step():
            found[news.request] += news.ids
            right += max(len(news.ids) - 1, 0)
        for sequence in scheduler.running.values():
            if not sequence.pending:
                rest = known.get(sequence.request.id, [])[sequence.produced : TOKENS - 1][:3]
                sequence.drafts[:] = [
                    token if random.random() < 0.67 else random.randrange(VOCAB) for token in rest
                ]
    return found, right


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), made)
    return made


@pytest.mark.parametrize(
    "way", [(1, 1), (2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str
)
def test_guesses_change_nothing_but_the_steps(
    way: tuple[int, int], folder: Path, crews: dict[int, Processes]
) -> None:
    want, _ = answers(Local(), folder, {})
    known = {
        name: ids for name, ids in want.items() if name != "2"
    }  # one goes on beside, without guesses
    executor = Local() if way == (1, 1) else crews[way[0] * way[1]]
    got, right = answers(executor, folder, known, tp=way[0], pp=way[1])
    assert got == want
    assert right >= TOKENS // 2

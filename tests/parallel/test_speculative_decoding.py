"""Speculative decoding over ranks: drafts change the number of steps, but not the tokens."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from bloomery.engine.executor import Executor
from bloomery.executors.local import LocalExecutor
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.parallel.engines import start_engine_loop
from tests.parity.cases import CASES, VOCAB, make_checkpoint
from tests.parity.serve import build_plan, greedy_request

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "kv_cache_gib": 0.01,
}
NUM_TOKENS = 24
MAX_DRAFTS = 3
DRAFT_ACCURACY = 0.67  # share of the draft tokens that are right
REQUESTS = [
    greedy_request("0", list(range(3, 20)), NUM_TOKENS),
    EngineRequest(
        "1",
        tuple(range(5, 16)),
        ResolvedSampling(temperature=0.9, seed=5, repetition_penalty=1.2),
        NUM_TOKENS,
    ),
    greedy_request("2", list(range(40, 65)), NUM_TOKENS),
]
TokensByRequest = dict[str, list[int]]


def generate(
    executor: Executor, folder: Path, known: TokensByRequest, **options: int
) -> tuple[TokensByRequest, int]:
    """Return the tokens of every request, and how many draft tokens were accepted.

    Drafts are made for requests whose tokens are known; two thirds of the draft tokens are right.
    """
    loop, _ = start_engine_loop(executor, build_plan(folder, 64, **OPTIONS, **options))
    rng = Random(1)
    tokens: TokensByRequest = {request.id: [] for request in REQUESTS}
    num_accepted = 0
    for request in REQUESTS:
        loop.add(request)
    while loop.busy:
        for output in loop.step():
            tokens[output.request] += output.ids
            num_accepted += max(len(output.ids) - 1, 0)
        for sequence in loop.scheduler.running.values():
            if not sequence.num_pending:
                expected = known.get(sequence.request.id, [])
                begin = sequence.num_output_tokens
                upcoming = expected[begin : NUM_TOKENS - 1][:MAX_DRAFTS]
                sequence.drafts[:] = [
                    token if rng.random() < DRAFT_ACCURACY else rng.randrange(VOCAB)
                    for token in upcoming
                ]
    return tokens, num_accepted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), folder)
    return folder


@pytest.mark.parametrize(
    ("tp", "pp"), [(1, 1), (2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_drafts_do_not_change_the_tokens(
    tp: int, pp: int, folder: Path, rank_executors: dict[int, MultiprocessExecutor]
) -> None:
    expected, _ = generate(LocalExecutor(), folder, {})
    # One request runs beside the others without drafts.
    known = {request_id: ids for request_id, ids in expected.items() if request_id != "2"}
    executor: Executor = LocalExecutor()
    if tp * pp > 1:
        executor = rank_executors[tp * pp]
    tokens, num_accepted = generate(
        executor, folder, known, tensor_parallel_size=tp, pipeline_parallel_size=pp
    )
    assert tokens == expected
    assert num_accepted >= NUM_TOKENS // 2

"""Every family spread over real processes gives the tokens of one process: tensor parallel, pipeline parallel, both.

The everyday run takes cases that differ in what is split, both ways at once; `pytest -m slow` takes all in all ways.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bloomery.config import Plan
from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import Local
from bloomery.executors.processes import Processes
from tests.parity.cases import CASES, VOCAB, Case, make_checkpoint
from tests.parity.serve import greedy, ids, plan, run

WAYS = [(2, 1), (1, 2), (2, 2)]
TOKENS = 8


def tokens(executor: Executor, wanted: Plan, case: Case) -> list[list[int]]:
    """Four prompts that begin alike, in chunks, with prefix hits and a cache with room for about two."""
    capacity = executor.start(wanted)
    longest = case.prompt + TOKENS
    blocks = Blocks(
        -(-longest // 4) + 2 * -(-longest // 8), capacity.block_size, wanted.prefix_cache
    )
    scheduler = Scheduler(
        blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, stages=capacity.stages
    )
    loop = Loop(scheduler, executor, wanted.depth)
    stem, *tails = (
        torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed, count in enumerate([case.prompt - 4, 4, 4, 4, 4])
    )
    first = run(loop, [greedy("0", stem + tails[0], TOKENS)])
    rest = run(loop, [greedy(str(i), stem + tails[i], TOKENS) for i in range(1, 4)])
    return [ids(news) for news in (first["0"], *rest.values())]


def compare(case: Case, way: tuple[int, int], folder: Path, crews: dict[int, Processes]) -> None:
    make_checkpoint(case, folder)
    wishes = dict(block_size=4, max_num_batched_tokens=7, max_num_seqs=5, kv_cache_gib=0.01)
    length = max(case.length, case.prompt + TOKENS)
    want = tokens(Local(), plan(folder, length, **wishes), case)
    got = tokens(crews[way[0] * way[1]], plan(folder, length, tp=way[0], pp=way[1], **wishes), case)
    assert got == want


# ALiBi; one key head; parallel blocks; experts; norms behind blocks; learned positions; norms of q and k; none of these
EVERYDAY = {
    "bloom",
    "gpt_bigcode-mqa",
    "falcon-40b",
    "qwen2_moe",
    "gemma2",
    "opt-350m",
    "olmo2",
    "cohere-normed",
    "llama",
}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in EVERYDAY], ids=lambda case: case.name
)
def test_in_both_ways_at_once(case: Case, tmp_path: Path, crews: dict[int, Processes]) -> None:
    compare(case, (2, 2), tmp_path, crews)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"tp{way[0]}-pp{way[1]}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_all_ways(
    case: Case, way: tuple[int, int], tmp_path: Path, crews: dict[int, Processes]
) -> None:
    compare(case, way, tmp_path, crews)

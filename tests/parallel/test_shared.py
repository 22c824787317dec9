"""Messages through shared memory, between real processes: the same as through torch, the same bits on every rank, and
an error rather than a wait when another is dead. And steps recorded with such messages in them."""

from __future__ import annotations

import signal
import subprocess
import sys
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
from bloomery.kernels.words import blank, blank_reference, own, own_reference
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.native.build import NoLibrary, build
from bloomery.native.team import team
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import greedy, ids, plan, run

try:
    build()
except NoLibrary as reason:
    pytest.skip(str(reason), allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("ranks share memory on Linux alone", allow_module_level=True)

RANKS = 3


def test_messages_are_those_of_torch_and_the_dead_are_not_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallel.sharing"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(RANKS), str(tmp_path)]) for rank in range(RANKS)
    ]
    try:
        assert [process.wait(240) for process in ranks] == [0, 0, -signal.SIGKILL]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "way", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=["tp", "pp"]
)
def test_recorded_steps_are_those_of_torch_and_of_one_process(
    way: tuple[int, int], tmp_path: Path, crews: dict[int, Processes]
) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    wishes = dict(block_size=4, max_num_batched_tokens=64, max_num_seqs=4, kv_cache_gib=0.01)

    def answers(executor: Executor, wanted: Plan) -> tuple[list[list[int]], bool]:
        capacity = executor.start(wanted)
        blocks = Blocks(capacity.blocks, capacity.block_size, True)
        scheduler = Scheduler(
            blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, stages=capacity.stages
        )
        requests = [greedy(str(i), list(range(3 + i, 20)), 12) for i in range(3)]
        warm = EngineRequest(
            "3",
            tuple(range(5, 30)),
            ResolvedSampling(temperature=0.8, seed=5, repetition_penalty=1.2),
            12,
        )
        found = run(Loop(scheduler, executor, wanted.depth), [*requests, warm])
        return [ids(news) for news in found.values()], any(
            "not recorded" in note for note in capacity.notes
        )

    alone = answers(Local(), plan(tmp_path, 64, **wishes))
    spread = answers(crews[2], plan(tmp_path, 64, tp=way[0], pp=way[1], **wishes))
    by_torch = answers(crews[2], plan(tmp_path, 64, tp=way[0], pp=way[1], native=False, **wishes))
    team().stop()
    assert alone == spread == by_torch == (alone[0], False)


def test_a_rank_looks_up_its_own_words() -> None:
    words = torch.tensor([0, 4, 5, 9, 10, 7])
    x = torch.randn(6, 24)
    want = own_reference(words, 5, 10), blank_reference(x, words, 5, 10)
    assert want[0].tolist() == [0, 0, 0, 4, 0, 2] and want[1].any(-1).tolist() == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]
    team().start(2)
    got = own(words, 5, 10), blank(x.clone(), words, 5, 10)
    team().stop()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

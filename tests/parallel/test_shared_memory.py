"""Messages through shared memory between real processes, and CPU traces that contain them.

They carry the same values as messages through torch, give the same bits on every rank, and fail
instead of waiting when a rank is dead.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.engine.executor import Executor
from bloomery.executors.local import LocalExecutor
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.kernels.vocab_shard import (
    local_vocab_rows,
    local_vocab_rows_reference,
    zero_foreign_rows,
    zero_foreign_rows_reference,
)
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.native.build import NativeBuildError, build_library
from bloomery.native.thread_pool import ThreadPool
from tests.parallel.engines import start_engine_loop
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import build_plan, greedy_request, output_token_ids, run_requests

try:
    build_library()
except NativeBuildError as reason:
    pytest.skip(str(reason), allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("ranks share memory only on Linux", allow_module_level=True)

NUM_RANKS = 3


def test_messages_equal_those_of_torch_and_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallel.shared_memory_rank"]
    processes = [
        subprocess.Popen([*command, str(rank), str(NUM_RANKS), str(tmp_path)])
        for rank in range(NUM_RANKS)
    ]
    try:
        statuses = [process.wait(240) for process in processes]
        assert statuses == [0, 0, -signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def generate(executor: Executor, folder: Path, **options: Any) -> list[list[int]]:
    """Complete three greedy requests and a sampled one; all steps must have been traced."""
    plan = build_plan(
        folder,
        64,
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_gib=0.01,
        **options,
    )
    loop, capacity = start_engine_loop(executor, plan)
    requests = [greedy_request(str(i), list(range(3 + i, 20)), 12) for i in range(3)]
    sampling = ResolvedSampling(temperature=0.8, seed=5, repetition_penalty=1.2)
    requests.append(EngineRequest("3", tuple(range(5, 30)), sampling, 12))
    outputs = run_requests(loop, requests)
    assert not any("not traced" in note for note in capacity.notes)
    return [output_token_ids(outputs[request.id]) for request in requests]


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)], ids=["tp", "pp"]
)
def test_traced_steps_give_the_tokens_of_torch_and_of_one_process(
    tp: int, pp: int, tmp_path: Path, rank_executors: dict[int, MultiprocessExecutor]
) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    ranks = rank_executors[2]
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    expected = generate(LocalExecutor(), tmp_path)
    assert generate(ranks, tmp_path, **layout) == expected
    assert generate(ranks, tmp_path, cpu_kernels=False, **layout) == expected


def test_a_rank_looks_up_only_its_vocab_shard() -> None:
    token_ids = torch.tensor([0, 4, 5, 9, 10, 7])
    is_local = [False, False, True, True, False, True]
    x = torch.randn(6, 24)
    local_rows = local_vocab_rows_reference(token_ids, 5, 10)
    zeroed = zero_foreign_rows_reference(x, token_ids, 5, 10)
    assert local_rows.tolist() == [0, 0, 0, 4, 0, 2]
    assert zeroed.any(-1).tolist() == is_local
    pool = ThreadPool(2)
    assert torch.equal(local_vocab_rows(token_ids, 5, 10, pool), local_rows)
    assert torch.equal(zero_foreign_rows(x.clone(), token_ids, 5, 10, pool), zeroed)

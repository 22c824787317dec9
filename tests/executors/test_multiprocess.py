"""Ranks as processes: where they listen, and what happens when a rank or its parent dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bloomery import LLM, SamplingParams
from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.errors import ConfigError
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.executors.rank_group import RankLostError
from bloomery.messages import EngineRequest, ResolvedSampling, ScheduledStep
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import (
    build_engine_loop,
    build_plan,
    greedy_request,
    output_token_ids,
    run_requests,
)
from tests.waiting import wait_until

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_gib": 0.01,
}
PROMPT = list(range(3, 20))
LOOPBACK_HEX = "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it
TCP_LISTEN = "0A"  # socket state in /proc/net/tcp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), folder)
    return folder


def child_pids(pid: int) -> list[int]:
    """Child processes of all threads of a process that exists."""
    pids = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        pids += [int(child) for child in path.read_text().split()]
    return pids


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except OSError:
        return False
    return state != "Z"


def wait_exited(pids: list[int]) -> bool:
    return wait_until(lambda: not any(is_running(pid) for pid in pids))


def listening_addresses(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, of the sockets that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTEN and fields[9] in inodes:
                addresses.append(fields[1].split(":")[0])
    return addresses


def test_ranks_listen_only_on_the_loopback_and_end_with_the_first_that_dies(folder: Path) -> None:
    executor = MultiprocessExecutor()
    executor.start(build_plan(folder, 128, tensor_parallel_size=2, **OPTIONS))
    pids = [rank.process.pid for rank in executor.ranks]
    addresses = [address for pid in pids for address in listening_addresses(pid)]
    assert addresses
    assert set(addresses) <= {LOOPBACK_HEX}
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        while True:
            executor.submit(ScheduledStep((), ())).result()
    assert wait_exited(pids)
    assert not executor.ranks
    assert executor.rendezvous_folder is None


@pytest.mark.slow
def test_a_load_error_of_a_rank_keeps_its_message(folder: Path) -> None:
    executor = MultiprocessExecutor()
    options = OPTIONS | {"kv_cache_gib": 1e-6}
    with pytest.raises(ConfigError, match="lower max_model_len to"):
        executor.start(build_plan(folder, 128, tensor_parallel_size=2, **options))
    assert not executor.ranks


def test_a_stream_survives_a_killed_rank(folder: Path) -> None:
    """The client starts another engine process, and the reader gets the remaining tokens.

    At the end the engine process itself is killed, and its ranks end with it.
    """
    num_tokens = 100
    local_loop = build_engine_loop(build_plan(folder, 128, **OPTIONS))
    local_outputs = run_requests(local_loop, [greedy_request("0", PROMPT, num_tokens)])
    expected = output_token_ids(local_outputs["0"])
    plan = build_plan(folder, 128, tensor_parallel_size=2, **OPTIONS)
    request = EngineRequest("0", tuple(PROMPT), ResolvedSampling(temperature=0.0), num_tokens)

    async def main() -> None:
        client = EngineClient(plan, timeouts=EngineTimeouts(restart_delay_seconds=0.0))
        await client.start()
        await client.ready()
        assert client.pid is not None
        ranks = child_pids(client.pid)
        killed = False
        while client.epoch == 1:  # again, if the stream ended before a rank could be killed
            token_ids: list[int] = []
            async for output in client.stream([request]):
                assert output.position == len(token_ids)
                token_ids += output.ids
                if not killed and len(token_ids) >= 5 and output.finish is None:
                    os.kill(ranks[0], signal.SIGKILL)
                    killed = True
            assert token_ids == expected
        assert killed
        assert client.epoch == 2
        assert wait_exited(ranks)
        new_ranks = child_pids(client.pid)
        os.kill(client.pid, signal.SIGKILL)
        assert wait_exited(new_ranks), "ranks outlive their engine process"
        await client.close()

    asyncio.run(main())


def test_the_offline_api_gives_the_same_results_with_two_ranks(folder: Path) -> None:
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1
        ),
        SamplingParams(
            temperature=0.9, seed=7, max_tokens=20, ignore_eos=True, repetition_penalty=1.1
        ),
    ]
    results = []
    for tp in (1, 2):
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            device="cpu",
            threads=1,
            tensor_parallel_size=tp,
            **OPTIONS,
        )
        outputs = llm.generate([PROMPT, PROMPT[:5]], params, use_tqdm=False)
        embedding = llm.embed([PROMPT])[0]
        llm.close()
        token_ids = [output.outputs[0].token_ids for output in outputs]
        results.append((token_ids, [round(value, 4) for value in embedding]))
    assert results[0] == results[1]


def test_a_model_that_cannot_be_split_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="tp 3 does not divide the model's 4 heads over 2 KV heads; 1, 2, 4 would work",
    ):
        LLM(str(folder), skip_tokenizer_init=True, tensor_parallel_size=3)
    with pytest.raises(
        ConfigError, match="pp 9 is more stages than the model has layers; at most 3 would work"
    ):
        LLM(str(folder), skip_tokenizer_init=True, pipeline_parallel_size=9)

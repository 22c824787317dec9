"""Ranks as processes: who listens where, and what happens when one of them, or their owner, dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bloomery import LLM, SamplingParams
from bloomery.engine.client import EngineClient, Patience
from bloomery.errors import ConfigError
from bloomery.executors.processes import Processes
from bloomery.executors.ranks import RankLost
from bloomery.messages import EngineRequest, ResolvedSampling, ScheduledStep
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import engine, greedy, ids, plan, run
from tests.waiting import until

WISHES = dict(block_size=4, max_num_batched_tokens=64, max_num_seqs=4, kv_cache_gib=0.01)
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), made)
    return made


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    return until(lambda: not any(map(alive, pids)))


def listening(pid: int) -> list[str]:
    """Local addresses, as the kernel writes them, of the sockets a process listens on."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].split(":")[0])
    return found


def test_ranks_listen_on_the_loopback_alone_and_end_with_the_first_that_dies(folder: Path) -> None:
    ranks = Processes()
    ranks.start(plan(folder, 128, tp=2, **WISHES))
    pids = [member.process.pid for member in ranks.members]
    heard = [address for pid in pids for address in listening(pid)]
    assert heard and set(heard) <= {"0100007F"}, "nothing but 127.0.0.1"
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 died of signal 9"):
        while True:
            ranks.submit(ScheduledStep((), ())).result()
    assert gone(pids) and not ranks.members
    assert ranks.folder is None


@pytest.mark.slow
def test_what_cannot_be_loaded_is_told_in_the_ranks_words(folder: Path) -> None:
    ranks = Processes()
    with pytest.raises(ConfigError, match="lower max_model_len to"):
        ranks.start(plan(folder, 128, tp=2, **WISHES | {"kv_cache_gib": 1e-6}))
    assert not ranks.members


def test_a_stream_goes_on_when_a_rank_is_killed(folder: Path) -> None:
    """Through the whole engine process: the supervisor starts another, and the reader gets what is left. At last the
    engine itself is killed."""
    wanted = plan(folder, 128, tp=2, **WISHES)
    want = ids(run(engine(plan(folder, 128, **WISHES)), [greedy("0", PROMPT, 100)])["0"])

    async def main() -> None:
        client = EngineClient(wanted, patience=Patience(pause=0.0))
        await client.start()
        await client.ready()
        assert client.pid is not None
        ranks = children(client.pid)
        killed = False
        while client.epoch == 1:  # again if it had come to its end before anybody could be killed
            got: list[int] = []
            async for news in client.stream(
                [EngineRequest("0", tuple(PROMPT), ResolvedSampling(temperature=0.0), 100)]
            ):
                assert news.position == len(got)
                got += news.ids
                if not killed and len(got) >= 5 and news.finish is None:
                    os.kill(ranks[0], signal.SIGKILL)
                    killed = True
            assert got == want
        assert killed and client.epoch == 2
        assert gone(ranks)
        survivors = children(client.pid)
        os.kill(client.pid, signal.SIGKILL)
        assert gone(survivors), "ranks that outlive their owner"
        await client.close()

    asyncio.run(main())


def test_the_offline_api(folder: Path) -> None:
    answers = []
    for wishes in ({}, {"tensor_parallel_size": 2}):
        llm = LLM(
            str(folder), skip_tokenizer_init=True, device="cpu", threads=1, **WISHES, **wishes
        )
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1
            ),
            SamplingParams(
                temperature=0.9, seed=7, max_tokens=20, ignore_eos=True, repetition_penalty=1.1
            ),
        ]
        outs = llm.generate([PROMPT, PROMPT[:5]], params, use_tqdm=False)
        vector = llm.embed([PROMPT])[0]
        llm.close()
        answers.append(
            ([out.outputs[0].token_ids for out in outs], [round(value, 4) for value in vector])
        )
    assert answers[0] == answers[1]


def test_what_cannot_be_split_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="tp 3 does not divide the model's 4 heads over 2 key heads; 1, 2, 4 would work",
    ):
        LLM(str(folder), skip_tokenizer_init=True, tensor_parallel_size=3)
    with pytest.raises(
        ConfigError, match="pp 9 is more stages than the model has layers; at most 3 would work"
    ):
        LLM(str(folder), skip_tokenizer_init=True, pipeline_parallel_size=9)

"""Ranks as Ray's actors on two real nodes of one machine. Needs ray, and some minutes: `pytest -m slow` runs it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import ConfigError
from bloomery.executors.local import Local
from bloomery.messages import Request, Sampling
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import greedy, ids, plan, run

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
WISHES = dict(block_size=4, max_batch_tokens=64, max_sequences=4, kv_cache_gib=0.01)
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), made)
    return made


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two nodes, of which each has room for two ranks."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made.address
    ray.shutdown()
    made.shutdown()


def answer(by: Executor, folder: Path, **wishes: object) -> list[list[int]]:
    wanted = plan(folder, 128, **WISHES, **wishes)
    capacity = by.start(wanted)
    blocks = Blocks(capacity.blocks, capacity.block_size)
    scheduler = Scheduler(blocks, capacity.max_batch_tokens, capacity.max_sequences, stages=capacity.stages)
    news = run(Loop(scheduler, by, wanted.depth), [greedy(str(i), PROMPT[i:], 24) for i in range(3)])
    return [ids(one) for one in news.values()]


def stages(executor: Any, tp: int) -> list[list[str]]:
    """The node of every rank, stage by stage."""
    where = [
        ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
        for actor in executor.actors
    ]
    return [where[start : start + tp] for start in range(0, len(where), tp)]


def test_the_same_tokens_over_actors_and_nodes(folder: Path, cluster: str) -> None:
    from bloomery.executors.ray import Actors

    want = answer(Local(), folder)
    for tp, pp, spread in ((2, 1, 1), (1, 2, 1), (2, 2, 2)):
        executor = Actors()
        assert answer(executor, folder, tp=tp, pp=pp, executor="ray") == want
        found = stages(executor, tp)
        assert [len(set(stage)) for stage in found] == [1] * pp, "ranks that share layers are on one node"
        assert len({node for stage in found for node in stage}) == spread
        executor.close()


def test_without_a_cluster_one_of_this_machine_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.executors.ray import Actors

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    executor = Actors()
    assert answer(executor, folder, tp=2, executor="ray") == answer(Local(), folder)
    executor.close()
    assert not ray.is_initialized()


def test_a_cluster_too_small_says_what_it_has(folder: Path, cluster: str) -> None:
    from bloomery.executors.ray import Actors

    with pytest.raises(
        ConfigError, match=r"2 stages needs 0 GPU, 4 CPU on one node. It has 2 node\(s\): .* 2 CPU; .*2 CPU"
    ):
        answer(Actors(), folder, tp=4, pp=2, executor="ray")


def test_a_stream_goes_on_when_an_actor_is_killed(folder: Path, cluster: str) -> None:
    want = answer(Local(), folder)[0]

    def actors() -> list[int]:
        names = {int(path.name): path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit()}
        return [pid for pid, path in names.items() if path.exists() and path.read_bytes().startswith(b"ray::Actor")]

    async def main() -> None:
        client = EngineClient(plan(folder, 128, pp=2, executor="ray", **WISHES), patience=Patience(pause=0.0))
        await client.start()
        await client.ready()
        found = actors()
        assert len(found) == 2
        got: list[int] = []
        async for news in client.stream([Request("0", tuple(PROMPT), Sampling(temperature=0.0), 24)]):
            assert news.position == len(got)
            got += news.ids
            if found and len(got) >= 5:
                os.kill(found.pop(), signal.SIGKILL)
                found = []
        assert got == want and client.epoch == 2
        await client.close()

    asyncio.run(main())

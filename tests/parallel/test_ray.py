"""Ranks as Ray's actors on two real nodes of one machine. Needs ray, and some minutes: `pytest -m slow` runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery.engine.blocks import Blocks
from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.replicas import Replicas, share
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import ConfigError
from bloomery.executors.local import Local
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import greedy, ids, plan, run
from tests.waiting import LONG, eventually

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
WISHES = dict(block_size=4, max_num_batched_tokens=64, max_num_seqs=4, kv_cache_gib=0.01)
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


def answer(by: Executor, folder: Path, count: int = 24, **wishes: object) -> list[list[int]]:
    wanted = plan(folder, 512, **WISHES, **wishes)
    capacity = by.start(wanted)
    blocks = Blocks(capacity.blocks, capacity.block_size)
    scheduler = Scheduler(
        blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, stages=capacity.stages
    )
    news = run(
        Loop(scheduler, by, wanted.depth), [greedy(str(i), PROMPT[i:], count) for i in range(3)]
    )
    return [ids(one) for one in news.values()]


def actors() -> list[int]:
    """Processes of the ranks on this machine."""
    names = {
        int(path.name): path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit()
    }
    return [
        pid
        for pid, path in names.items()
        if path.exists() and path.read_bytes().startswith(b"ray::Actor")
    ]


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
        assert [len(set(stage)) for stage in found] == [1] * pp, (
            "ranks that share layers are on one node"
        )
        assert len({node for stage in found for node in stage}) == spread
        executor.close()


def test_without_a_cluster_one_of_this_machine_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.executors.ray import Actors

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    executor = Actors()
    assert answer(executor, folder, tp=2, executor="ray") == answer(Local(), folder)
    executor.close()
    assert not ray.is_initialized()


def test_a_cluster_too_small_says_what_it_has(folder: Path, cluster: str) -> None:
    from bloomery.executors.ray import Actors

    with pytest.raises(
        ConfigError,
        match=r"2 stages needs 0 GPU, 4 CPU on one node. It has 2 node\(s\): .* 2 CPU; .*2 CPU",
    ):
        answer(Actors(), folder, tp=4, pp=2, executor="ray")


def test_a_stream_goes_on_when_an_actor_is_killed(folder: Path, cluster: str) -> None:
    want = answer(Local(), folder)[0]

    async def main() -> None:
        client = EngineClient(
            plan(folder, 128, pp=2, executor="ray", **WISHES), patience=Patience(pause=0.0)
        )
        await client.start()
        await client.ready()
        found = actors()
        assert len(found) == 2
        got: list[int] = []
        async for news in client.stream(
            [EngineRequest("0", tuple(PROMPT), ResolvedSampling(temperature=0.0), 24)]
        ):
            assert news.position == len(got)
            got += news.ids
            if found and len(got) >= 5:
                os.kill(found.pop(), signal.SIGKILL)
                found = []
        assert got == want and client.epoch == 2
        await client.close()

    asyncio.run(main())


def test_a_cluster_that_is_gone_is_told_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.executors.ray import Actors

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(
        ConfigError, match=f"the Ray cluster at 127.0.0.1:{port} cannot be reached: .*refused"
    ):
        answer(Actors(), folder, executor="ray")


def test_replicas_want_a_cluster_that_outlives_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.executors.ray import Actors

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="share a cluster, and none is running"):
        Actors().start(share(plan(folder, 128, executor="ray", **WISHES), 0, 2))


def test_when_the_actor_of_a_replica_is_killed_its_streams_go_on_at_the_other(
    folder: Path, cluster: str
) -> None:
    """And the replica comes back. Both are held still around the kill, so that no stream comes to its end meanwhile."""
    count = 400
    want = answer(Local(), folder, count)
    wanted = plan(folder, 512, executor="ray", **WISHES)
    got: dict[str, list[int]] = {str(number): [] for number in range(3)}

    async def read(engines: Replicas | EngineClient, name: str) -> str | None:
        async for news in engines.stream(
            [
                EngineRequest(
                    name, tuple(PROMPT[int(name) :]), ResolvedSampling(temperature=0.0), count
                )
            ]
        ):
            assert news.position == len(got[name]), "a gap or a duplicate"
            got[name] += news.ids
        return news.finish

    async def main() -> None:
        engines = Replicas(
            [
                EngineClient(share(wanted, number, 2), patience=Patience(pause=0.0))
                for number in (0, 1)
            ]
        )
        await engines.start()
        await asyncio.gather(*(client.ready() for client in engines.clients))
        readers = [asyncio.create_task(read(engines, name)) for name in got]
        assert await eventually(lambda: all(len(tokens) >= 5 for tokens in got.values()))
        victim, other = actors()
        for pid in (victim, other):
            os.kill(pid, signal.SIGSTOP)
        assert sorted(len(open) for open in engines.open) == [1, 2]
        os.kill(victim, signal.SIGKILL)
        assert await eventually(lambda: sorted(len(open) for open in engines.open) == [0, 3])
        os.kill(other, signal.SIGCONT)
        assert await asyncio.wait_for(asyncio.gather(*readers), LONG) == ["length"] * 3
        assert list(got.values()) == want
        dead = next(
            client
            for client in engines.clients
            if client.epoch > 1 or client.status.state != "ready"
        )
        await asyncio.wait_for(dead.ready(), LONG)
        assert sorted(client.epoch for client in engines.clients) == [1, 2]
        got["0"].clear()
        assert await asyncio.wait_for(read(dead, "0"), LONG) == "length" and got["0"] == want[0]
        await engines.close()

    asyncio.run(main())

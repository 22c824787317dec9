"""Ranks as Ray actors on two real Ray nodes of one machine.

Needs ray and some minutes: `pytest -m slow` runs it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.engine.executor import Executor
from bloomery.engine.replicas import ReplicaSet, plan_for_replica
from bloomery.errors import ConfigError
from bloomery.executors.local import LocalExecutor
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.parallel.engines import start_engine_loop
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import build_plan, greedy_request, output_token_ids, run_requests
from tests.waiting import WAIT_SECONDS, wait_until_async

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_gib": 0.01,
}
PROMPT = list(range(3, 20))
NUM_TOKENS = 24
IMMEDIATE_RESTART = EngineTimeouts(restart_delay_seconds=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(next(case for case in CASES if case.name == "llama"), folder)
    return folder


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two Ray nodes, each with room for two ranks."""
    from ray.cluster_utils import Cluster

    head_options = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head_options)
    cluster.add_node(num_cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def generate(
    executor: Executor, folder: Path, num_tokens: int = NUM_TOKENS, **options: Any
) -> list[list[int]]:
    """Complete three prompts and return their tokens."""
    loop, _ = start_engine_loop(executor, build_plan(folder, 512, **OPTIONS, **options))
    requests = [greedy_request(str(i), PROMPT[i:], num_tokens) for i in range(3)]
    outputs = run_requests(loop, requests)
    return [output_token_ids(outputs[request.id]) for request in requests]


def actor_pids() -> list[int]:
    """Processes of the rank actors on this machine."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [int(path.name) for path in processes if is_rank_actor(path / "cmdline")]


def is_rank_actor(command_file: Path) -> bool:
    try:
        return command_file.read_bytes().startswith(b"ray::RayRankActor")
    except OSError:  # the process has exited
        return False


def nodes_by_stage(executor: Any, tp: int) -> list[list[str]]:
    """The Ray node of every rank, one list for each pipeline stage."""
    nodes = [
        ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
        for actor in executor.actors
    ]
    return [nodes[start : start + tp] for start in range(0, len(nodes), tp)]


@pytest.mark.parametrize(("tp", "pp", "num_nodes"), [(2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_actors_on_one_or_two_nodes_give_the_tokens_of_one_process(
    tp: int, pp: int, num_nodes: int, folder: Path, cluster: str
) -> None:
    from bloomery.executors.ray import RayExecutor

    expected = generate(LocalExecutor(), folder)
    executor = RayExecutor()
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    assert generate(executor, folder, executor="ray", **layout) == expected
    stages = nodes_by_stage(executor, tp)
    nodes_per_stage = [len(set(nodes)) for nodes in stages]
    assert nodes_per_stage == [1] * pp, "a tensor parallel group must be on one node"
    assert len({node for nodes in stages for node in nodes}) == num_nodes
    executor.close()


def test_without_a_cluster_a_local_one_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.executors.ray import RayExecutor

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    executor = RayExecutor()
    tokens = generate(executor, folder, tensor_parallel_size=2, executor="ray")
    assert tokens == generate(LocalExecutor(), folder)
    executor.close()
    assert not ray.is_initialized()


def test_a_cluster_that_is_too_small_is_refused_with_its_size(folder: Path, cluster: str) -> None:
    from bloomery.executors.ray import RayExecutor

    layout = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    with pytest.raises(
        ConfigError,
        match=r"2 stages needs 0 GPU, 4 CPU on one node. It has 2 node\(s\): .* 2 CPU; .*2 CPU",
    ):
        generate(RayExecutor(), folder, executor="ray", **layout)


def test_a_stream_survives_a_killed_actor(folder: Path, cluster: str) -> None:
    expected = generate(LocalExecutor(), folder)[0]
    plan = build_plan(folder, 128, pipeline_parallel_size=2, executor="ray", **OPTIONS)
    request = EngineRequest("0", tuple(PROMPT), ResolvedSampling(temperature=0.0), NUM_TOKENS)

    async def main() -> None:
        client = EngineClient(plan, timeouts=IMMEDIATE_RESTART)
        await client.start()
        await client.ready()
        pids = actor_pids()
        assert len(pids) == 2
        killed = False
        token_ids: list[int] = []
        async for output in client.stream([request]):
            assert output.position == len(token_ids)
            token_ids += output.ids
            if not killed and len(token_ids) >= 5:
                os.kill(pids[-1], signal.SIGKILL)
                killed = True
        assert token_ids == expected
        assert client.epoch == 2
        await client.close()

    asyncio.run(main())


def test_an_unreachable_cluster_is_reported_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.executors.ray import RayExecutor

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(
        ConfigError, match=f"the Ray cluster at 127.0.0.1:{port} cannot be reached: .*refused"
    ):
        generate(RayExecutor(), folder, executor="ray")


def test_replicas_need_a_running_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.executors.ray import RayExecutor

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = build_plan(folder, 128, executor="ray", **OPTIONS)
    with pytest.raises(ConfigError, match="share a cluster, and none is running"):
        RayExecutor().start(plan_for_replica(plan, 0, 2))


def test_streams_of_a_killed_replica_continue_on_the_other_one(folder: Path, cluster: str) -> None:
    """The killed replica comes back afterwards.

    Both actors are stopped around the kill, so no stream can end meanwhile.
    """
    num_tokens = 400
    expected = generate(LocalExecutor(), folder, num_tokens)
    plan = build_plan(folder, 512, executor="ray", **OPTIONS)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(3)}

    async def read_stream(engine: ReplicaSet | EngineClient, request_id: str) -> str | None:
        prompt = tuple(PROMPT[int(request_id) :])
        sampling = ResolvedSampling(temperature=0.0)
        request = EngineRequest(request_id, prompt, sampling, num_tokens)
        async for output in engine.stream([request]):
            assert output.position == len(tokens[request_id]), "a gap or a duplicate"
            tokens[request_id] += output.ids
        return output.finish

    async def main() -> None:
        clients = [
            EngineClient(plan_for_replica(plan, number, 2), timeouts=IMMEDIATE_RESTART)
            for number in (0, 1)
        ]
        replicas = ReplicaSet(clients)

        def open_streams() -> list[int]:
            return sorted(len(streams) for streams in replicas.open)

        await replicas.start()
        await asyncio.gather(*(client.ready() for client in clients))
        readers = [asyncio.create_task(read_stream(replicas, request_id)) for request_id in tokens]
        assert await wait_until_async(lambda: all(len(ids) >= 5 for ids in tokens.values()))
        victim, survivor = actor_pids()
        for pid in (victim, survivor):
            os.kill(pid, signal.SIGSTOP)
        assert open_streams() == [1, 2]
        os.kill(victim, signal.SIGKILL)
        assert await wait_until_async(lambda: open_streams() == [0, 3])
        os.kill(survivor, signal.SIGCONT)
        finish_reasons = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
        assert finish_reasons == ["length"] * 3
        assert list(tokens.values()) == expected
        restarted = next(
            client for client in clients if client.epoch > 1 or client.status.state != "ready"
        )
        await asyncio.wait_for(restarted.ready(), WAIT_SECONDS)
        assert sorted(client.epoch for client in clients) == [1, 2]
        tokens["0"].clear()
        assert await asyncio.wait_for(read_stream(restarted, "0"), WAIT_SECONDS) == "length"
        assert tokens["0"] == expected[0]
        await replicas.close()

    asyncio.run(main())

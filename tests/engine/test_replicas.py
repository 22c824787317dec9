"""Replicas: each has its own devices, and requests continue when an engine crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.engine.replicas import ReplicaSet, plan_for_replica
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from tests.chaos.fake_engine import POISON, fake_engine_command, fake_plan
from tests.engine.fake_executor import reference_tokens
from tests.waiting import WAIT_SECONDS, wait_until_async

MANY_RESTARTS = EngineTimeouts(max_restarts=10**6, restart_delay_seconds=0.0)


def create_request(prompt: list[int], request_id: str, max_tokens: int = 12) -> EngineRequest:
    return EngineRequest(request_id, tuple(prompt), ResolvedSampling(), max_tokens)


async def start_replicas(*options: str) -> ReplicaSet:
    """Start two replicas of the fake engine and wait until both are loaded."""
    command = fake_engine_command(*options)
    clients = [EngineClient(fake_plan(), command, MANY_RESTARTS) for _ in range(2)]
    replicas = ReplicaSet(clients)
    await replicas.start()
    await asyncio.gather(*(client.ready() for client in clients))
    return replicas


async def read_stream(replicas: ReplicaSet, request: EngineRequest) -> TokenOutput:
    """Read a request to its end, check its tokens, and return the last output."""
    tokens = list(request.prompt)
    async for output in replicas.stream([request]):
        assert output.position == len(tokens) - len(request.prompt), "a gap or a duplicate"
        tokens += output.ids
    if output.finish != "error":
        assert tokens == reference_tokens(request)
    return output


def test_each_replica_has_devices_of_its_own() -> None:
    gpus = replace(fake_plan(), device="cuda", gpu_memory_utilization=0.9)
    devices = [plan_for_replica(gpus, number, 3).device for number in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:2"]
    parallel = replace(gpus, tensor_parallel_size=2, pipeline_parallel_size=2)
    first_devices = [plan_for_replica(parallel, number, 2).first_device for number in range(2)]
    assert first_devices == [0, 4]
    one_gpu = plan_for_replica(replace(gpus, device="cuda:0"), 1, 3)
    assert one_gpu.gpu_memory_utilization == 0.3, "replicas share the GPU that the plan names"
    assert plan_for_replica(replace(fake_plan(), threads=64), 1, 2).threads <= 32
    on_ray = replace(gpus, executor="ray")
    expected = replace(on_ray, shares_ray_cluster=True)
    assert plan_for_replica(on_ray, 1, 2) == expected, "Ray assigns the GPUs"


def test_streams_continue_at_another_engine_when_theirs_crashes() -> None:
    async def main() -> None:
        replicas = await start_replicas("--delay", "0.004", "--load", "2")
        clients = replicas.clients
        requests = [create_request([i % 5], str(i), 400) for i in range(8)]
        readers = [asyncio.create_task(read_stream(replicas, request)) for request in requests]
        assert await wait_until_async(lambda: all(client.stats.tokens_out for client in clients))
        first_pid, second_pid = (client.pid or 0 for client in clients)
        # The second engine must not finish a request before all requests have moved to it.
        os.kill(second_pid, signal.SIGSTOP)
        assert [len(routed) for routed in replicas.open_requests] == [4, 4]
        os.kill(first_pid, signal.SIGKILL)
        assert await wait_until_async(lambda: len(replicas.open_requests[1]) == 8)
        assert replicas.status.state == "ready" and clients[0].status.state != "ready"
        os.kill(second_pid, signal.SIGCONT)
        outputs = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
        assert {output.finish for output in outputs} == {"length"}
        await clients[0].ready()
        assert clients[0].epoch == 2 and clients[1].epoch == 1
        # Tokens that were lost in the crash are counted by no engine.
        assert replicas.stats.tokens_out >= 8 * 400 - 8
        await replicas.close()

    asyncio.run(main())


def test_a_request_that_kills_engines_is_given_up() -> None:
    async def main() -> None:
        replicas = await start_replicas("--delay", "0.002")
        requests = [create_request([i % 5], str(i), 60) for i in range(4)]
        good = [asyncio.create_task(read_stream(replicas, request)) for request in requests]
        bad_request = create_request([*POISON, 1], "bad")
        bad = await asyncio.wait_for(read_stream(replicas, bad_request), WAIT_SECONDS)
        assert bad.finish == "error" and "stopped 3 times" in (bad.error or "")
        outputs = await asyncio.wait_for(asyncio.gather(*good), WAIT_SECONDS)
        assert {output.finish for output in outputs} == {"length"}
        await replicas.close()

    asyncio.run(main())


def test_requests_of_one_stream_stay_together_and_end_separately() -> None:
    async def main() -> None:
        replicas = await start_replicas()
        pair = [create_request([1, 2], "a", 3), create_request([1, 2], "b", 9)]
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        async for output in replicas.stream(pair):
            tokens[output.request] += output.ids
        assert [len(ids) for ids in tokens.values()] == [3, 9]
        assert not any(replicas.open_requests)
        stream = replicas.stream([create_request([3], "c", 2000)])
        await anext(stream)
        assert replicas.abort("c") and not replicas.abort("d")
        assert [output.finish async for output in stream][-1] == "abort"
        await replicas.close()

    asyncio.run(main())

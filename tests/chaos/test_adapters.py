"""LoRA adapters under faults: streams keep theirs when engines die, and bad ones fail alone."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bloomery.engine.client import EngineClient
from bloomery.engine.replicas import ReplicaSet
from bloomery.errors import InvalidRequest, RequestFailed
from bloomery.messages import EngineRequest
from tests.chaos.fake_engine import CRASH_ADAPTER, fake_engine_command, fake_plan
from tests.chaos.test_engine_crashes import MANY_RESTARTS, random_requests, read_stream
from tests.engine.fake_executor import BAD_ADAPTER
from tests.waiting import WAIT_SECONDS

PLAN = fake_plan(enable_lora=True, max_loras=2, max_cpu_loras=3)


def create_client(*options: str) -> EngineClient:
    return EngineClient(PLAN, fake_engine_command("--delay", "0.002", *options), MANY_RESTARTS)


def write_files(folder: Path) -> dict[str, str]:
    """Files for adapters whose content is never read, by name."""
    paths = {name: folder / name for name in "abcde"}
    paths |= {path[1:]: Path(f"{folder}{path}") for path in (BAD_ADAPTER, CRASH_ADAPTER)}
    for path in paths.values():
        path.write_text(path.name)
    return {name: str(path) for name, path in paths.items()}


def adapted_requests(paths: dict[str, str], random: Random, count: int) -> list[EngineRequest]:
    requests = random_requests(random, count, 60)
    names = ["", *"abcde"]
    return [
        replace(request, lora=names[number % 6], lora_path=paths.get(names[number % 6], ""))
        for number, request in enumerate(requests)
    ]


def test_streams_keep_their_adapters_through_kills(tmp_path: Path) -> None:
    """Five adapters share two slots; `read_stream` compares the tokens of each."""

    async def main() -> int:
        random = Random(3)
        paths = write_files(tmp_path)
        client = create_client()
        await client.start()
        for _ in range(3):
            await client.ready()
            requests = adapted_requests(paths, random, 8)
            readers = [asyncio.create_task(read_stream(client, request)) for request in requests]
            await asyncio.sleep(random.random() * 0.2)
            if client.pid is not None:
                os.kill(client.pid, signal.SIGKILL)
            outputs = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
            assert all(output.finish in ("stop", "length") for output in outputs)
        await client.close()
        return client.epoch

    assert asyncio.run(main()) >= 2


@pytest.mark.parametrize("name", ["bad", "crash"])
def test_a_harmful_adapter_fails_only_its_own_request(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        paths = write_files(tmp_path)
        client = create_client()
        await client.start()
        await client.ready()
        requests = adapted_requests(paths, Random(4), 6)
        harmful = replace(requests[1], id="harmful", lora=name, lora_path=paths[name])
        readers = [read_stream(client, request) for request in [*requests, harmful]]
        *outputs, failed = await asyncio.wait_for(asyncio.gather(*readers), WAIT_SECONDS)
        assert all(output.finish in ("stop", "length") for output in outputs)
        assert failed.finish == "error"
        assert client.status.state == "ready"
        await client.close()

    asyncio.run(main())


def test_loading_answers_with_the_adapter_or_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        paths = write_files(tmp_path)
        client = create_client()
        await client.start()
        early = asyncio.create_task(client.load_adapter("a", paths["a"]))  # before it is ready
        info = await asyncio.wait_for(early, WAIT_SECONDS)
        assert info.rank == 8
        with pytest.raises(InvalidRequest, match="rank 99 is too large"):
            await client.load_adapter("bad", paths["bad"])
        with pytest.raises(InvalidRequest, match="stopped 2 times while it loaded"):
            await asyncio.wait_for(client.load_adapter("crash", paths["crash"]), WAIT_SECONDS)
        await client.ready()
        loads = [client.load_adapter(name, paths[name]) for name in "bcde"]
        assert len(await asyncio.wait_for(asyncio.gather(*loads), WAIT_SECONDS)) == 4
        client.unload_adapter("e")
        while client.stats.adapters_in_memory != 2:
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(main())


def test_a_load_ends_with_the_engine_and_is_not_the_clients_fault(tmp_path: Path) -> None:
    async def main() -> None:
        paths = write_files(tmp_path)
        client = create_client()
        await client.start()
        load = asyncio.create_task(client.load_adapter("a", paths["a"]))  # before it is ready
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(RequestFailed, match="shutting down"):
            await load

    asyncio.run(main())


def test_replicas_all_load_an_adapter(tmp_path: Path) -> None:
    async def main() -> None:
        paths = write_files(tmp_path)
        replicas = ReplicaSet([create_client() for _ in range(2)])
        await replicas.start()
        await asyncio.gather(*(client.ready() for client in replicas.clients))
        await replicas.load_adapter("a", paths["a"])
        while [client.stats.adapters_in_memory for client in replicas.clients] != [1, 1]:
            await asyncio.sleep(0.01)
        assert replicas.stats.adapters_in_memory == 2
        replicas.unload_adapter("a")
        while replicas.stats.adapters_in_memory:
            await asyncio.sleep(0.01)
        await replicas.close()

    asyncio.run(main())

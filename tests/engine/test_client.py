"""The engine client with a real child process: start, streams, shutdown, and the status it reports.

What happens when engines crash is tested in tests/chaos.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
import uvloop

from bloomery.engine.client import EngineChild, EngineClient, EngineTimeouts
from bloomery.errors import BloomeryError, InvalidRequest, RequestFailed
from bloomery.ipc import EngineMessage
from bloomery.messages import EngineRequest, EngineStats, ResolvedSampling, TokenOutput
from tests.chaos.fake_engine import BLOCKS, fake_engine_command, fake_plan
from tests.engine.fake_executor import reference_tokens
from tests.waiting import WAIT_SECONDS, wait_until_async

CLOSE_THEN_EXIT = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(0.1); sys.exit(4)"
SEND_NOISE = "import os, sys; os.write(int(sys.argv[1]), b'HTTP/1.1 400')"


@asynccontextmanager
async def running_client(
    *options: str, timeouts: EngineTimeouts | None = None, **plan_changes: object
) -> AsyncIterator[EngineClient]:
    client = EngineClient(fake_plan(**plan_changes), fake_engine_command(*options), timeouts)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def create_request(request_id: str, *prompt: int, max_tokens: int = 12) -> EngineRequest:
    return EngineRequest(request_id, prompt, ResolvedSampling(), max_tokens)


async def collect(client: EngineClient, *requests: EngineRequest) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {request.id: [] for request in requests}
    async for output in client.stream(requests):
        outputs[output.request].append(output)
    return outputs


def join_tokens(outputs: list[TokenOutput]) -> list[int]:
    """Return all token ids. Asserts that no token is missing or repeated and the end comes once."""
    ids: list[int] = []
    for output in outputs:
        assert output.position == len(ids)
        ids += output.ids
    finished = [output.finish is not None for output in outputs]
    assert finished == [False] * (len(outputs) - 1) + [True]
    return ids


async def wait_idle(client: EngineClient) -> EngineStats:
    """Wait until the engine has no requests and holds no blocks. Returns its statistics."""
    while client.stats.running or client.stats.waiting or client.stats.kv_used:
        await asyncio.sleep(0.01)
    return client.stats


async def run_client_lifecycle() -> None:
    progress: list[float] = []

    def create_child(on_message: Callable[[EngineChild, EngineMessage], None]) -> EngineChild:
        def record_progress(child: EngineChild, message: EngineMessage) -> None:
            on_message(child, message)
            if client.status.state == "loading":
                progress.append(client.status.progress)

        return EngineChild(record_progress)

    command = fake_engine_command("--load", "0.5")
    client = EngineClient(fake_plan(), command, create_child=create_child)
    await client.start()
    assert client.status.state == "loading" and client.capacity is None
    # A request may wait for the engine.
    early = asyncio.create_task(collect(client, create_request("early", 1, 2)))
    assert (await client.ready()).blocks == BLOCKS and client.status.state == "ready"
    assert progress == [part / 5 for part in range(5)]
    requests = [
        create_request("first", 1, 2),
        create_request("second", 3, max_tokens=20),
        create_request("third", 4, 5, 6, max_tokens=3),
    ]
    outputs = await collect(client, *requests)
    for request in requests:
        assert [*request.prompt, *join_tokens(outputs[request.id])] == reference_tokens(request)
        assert outputs[request.id][-1].finish == "length"
        assert outputs[request.id][0].queued >= 0
    assert join_tokens((await early)["early"])
    stats = await wait_idle(client)
    assert stats.tokens_out == 12 + 12 + 20 + 3
    assert stats.tokens_in == 2 + 2 + 1 + 3
    assert stats.kv_blocks == BLOCKS
    pid = client.pid
    await client.close()
    assert client.status.state == "closed"
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    with pytest.raises(RequestFailed, match="takes no more requests"):
        await collect(client, requests[0])
    with pytest.raises(BloomeryError, match="not available: closed"):
        await client.ready()


def test_a_client_loads_streams_and_closes() -> None:
    asyncio.run(run_client_lifecycle())


def test_a_client_loads_streams_and_closes_under_uvloop() -> None:
    uvloop.run(run_client_lifecycle())


def test_leaving_a_stream_aborts_its_open_requests() -> None:
    async def main() -> None:
        async with running_client("--delay", "0.01") as client:
            requests = [
                create_request("a", 1, max_tokens=1000),
                create_request("b", 2, max_tokens=2),
            ]
            async with aclosing(client.stream(requests)) as outputs:
                async for output in outputs:
                    if output.finish:
                        break
            assert not client.journal.entries
            async for _ in client.stream([create_request("a", 1, max_tokens=1000)]):
                break  # the event loop closes the stream
            await asyncio.sleep(0.1)
            task = asyncio.create_task(collect(client, create_request("c", 1, max_tokens=1000)))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stats = await wait_idle(client)
            assert not client.journal.entries
            assert 2 < stats.tokens_out < 1000, "an aborted request ran to its end"

    asyncio.run(main())


def test_a_request_can_be_aborted_by_its_id() -> None:
    async def main() -> None:
        async with running_client("--delay", "0.01") as client:
            outputs: list[TokenOutput] = []
            requests = [
                create_request("a", 1, max_tokens=1000),
                create_request("b", 2, max_tokens=20),
            ]
            async for output in client.stream(requests):
                outputs.append(output)
                if len(outputs) == 6:
                    assert client.abort("a")
                    assert not client.abort("a")
                    assert not client.abort("unknown")
            finishes = {output.request: output.finish for output in outputs if output.finish}
            assert finishes == {"a": "abort", "b": "length"}
            assert sum(len(output.ids) for output in outputs if output.request == "a") < 1000

    asyncio.run(main())


def test_a_slow_reader_gets_all_tokens_in_few_outputs() -> None:
    async def main() -> None:
        async with running_client("--delay", "0.002") as client:
            request = create_request("slow", 1, 2, 3, max_tokens=200)
            outputs: list[TokenOutput] = []
            async for output in client.stream([request]):
                outputs.append(output)
                all_generated = await wait_until_async(lambda: client.stats.tokens_out == 200)
                assert all_generated, "the engine waits for the reader"
            assert [*request.prompt, *join_tokens(outputs)] == reference_tokens(request)
            assert len(outputs) <= 2

    asyncio.run(main())


def test_a_refused_request_does_not_affect_others() -> None:
    async def main() -> None:
        async with running_client() as client:
            too_large = create_request("large", 1, max_tokens=10**6)
            outputs = await collect(client, too_large, create_request("good", 1))
            (refusal,) = outputs["large"]
            assert refusal.finish == "error" and "1000001 cache positions" in str(refusal.error)
            assert len(join_tokens(outputs["good"])) == 12
            with pytest.raises(InvalidRequest, match="'twin' is already in use"):
                await collect(client, create_request("twin", 1), create_request("twin", 1))
            assert not client.journal.entries

    asyncio.run(main())


@pytest.mark.parametrize("close_twice", [True, False], ids=["second close", "drain timeout"])
def test_closing_drains_for_a_while_and_then_fails_open_requests(close_twice: bool) -> None:
    async def main() -> None:
        async with running_client("--delay", "0.02") as client:
            await client.ready()
            short_request = create_request("short", 1, max_tokens=20)
            long_request = create_request("long", 1, max_tokens=2000)
            short = asyncio.create_task(collect(client, short_request))
            long = asyncio.create_task(collect(client, long_request))
            assert await wait_until_async(lambda: client.stats.tokens_out)
            drain_seconds = WAIT_SECONDS if close_twice else 0.3
            closing = asyncio.create_task(client.close(drain_seconds))
            assert await wait_until_async(lambda: client.status.state == "draining")
            with pytest.raises(RequestFailed, match="draining"):
                await collect(client, create_request("late", 1))
            if close_twice:
                assert len(join_tokens((await short)["short"])) == 20 and not closing.done()
                await client.close()
            await closing
            last = (await long)["long"][-1]
            assert (last.finish, last.error) == ("error", "the server is shutting down")

    asyncio.run(main())


def test_an_engine_that_ignores_sigterm_is_killed() -> None:
    async def main() -> None:
        async with running_client(timeouts=EngineTimeouts(shutdown_seconds=0.2)) as client:
            await client.ready()
            pid = client.pid
            os.kill(pid or 0, signal.SIGSTOP)  # a stopped process handles no signal
            await asyncio.wait_for(client.close(), WAIT_SECONDS)
            with pytest.raises(ProcessLookupError):
                os.kill(pid or 0, 0)

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_fails_at_once_with_the_reason() -> None:
    async def main() -> None:
        async with running_client("--refuse") as client:
            waiting = asyncio.create_task(collect(client, create_request("a", 1)))
            assert await client.wait_failed() == "model.safetensors: 12 bytes are missing"
            assert client.status.state == "failed" and client.epoch == 1
            with pytest.raises(BloomeryError, match="12 bytes are missing"):
                await client.ready()
            (failure,) = (await waiting)["a"]
            assert (failure.finish, failure.error) == ("error", "the engine has failed")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), "exited with status 3"),
        ((sys.executable, "-c", CLOSE_THEN_EXIT), "exited with status 4"),
        (("/no/such/program",), "could not be started"),
        ((sys.executable, "-c", SEND_NOISE), "broke the protocol"),
    ],
    ids=["exits", "exits slowly", "absent", "sends noise"],
)
def test_the_number_of_restarts_is_limited(command: tuple[str, ...], reason: str) -> None:
    async def main() -> None:
        timeouts = EngineTimeouts(max_restarts=2, restart_delay_seconds=0.01)
        client = EngineClient(fake_plan(), command, timeouts)
        await client.start()
        waiting = asyncio.create_task(collect(client, create_request("a", 1)))
        detail = await asyncio.wait_for(client.wait_failed(), WAIT_SECONDS)
        assert "died 3 times in a row" in detail and reason in detail
        assert client.epoch == 3
        assert (await waiting)["a"][-1].finish == "error"
        await client.close()
        assert client.status.state == "failed"

    asyncio.run(main())


def test_a_thousand_requests_at_once_are_all_answered() -> None:
    async def main() -> None:
        limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
        async with running_client("--instant", **limits) as client:
            requests = [
                create_request(str(number), *[number % 5] * 10, max_tokens=16)
                for number in range(1000)
            ]
            await client.ready()
            os.kill(client.pid or 0, signal.SIGSTOP)  # until all requests have been sent
            readers = [asyncio.create_task(collect(client, request)) for request in requests]
            entries = client.journal.entries
            assert await wait_until_async(lambda: all(entry.sent for entry in entries.values()))
            os.kill(client.pid or 0, signal.SIGCONT)
            collected = await asyncio.gather(*readers)
            for request, outputs in zip(requests, collected):
                tokens = join_tokens(outputs[request.id])
                assert tokens == [(10 + position) % 7 for position in range(16)]
            stats = await wait_idle(client)
            assert stats.tokens_out == 16_000 and client.epoch == 1 and stats.steps < 400

    asyncio.run(main())


def test_a_request_that_waits_too_long_for_an_engine_ends_with_its_deadline() -> None:
    async def main() -> None:
        timeouts = EngineTimeouts(queue_seconds=0.3)
        async with running_client("--load", "100", timeouts=timeouts) as client:
            (output,) = (await collect(client, create_request("a", 1)))["a"]
            assert (output.finish, output.ids) == ("deadline", ())
            assert not client.journal.entries

    asyncio.run(main())


def test_an_engine_is_ready_only_while_it_makes_progress() -> None:
    async def main() -> None:
        timeouts = EngineTimeouts(step_seconds=6.0, first_step_seconds=6.0)
        async with running_client("--delay", "0.01", timeouts=timeouts) as client:
            await client.ready()
            await collect(client, create_request("a", 1, max_tokens=40))
            assert client.status.state == "ready"
            os.kill(client.pid or 0, signal.SIGSTOP)
            while client.status.state == "ready":
                await asyncio.sleep(0.05)
            assert client.status.state == "stalled"
            assert client.epoch == 1, "it is reported as stalled before it is replaced"
            os.kill(client.pid or 0, signal.SIGCONT)
            while client.status.state != "ready":
                await asyncio.sleep(0.05)
            assert client.epoch == 1

    asyncio.run(main())

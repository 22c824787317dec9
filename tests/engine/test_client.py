"""The client with a real child process: life from loading to closing, streams, and what it says of itself.

What happens when engines die is tests/chaos.
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

from bloomery.engine.child import Child
from bloomery.engine.client import EngineClient, Patience
from bloomery.engine.wire import Message
from bloomery.errors import BloomeryError, InvalidRequest, RequestFailed
from bloomery.messages import EngineRequest, ResolvedSampling, EngineStats, TokenOutput
from tests.chaos.ghost_engine import BLOCKS, command, plan
from tests.ghost.ghost import plain
from tests.waiting import LONG, eventually

SLOW_END = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(0.1); sys.exit(4)"


@asynccontextmanager
async def engine(
    *options: str, patience: Patience | None = None, **changes: object
) -> AsyncIterator[EngineClient]:
    client = EngineClient(plan(**changes), command(*options), patience)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def request(name: str, *prompt: int, tokens: int = 12) -> EngineRequest:
    return EngineRequest(name, prompt, ResolvedSampling(), tokens)


async def collect(client: EngineClient, *requests: EngineRequest) -> dict[str, list[TokenOutput]]:
    got: dict[str, list[TokenOutput]] = {request.id: [] for request in requests}
    async for news in client.stream(requests):
        got[news.request].append(news)
    return got


def ids(news: list[TokenOutput]) -> list[int]:
    """All ids, if they are without gap or duplicate and end once."""
    found: list[int] = []
    for tokens in news:
        assert tokens.position == len(found)
        found += tokens.ids
    assert [tokens.finish is not None for tokens in news] == [False] * (len(news) - 1) + [True]
    return found


async def idle(client: EngineClient) -> EngineStats:
    """The figures once the engine has nothing left to do."""
    while client.stats.running or client.stats.waiting or client.stats.kv_used:
        await asyncio.sleep(0.01)
    return client.stats


async def life() -> None:
    progress: list[float] = []

    def watched(hear: Callable[[Child, Message], None]) -> Child:
        def listen(child: Child, message: Message) -> None:
            hear(child, message)
            if client.status.state == "loading":
                progress.append(client.status.progress)

        return Child(listen)

    client = EngineClient(plan(), command("--load", "0.5"), birth=watched)
    await client.start()
    assert client.status.state == "loading" and client.capacity is None
    early = asyncio.create_task(
        collect(client, request("early", 1, 2))
    )  # a request may wait for the engine
    assert (await client.ready()).blocks == BLOCKS and client.status.state == "ready"
    assert progress == [part / 5 for part in range(5)]
    one = request("one", 1, 2)
    two = request("two", 3, tokens=20)
    three = request("three", 4, 5, 6, tokens=3)
    got = await collect(client, one, two, three)
    for asked in (one, two, three):
        assert [*asked.prompt, *ids(got[asked.id])] == plain(asked)
        assert got[asked.id][-1].finish == "length" and got[asked.id][0].queued >= 0
    assert ids((await early)["early"])
    stats = await idle(client)
    assert (
        stats.tokens_out == 12 + 12 + 20 + 3
        and stats.tokens_in == 2 + 2 + 1 + 3
        and stats.kv_blocks == BLOCKS
    )
    pid = client.pid
    await client.close()
    assert client.status.state == "closed"
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    with pytest.raises(RequestFailed, match="takes no more requests"):
        await collect(client, one)
    with pytest.raises(BloomeryError, match="not available: closed"):
        await client.ready()


def test_life() -> None:
    asyncio.run(life())


def test_life_under_uvloop() -> None:
    uvloop.run(life())


def test_leaving_a_stream_aborts_what_is_open() -> None:
    async def main() -> None:
        async with engine("--delay", "0.01") as client:
            async with aclosing(
                client.stream([request("a", 1, tokens=1000), request("b", 2, tokens=2)])
            ) as news:
                async for tokens in news:
                    if tokens.finish:
                        break
            assert not client.journal.entries
            async for _ in client.stream([request("a", 1, tokens=1000)]):
                break  # without closing: the event loop does it
            await asyncio.sleep(0.1)
            task = asyncio.create_task(collect(client, request("c", 1, tokens=1000)))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stats = await idle(client)
            assert not client.journal.entries and 2 < stats.tokens_out < 1000, (
                "one was left to its end"
            )

    asyncio.run(main())


def test_abort_by_id() -> None:
    async def main() -> None:
        async with engine("--delay", "0.01") as client:
            got: list[TokenOutput] = []
            async for tokens in client.stream(
                [request("a", 1, tokens=1000), request("b", 2, tokens=20)]
            ):
                got.append(tokens)
                if len(got) == 6:
                    assert (
                        client.abort("a")
                        and not client.abort("a")
                        and not client.abort("never heard of")
                    )
            ends = {tokens.request: tokens.finish for tokens in got if tokens.finish}
            assert ends == {"a": "abort", "b": "length"}
            assert sum(len(tokens.ids) for tokens in got if tokens.request == "a") < 1000

    asyncio.run(main())


def test_a_slow_reader_gets_all_in_few_pieces() -> None:
    async def main() -> None:
        async with engine("--delay", "0.002") as client:
            asked = request("slow", 1, 2, 3, tokens=200)
            got: list[TokenOutput] = []
            async for tokens in client.stream([asked]):
                got.append(tokens)
                assert await eventually(lambda: client.stats.tokens_out == 200), (
                    "the engine waits for the reader"
                )
            assert [*asked.prompt, *ids(got)] == plain(asked) and len(got) <= 2

    asyncio.run(main())


def test_refusals() -> None:
    async def main() -> None:
        async with engine() as client:
            got = await collect(client, request("vast", 1, tokens=10**6), request("good", 1))
            (error,) = got["vast"]
            assert error.finish == "error" and "1000001 cache positions" in str(error.error)
            assert len(ids(got["good"])) == 12
            with pytest.raises(InvalidRequest, match="'twin' is already in use"):
                await collect(client, request("twin", 1), request("twin", 1))
            assert not client.journal.entries

    asyncio.run(main())


@pytest.mark.parametrize("again", [True, False], ids=["told again", "time is up"])
def test_closing_drains_for_a_while_then_ends_the_rest(again: bool) -> None:
    async def main() -> None:
        async with engine("--delay", "0.02") as client:
            await client.ready()
            short = asyncio.create_task(collect(client, request("short", 1, tokens=20)))
            long = asyncio.create_task(collect(client, request("long", 1, tokens=2000)))
            assert await eventually(lambda: client.stats.tokens_out)
            closing = asyncio.create_task(client.close(drain_seconds=LONG if again else 0.3))
            assert await eventually(lambda: client.status.state == "draining")
            with pytest.raises(RequestFailed, match="draining"):
                await collect(client, request("late", 1))
            if again:
                assert len(ids((await short)["short"])) == 20 and not closing.done()
                await client.close()
            await closing
            last = (await long)["long"][-1]
            assert (last.finish, last.error) == ("error", "the server is shutting down")

    asyncio.run(main())


def test_an_engine_that_ignores_sigterm_is_killed() -> None:
    async def main() -> None:
        async with engine(patience=Patience(grace=0.2)) as client:
            await client.ready()
            pid = client.pid
            os.kill(pid or 0, signal.SIGSTOP)  # it cannot even hear
            await asyncio.wait_for(client.close(), LONG)
            with pytest.raises(ProcessLookupError):
                os.kill(pid or 0, 0)

    asyncio.run(main())


def test_what_cannot_be_loaded_fails_at_once_and_says_why() -> None:
    async def main() -> None:
        async with engine("--refuse") as client:
            waiting = asyncio.create_task(collect(client, request("a", 1)))
            assert await client.wait_failed() == "model.safetensors: 12 bytes are missing"
            assert client.status.state == "failed" and client.epoch == 1
            with pytest.raises(BloomeryError, match="12 bytes are missing"):
                await client.ready()
            (error,) = (await waiting)["a"]
            assert (error.finish, error.error) == ("error", "the engine has failed")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), "exited with status 3"),
        ((sys.executable, "-c", SLOW_END), "exited with status 4"),
        (("/nowhere/to/be/found",), "could not be started"),
        (
            (sys.executable, "-c", "import os, sys; os.write(int(sys.argv[1]), b'HTTP/1.1 400')"),
            "broke the protocol",
        ),
    ],
    ids=["exits", "exits slowly", "absent", "babbles"],
)
def test_restarts_are_bounded(bad: tuple[str, ...], why: str) -> None:
    async def main() -> None:
        client = EngineClient(plan(), bad, Patience(restarts=2, pause=0.01))
        await client.start()
        waiting = asyncio.create_task(collect(client, request("a", 1)))
        detail = await asyncio.wait_for(client.wait_failed(), LONG)
        assert "died 3 times in a row" in detail and why in detail and client.epoch == 3
        assert (await waiting)["a"][-1].finish == "error"
        await client.close()
        assert client.status.state == "failed"

    asyncio.run(main())


def test_a_thousand_small_requests() -> None:
    async def main() -> None:
        async with engine("--quick", max_num_seqs=256, max_num_batched_tokens=2048) as client:
            asked = [request(str(number), *[number % 5] * 10, tokens=16) for number in range(1000)]
            await client.ready()
            os.kill(client.pid or 0, signal.SIGSTOP)  # until all have been sent
            readers = [asyncio.create_task(collect(client, one)) for one in asked]
            assert await eventually(
                lambda: all(entry.sent for entry in client.journal.entries.values())
            )
            os.kill(client.pid or 0, signal.SIGCONT)
            answers = await asyncio.gather(*readers)
            for one, got in zip(asked, answers):
                assert ids(got[one.id]) == [(10 + position) % 7 for position in range(16)]
            stats = await idle(client)
            assert stats.tokens_out == 16_000 and client.epoch == 1 and stats.steps < 400

    asyncio.run(main())


def test_who_waits_too_long_for_an_engine_is_told_so() -> None:
    async def main() -> None:
        async with engine("--load", "100", patience=Patience(queue=0.3)) as client:
            (end,) = (await collect(client, request("a", 1)))["a"]
            assert (end.finish, end.ids) == ("deadline", ()) and not client.journal.entries

    asyncio.run(main())


def test_ready_is_an_engine_that_makes_progress() -> None:
    async def main() -> None:
        async with engine("--delay", "0.01", patience=Patience(silence=6.0, first=6.0)) as client:
            await client.ready()
            await collect(client, request("a", 1, tokens=40))
            assert client.status.state == "ready"
            os.kill(client.pid or 0, signal.SIGSTOP)
            while client.status.state == "ready":
                await asyncio.sleep(0.05)
            assert client.status.state == "stalled" and client.epoch == 1, (
                "doubted before it is replaced"
            )
            os.kill(client.pid or 0, signal.SIGCONT)
            while client.status.state != "ready":
                await asyncio.sleep(0.05)
            assert client.epoch == 1

    asyncio.run(main())

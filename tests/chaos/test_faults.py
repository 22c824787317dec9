"""Short forms of what benchmarks/reliability.py does at length, on the real two processes."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
from pathlib import Path

import pytest

from benchmarks.reliability import LONG, alive, idle, text_of
from tests.chaos.bodies import body
from tests.chaos.files import BYTES, trial
from tests.chaos.files import SECONDS as OF_A_FILE
from tests.chaos.http import Refused, events, request, served, status
from tests.waiting import LONG as SECONDS
from tests.waiting import until


def test_damaged_files() -> None:
    seen, slowest, grown = trial(400, 7)
    assert seen["refused"] > 200 and slowest < OF_A_FILE and grown < BYTES


def test_health_is_true_and_streams_outlive_a_stopped_engine(tmp_path: Path) -> None:
    async def main(port: int, engine: int) -> None:
        want = await text_of(port, LONG | {"max_tokens": 80})
        streams = [asyncio.create_task(text_of(port, LONG | {"max_tokens": 80})) for _ in range(4)]
        await asyncio.sleep(0.2)
        os.kill(engine, signal.SIGSTOP)
        while await status(port, "/ready") == 200:
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*streams) == [want] * 4
        assert math.isfinite(await idle(port))

    with served(tmp_path, "--engine", "--speaker --delay 0.01", "--silence", "3") as server:
        asyncio.run(main(server.port, server.children("engine")[0]))


def test_a_signal_lets_answers_end_for_a_while(tmp_path: Path) -> None:
    begun = [asyncio.Event(), asyncio.Event()]

    async def long(port: int) -> str:
        try:
            await text_of(port, LONG | {"max_tokens": 1900}, begun[0].set)
        except RuntimeError as error:
            return str(error)
        return ""

    async def main(port: int) -> None:
        short = asyncio.create_task(text_of(port, LONG | {"max_tokens": 20}, begun[1].set))
        endless = asyncio.create_task(long(port))
        for event in begun:
            await event.wait()
        server.process.terminate()
        assert await short
        assert await endless == "the server is shutting down"  # an event, not a cut

    with served(tmp_path, "--engine", "--quick --delay 0.05", "--drain", "4") as server:
        pids = server.children("engine") + server.children("apart")
        asyncio.run(main(server.port))
        assert server.process.wait(SECONDS) == 0
        assert until(lambda: not any(map(alive, pids)))


def test_a_second_signal_is_heard_at_once(tmp_path: Path) -> None:
    async def main(port: int) -> None:
        async for _ in events(port, "/v1/completions", LONG | {"max_tokens": 1900}):
            server.process.terminate()
            while await status(port, "/ready") == 200:  # two signals at once would be one
                await asyncio.sleep(0.02)
            server.process.terminate()
            return

    with served(tmp_path, "--engine", "--quick --delay 0.1", "--drain", "180") as server:
        asyncio.run(main(server.port))
        assert server.process.wait(SECONDS) == 0


def test_a_killed_server_leaves_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path, "--engine", "--quick --delay 0.01") as server:
        assert until(
            lambda: server.children("engine") and server.children("apart")
        )  # which follow the engine
        pids = server.children("engine") + server.children("apart")
        server.process.kill()
        assert until(
            lambda: not any(map(alive, pids))
        )  # a text process that is still importing ends when it has


def test_wrong_bodies(tmp_path: Path) -> None:
    chance = random.Random(3)
    canary = socket.create_server(("127.0.0.1", 0))
    canary.settimeout(0.2)

    async def main(port: int) -> None:
        for _ in range(60):
            made = [body(chance) for _ in range(5)]
            found = await asyncio.gather(
                *(request(port, "POST", path, data) for path, data in made)
            )
            assert all(answer.status < 500 for answer in found), [answer.status for answer in found]
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/"
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        for content in (parts, f"![picture]({url})"):
            await request(
                port,
                "POST",
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": content}]},
            )
        await request(
            port,
            "POST",
            "/generate",
            {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}},
        )
        with pytest.raises(TimeoutError):
            canary.accept()  # nothing is fetched on behalf of a request

    with canary, served(tmp_path) as server:
        asyncio.run(main(server.port))


def test_a_queue_that_is_too_long(tmp_path: Path) -> None:
    async def main(port: int) -> None:
        begun = [asyncio.Event(), asyncio.Event()]
        busy = [
            asyncio.create_task(text_of(port, LONG | {"max_tokens": 200}, one.set)) for one in begun
        ]
        for event in begun:
            await event.wait()
        with pytest.raises(Refused, match="504"):
            await text_of(port, LONG | {"max_tokens": 5})
        for task in busy:
            task.cancel()

    limits = "queue_seconds=1,keepalive_seconds=20"
    options = ("--engine", "--speaker --delay 0.1", "--sequences", "2", "--policy", "fcfs")
    with served(tmp_path, *options, "--limits", limits) as server:
        asyncio.run(main(server.port))

"""Short forms of what benchmarks/reliability.py does at length, on the real two processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from benchmarks.reliability import LONG, alive, idle, text_of
from tests.chaos.bodies import body
from tests.chaos.files import BYTES, SECONDS, trial
from tests.chaos.http import Refused, events, request, served, status


def test_damaged_files() -> None:
    seen, slowest, grown = trial(400, 7)
    assert seen["refused"] > 200 and slowest < SECONDS and grown < BYTES


def test_health_is_true_and_streams_outlive_a_stopped_engine(tmp_path: Path) -> None:
    async def main(port: int, engine: int) -> None:
        want = await text_of(port, LONG | {"max_tokens": 80})
        streams = [asyncio.create_task(text_of(port, LONG | {"max_tokens": 80})) for _ in range(4)]
        await asyncio.sleep(0.2)
        os.kill(engine, signal.SIGSTOP)
        begun = time.monotonic()
        while await status(port, "/ready") == 200:
            await asyncio.sleep(0.05)
        assert time.monotonic() - begun < 10
        assert await asyncio.gather(*streams) == [want] * 4
        assert await idle(port) < 2

    with served(tmp_path, "--engine", "--speaker --delay 0.01", "--silence", "3") as server:
        asyncio.run(main(server.port, server.children("engine")[0]))


def test_a_signal_lets_answers_end_for_a_while(tmp_path: Path) -> None:
    async def long(port: int) -> str:
        try:
            await text_of(port, LONG | {"max_tokens": 1900})
        except RuntimeError as error:
            return str(error)
        return ""

    async def main(port: int) -> None:
        short = asyncio.create_task(text_of(port, LONG | {"max_tokens": 60}))
        endless = asyncio.create_task(long(port))
        await asyncio.sleep(0.3)
        server.process.terminate()
        assert await short
        assert await endless == "the server is shutting down"  # an event, not a cut

    with served(tmp_path, "--engine", "--quick --delay 0.02", "--drain", "2") as server:
        pids = server.children("engine") + server.children("apart")
        asyncio.run(main(server.port))
        assert server.process.wait(20) == 0
        assert not any(map(alive, pids))


def test_a_second_signal_is_heard_at_once(tmp_path: Path) -> None:
    async def main(port: int) -> None:
        async for _ in events(port, "/v1/completions", LONG | {"max_tokens": 1900}):
            server.process.terminate()
            await asyncio.sleep(0.2)
            server.process.terminate()
            return

    with served(tmp_path, "--engine", "--quick --delay 0.02") as server:
        asyncio.run(main(server.port))
        begun = time.monotonic()
        assert server.process.wait(20) == 0 and time.monotonic() - begun < 10


def test_a_killed_server_leaves_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path, "--engine", "--quick --delay 0.01") as server:
        pids: list[int] = []
        warm = time.monotonic() + 20
        while len(pids) < 2 and time.monotonic() < warm:  # texts' processes follow the engine
            pids = server.children("engine") + server.children("apart")
            time.sleep(0.05)
        assert len(pids) == 2
        server.process.kill()
        end = time.monotonic() + 20  # a text process that is still importing ends when it has
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.02)
        assert not any(map(alive, pids))


def test_wrong_bodies_and_a_queue_that_is_too_long(tmp_path: Path) -> None:
    chance = random.Random(3)
    canary = socket.create_server(("127.0.0.1", 0))
    canary.settimeout(0.2)

    async def main(port: int) -> None:
        for _ in range(60):
            made = [body(chance) for _ in range(5)]
            found = await asyncio.gather(*(request(port, "POST", path, data) for path, data in made))
            assert all(answer.status < 500 for answer in found), [answer.status for answer in found]
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/"
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        for content in (parts, f"![picture]({url})"):
            await request(port, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        await request(port, "POST", "/generate", {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}})
        with pytest.raises(TimeoutError):
            canary.accept()  # nothing is fetched on behalf of a request
        busy = [asyncio.create_task(text_of(port, LONG | {"max_tokens": 200})) for _ in range(2)]
        await asyncio.sleep(0.3)
        with pytest.raises(Refused, match="504"):
            await text_of(port, LONG | {"max_tokens": 5})
        for task in busy:
            task.cancel()

    limits = "queue_seconds=1,keepalive_seconds=20"
    options = ("--engine", "--speaker --delay 0.03", "--sequences", "2", "--limits", limits)
    with canary, served(tmp_path, *options) as server:
        asyncio.run(main(server.port))

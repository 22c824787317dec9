"""Short forms of the faults in benchmarks/reliability.py, on the real two processes."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.chaos.damaged_files import MAX_FILE_SECONDS, MAX_GROWTH_BYTES, try_damaged_files
from tests.chaos.http import (
    LONG_COMPLETION,
    RefusedError,
    get_status,
    is_alive,
    read_completion,
    run_server,
    seconds_until_idle,
    send_request,
    stream_events,
)
from tests.chaos.invalid_bodies import random_invalid_body
from tests.waiting import WAIT_SECONDS, wait_until


def test_damaged_files_are_refused_quickly_and_with_little_memory() -> None:
    report = try_damaged_files(400, 7)
    assert report.outcomes["refused"] > 200
    assert report.slowest_seconds < MAX_FILE_SECONDS
    assert report.growth_bytes < MAX_GROWTH_BYTES


def test_a_stopped_engine_is_not_ready_and_streams_survive_it(tmp_path: Path) -> None:
    async def main(port: int, engine_pid: int) -> None:
        body = LONG_COMPLETION | {"max_tokens": 80}
        expected = await read_completion(port, body)
        streams = [asyncio.create_task(read_completion(port, body)) for _ in range(4)]
        await asyncio.sleep(0.2)
        os.kill(engine_pid, signal.SIGSTOP)
        while await get_status(port, "/ready") == 200:
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*streams) == [expected] * 4
        assert math.isfinite(await seconds_until_idle(port))

    options = ("--engine", "--scripted --delay 0.01", "--step-timeout", "2")
    with run_server(tmp_path, *options) as server:
        asyncio.run(main(server.port, server.children("engine")[0]))


def test_after_a_signal_answers_may_end_for_a_while(tmp_path: Path) -> None:
    started = [asyncio.Event(), asyncio.Event()]

    async def read_long(port: int) -> str:
        try:
            await read_completion(port, LONG_COMPLETION | {"max_tokens": 1900}, started[0].set)
        except RuntimeError as error:
            return str(error)
        return ""

    async def main(port: int) -> None:
        short_body = LONG_COMPLETION | {"max_tokens": 20}
        short = asyncio.create_task(read_completion(port, short_body, started[1].set))
        long = asyncio.create_task(read_long(port))
        for event in started:
            await event.wait()
        server.process.terminate()
        while await get_status(port, "/ready") == 200:
            await asyncio.sleep(0.02)
        # The server still listens and says when to come back.
        refused = await send_request(port, "POST", "/v1/completions", short_body)
        assert (refused.status, refused.headers["retry-after"]) == (503, "10")
        assert refused.headers["connection"] == "close"
        assert "shutting down" in refused.json["error"]["message"]
        assert await short
        assert await long == "the server is shutting down"  # an event, not a cut connection

    options = ("--engine", "--instant --delay 0.05", "--drain-seconds", "4")
    with run_server(tmp_path, *options) as server:
        pids = server.children("engine") + server.children("tokenizer_pool")
        asyncio.run(main(server.port))
        assert server.process.wait(WAIT_SECONDS) == 0
        assert wait_until(lambda: not any(map(is_alive, pids)))
        assert re.search(r"waiting up to 4 s for [12] open request", server.log.read_text())


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    async def main(port: int) -> None:
        body = LONG_COMPLETION | {"max_tokens": 1900}
        async for _ in stream_events(port, "/v1/completions", body):
            server.process.terminate()
            while await get_status(port, "/ready") == 200:  # two signals at once would be one
                await asyncio.sleep(0.02)
            server.process.terminate()
            return

    options = ("--engine", "--instant --delay 0.1", "--drain-seconds", "180")
    with run_server(tmp_path, *options) as server:
        asyncio.run(main(server.port))
        assert server.process.wait(WAIT_SECONDS) == 0
        assert "stopping at once; cut off: 1 open request" in server.log.read_text()


def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    with run_server(tmp_path, "--engine", "--instant --delay 0.01") as server:
        # Tokenizer workers start after the engine.
        assert wait_until(lambda: server.children("engine") and server.children("tokenizer_pool"))
        pids = server.children("engine") + server.children("tokenizer_pool")
        server.process.kill()
        # A tokenizer worker that is still importing exits when it has finished that.
        assert wait_until(lambda: not any(map(is_alive, pids)))


def test_invalid_bodies_give_no_server_error_and_nothing_is_fetched(tmp_path: Path) -> None:
    chance = random.Random(3)
    canary = socket.create_server(("127.0.0.1", 0))
    canary.settimeout(0.2)

    async def main(port: int) -> None:
        for _ in range(60):
            bodies = [random_invalid_body(chance) for _ in range(5)]
            requests = [send_request(port, "POST", path, data) for path, data in bodies]
            statuses = [response.status for response in await asyncio.gather(*requests)]
            assert all(status < 500 for status in statuses), statuses
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/"
        image_parts = [{"type": "image_url", "image_url": {"url": url}}]
        for content in (image_parts, f"![picture]({url})"):
            chat = {"messages": [{"role": "user", "content": content}]}
            await send_request(port, "POST", "/v1/chat/completions", chat)
        generate = {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}}
        await send_request(port, "POST", "/generate", generate)
        with pytest.raises(TimeoutError):
            canary.accept()  # nothing is fetched on behalf of a request

    with canary, run_server(tmp_path) as server:
        asyncio.run(main(server.port))


def test_a_request_that_queues_too_long_is_refused(tmp_path: Path) -> None:
    async def main(port: int) -> None:
        started = [asyncio.Event(), asyncio.Event()]
        long_body = LONG_COMPLETION | {"max_tokens": 200}
        running = [
            asyncio.create_task(read_completion(port, long_body, event.set)) for event in started
        ]
        for event in started:
            await event.wait()
        with pytest.raises(RefusedError, match="504"):
            await read_completion(port, LONG_COMPLETION | {"max_tokens": 5})
        for task in running:
            task.cancel()

    limits = "queue_seconds=1,keepalive_seconds=20"
    options = ("--engine", "--scripted --delay 0.1", "--max-num-seqs", "2", "--policy", "fcfs")
    with run_server(tmp_path, *options, "--limits", limits) as server:
        asyncio.run(main(server.port))

"""A watermark request on a real served CPU engine, whose process preloads torch before its plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.chaos.http import free_port
from tests.waiting import wait_until


def engine_pids(server: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if "engine_main" in command_line(pid)]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[httpx2.Client, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [sys.executable, "-m", "bloomery", "serve", "--device", "cpu", "--port", str(port)]
    options = ["--threads", "1", "--kv-cache-gib", "0.2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            assert wait_until(lambda: process.poll() is not None or is_ready(client), 240)
            assert process.poll() is None, (tmp_path / "log").read_text()[-500:]
            yield client, process
    finally:
        process.kill()
        process.wait(30)


def test_watermark_requests_succeed_and_the_engine_survives_them(
    server: tuple[httpx2.Client, subprocess.Popen[bytes]],
) -> None:
    """A second one matters: a server whose engine dies again and again would stop."""
    client, process = server
    (engine_pid,) = engine_pids(process)
    parameters = {"max_new_tokens": 8, "watermark": True, "details": True}
    body = {"inputs": "The smith heats the iron", "parameters": parameters}
    for _ in range(2):
        response = client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["details"]["generated_tokens"] == 8
        assert engine_pids(process) == [engine_pid], "the request killed the engine"
    streamed = client.post("/generate_stream", json=body)
    events = [line for line in streamed.text.splitlines() if line.startswith("data:")]
    assert len(events) == 8 and '"generated_text":null' not in events[-1].replace(" ", "")
    assert engine_pids(process) == [engine_pid], "the request killed the engine"

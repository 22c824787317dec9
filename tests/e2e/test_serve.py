"""`bloomery serve` as a person starts it: a real process, its engine killed under it, stopped by a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.chaos.http import free_port
from tests.waiting import until

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[httpx2.Client, subprocess.Popen[bytes], Path]]:
    """Its log goes to a file: a pipe that nobody reads is full at some time, and who writes to it stands still."""
    port = free_port()
    log = tmp_path / "log"
    line = [
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--port",
        str(port),
        "--threads",
        "1",
        "--kv-cache-gib",
        "0.2",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen([*line, "--no-native"], stderr=file)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            assert until(lambda: process.poll() is not None or ready(client), 240), (
                "the server does not get ready"
            )
            assert process.poll() is None, "the server has ended"
            yield client, process, log
    finally:
        process.kill()
        process.wait(30)


def ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx2.HTTPError:
        return False


def engine_of(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(
        int(pid) for pid in children if "engine_main" in Path(f"/proc/{pid}/cmdline").read_text()
    )


def test_a_stream_outlives_its_engine_and_a_signal_ends_the_server(server: tuple) -> None:
    client, process, log = server
    entry = GOLDEN[2]
    body = {
        "prompt": entry["prompt"],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    ids: list[int] = []
    killed = False
    with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if len(ids) >= 10 and not killed:
                os.kill(engine_of(process), signal.SIGKILL)
                killed = True
    assert killed
    assert ids == entry["ids"][:60], "a gap, a repeat or another text"
    page = client.get("/", headers={"accept": "text/html"})
    assert page.status_code == 200 and "<title>" in page.text
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    logs = log.read_text()
    assert entry["prompt"] not in logs
    assert re.search(r"killed by signal 9", logs)
    assert "Traceback" not in logs


def test_a_public_address_without_a_key_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bloomery", "serve", "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "there is no API key" in done.stderr

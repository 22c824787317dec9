"""`bloomery serve` in a real process whose engine is killed; a signal ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from tests.chaos.http import free_port
from tests.waiting import wait_until

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
OPTIONS = ("--threads", "1", "--kv-cache-gib", "0.2", "--no-cpu-kernels")


class ServedProcess(NamedTuple):
    client: httpx2.Client
    process: subprocess.Popen[bytes]
    log_file: Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedProcess]:
    """A server with the embedded model.

    Its log goes to a file: a pipe that no one reads would fill up and block the server.
    """
    port = free_port()
    log_file = tmp_path / "log"
    command = [sys.executable, "-m", "bloomery", "serve", "--port", str(port), *OPTIONS]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            assert wait_until(lambda: process.poll() is not None or is_ready(client), 240), (
                "the server does not get ready"
            )
            assert process.poll() is None, "the server has exited"
            yield ServedProcess(client, process, log_file)
    finally:
        process.kill()
        process.wait(30)


def is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx2.HTTPError:
        return False


def engine_pid(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(
        int(pid) for pid in children if "engine_main" in Path(f"/proc/{pid}/cmdline").read_text()
    )


def test_a_stream_survives_its_engine_and_a_signal_ends_the_server(server: ServedProcess) -> None:
    client, process, log_file = server
    entry = GOLDEN[2]
    body = {
        "prompt": entry["prompt"],
        "max_tokens": 60,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    killed = False
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                token_ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if len(token_ids) >= 10 and not killed:
                os.kill(engine_pid(process), signal.SIGKILL)
                killed = True
    assert killed
    assert token_ids == entry["ids"][:60], "a gap, a repetition or another text"
    metrics = client.get("/metrics").text
    assert re.search(r"^bloomery_engine_restarts_total\{.*\} 1\.0$", metrics, re.MULTILINE)
    page = client.get("/", headers={"accept": "text/html"})
    assert page.status_code == 200
    assert "<title>" in page.text
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    log = log_file.read_text()
    assert entry["prompt"] not in log
    assert re.search(r"killed by signal 9", log)
    assert "Traceback" not in log


def test_a_public_address_without_an_api_key_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bloomery", "serve", "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "there is no API key" in done.stderr

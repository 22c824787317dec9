"""The list of bad requests against a server of two processes: one under python -O, or a running
one.

`benchmarks/reliability.py bad` runs it in four ways: plain, under python -O, 16 at a time, and
beside 64 live streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.chaos.http import run_server
from tests.server.conftest import HttpTestServer
from tests.server.test_errors import *  # noqa: F403
from tests.server.test_errors import canary_answer
from tests.waiting import WAIT_SECONDS, wait_until


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpTestServer]:
    running_port = request.config.getoption("--server")
    folder: Path = tmp_path_factory.mktemp("server")
    if running_port:
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{running_port}", timeout=WAIT_SECONDS
        ) as client:
            yield HttpTestServer(client, None, ("127.0.0.1", running_port))
        return
    options = ("--engine", "--scripted --blocks 512 --context 512", "--limits", "requests=1024")
    with run_server(folder, *options, python=("-O",)) as own:
        engine = own.children("engine")
        with httpx2.Client(base_url=f"http://127.0.0.1:{own.port}", timeout=WAIT_SECONDS) as client:
            yield HttpTestServer(client, None, ("127.0.0.1", own.port))
        assert own.children("engine") == engine, "an engine was lost on the way"
        assert "Traceback" not in own.log.read_text()


@pytest.fixture(autouse=True)
def server_stays_healthy(server: HttpTestServer, expected_canary: str) -> Iterator[None]:
    """Others may be there at the same time: what is held is not ours to judge."""
    yield
    assert canary_answer(server) == expected_canary
    assert server.get("/ready").status_code == 200


def test_the_engine_holds_nothing_in_the_end(
    server: HttpTestServer, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--server"):
        pytest.skip("others use that server")

    def free() -> bool:
        lines = server.get("/metrics").text.splitlines()
        return any(
            line.startswith("vllm:kv_cache_usage_perc") and line.endswith(" 0.0") for line in lines
        )

    assert wait_until(free)

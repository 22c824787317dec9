"""The list of bad requests once more, against a server of two processes: under python -O here, or one that is running.

`benchmarks/reliability.py bad` runs it four ways: plain, python -O, 16 at a time, beside 64 live streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.chaos.http import served
from tests.server.conftest import Running
from tests.server.test_bad_requests import *  # noqa: F403
from tests.server.test_bad_requests import canary
from tests.waiting import LONG, until


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    given = request.config.getoption("--server")
    folder: Path = tmp_path_factory.mktemp("server")
    if given:
        with httpx2.Client(base_url=f"http://127.0.0.1:{given}", timeout=LONG) as client:
            yield Running(client, None, ("127.0.0.1", given))
        return
    options = ("--engine", "--speaker --blocks 512 --context 512", "--limits", "requests=1024")
    with served(folder, *options, python=("-O",)) as own:
        engine = own.children("engine")
        with httpx2.Client(base_url=f"http://127.0.0.1:{own.port}", timeout=LONG) as client:
            yield Running(client, None, ("127.0.0.1", own.port))
        assert own.children("engine") == engine, "an engine was lost on the way"
        assert "Traceback" not in own.log.read_text()


@pytest.fixture(autouse=True)
def unharmed(server: Running, song: str) -> Iterator[None]:
    """Others may be there at the same time: what is held is not ours to judge."""
    yield
    assert canary(server) == song
    assert server.get("/ready").status_code == 200


def test_the_engine_holds_nothing_in_the_end(
    server: Running, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--server"):
        pytest.skip("others use that server")

    def free() -> bool:
        lines = server.get("/metrics").text.splitlines()
        return any(
            line.startswith("vllm:kv_cache_usage_perc") and line.endswith(" 0.0") for line in lines
        )

    assert until(free)

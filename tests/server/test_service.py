"""Requests while the engine is not ready, and texts that go to the tokenizer worker pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bloomery.messages import EngineStatus
from bloomery.server.service import resident_memory_bytes
from tests.server.conftest import HttpTestServer


@pytest.mark.parametrize("state", ["loading", "failed", "draining", "restarting", "closed"])
def test_health_and_requests_while_the_engine_is_not_ready(
    serve: Callable[..., HttpTestServer], state: str
) -> None:
    server = serve()
    server.backend.status = EngineStatus(state, 0.25, "reading weights")
    if state == "loading":
        server.backend.capacity = None
    for path in ("/health", "/ping", "/"):
        response = server.get(path)
        assert response.status_code == 503
        assert response.json() == {"error": "unhealthy", "error_type": "healthcheck"}
    assert server.get("/live").status_code == 200
    ready = server.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {
        "state": state,
        "model": "speaker",
        "progress": 0.25,
        "detail": "reading weights",
    }
    for path in ("/info", "/v1/models", "/stats", "/metrics", "/docs"):
        assert server.get(path).status_code == 200
    assert server.get("/", headers={"accept": "text/html"}).status_code == 200
    for path, body in (
        ("/v1/completions", {"prompt": "The iron", "max_tokens": 3}),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
    ):
        response = server.post(path, body)
        if state == "restarting":
            assert response.status_code == 200
            continue
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        closes = response.headers.get("connection") == "close"
        assert closes == (state in ("draining", "closed"))


def test_resident_memory_is_measured() -> None:
    assert resident_memory_bytes() > 10 << 20


def test_long_texts_are_tokenized_in_a_worker_process(
    serve: Callable[..., HttpTestServer],
) -> None:
    """While the worker is stopped, the text waits and other requests are answered."""
    server = serve(max_model_len=60_000, num_blocks=8000)
    body = {"inputs": "Iron, ash and slag! " * 500}
    before = child_processes()
    expected = server.post("/tokenize", body).json()
    (worker,) = child_processes() - before
    os.kill(worker, signal.SIGSTOP)
    responses: list[object] = []
    thread = threading.Thread(
        target=lambda: responses.append(server.post("/tokenize", body).json())
    )
    thread.start()
    for _ in range(20):
        assert server.get("/live").status_code == 200
    thread.join(0.3)
    assert not responses, "the text was not tokenized by the worker"
    os.kill(worker, signal.SIGCONT)
    thread.join()
    assert responses == [expected]


def child_processes() -> set[int]:
    """Process ids of the children of this process, over all its threads."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            children.update(map(int, (task / "children").read_text().split()))
    return children

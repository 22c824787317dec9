"""Requests while the engine is not ready, and texts that go to the tokenizer worker pool."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.messages import CacheGroup, EngineStatus
from bloomery.server.service import InferenceService, ServerSettings, resident_memory_bytes
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer
from tests.server.scripted_engine import InProcessEngine
from tests.waiting import wait_until_async


@pytest.mark.parametrize("state", ["loading", "failed", "draining", "restarting", "closed"])
def test_health_and_requests_while_the_engine_is_not_ready(
    serve: Callable[..., HttpTestServer], state: str
) -> None:
    server = serve()
    server.backend.status = EngineStatus(state, 0.25, "reading weights")
    if state == "loading":
        server.backend.capacity = None
    assert server.get("/").status_code == 503
    for path in ("/health", "/ping"):
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


def test_a_worker_is_prepared_for_grammars_once_the_engine_is_ready(tokenizer: Tokenizer) -> None:
    """The first request with a grammar need not wait, and the engine loads undisturbed."""

    async def main() -> None:
        backend = InProcessEngine(tokenizer)
        capacity = backend.capacity
        backend.capacity = None
        settings = ServerSettings(model="speaker", warm=True, prepare_grammars=True)
        service = InferenceService(backend, tokenizer, settings)
        pool = service.tokenizer_pool
        service.warm_up()
        try:
            assert await wait_until_async(lambda: pool.idle_workers)
            assert not any(worker.has_vocabulary for worker in pool.idle_workers)
            backend.capacity = capacity
            assert await wait_until_async(
                lambda: any(worker.has_vocabulary for worker in pool.idle_workers)
            )
        finally:
            pool.close()

    asyncio.run(main())


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


@pytest.mark.parametrize("has_states", [False, True])
def test_an_engine_with_states_hears_where_the_system_message_ends(
    serve: Callable[..., HttpTestServer], tokenizer: Tokenizer, has_states: bool
) -> None:
    server = serve()
    if has_states:
        groups = (CacheGroup(), CacheGroup(state_blocks=1))
        server.backend.capacity = replace(server.backend.capacity, cache_groups=groups)
    system = {"role": "system", "content": "Answer in iambs."}
    messages = [system, {"role": "user", "content": "The iron"}]
    body = {"model": "speaker", "messages": messages, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200
    request = server.backend.received[-1]
    shared = tokenizer.decode(list(request.prompt[: request.system_length]), skip_special=False)
    expected = "<|im_start|>system\nAnswer in iambs.<|im_end|>\n<|im_start|>user\n"
    assert shared == (expected if has_states else "")


def child_processes() -> set[int]:
    """Process ids of the children of this process, over all its threads."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            children.update(map(int, (task / "children").read_text().split()))
    return children

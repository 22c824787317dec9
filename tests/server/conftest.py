"""Real servers on real sockets: uvicorn in a thread, the application in front of an engine of the tests'."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import uvicorn

from bloomery.server.app import create_app
from bloomery.server.protocol import bounded
from bloomery.server.service import Settings
from bloomery.text.tokenizer import Tokenizer
from tests.server.speaker import InProcess, words
from tests.waiting import LONG, until


@dataclass
class Running:
    client: httpx2.Client
    backend: Any
    address: tuple[str, int]

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(path, **options)

    def raw(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=LONG)


class Attended:
    """The application with what must be done in its event loop before the first request and after the last."""

    def __init__(self, app: Any, before: Any, after: Any):
        self.app = app
        self.before = before
        self.after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def say(message: Any) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self.before()
            if message["type"] == "lifespan.shutdown.complete":
                await self.after()
            await send(message)

        await self.app(scope, receive, say if scope["type"] == "lifespan" else send)


def small() -> int:
    """Bytes of memory; the real figure is that of every test in this process."""
    return 1 << 20


def run(
    backend: Any,
    tokenizer: Tokenizer,
    settings: Settings,
    exit: ExitStack,
    before: Any = None,
    after: Any = None,
    traces: Any = None,
    measure: Callable[[], int] = small,
) -> Running:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 16384
    )  # so that it does not take megabytes to fill one
    exit.callback(listener.close)
    app: Any = create_app(backend, tokenizer, settings, traces)
    service = getattr(app, "app", app).service
    service.measure = measure
    apart = service.apart
    if before:
        app = Attended(app, before, after)
    config = uvicorn.Config(
        app,
        http=bounded(settings.limits),
        log_level="critical",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()

    def stop() -> None:
        # a forced exit skips what must be done after
        server.should_exit = True
        server.force_exit = not before
        thread.join(LONG)
        assert not thread.is_alive(), "the server does not end"
        apart.close()  # which a forced exit leaves to the end of the process

    exit.callback(stop)
    assert until(lambda: server.started), "the server does not start"
    address = listener.getsockname()
    client = httpx2.Client(base_url=f"http://127.0.0.1:{address[1]}", timeout=LONG)
    exit.callback(client.close)
    return Running(client, backend, address)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return words()


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., Running]]:
    """A server of the test's own: options of the engine by name, settings as given."""
    with ExitStack() as exit:

        def start(
            settings: Settings | None = None, measure: Callable[[], int] = small, **options: Any
        ) -> Running:
            made = settings or Settings(model="speaker")
            return run(InProcess(tokenizer, **options), tokenizer, made, exit, measure=measure)

        yield start


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that tests of a module share."""
    with ExitStack() as exit:
        yield run(
            InProcess(tokenizer),
            tokenizer,
            Settings(model="speaker", aliases=("org/speaker-1",)),
            exit,
        )

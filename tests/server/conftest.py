"""Fixtures that start real HTTP servers: uvicorn in a thread, before a scripted engine."""

from __future__ import annotations

import asyncio
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
from bloomery.server.limits import bounded_protocol
from bloomery.server.service import ServerSettings
from bloomery.text.tokenizer import Tokenizer
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer
from tests.waiting import WAIT_SECONDS, wait_until


@dataclass
class HttpTestServer:
    """A running server: a client of it, its engine and its address."""

    client: httpx2.Client
    backend: Any
    address: tuple[str, int]

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(path, **options)

    def open_socket(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WAIT_SECONDS)


class LifespanHooks:
    """The application with coroutines to run in its event loop at startup and at shutdown."""

    def __init__(self, app: Any, on_startup: Any, on_shutdown: Any):
        self.app = app
        self.on_startup = on_startup
        self.on_shutdown = on_shutdown

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_after_hooks(message: Any) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self.on_startup()
            if message["type"] == "lifespan.shutdown.complete":
                await self.on_shutdown()
            await send(message)

        is_lifespan = scope["type"] == "lifespan"
        await self.app(scope, receive, send_after_hooks if is_lifespan else send)


class FastStopServer(uvicorn.Server):
    """A server that ends within 10 ms when it is told to exit by force.

    uvicorn looks at `should_exit` every 100 ms and then gives connections another 100 ms.
    """

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # connections that are idle close now


def small_memory() -> int:
    """A memory measurement of 1 MiB; the real one would count every test in this process."""
    return 1 << 20


def start_server(
    backend: Any,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    exit_stack: ExitStack,
    on_startup: Any = None,
    on_shutdown: Any = None,
    traces: Any = None,
    measure_memory: Callable[[], int] = small_memory,
) -> HttpTestServer:
    """Start a server that ends with `exit_stack`."""
    listener = socket.create_server(("127.0.0.1", 0))
    # A small send buffer, so that tests of slow readers need not fill megabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    exit_stack.callback(listener.close)
    app: Any = create_app(backend, tokenizer, settings, traces)
    service = getattr(app, "app", app).service
    service.measure_memory = measure_memory
    if on_startup:
        app = LifespanHooks(app, on_startup, on_shutdown)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(settings.limits),
        log_level="critical",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = FastStopServer(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        server.force_exit = not on_startup  # a forced exit would skip the shutdown hook
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "the server does not end"
        service.tokenizer_pool.close()  # a forced exit does not close it

    exit_stack.callback(stop)
    assert wait_until(lambda: server.started), "the server does not start"
    address = listener.getsockname()
    client = httpx2.Client(base_url=f"http://127.0.0.1:{address[1]}", timeout=WAIT_SECONDS)
    exit_stack.callback(client.close)
    return HttpTestServer(client, backend, address)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_test_tokenizer()


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., HttpTestServer]]:
    """A function that starts a server for one test; keyword arguments are engine options."""
    with ExitStack() as exit_stack:

        def start(
            settings: ServerSettings | None = None,
            measure_memory: Callable[[], int] = small_memory,
            **options: Any,
        ) -> HttpTestServer:
            return start_server(
                InProcessEngine(tokenizer, **options),
                tokenizer,
                settings or ServerSettings(model="speaker"),
                exit_stack,
                measure_memory=measure_memory,
            )

        yield start


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[HttpTestServer]:
    """A server that the tests of a module share."""
    settings = ServerSettings(model="speaker", aliases=("org/speaker-1",))
    with ExitStack() as exit_stack:
        yield start_server(InProcessEngine(tokenizer), tokenizer, settings, exit_stack)

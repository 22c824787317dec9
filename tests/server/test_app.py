"""The HTTP server as a whole: how it takes connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from bloomery.config import ServerConfig
from bloomery.serve import build_uvicorn_config
from bloomery.serve_main import open_listeners
from bloomery.server.app import InferenceServer, LoadingApp
from bloomery.server.limits import ServerLimits

NUM_CONNECTIONS = 120  # more than asyncio queues by default; some systems queue no more than 128


def test_a_burst_of_connections_waits_for_a_busy_server() -> None:
    """Without room in the queue, a client would try again only after a second."""

    async def connect_burst() -> None:
        listeners = open_listeners("127.0.0.1", 0)
        address = listeners[0].getsockname()
        config = build_uvicorn_config(LoadingApp(), ServerConfig(), ServerLimits())
        server = InferenceServer(config)
        serving = asyncio.create_task(server.serve(listeners))
        while not server.started:
            await asyncio.sleep(0.01)
        with contextlib.ExitStack() as clients:
            for _ in range(NUM_CONNECTIONS):
                # This blocks the event loop, so that the server accepts none of them.
                clients.enter_context(socket.create_connection(address, timeout=0.5))
        server.should_exit = True
        await serving

    asyncio.run(connect_burst())

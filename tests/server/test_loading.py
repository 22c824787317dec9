"""The server answers while the model is still being located or downloaded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bloomery.server.app import LoadingApp


class RecordingApp:
    """An ASGI application that records what it is asked for."""

    def __init__(self) -> None:
        self.scopes: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{step}"
                self.scopes.append(step)
                await send({"type": f"lifespan.{step}.complete"})
        else:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})


async def get(app: LoadingApp, path: str, accept: str = "*/*") -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"accept", accept.encode())]
    await app({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)
    response_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], response_headers, body


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/chat/completions", ["error", "message"]),
        ("/v1/messages", ["error", "message"]),
        ("/generate", ["error"]),
        ("/health", ["error"]),
    ],
)
def test_every_route_says_that_the_model_is_loading(path: str, message: list[str]) -> None:
    status, headers, body = asyncio.run(get(LoadingApp(), path))
    content = json.loads(body)
    for name in message:
        content = content[name]
    assert (status, headers["retry-after"]) == (503, "5")
    assert content == "the model is being loaded"


def test_probes_and_the_page() -> None:
    app = LoadingApp()
    status, _, body = asyncio.run(get(app, "/ready"))
    assert status == 503 and json.loads(body)["state"] == "loading"
    status, _, body = asyncio.run(get(app, "/live"))
    assert status == 200 and json.loads(body) == {"live": True}
    status, headers, body = asyncio.run(get(app, "/", "text/html"))
    assert status == 503 and headers["content-type"].startswith("text/html")
    assert b"http-equiv" in body, "the page opens the chat by itself"


def test_the_app_of_the_model_takes_over_and_is_shut_down() -> None:
    async def main() -> None:
        loading_app = LoadingApp()
        model_app = RecordingApp()
        to_server: asyncio.Queue[Any] = asyncio.Queue()
        from_server: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "lifespan"}
        lifespan = asyncio.create_task(loading_app(scope, to_server.get, from_server.put))
        to_server.put_nowait({"type": "lifespan.startup"})
        assert (await from_server.get())["type"] == "lifespan.startup.complete"
        assert (await get(loading_app, "/"))[0] == 503
        await loading_app.attach(model_app)
        assert (await get(loading_app, "/"))[0] == 204
        to_server.put_nowait({"type": "lifespan.shutdown"})
        assert (await from_server.get())["type"] == "lifespan.shutdown.complete"
        await lifespan
        assert model_app.scopes == ["lifespan", "startup", "http", "shutdown"]

    asyncio.run(main())

"""One real server for all clients: HTTP on a socket, an engine process, the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.client import EngineClient
from bloomery.server.service import ServerSettings
from bloomery.text.load import load_tokenizer
from tests.server.conftest import start_server
from tests.waiting import wait_until

KEY = "sk-test-key"
MODEL = "smollm2"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of the server, which requires KEY."""
    plan, artifact = build_engine_plan(
        EngineConfig(threads=1, kv_cache_gib=0.25, max_model_len=1024, device="cpu")
    )
    client = EngineClient(plan)
    settings = ServerSettings(model=MODEL, keys=(KEY,))
    with ExitStack() as exit_stack:
        server = start_server(
            client,
            load_tokenizer(artifact),
            settings,
            exit_stack,
            on_startup=client.start,
            on_shutdown=client.close,
        )
        is_ready = wait_until(lambda: server.get("/ready").status_code == 200, 240)
        assert is_ready, "the model does not get ready"
        yield f"http://127.0.0.1:{server.address[1]}"

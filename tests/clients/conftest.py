"""One real server for all clients: HTTP on a socket, the engine in a process of its own, the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bloomery.config import Config
from bloomery.describe import plan_for
from bloomery.engine.client import EngineClient
from bloomery.server.service import Settings
from bloomery.text.load import load_tokenizer
from tests.server.conftest import run
from tests.waiting import until

KEY = "sk-of-the-tests"
MODEL = "smollm2"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where the server is; it wants KEY."""
    plan, artifact = plan_for(
        Config(threads=1, kv_cache_gib=0.25, max_model_len=1024, device="cpu")
    )
    client = EngineClient(plan)
    settings = Settings(model=MODEL, keys=(KEY,))
    with ExitStack() as exit:
        server = run(
            client,
            load_tokenizer(artifact),
            settings,
            exit,
            before=client.start,
            after=client.close,
        )
        assert until(lambda: server.get("/ready").status_code == 200, 240), (
            "the model does not get ready"
        )
        yield f"http://127.0.0.1:{server.address[1]}"

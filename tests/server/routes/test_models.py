"""/v1/models in the forms of OpenAI and of Anthropic."""

from __future__ import annotations

import pytest

from tests.server.conftest import HttpTestServer

ANTHROPIC_HEADERS = {"anthropic-version": "2023-06-01"}


def test_openai_lists_every_name(server: HttpTestServer) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["speaker", "org/speaker-1"]
    assert all(model["object"] == "model" for model in listed["data"])


def test_anthropic_gets_its_own_form(server: HttpTestServer) -> None:
    types = pytest.importorskip("anthropic.types")
    page = server.get("/v1/models", headers=ANTHROPIC_HEADERS).json()
    models = [types.ModelInfo.model_validate(model, strict=False) for model in page["data"]]
    assert [model.id for model in models] == ["speaker", "org/speaker-1"]
    assert page["first_id"] == "speaker" and page["last_id"] == "org/speaker-1"
    assert page["has_more"] is False
    one = server.get("/v1/models/speaker", headers=ANTHROPIC_HEADERS).json()
    assert types.ModelInfo.model_validate(one).max_tokens == 512

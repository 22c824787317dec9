"""Requests with images, in every dialect: to a vision model of which only the text part is served,
and to a text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bloomery.server.service import ServerSettings
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer, start_server
from tests.server.scripted_engine import InProcessEngine

IMAGE_URL = "data:image/png;base64,iVBORw0KGgo="
EXPLANATION = "speaker is a vision model, and this server runs its text part only"


def user_message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


OPENAI_IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
RESPONSES_IMAGE = {"type": "input_image", "image_url": IMAGE_URL}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [ANTHROPIC_IMAGE]}
TEXT = {"type": "text", "text": "What is this?"}

# Path, body, status of the refusal, and the field that its message names.
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (
        "/v1/chat/completions",
        {"messages": user_message(TEXT, OPENAI_IMAGE)},
        400,
        "messages[0].content[1]",
    ),
    (
        "/v1/messages",
        {"max_tokens": 4, "messages": user_message(ANTHROPIC_IMAGE, TEXT)},
        400,
        "messages[0].content[0]",
    ),
    (
        "/v1/messages",
        {"max_tokens": 4, "messages": user_message(TOOL_RESULT)},
        400,
        "messages[0].content[0].content[0]",
    ),
    ("/v1/responses", {"input": user_message(RESPONSES_IMAGE)}, 400, "input[0].content[0]"),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]},
        400,
        "messages[0].images",
    ),
    ("/api/generate", {"prompt": "x", "images": ["aaaa"]}, 400, "images"),
]
# TGI has images inside of the prompt. Its status for a refused input is 422.
INLINE_IMAGE = {"inputs": f"![]({IMAGE_URL})What is this?", "parameters": {"max_new_tokens": 2}}
CHUNKS = {"inputs": [{"type": "image", "data": "aaaa"}], "parameters": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def vision_server(tokenizer: Tokenizer) -> Iterator[HttpTestServer]:
    settings = ServerSettings(model="speaker", text_part_only=True)
    with ExitStack() as exit_stack:
        yield start_server(InProcessEngine(tokenizer), tokenizer, settings, exit_stack)


@pytest.mark.parametrize(("path", "body", "status", "field"), REFUSED)
def test_vision_model_refuses_images(
    vision_server: HttpTestServer, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    response = vision_server.post(path, body)
    assert response.status_code == status
    assert field in response.text and "text only" in response.text
    assert EXPLANATION in response.text


@pytest.mark.parametrize(("path", "body", "status", "field"), REFUSED)
def test_text_model_refuses_images(
    server: HttpTestServer, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    response = server.post(path, body)
    assert response.status_code == status
    assert field in response.text and "text only" in response.text
    assert "vision" not in response.text


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_images_in_a_tgi_prompt(
    vision_server: HttpTestServer, server: HttpTestServer, path: str
) -> None:
    response = vision_server.post(path, INLINE_IMAGE)
    assert response.status_code == 422
    assert "`inputs` has an image" in response.text and EXPLANATION in response.text
    assert server.post(path, INLINE_IMAGE).status_code == 200  # to a text model it is plain text
    for either in (vision_server, server):
        response = either.post(path, CHUNKS)
        assert response.status_code == 422 and "inputs" in response.text


def test_vision_model_answers_text(vision_server: HttpTestServer) -> None:
    body = {"messages": user_message(TEXT), "max_tokens": 2}
    assert vision_server.post("/v1/chat/completions", body).status_code == 200
    body = {"inputs": "![a link](http://127.0.0.1:1)", "parameters": {"max_new_tokens": 2}}
    assert vision_server.post("/generate", body).status_code == 200


def test_info_says_that_only_the_text_part_is_served(
    vision_server: HttpTestServer, server: HttpTestServer
) -> None:
    assert vision_server.get("/info").json()["text_part_only"] is True
    assert server.get("/info").json()["text_part_only"] is False

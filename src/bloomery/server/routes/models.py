"""/v1/models: the model under each of its names, in OpenAI's form or in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp

from bloomery.server.errors import format_openai_error
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import MODEL, MODEL_LIST


async def models(call: HttpCall) -> ASGIApp:
    """The models served here."""
    settings = call.service.settings
    names = (settings.model, *settings.aliases)
    data = [describe_model(call, name) for name in names]
    if is_anthropic_client(call):
        page = {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
        return call.json_response(page)
    return call.json_response({"object": "list", "data": data})


async def model(call: HttpCall) -> ASGIApp:
    """One of them."""
    name = call.path_parameter
    call.service.check_model(name)
    return call.json_response(describe_model(call, name or call.service.settings.model))


def is_anthropic_client(call: HttpCall) -> bool:
    return "anthropic-version" in call.headers


def describe_model(call: HttpCall, name: str) -> dict[str, Any]:
    capacity = call.service.backend.capacity
    if is_anthropic_client(call):
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(call.service.started, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": capacity and capacity.max_model_len,
            "max_tokens": capacity and capacity.max_model_len,
        }
    return {
        "id": name,
        "object": "model",
        "created": call.service.started,
        "owned_by": "bloomery",
        "root": call.service.settings.model,
        "max_model_len": capacity and capacity.max_model_len,
    }


ROUTES = (
    Route("/v1/models", models, format_openai_error, response_shape=MODEL_LIST),
    Route("/v1/models/{model}", model, format_openai_error, response_shape=MODEL),
)

"""/v1/models: the model under each of its names and its LoRA adapters.

They are written in OpenAI's form or in Anthropic's. The parent of an adapter is the base model.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp

from bloomery.server.errors import format_openai_error
from bloomery.server.service import PLACEHOLDER_MODELS, HttpCall, Route
from bloomery.server.shapes import MODEL, MODEL_LIST


async def models(call: HttpCall) -> ASGIApp:
    """The models served here: the base model and its LoRA adapters."""
    service = call.service
    names = (*service.settings.model_names, *await service.adapters.list_names())
    data = [describe_model(call, name) for name in names]
    if is_anthropic_client(call):
        page = {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
        return call.json_response(page)
    return call.json_response({"object": "list", "data": data})


async def model(call: HttpCall) -> ASGIApp:
    """One of them."""
    name = call.path_parameter
    await call.select_model(name)
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
    service = call.service
    description = {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "bloomery",
        "root": service.settings.model,
        "max_model_len": capacity and capacity.max_model_len,
    }
    if name not in (*service.settings.model_names, *PLACEHOLDER_MODELS):
        adapter = service.adapters.catalog.adapters.get(name)
        description["root"] = adapter.source if adapter else name
        description["parent"] = service.settings.model
    return description


ROUTES = (
    Route("/v1/models", models, format_openai_error, response_shape=MODEL_LIST),
    Route("/v1/models/{model}", model, format_openai_error, response_shape=MODEL),
)

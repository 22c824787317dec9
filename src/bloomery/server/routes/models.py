"""OpenAI's /v1/models: the model, under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from bloomery.server.call import Call, Route
from bloomery.server.errors import openai
from bloomery.server.shapes import MODEL, MODELS


async def models(call: Call) -> ASGIApp:
    """The models served here."""
    settings = call.service.settings
    return call.json(
        {
            "object": "list",
            "data": [about(call, name) for name in (settings.model, *settings.aliases)],
        }
    )


async def model(call: Call) -> ASGIApp:
    """One of them."""
    call.service.check_model(call.parameter)
    return call.json(about(call, call.parameter or call.service.settings.model))


def about(call: Call, name: str) -> dict[str, Any]:
    capacity = call.service.backend.capacity
    return {
        "id": name,
        "object": "model",
        "created": call.service.started,
        "owned_by": "bloomery",
        "root": call.service.settings.model,
        "max_model_len": capacity and capacity.max_length,
    }


ROUTES = (
    Route("/v1/models", models, openai, answer=MODELS),
    Route("/v1/models/{model}", model, openai, answer=MODEL),
)

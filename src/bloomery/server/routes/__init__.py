"""The table of all endpoints. A path that is not here does not exist."""

from __future__ import annotations

from bloomery.server.routes import (
    adapters,
    chat,
    clouds,
    completions,
    embeddings,
    generate,
    messages,
    models,
    ollama,
    page,
    responses,
    status,
    stored_chats,
    stored_conversations,
    tokens,
)
from bloomery.server.service import Route, ServerSettings


def build_routes(settings: ServerSettings) -> tuple[Route, ...]:
    return (
        *page.ROUTES,
        *generate.ROUTES,
        *clouds.ROUTES,
        *chat.ROUTES,
        *stored_chats.ROUTES,
        *completions.ROUTES,
        *responses.ROUTES,
        *stored_conversations.ROUTES,
        *messages.ROUTES,
        *embeddings.ROUTES,
        *models.ROUTES,
        *adapters.ROUTES,
        *ollama.ROUTES,
        *tokens.ROUTES,
        *status.build_status_routes(settings.open_metrics),
    )

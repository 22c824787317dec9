"""Every endpoint, in one table: what is not here does not exist, what is not open here needs a key."""

from __future__ import annotations

from bloomery.server.call import Route
from bloomery.server.routes import (
    chat,
    completions,
    embeddings,
    generate,
    messages,
    models,
    page,
    responses,
    status,
    tokens,
)
from bloomery.server.service import Settings


def table(settings: Settings) -> tuple[Route, ...]:
    return (
        *page.ROUTES,
        *generate.ROUTES,
        *chat.ROUTES,
        *completions.ROUTES,
        *responses.ROUTES,
        *messages.ROUTES,
        *embeddings.ROUTES,
        *models.ROUTES,
        *tokens.ROUTES,
        *status.routes(settings.open_metrics),
    )

"""OpenAI's /v1/embeddings: texts or token ids as vectors of length 1, pooled from the served model's hidden states."""

from __future__ import annotations

import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.messages import PoolingType, EngineRequest
from bloomery.sampling import embedding_request
from bloomery.server.call import Call, Route
from bloomery.server.errors import openai
from bloomery.server.limits import Ticket, check_labels
from bloomery.server.routes.completions import ids_of, several
from bloomery.server.schema import Body
from bloomery.server.shapes import EMBEDDINGS
from bloomery.server.streaming import Watch

MOST = 2048  # inputs of a request, as OpenAI allows


class EmbeddingBody(Body, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        "dimensions": "the embeddings of this model are not made to be shortened; leave it out"
    }
    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: PoolingType | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


async def embeddings(call: Call) -> ASGIApp:
    """Turn texts into vectors; pooling is mean (of all positions, the default) or last (the last token's)."""
    body = await call.read(EmbeddingBody)
    call.service.check_model(body.model)
    check_labels(body.user, None, call.service.limits)
    inputs = several(body.input, "input")
    if len(inputs) > MOST:
        raise InvalidRequest(f"input may have at most {MOST} entries, not {len(inputs)}", "input")
    together = min(
        len(inputs), call.service.limits.fan_out
    )  # more than these go one batch after the other
    ticket = call.admit(together)
    service = call.service
    found = dict[str, Sequence[float]]()
    async with Watch(call.receive, call.deadline):
        made = [
            await request(call, index, text, body, len(inputs)) for index, text in enumerate(inputs)
        ]
        tokens = sum(len(one.prompt) for one in made)
        ticket.wait(
            tokens, service.waiting_tokens, service.prompt_rate, lambda: service.abort(made)
        )
        for first in range(0, len(made), together):
            found |= await collected(call, ticket, made[first : first + together])
    call.timings.last = time.monotonic()
    call.service.metrics.embed(call.timings, tokens)
    call.facts |= {"prompt_tokens": tokens, "inputs": len(made)}
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": written(found[one.id], body.encoding_format),
        }
        for index, one in enumerate(made)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return call.json(
        {"object": "list", "data": data, "model": call.service.settings.model, "usage": usage}
    )


async def request(
    call: Call, index: int, text: str | list[Any], body: EmbeddingBody, count: int
) -> EngineRequest:
    service = call.service
    try:
        prompt = await ids_of(service, text, body.add_special_tokens, "input")
        return embedding_request(
            prompt.ids,
            body.pooling or "mean",
            id=f"{call.unique}-{index}",
            vocab=service.capacity.vocab,
            max_length=service.capacity.max_length,
            salt=call.salt,
            tenant=call.salt,
        )
    except InvalidRequest as error:
        if count > 1:
            error.field = f"input[{index}]"
        raise


async def collected(
    call: Call, ticket: Ticket, made: Sequence[EngineRequest]
) -> dict[str, Sequence[float]]:
    found: dict[str, Sequence[float]] = {}
    async with aclosing(call.service.backend.stream(made)) as stream:
        async for news in stream:
            if not news.embedding:
                raise call.service.failure(news, ticket)
            found[news.request] = news.embedding
    return found


def written(vector: Sequence[float], format: str | None) -> list[float] | str:
    if format != "base64":
        return list(vector)
    packed = array("f", vector)  # float32, the least significant byte first
    if sys.byteorder == "big":
        packed.byteswap()
    return b64encode(packed.tobytes()).decode()


ROUTES = (
    Route("/v1/embeddings", embeddings, openai, EmbeddingBody, generates=True, answer=EMBEDDINGS),
)

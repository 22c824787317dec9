"""OpenAI's /v1/embeddings: texts or token ids as unit vectors, pooled from hidden states."""

from __future__ import annotations

import math
import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.messages import EngineRequest, PoolingType
from bloomery.sampling import build_embedding_request
from bloomery.server.errors import format_openai_error
from bloomery.server.generation import DisconnectWatch
from bloomery.server.limits import AdmissionPermit, check_labels
from bloomery.server.routes.completions import split_prompts, tokenize_prompt
from bloomery.server.schema import ADAPTER_FIELDS, RequestBody
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import EMBEDDINGS

MAX_INPUTS = 2048  # of one request, as OpenAI allows


class EmbeddingBody(RequestBody, kw_only=True):
    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = ADAPTER_FIELDS

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: PoolingType | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


async def embeddings(call: HttpCall) -> ASGIApp:
    """Turn texts into vectors; pooling is mean (of all positions, the default) or last (the last
    token's). With dimensions, vectors are cut to their first numbers and scaled to length 1."""
    body = await call.read_body(EmbeddingBody)
    service = call.service
    await call.select_model(body.model)
    check_labels(body.user, None, service.limits)
    vectors, num_tokens = await embed_inputs(call, body)
    data = []
    for index, vector in enumerate(vectors):
        encoded = encode_vector(vector, body.encoding_format)
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    return call.json_response(
        {
            "object": "list",
            "data": data,
            "model": call.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


async def embed_inputs(call: HttpCall, body: EmbeddingBody) -> tuple[list[Sequence[float]], int]:
    """The vector of each input, and the number of tokens in all of them."""
    service = call.service
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidRequest("dimensions must be a whole number, at least 1", "dimensions")
    inputs = split_prompts(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        message = f"input may have at most {MAX_INPUTS} entries, not {len(inputs)}"
        raise InvalidRequest(message, "input")
    batch_size = min(len(inputs), service.limits.fan_out)
    permit = call.admit(batch_size)
    vectors: dict[str, Sequence[float]] = {}  # by request id
    async with DisconnectWatch(call.receive, call.deadline):
        requests = [
            await _embedding_request(call, body, index, entry, len(inputs))
            for index, entry in enumerate(inputs)
        ]
        num_tokens = sum(len(request.prompt) for request in requests)
        permit.enqueue(
            num_tokens,
            service.max_waiting_tokens,
            service.prompt_rate,
            lambda: service.abort(requests),
        )
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            vectors |= await _collect_vectors(call, permit, batch)
    call.timings.last_token = time.monotonic()
    service.metrics.observe_embedding(call.timings, num_tokens)
    if call.adapter is not None:
        service.metrics.adapters.observe_answer(call.adapter.name, num_tokens, 0)
    call.log_fields |= {"prompt_tokens": num_tokens, "inputs": len(requests)}
    ordered = [shorten_vector(vectors[request.id], body.dimensions) for request in requests]
    return ordered, num_tokens


async def _embedding_request(
    call: HttpCall, body: EmbeddingBody, index: int, entry: str | list[Any], num_inputs: int
) -> EngineRequest:
    service = call.service
    try:
        prompt = await tokenize_prompt(service, entry, body.add_special_tokens, "input")
        return build_embedding_request(
            prompt.ids,
            body.pooling or "mean",
            id=f"{call.unique_id}-{index}",
            vocab_size=service.capacity.vocab,
            max_model_len=service.capacity.max_model_len,
            cache_salt=call.tenant,
            tenant=call.tenant,
            lora=call.adapter.engine_name if call.adapter else "",
            lora_path=call.adapter.path if call.adapter else "",
        )
    except InvalidRequest as error:
        if num_inputs > 1:
            error.field = f"input[{index}]"
        raise


async def _collect_vectors(
    call: HttpCall, permit: AdmissionPermit, requests: Sequence[EngineRequest]
) -> dict[str, Sequence[float]]:
    vectors: dict[str, Sequence[float]] = {}
    async with aclosing(call.service.backend.stream(requests)) as outputs:
        async for output in outputs:
            if not output.embedding:
                raise call.service.error_for(output, permit)
            vectors[output.request] = output.embedding
    return vectors


def shorten_vector(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first `dimensions` numbers at length 1, as models with nested embeddings expect it."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        message = f"dimensions may be at most {len(vector)}, the size of this model's embeddings"
        raise InvalidRequest(message, "dimensions")
    shortened = vector[:dimensions]
    length = math.hypot(*shortened)
    if not length:
        return shortened
    return [number / length for number in shortened]


def encode_vector(vector: Sequence[float], encoding_format: str | None) -> list[float] | str:
    """A list of numbers, or little-endian float32 in base64."""
    if encoding_format != "base64":
        return list(vector)
    packed = array("f", vector)
    if sys.byteorder == "big":
        packed.byteswap()
    return b64encode(packed.tobytes()).decode()


ROUTES = (
    Route(
        "/v1/embeddings",
        embeddings,
        format_openai_error,
        EmbeddingBody,
        generates=True,
        response_shape=EMBEDDINGS,
    ),
)

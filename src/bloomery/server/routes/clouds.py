"""Routes of cloud platforms: SageMaker's /invocations and Vertex AI's /vertex."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.server.errors import format_openai_error, format_tgi_error
from bloomery.server.generation import GenerationInput, GenerationJob
from bloomery.server.routes import chat, completions, generate
from bloomery.server.routes.openai import select_openai_model
from bloomery.server.schema import RequestBody
from bloomery.server.service import JSON_OR_EVENTS, HttpCall, Route
from bloomery.server.shapes import INVOCATION


class VertexBody(RequestBody, kw_only=True):
    instances: list[dict[str, Any]]


class InvocationBody(RequestBody, kw_only=True):
    """One of the bodies of /generate, /v1/chat/completions and /v1/completions."""

    inputs: str | None = None
    messages: list[chat.ChatMessage] | None = None
    prompt: str | list[Any] | None = None


async def invocations(call: HttpCall) -> ASGIApp:
    """SageMaker's route: what is in the body decides whether it is a text, a conversation or a
    completion."""
    raw = await call.read_json()
    if raw.get("inputs") is not None:
        return await generate.generate_or_stream(call)
    call.error_formatter = format_openai_error
    if raw.get("messages") is not None:
        return await chat.chat_completions(call)
    if raw.get("prompt") is not None:
        return await completions.completions(call)
    call.error_formatter = format_tgi_error
    raise InvalidRequest("one of inputs, messages or prompt is needed", "inputs")


async def vertex(call: HttpCall) -> ASGIApp:
    """Vertex AI's route: several texts or conversations at once."""
    body = await call.read_body(VertexBody)
    if not body.instances:
        raise InvalidRequest("`instances` cannot be empty", "instances")
    permit = call.admit(len(body.instances))
    inputs = [await _vertex_input(call, raw) for raw in body.instances]
    await call.select_model(None)  # each input has its own adapter, or none
    job = GenerationJob(call, permit, inputs)
    await job.run()
    return call.json_response({"predictions": [answer.text for answer in job.best_answers]})


async def _vertex_input(call: HttpCall, raw: dict[str, Any]) -> GenerationInput:
    if raw.get("messages") is not None:
        chat_body = call.parse_body(raw, chat.ChatBody)
        await select_openai_model(call, chat_body)
        params = chat.chat_sampling_params(call, chat_body)
        entry = GenerationInput.from_plan(await chat.plan_chat(call, chat_body), params)
    else:
        body = call.parse_body(raw, generate.GenerateBody)
        if body.parameters is not None and body.parameters.do_sample is None:
            body.parameters.do_sample = True
        await call.select_model(None)
        await call.select_adapter(body.parameters.adapter_id if body.parameters else None)
        params = generate.tgi_sampling_params(call, body, stream=False)
        prompt = await generate.tokenize_inputs(call, body, params)
        grammar = await generate.compile_grammar(call, body)
        entry = GenerationInput(prompt, params, grammar=grammar)
    if params.num_sequences > 1:
        raise InvalidRequest("an instance has one answer: leave out n and best_of")
    return replace(entry, adapter=call.adapter)  # each instance names its own


ROUTES = (
    Route(
        "/invocations",
        invocations,
        format_tgi_error,
        InvocationBody,
        generates=True,
        media_types=JSON_OR_EVENTS,
        response_shape=INVOCATION,
    ),
    Route(
        "/vertex",
        vertex,
        format_tgi_error,
        VertexBody,
        generates=True,
        response_shape={"predictions": ["string"]},
    ),
)

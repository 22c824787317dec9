"""OpenAI's /v1/responses: answers as items, in one response, as typed events or in the background.

A stored response can be read, continued by its id, cancelled and deleted. response_items.py reads
the items of a request, and response_writer.py writes those of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams, StructuredOutputs
from bloomery.server.answer_blocks import collect_answer
from bloomery.server.conversations import BackgroundResponse, StoredConversation, StoredResponse
from bloomery.server.errors import DeadlineExceeded, HttpError, format_openai_error
from bloomery.server.generation import (
    EVENT_STREAM_HEADERS,
    EventStreamResponse,
    GenerationInput,
    GenerationJob,
    format_event,
)
from bloomery.server.limits import check_labels
from bloomery.server.routes.chat import ChatMessage, to_template_messages
from bloomery.server.routes.openai import merge_sampling_params
from bloomery.server.routes.response_items import (
    ResponseBody,
    ResponseInputBody,
    ResponseTools,
    read_input_items,
    read_tool_choice,
    read_tools,
    to_messages,
)
from bloomery.server.routes.response_writer import ResponseObjectFormatter
from bloomery.server.routes.stored_conversations import find_conversation
from bloomery.server.service import JSON_OR_EVENTS, HttpCall, PlannedResponse, Route, plan_response
from bloomery.server.shapes import OPENAI_RESPONSE

LOGPROBS_INCLUDE = "message.output_text.logprobs"
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_LISTED_ITEMS = 100  # of one page of input items, as OpenAI allows
DEFAULT_LISTED_ITEMS = 20
FINAL_STATUSES = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True)
class ResponseInput:
    """The items and tools of a request, and its prompt."""

    items: list[dict[str, Any]]
    previous_items: list[dict[str, Any]]
    conversation: StoredConversation | None
    tools: ResponseTools
    planned: PlannedResponse


async def responses(call: HttpCall) -> ASGIApp:
    """Answer a conversation, or go on with one."""
    body = await call.read_body(ResponseBody)
    await call.select_model(body.model)
    params = response_sampling_params(call, body)
    permit = call.admit(1)
    prepared = await prepare_input(call, body)
    job = GenerationJob(call, permit, [GenerationInput.from_plan(prepared.planned, params)])
    stored = StoredResponse({}, prepared.items, prepared.previous_items, prepared.conversation)
    formatter = ResponseObjectFormatter(job, body, prepared.tools, stored)
    if body.background:
        return start_background_response(job, formatter)
    if body.stream:
        return job.event_response(formatter, format_error=formatter.error_event)
    return call.json_response(await collect_answer(job, formatter))


async def count_input_tokens(call: HttpCall) -> ASGIApp:
    """How many tokens the input of a response has."""
    body = await call.read_body(ResponseInputBody)
    await call.select_model(body.model)
    call.admit(1)
    prepared = await prepare_input(call, body, is_counted=True)
    num_tokens = len(prepared.planned.prompt.ids)
    return call.json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


def response_sampling_params(call: HttpCall, body: ResponseBody) -> SamplingParams:
    check_labels(body.user, body.metadata, call.service.limits)
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: leave out store", "store")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        message = "max_output_tokens must be a whole number, at least 1"
        raise InvalidRequest(message, "max_output_tokens")
    logprobs = None
    if LOGPROBS_INCLUDE in (body.include or ()):
        logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        message = f"top_logprobs needs {LOGPROBS_INCLUDE!r} in include"
        raise InvalidRequest(message, "top_logprobs")
    maximum = call.service.limits.logprobs
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= maximum:
        raise InvalidRequest(f"top_logprobs must be from 0 to {maximum}", "top_logprobs")
    return merge_sampling_params(
        call,
        body,
        ("temperature", "top_p", "priority", "deadline_ms"),
        max_tokens=body.max_output_tokens,
        logprobs=logprobs,
    )


async def prepare_input(
    call: HttpCall, body: ResponseInputBody, is_counted: bool = False
) -> ResponseInput:
    """Read items, tools and formats, and render the prompt.

    `is_counted`: nothing will be generated, so no grammar is needed.
    """
    conversation = find_named_conversation(call, body)
    if conversation is None:
        previous_items = find_previous_items(call, body.previous_response_id)
    else:
        previous_items = list(conversation.items)
    if not body.input and not previous_items:
        raise InvalidRequest("input is missing: give a text or a list of items", "input")
    items = read_input_items(body.input or [])
    messages = to_messages([*previous_items, *items])
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    tools = read_tools(body.tools or [])
    for ignored in dict.fromkeys(tools.ignored_types):
        call.warn(f"tools of type {ignored!r} are run by OpenAI itself and are ignored here")
    choice, allowed = read_tool_choice(body.tool_choice, tools)
    chat_messages = msgspec.convert(messages, list[ChatMessage])
    reasoning = body.reasoning or {}
    planned = await plan_response(
        call,
        messages=to_template_messages(chat_messages, call.service.tokenizer.chat_templates),
        tools=tools.functions,
        tool_choice="none" if is_counted else choice,
        allowed_tools=allowed,
        parallel=body.parallel_tool_calls is not False,
        outputs=None if is_counted else read_text_format(body.text),
        reasoning_effort=read_effort(reasoning.get("effort")),
        thinking_budget=read_budget(body, reasoning),
        output_field="text.format",
    )
    return ResponseInput(items, previous_items, conversation, tools, planned)


def find_named_conversation(call: HttpCall, body: ResponseInputBody) -> StoredConversation | None:
    """The conversation object that the response reads and adds to, if the request names one."""
    if body.conversation is None:
        return None
    if body.previous_response_id is not None:
        message = "conversation and previous_response_id exclude each other: give one of them"
        raise InvalidRequest(message, "conversation")
    named = body.conversation
    conversation_id = named.get("id") if isinstance(named, dict) else named
    if not isinstance(conversation_id, str):
        raise InvalidRequest("conversation must be an id, or an object with one", "conversation")
    return find_conversation(call, conversation_id)


def find_previous_items(call: HttpCall, response_id: str | None) -> list[dict[str, Any]]:
    """All items of the response that this one continues."""
    if response_id is None:
        return []
    stored = call.service.conversations.get((call.tenant, response_id))
    if stored is None:
        message = f"the response {response_id[:64]!r} is not, or no longer, known here"
        raise InvalidRequest(message, "previous_response_id")
    if stored.response["status"] not in FINAL_STATUSES:
        message = f"the response {response_id[:64]!r} is still {stored.response['status']}"
        raise InvalidRequest(message, "previous_response_id")
    return stored.conversation


def read_text_format(text: dict[str, Any] | None) -> StructuredOutputs | None:
    """What `text.format` demands of the answer."""
    text_format = (text or {}).get("format") or {}
    if not isinstance(text_format, dict):
        raise InvalidRequest("text.format must be an object", "text.format")
    match text_format.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            schema = text_format.get("schema")
            if not isinstance(schema, dict | bool):
                message = "text.format.schema must be a JSON schema"
                raise InvalidRequest(message, "text.format.schema")
            return StructuredOutputs(json=schema, strict=text_format.get("strict") is not False)
        case other:
            message = f"text.format.type {str(other)[:64]!r} must be text, json_object, json_schema"
            raise InvalidRequest(message, "text.format.type")


def read_effort(effort: Any) -> str | None:
    if effort is not None and effort not in REASONING_EFFORTS:
        message = f"reasoning.effort must be one of {', '.join(REASONING_EFFORTS)}"
        raise InvalidRequest(message, "reasoning.effort")
    return None if effort is None else str(effort)


def read_budget(body: ResponseInputBody, reasoning: dict[str, Any]) -> int | None:
    """The most tokens of reasoning: `reasoning.max_tokens`, or vLLM's field."""
    budget = reasoning.get("max_tokens", body.thinking_token_budget)
    is_number = isinstance(budget, int) and not isinstance(budget, bool)
    if budget is not None and not (is_number and budget >= 0):
        message = "reasoning.max_tokens must be a whole number, at least 0"
        raise InvalidRequest(message, "reasoning.max_tokens")
    return budget


# ---- background responses ------------------------------------------------------------------


def start_background_response(job: GenerationJob, formatter: ResponseObjectFormatter) -> ASGIApp:
    """Generate without the HTTP request; the client polls, or reads the events."""
    call = job.call
    background = BackgroundResponse()
    formatter.stored.background = background
    opening = formatter.queue()
    call.service.conversations.put((call.tenant, formatter.response_id), formatter.stored)
    # The places stay taken until the generation ends.
    cleanup = call.cleanup.pop_all()
    background.start(background_events(job, formatter, opening, cleanup))
    if formatter.body.stream:
        return follow_response(call, background, 0)
    return call.json_response(formatter.stored.response)


async def background_events(
    job: GenerationJob, formatter: ResponseObjectFormatter, opening: bytes, cleanup: ExitStack
) -> AsyncGenerator[bytes, None]:
    """The events of a background response, one by one. A failure becomes the last one."""
    with cleanup:
        for event in split_events(opening):
            yield event
        try:
            async with (
                asyncio.timeout_at(job.call.deadline),
                aclosing(job.events(formatter)) as all,
            ):
                async for data in all:
                    for event in split_events(data):
                        yield event
        except Exception as error:
            cause = DeadlineExceeded() if isinstance(error, TimeoutError) else error
            yield formatter.fail(job.call.record_failure(cause))


def split_events(data: bytes) -> list[bytes]:
    """Single events. The JSON of an event has no line breaks."""
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def follow_response(call: HttpCall, background: BackgroundResponse, start: int) -> ASGIApp:
    limits = call.service.limits
    return EventStreamResponse(
        background.follow(start),
        lambda error: format_event(
            {"type": "error", "message": call.record_failure(error).message}, "error"
        ),
        deadline=call.deadline,
        keepalive_seconds=limits.keepalive_seconds,
        stall_seconds=limits.stall_seconds,
        headers=EVENT_STREAM_HEADERS | call.warning_headers,
    )


# ---- stored responses ----------------------------------------------------------------------


def find_response(call: HttpCall) -> StoredResponse:
    stored = call.service.conversations.get((call.tenant, call.path_parameter))
    if stored is None:
        raise unknown_response_error(call)
    return stored


def unknown_response_error(call: HttpCall) -> HttpError:
    message = f"the response {call.path_parameter[:64]!r} is not, or no longer, stored here"
    return HttpError(404, message, "not_found")


async def retrieve_response(call: HttpCall) -> ASGIApp:
    """A stored response. With stream=true, the events of a background response from
    starting_after on."""
    stored = find_response(call)
    query = QueryParams(call.scope["query_string"])
    if query.get("stream") != "true":
        return call.json_response(stored.response)
    if stored.background is None:
        message = "stream is possible for background responses only: leave it out"
        raise InvalidRequest(message, "stream")
    start = read_count(query, "starting_after", -1, 10**9) + 1
    return follow_response(call, stored.background, start)


async def delete_response(call: HttpCall) -> ASGIApp:
    """Forget a stored response; one that still runs is cancelled."""
    if not call.service.conversations.delete((call.tenant, call.path_parameter)):
        raise unknown_response_error(call)
    return call.json_response({"id": call.path_parameter, "object": "response", "deleted": True})


async def cancel_response(call: HttpCall) -> ASGIApp:
    """Cancel a background response and return what there is of it."""
    stored = find_response(call)
    background = stored.background
    if background is None or background.task is None:
        message = "only a response created with background: true can be cancelled"
        raise HttpError(400, message, "not_cancellable")
    background.cancel()
    await asyncio.wait([background.task])
    if stored.response["status"] not in FINAL_STATUSES:
        stored.response = {**stored.response, "status": "cancelled"}
    return call.json_response(stored.response)


async def list_input_items(call: HttpCall) -> ASGIApp:
    """The input items of a stored response, the newest first unless order=asc."""
    stored = find_response(call)
    query = QueryParams(call.scope["query_string"])
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    limit = read_count(query, "limit", DEFAULT_LISTED_ITEMS, MAX_LISTED_ITEMS)
    items: Sequence[dict[str, Any]] = stored.input_items
    if order == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        positions = [index for index, item in enumerate(items) if item["id"] == after]
        if not positions:
            raise InvalidRequest(f"after: there is no item {after[:64]!r}", "after")
        items = items[positions[0] + 1 :]
    page = items[:limit]
    return call.json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(items) > len(page),
        }
    )


def read_count(query: QueryParams, name: str, default: int, maximum: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > maximum:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {maximum}", name)
    return int(text)


ROUTES = (
    Route(
        "/v1/responses",
        responses,
        format_openai_error,
        ResponseBody,
        generates=True,
        media_types=JSON_OR_EVENTS,
        response_shape=OPENAI_RESPONSE,
    ),
    Route(
        "/v1/responses/input_tokens",
        count_input_tokens,
        format_openai_error,
        ResponseInputBody,
        response_shape={"object": "string", "input_tokens": "integer"},
    ),
    Route(
        "/v1/responses/{response_id}",
        retrieve_response,
        format_openai_error,
        media_types=JSON_OR_EVENTS,
        response_shape=OPENAI_RESPONSE,
    ),
    Route("/v1/responses/{response_id}", delete_response, format_openai_error, verb="DELETE"),
    Route(
        "/v1/responses/{response_id}/cancel",
        cancel_response,
        format_openai_error,
        response_shape=OPENAI_RESPONSE,
        verb="POST",
    ),
    Route("/v1/responses/{response_id}/input_items", list_input_items, format_openai_error),
)

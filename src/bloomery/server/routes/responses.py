"""OpenAI's /v1/responses: text, in one response or as typed events. Ids continue conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.errors import HttpErrorInfo, format_openai_error
from bloomery.server.generation import GenerationInput, GenerationJob, format_event
from bloomery.server.limits import check_labels
from bloomery.server.routes.chat import ChatMessage, check_text_parts, to_template_messages
from bloomery.server.routes.openai import (
    NO_GRAMMAR,
    NO_TOOLS,
    TEXT_ONLY,
    check_tool_choice,
    merge_sampling_params,
)
from bloomery.server.schema import RequestBody
from bloomery.server.service import JSON_OR_EVENTS, HttpCall, Route
from bloomery.server.shapes import OPENAI_RESPONSE
from bloomery.text.outputs import CompletionDelta, CompletionState

TEXT_PART_TYPES = ("input_text", "output_text", "text")
INPUT_ROLES = ("system", "developer", "user", "assistant")


class ResponseBody(RequestBody, kw_only=True):
    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {
        "tools": NO_TOOLS,
        "background": "answers are given at once; leave it out",
        "conversation": "use previous_response_id",
        "prompt": TEXT_ONLY,
    }
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    stream: bool | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None
    tool_choice: Any = None
    user: str | None = None
    metadata: dict[str, str] | None = None


async def responses(call: HttpCall) -> ASGIApp:
    """Answer a conversation, or go on with one."""
    body = await call.read_body(ResponseBody)
    params = response_sampling_params(call, body)
    permit = call.admit(1)
    conversation = collect_conversation(call, body)
    chat_messages = [ChatMessage(**message) for message in conversation]
    if body.instructions:
        chat_messages.insert(0, ChatMessage(role="system", content=body.instructions))
    template_messages = to_template_messages(chat_messages, call.service.tokenizer.chat_templates)
    prompt = await call.service.apply_chat_template(template_messages)
    job = GenerationJob(call, permit, [GenerationInput(prompt, params)])
    formatter = ResponseObjectFormatter(job, body, conversation)
    return await job.respond(formatter, body.stream, formatter.error_event)


def response_sampling_params(call: HttpCall, body: ResponseBody) -> SamplingParams:
    call.service.check_model(body.model)
    check_labels(body.user, body.metadata, call.service.limits)
    text_format = (body.text or {}).get("format") or {}
    format_type = text_format.get("type", "text")
    if format_type != "text":
        message = f"text.format {str(format_type)[:64]!r} is not supported: {NO_GRAMMAR}"
        raise InvalidRequest(message, "text.format")
    check_tool_choice(body.tool_choice)
    return merge_sampling_params(
        call,
        body,
        ("temperature", "top_p", "priority", "deadline_ms"),
        max_tokens=body.max_output_tokens,
    )


def collect_conversation(call: HttpCall, body: ResponseBody) -> list[dict[str, Any]]:
    """The messages of the previous response, if one is named, and those of this request."""
    previous: list[dict[str, Any]] = []
    response_id = body.previous_response_id
    if response_id is not None:
        stored = call.service.conversations.get((call.tenant, response_id))
        if stored is None:
            message = f"the response {response_id[:64]!r} is not, or no longer, known here"
            raise InvalidRequest(message, "previous_response_id")
        previous = [dict(message) for message in stored]
    if isinstance(body.input, str):
        return [*previous, {"role": "user", "content": body.input}]
    new_messages = [
        _parse_message(item, f"input[{index}]") for index, item in enumerate(body.input)
    ]
    return previous + new_messages


def _parse_message(item: Mapping[str, Any], path: str) -> dict[str, str]:
    if item.get("type", "message") != "message" or item.get("role") not in INPUT_ROLES:
        raise InvalidRequest(f"{path} must be a message of {', '.join(INPUT_ROLES)}", path)
    content = item.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        check_text_parts(content, f"{path}.content", TEXT_PART_TYPES)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        message = f"{path}.content must be a string or a list of text parts"
        raise InvalidRequest(message, f"{path}.content")
    return {"role": item["role"], "content": content}


class ResponseObjectFormatter:
    """Writes an answer as a response with one message, or as typed events."""

    def __init__(self, job: GenerationJob, body: ResponseBody, conversation: list[dict[str, Any]]):
        self.job = job
        self.body = body
        self.conversation = conversation
        self.response_id = f"resp_{job.call.unique_id}"
        self.message_id = f"msg_{job.call.unique_id}"
        self.sequence_number = -1  # of the last event
        self.started = False

    @property
    def answer(self) -> CompletionState:
        return self.job.best_answers[0]

    def full_response(self) -> dict[str, Any]:
        """The response, also stored unless the client asked not to store it."""
        if self.body.store is not False:
            self._store_conversation()
        was_cut = self.answer.finish_reason == "length"
        return self._response(
            status="incomplete" if was_cut else "completed",
            output=[self._message("completed")],
            incomplete_details={"reason": "max_output_tokens"} if was_cut else None,
            usage=self._usage(),
        )

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        events = b"" if self.started else self._opening_events()
        self.started = True
        if delta.text:
            events += self._event(
                "response.output_text.delta", **self._location(), delta=delta.text, logprobs=[]
            )
        return events

    def final_events(self) -> bytes:
        text = self.answer.text
        response = self.full_response()
        location = self._location()
        events = self._event("response.output_text.done", **location, text=text, logprobs=[])
        events += self._event("response.content_part.done", **location, part=self._part(text))
        events += self._event(
            "response.output_item.done", output_index=0, item=self._message("completed")
        )
        return events + self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: HttpErrorInfo) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _store_conversation(self) -> None:
        call = self.job.call
        answer = {"role": "assistant", "content": self.answer.text}
        key = (call.tenant, self.response_id)
        call.service.conversations.put(key, [*self.conversation, answer])

    def _opening_events(self) -> bytes:
        response = self._response("in_progress", [], None, None)
        message = self._message("in_progress")
        part = self._part("")
        events = self._event("response.created", response=response)
        events += self._event("response.in_progress", response=response)
        events += self._event("response.output_item.added", output_index=0, item=message)
        return events + self._event("response.content_part.added", **self._location(), part=part)

    def _event(self, event_type: str, **data: Any) -> bytes:
        self.sequence_number += 1
        content = {"type": event_type, "sequence_number": self.sequence_number, **data}
        return format_event(content, event_type)

    def _location(self) -> dict[str, Any]:
        """The position of the text in the response."""
        return {"item_id": self.message_id, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self.answer.text)]
        return {
            "type": "message",
            "id": self.message_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.job.openai_usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _response(
        self, status: str, output: list[Any], incomplete_details: Any, usage: Any
    ) -> dict[str, Any]:
        call = self.job.call
        body = self.body
        params = self.job.inputs[0].params
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": call.service.settings.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }


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
)

"""Anthropic's /v1/messages and /v1/messages/count_tokens: text, in one response or streamed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.errors import HttpErrorInfo, format_anthropic_error
from bloomery.server.generation import GenerationInput, GenerationJob, format_event
from bloomery.server.routes.chat import check_text_parts
from bloomery.server.routes.openai import NO_TOOLS, merge_sampling_params
from bloomery.server.schema import RequestBody
from bloomery.server.service import JSON_OR_EVENTS, HttpCall, Route, TokenizedPrompt
from bloomery.server.shapes import ANTHROPIC_MESSAGE
from bloomery.text.outputs import CompletionDelta, CompletionState

MessageContent = str | list[dict[str, Any]]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: MessageContent


class CountBody(RequestBody, kw_only=True):
    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {"tools": NO_TOOLS, "mcp_servers": NO_TOOLS}
    messages: list[AnthropicMessage]
    model: str | None = None
    system: MessageContent | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None


async def messages(call: HttpCall) -> ASGIApp:
    """Answer a conversation."""
    body = await call.read_body(MessagesBody)
    params = message_sampling_params(call, body)
    permit = call.admit(1)
    prompt = await tokenize_messages(call, body)
    job = GenerationJob(call, permit, [GenerationInput(prompt, params)])
    formatter = MessageFormatter(job)
    return await job.respond(formatter, body.stream, formatter.error_event)


async def count_tokens(call: HttpCall) -> ASGIApp:
    """How many tokens a conversation has."""
    body = await call.read_body(CountBody)
    call.service.check_model(body.model)
    call.admit(1)
    prompt = await tokenize_messages(call, body)
    return call.json_response({"input_tokens": len(prompt.ids)})


def message_sampling_params(call: HttpCall, body: MessagesBody) -> SamplingParams:
    call.service.check_model(body.model)
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise InvalidRequest("temperature must be from 0 to 1", "temperature")
    return merge_sampling_params(
        call,
        body,
        ("temperature", "top_k", "top_p"),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
    )


async def tokenize_messages(call: HttpCall, body: CountBody) -> TokenizedPrompt:
    """The conversation's prompt; a last message of the assistant is continued."""
    if not body.messages:
        raise InvalidRequest("messages is empty: a conversation needs at least one", "messages")
    template_messages = []
    if body.system is not None:
        content = join_text_parts(body.system, "system")
        template_messages.append({"role": "system", "content": content})
    for index, message in enumerate(body.messages):
        content = join_text_parts(message.content, f"messages[{index}].content")
        template_messages.append({"role": message.role, "content": content})
    continues = template_messages[-1]["role"] == "assistant"
    return await call.service.apply_chat_template(
        template_messages, continue_final_message=continues
    )


def join_text_parts(content: MessageContent, path: str) -> str:
    if isinstance(content, str):
        return content
    check_text_parts(content, path)
    return "\n".join(part["text"] for part in content)


class MessageFormatter:
    """Writes an answer as Anthropic does: one message with one block of text."""

    def __init__(self, job: GenerationJob):
        self.job = job
        self.started = False

    @property
    def answer(self) -> CompletionState:
        return self.job.best_answers[0]

    def full_response(self) -> dict[str, Any]:
        text_block = {"type": "text", "text": self.answer.text}
        return {
            **self._head(),
            "content": [text_block],
            **self._stop_fields(),
            "usage": self._usage(),
        }

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        events = b"" if self.started else self._opening_events()
        self.started = True
        if delta.text:
            text_delta = {"type": "text_delta", "text": delta.text}
            events += self._event("content_block_delta", index=0, delta=text_delta)
        return events

    def final_events(self) -> bytes:
        events = self._event("content_block_stop", index=0)
        events += self._event("message_delta", delta=self._stop_fields(), usage=self._usage())
        return events + self._event("message_stop")

    def error_event(self, error: HttpErrorInfo) -> bytes:
        _, body = format_anthropic_error(error, self.job.call.request_id)
        return format_event(body, "error")

    def _opening_events(self) -> bytes:
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        empty_block = {"type": "text", "text": ""}
        events = self._event("message_start", message=message)
        events += self._event("content_block_start", index=0, content_block=empty_block)
        return events + self._event("ping")

    def _event(self, event_type: str, **data: Any) -> bytes:
        return format_event({"type": event_type, **data}, event_type)

    def _head(self) -> dict[str, Any]:
        call = self.job.call
        return {
            "id": f"msg_{call.unique_id}",
            "type": "message",
            "role": "assistant",
            "model": call.service.settings.model,
        }

    def _stop_fields(self) -> dict[str, Any]:
        answer = self.answer
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Anthropic does not count cached prompt tokens as input tokens."""
        num_cached = sum(self.job.cached_tokens)
        return {
            "input_tokens": self.job.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.job.num_output_tokens,
        }


ROUTES = (
    Route(
        "/v1/messages",
        messages,
        format_anthropic_error,
        MessagesBody,
        generates=True,
        media_types=JSON_OR_EVENTS,
        response_shape=ANTHROPIC_MESSAGE,
    ),
    Route(
        "/v1/messages/count_tokens",
        count_tokens,
        format_anthropic_error,
        CountBody,
        response_shape={"input_tokens": "integer"},
    ),
)

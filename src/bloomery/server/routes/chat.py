"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.errors import format_openai_error
from bloomery.server.generation import GenerationInput, GenerationJob
from bloomery.server.routes.openai import (
    NO_TOOLS,
    CompletionEnvelope,
    GenerationBody,
    check_tool_choice,
    format_chat_logprobs,
    format_prompt_logprobs,
    openai_finish_reason,
    openai_sampling_params,
)
from bloomery.server.service import JSON_OR_EVENTS, HttpCall, Route, TokenizedPrompt
from bloomery.server.shapes import CHAT_COMPLETION
from bloomery.text.outputs import CompletionDelta, CompletionState

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Scalar = str | int | float | bool | None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None


async def chat_completions(call: HttpCall) -> ASGIApp:
    """Answer a conversation."""
    body = await call.read_body(ChatBody)
    params = chat_sampling_params(call, body)
    permit = call.admit(params.num_sequences)
    prompt = await tokenize_chat(call, body)
    job = GenerationJob(call, permit, [GenerationInput(prompt, params)])
    return await job.respond(ChatFormatter(job, body), body.stream)


def chat_sampling_params(call: HttpCall, body: ChatBody) -> SamplingParams:
    max_logprobs = call.service.limits.logprobs
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= body.top_logprobs <= max_logprobs:
            raise InvalidRequest(f"top_logprobs must be from 0 to {max_logprobs}", "top_logprobs")
    check_tool_choice(body.tool_choice)
    if set(body.modalities or ()) - {"text"}:
        raise InvalidRequest("modalities may be text only", "modalities")
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    return openai_sampling_params(
        call,
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


async def tokenize_chat(call: HttpCall, body: ChatBody) -> TokenizedPrompt:
    messages = to_template_messages(body.messages, call.service.tokenizer.chat_templates)
    return await call.service.apply_chat_template(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def to_template_messages(
    messages: Sequence[ChatMessage], templates: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text only.

    The role "developer" becomes "system" for templates that do not know it.
    """
    if not messages:
        raise InvalidRequest("messages is empty: a conversation needs at least one", "messages")
    knows_developer = any("developer" in template for template in templates.values())
    template_messages = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.tool_calls or message.role in ("tool", "function"):
            raise InvalidRequest(f"{path} is about a tool: {NO_TOOLS}", f"{path}.role")
        if message.content is None:
            raise InvalidRequest(f"{path}.content is missing", f"{path}.content")
        if isinstance(message.content, list):
            check_text_parts(message.content, f"{path}.content")
        is_system = message.role == "developer" and not knows_developer
        role = "system" if is_system else message.role
        template_messages.append({**msgspec.to_builtins(message), "role": role})
    return template_messages


def check_text_parts(
    parts: Sequence[Mapping[str, Any]], path: str, part_types: Sequence[str] = ("text",)
) -> None:
    """Refuse content parts that are not text."""
    for index, part in enumerate(parts):
        if part.get("type") not in part_types or not isinstance(part.get("text"), str):
            part_path = f"{path}[{index}]"
            part_type = str(part.get("type"))[:64]
            message = f"{part_path} is of type {part_type!r}: the model reads text only"
            raise InvalidRequest(message, f"{part_path}.type")


class ChatFormatter:
    """Writes an answer as OpenAI does: the role first, then content, then the finish reason."""

    def __init__(self, job: GenerationJob, body: ChatBody):
        object_name = "chat.completion.chunk" if body.stream else "chat.completion"
        self.job = job
        self.body = body
        self.tokenizer = job.call.service.tokenizer
        self.envelope = CompletionEnvelope(job, body, "chatcmpl", object_name)
        # Tokens that add no text yet get no chunk, unless a chunk would show something else.
        self.skips_empty_text = not (
            body.logprobs or body.return_token_ids or self.envelope.continuous_usage
        )
        self.started_choices: set[int] = set()

    def full_response(self) -> dict[str, Any]:
        more = self._prompt_token_ids()
        num_top = self.body.prompt_logprobs
        if num_top is not None:
            entries = self.job.generations[0].prompt_logprobs
            more["prompt_logprobs"] = format_prompt_logprobs(self.tokenizer, entries, num_top)
        choices = []
        for index, answer in enumerate(self.job.best_answers):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append(self._choice(index, {"message": message}, answer, answer.finish_reason))
        return self.envelope.full_response(choices, **more)

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        index = delta.index
        events = b""
        if index not in self.started_choices:
            more = {} if self.started_choices else self._prompt_token_ids()
            self.started_choices.add(index)
            opening = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            events = self.envelope.chunk_event(self._choice(index, opening), **more)
        if delta.text or not self.skips_empty_text:
            choice = self._choice(index, {"delta": {"content": delta.text}}, delta)
            events += self.envelope.chunk_event(choice)
        if delta.finish_reason is not None:
            choice = self._choice(index, {"delta": {}}, None, delta.finish_reason)
            events += self.envelope.chunk_event(choice)
        return events

    def final_events(self) -> bytes:
        return self.envelope.final_events()

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        tokens: CompletionState | CompletionDelta | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """One choice; `tokens` provides its log-probabilities and token ids."""
        logprobs = None
        if tokens is not None and self.body.logprobs:
            num_top = self.body.top_logprobs or 0
            logprobs = format_chat_logprobs(self.tokenizer, tokens.logprobs, num_top)
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": openai_finish_reason(finish_reason),
        }
        if tokens is not None and self.body.return_token_ids:
            choice["token_ids"] = tokens.token_ids
        return choice

    def _prompt_token_ids(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.job.generations[0].prompt_ids}


ROUTES = (
    Route(
        "/v1/chat/completions",
        chat_completions,
        format_openai_error,
        ChatBody,
        generates=True,
        media_types=JSON_OR_EVENTS,
        response_shape=CHAT_COMPLETION,
    ),
)

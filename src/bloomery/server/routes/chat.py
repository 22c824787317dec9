"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.call import BOTH, Call, Route
from bloomery.server.errors import openai
from bloomery.server.generation import Ask, Job
from bloomery.server.routes.openai import (
    TOOLS,
    Envelope,
    GenerationBody,
    chat_logprobs,
    check_tools,
    finish_reason,
    prompt_logprobs,
    sampling,
)
from bloomery.server.service import Prompt
from bloomery.server.shapes import CHAT
from bloomery.text.answer import Answer, Delta

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Scalar = str | int | float | bool | None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None


async def chat_completions(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = await call.read(ChatBody)
    params = wishes(call, body)
    ticket = call.admit(params.children)
    job = Job(call, ticket, [Ask(await prompt(call, body), params)])
    return await job.answer(Chat(job, body), body.stream)


def wishes(call: Call, body: ChatBody) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= call.service.limits.logprobs:
        raise InvalidRequest(
            f"top_logprobs must be from 0 to {call.service.limits.logprobs}", "top_logprobs"
        )
    check_tools(body.tool_choice)
    if set(body.modalities or ()) - {"text"}:
        raise InvalidRequest("modalities may be text only", "modalities")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling(
        call, body, max_tokens=most, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
    )


async def prompt(call: Call, body: ChatBody) -> Prompt:
    return await call.service.conversation(
        conversation(body.messages, call.service.tokenizer.chat_templates),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def conversation(messages: Sequence[Message], templates: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages as templates know them: text only, and a developer's as a system's where they know no developer."""
    if not messages:
        raise InvalidRequest("messages is empty: a conversation needs at least one", "messages")
    knows = any("developer" in template for template in templates.values())
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.tool_calls or message.role in ("tool", "function"):
            raise InvalidRequest(f"{where} is about a tool: {TOOLS}", f"{where}.role")
        if message.content is None:
            raise InvalidRequest(f"{where}.content is missing", f"{where}.content")
        if isinstance(message.content, list):
            check_parts(message.content, f"{where}.content")
        role = "system" if message.role == "developer" and not knows else message.role
        plain.append({**msgspec.to_builtins(message), "role": role})
    return plain


def check_parts(
    parts: Sequence[Mapping[str, Any]], where: str, kinds: Sequence[str] = ("text",)
) -> None:
    for index, part in enumerate(parts):
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            at = f"{where}[{index}]"
            kind = str(part.get("type"))[:64]
            raise InvalidRequest(
                f"{at} is of type {kind!r}: the model reads text only", f"{at}.type"
            )


class Chat:
    """The answer as OpenAI writes it: a role first, then content, then the reason it ended."""

    def __init__(self, job: Job, body: ChatBody):
        self.job = job
        self.body = body
        self.tokenizer = job.call.service.tokenizer
        self.envelope = Envelope(
            job, body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion"
        )
        self.silent = not (body.logprobs or body.return_token_ids or self.envelope.always)
        self.begun: set[int] = set()

    def whole(self) -> dict[str, Any]:
        scores = self.body.prompt_logprobs
        more = self._prompt_ids()
        choices = []
        if scores is not None:
            known = self.job.generations[0].prompt_logprobs
            more["prompt_logprobs"] = prompt_logprobs(self.tokenizer, known, scores)
        for index, answer in enumerate(self.job.answers):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append(self._choice(index, {"message": message}, answer, answer.finish_reason))
        return self.envelope.whole(choices, **more)

    def delta(self, index: int, delta: Delta) -> bytes:
        said = b""
        if delta.index not in self.begun:
            more = {} if self.begun else self._prompt_ids()
            self.begun.add(delta.index)
            opening = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            said = self.envelope.chunk(self._choice(delta.index, opening), **more)
        if delta.text or not self.silent:
            said += self.envelope.chunk(
                self._choice(delta.index, {"delta": {"content": delta.text}}, delta)
            )
        if delta.finish_reason is not None:
            said += self.envelope.chunk(
                self._choice(delta.index, {"delta": {}}, None, delta.finish_reason)
            )
        return said

    def _choice(
        self,
        index: int,
        part: dict[str, Any],
        gained: Answer | Delta | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = None
        ids = {}
        if gained is not None and self.body.logprobs:
            logprobs = chat_logprobs(self.tokenizer, gained.logprobs, self.body.top_logprobs or 0)
        if gained is not None and self.body.return_token_ids:
            ids = {"token_ids": gained.token_ids}
        return {
            "index": index,
            **part,
            "logprobs": logprobs,
            "finish_reason": finish_reason(reason),
            **ids,
        }

    def _prompt_ids(self) -> dict[str, Any]:
        return (
            {"prompt_token_ids": self.job.generations[0].prompt_ids}
            if self.body.return_token_ids
            else {}
        )

    def end(self) -> bytes:
        return self.envelope.end()


ROUTES = (
    Route(
        "/v1/chat/completions",
        chat_completions,
        openai,
        ChatBody,
        generates=True,
        media=BOTH,
        answer=CHAT,
    ),
)

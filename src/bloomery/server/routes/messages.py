"""Anthropic's /v1/messages and /v1/messages/count_tokens: text, whole or streamed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.call import BOTH, Call, Route
from bloomery.server.errors import Problem, anthropic
from bloomery.server.generation import Ask, Job
from bloomery.server.routes.chat import check_parts
from bloomery.server.routes.openai import TOOLS, wished
from bloomery.server.schema import Body
from bloomery.server.service import Prompt
from bloomery.server.shapes import MESSAGE
from bloomery.server.streaming import event
from bloomery.text.answer import Answer, Delta

Content = str | list[dict[str, Any]]


class MessageIn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class CountBody(Body, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {"tools": TOOLS, "mcp_servers": TOOLS}
    messages: list[MessageIn]
    model: str | None = None
    system: Content | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None


async def messages(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = await call.read(MessagesBody)
    params = wishes(call, body)
    ticket = call.admit(1)
    job = Job(call, ticket, [Ask(await prompt(call, body), params)])
    message = Message(job)
    return await job.answer(message, body.stream, message.failed)


async def count_tokens(call: Call) -> ASGIApp:
    """How many tokens a conversation has."""
    body = await call.read(CountBody)
    call.service.check_model(body.model)
    call.admit(1)
    return call.json({"input_tokens": len((await prompt(call, body)).ids)})


def wishes(call: Call, body: MessagesBody) -> SamplingParams:
    call.service.check_model(body.model)
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise InvalidRequest("temperature must be from 0 to 1", "temperature")
    fields = ("temperature", "top_k", "top_p")
    return wished(call, body, fields, max_tokens=body.max_tokens, stop=body.stop_sequences or None)


async def prompt(call: Call, body: CountBody) -> Prompt:
    """A last message of the assistant's is one to be continued."""
    if not body.messages:
        raise InvalidRequest("messages is empty: a conversation needs at least one", "messages")
    plain = (
        []
        if body.system is None
        else [{"role": "system", "content": joined(body.system, "system")}]
    )
    plain += [
        {"role": message.role, "content": joined(message.content, f"messages[{index}].content")}
        for index, message in enumerate(body.messages)
    ]
    return await call.service.conversation(
        plain, continue_final_message=plain[-1]["role"] == "assistant"
    )


def joined(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    check_parts(content, where)
    return "\n".join(part["text"] for part in content)


class Message:
    """The answer as Anthropic writes it: one block of text."""

    def __init__(self, job: Job):
        self.job = job
        self.begun = False

    @property
    def answer(self) -> Answer:
        return self.job.answers[0]

    def whole(self) -> dict[str, Any]:
        text = {"type": "text", "text": self.answer.text}
        return {**self._head(), "content": [text], **self._ending(), "usage": self._usage()}

    def delta(self, index: int, delta: Delta) -> bytes:
        said = b"" if self.begun else self._begin()
        self.begun = True
        if delta.text:
            said += self._event(
                "content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text}
            )
        return said

    def end(self) -> bytes:
        said = self._event("content_block_stop", index=0)
        said += self._event("message_delta", delta=self._ending(), usage=self._usage())
        return said + self._event("message_stop")

    def failed(self, problem: Problem) -> bytes:
        return event(anthropic(problem, self.job.call.id)[1], "error")

    def _begin(self) -> bytes:
        empty = {
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        said = self._event("message_start", message={**self._head(), "content": [], **empty})
        said += self._event(
            "content_block_start", index=0, content_block={"type": "text", "text": ""}
        )
        return said + self._event("ping")

    def _event(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, **data}, kind)

    def _head(self) -> dict[str, Any]:
        call = self.job.call
        return {
            "id": f"msg_{call.unique}",
            "type": "message",
            "role": "assistant",
            "model": call.service.settings.model,
        }

    def _ending(self) -> dict[str, Any]:
        answer = self.answer
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        found = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        return {
            "stop_reason": "end_turn" if found is None else "stop_sequence",
            "stop_sequence": found,
        }

    def _usage(self) -> dict[str, int]:
        """Anthropic counts what was found in a cache apart."""
        cached = sum(self.job.cached)
        return {
            "input_tokens": self.job.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.job.completion_tokens,
        }


ROUTES = (
    Route(
        "/v1/messages",
        messages,
        anthropic,
        MessagesBody,
        generates=True,
        media=BOTH,
        answer=MESSAGE,
    ),
    Route(
        "/v1/messages/count_tokens",
        count_tokens,
        anthropic,
        CountBody,
        answer={"input_tokens": "integer"},
    ),
)

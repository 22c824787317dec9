"""OpenAI's /v1/responses: text, whole or as its typed events, and conversations that go on by an id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.call import BOTH, Call, Route
from bloomery.server.errors import Problem, openai
from bloomery.server.generation import Ask, Job
from bloomery.server.limits import check_labels
from bloomery.server.routes.chat import Message as ChatMessage
from bloomery.server.routes.chat import check_parts, conversation
from bloomery.server.routes.openai import ELSEWHERE, GRAMMAR, TOOLS, check_tools, wished
from bloomery.server.schema import Body
from bloomery.server.shapes import RESPONSE
from bloomery.server.streaming import event
from bloomery.text.answer import Answer, Delta

TEXTS = ("input_text", "output_text", "text")
ROLES = ("system", "developer", "user", "assistant")


class ResponseBody(Body, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {
        "tools": TOOLS,
        "background": "answers are given at once; leave it out",
        "conversation": "use previous_response_id",
        "prompt": ELSEWHERE,
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


async def responses(call: Call) -> ASGIApp:
    """Answer a conversation, or go on with one."""
    body = await call.read(ResponseBody)
    params = wishes(call, body)
    ticket = call.admit(1)
    said = messages(call, body)
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    known = conversation(
        [ChatMessage(**message) for message in opening + said],
        call.service.tokenizer.chat_templates,
    )
    job = Job(call, ticket, [Ask(await call.service.conversation(known), params)])
    response = Response(job, body, said)
    return await job.answer(response, body.stream, response.failed)


def wishes(call: Call, body: ResponseBody) -> SamplingParams:
    call.service.check_model(body.model)
    check_labels(body.user, body.metadata, call.service.limits)
    kind = ((body.text or {}).get("format") or {}).get("type", "text")
    if kind != "text":
        raise InvalidRequest(
            f"text.format {str(kind)[:64]!r} is not supported: {GRAMMAR}", "text.format"
        )
    check_tools(body.tool_choice)
    return wished(
        call,
        body,
        ("temperature", "top_p", "priority", "deadline_ms"),
        max_tokens=body.max_output_tokens,
    )


def messages(call: Call, body: ResponseBody) -> list[dict[str, Any]]:
    """What was said before, and what is said now, as plain messages."""
    before: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        found = call.service.conversations.get((call.salt, body.previous_response_id))
        if found is None:
            message = (
                f"the response {body.previous_response_id[:64]!r} is not, or no longer, known here"
            )
            raise InvalidRequest(message, "previous_response_id")
        before = [dict(message) for message in found]
    if isinstance(body.input, str):
        return [*before, {"role": "user", "content": body.input}]
    return before + [_message(item, f"input[{index}]") for index, item in enumerate(body.input)]


def _message(item: Mapping[str, Any], where: str) -> dict[str, str]:
    if item.get("type", "message") != "message" or item.get("role") not in ROLES:
        raise InvalidRequest(f"{where} must be a message of {', '.join(ROLES)}", where)
    content = item.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        check_parts(content, f"{where}.content", TEXTS)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of text parts", f"{where}.content"
        )
    return {"role": item["role"], "content": content}


class Response:
    """The answer as a response with one message, and every event on the way to it."""

    def __init__(self, job: Job, body: ResponseBody, said: list[dict[str, Any]]):
        self.job = job
        self.body = body
        self.said = said
        self.id = f"resp_{job.call.unique}"
        self.item = f"msg_{job.call.unique}"
        self.number = -1
        self.begun = False

    @property
    def answer(self) -> Answer:
        return self.job.answers[0]

    def whole(self) -> dict[str, Any]:
        """The whole response, remembered unless the client asked not to."""
        if self.body.store is not False:
            answer = {"role": "assistant", "content": self.answer.text}
            self.job.call.service.conversations.put(
                (self.job.call.salt, self.id), [*self.said, answer]
            )
        cut = self.answer.finish_reason == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        return self._whole(
            "incomplete" if cut else "completed",
            [self._message("completed")],
            details,
            self._usage(),
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        said = b"" if self.begun else self._begin()
        self.begun = True
        if delta.text:
            said += self._event(
                "response.output_text.delta", **self._place(), delta=delta.text, logprobs=[]
            )
        return said

    def end(self) -> bytes:
        text = self.answer.text
        whole = self.whole()
        said = self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        said += self._event("response.content_part.done", **self._place(), part=self._part(text))
        said += self._event(
            "response.output_item.done", output_index=0, item=self._message("completed")
        )
        return said + self._event(f"response.{whole['status']}", response=whole)

    def failed(self, problem: Problem) -> bytes:
        return self._event("error", code=problem.code, message=problem.message, param=problem.param)

    def _begin(self) -> bytes:
        started = self._whole("in_progress", [], None, None)
        said = self._event("response.created", response=started)
        said += self._event("response.in_progress", response=started)
        said += self._event(
            "response.output_item.added", output_index=0, item=self._message("in_progress")
        )
        return said + self._event(
            "response.content_part.added", **self._place(), part=self._part("")
        )

    def _event(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number, **data}, kind)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self.answer.text)]
        return {
            "type": "message",
            "id": self.item,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.job.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }

    def _whole(self, status: str, output: list[Any], incomplete: Any, usage: Any) -> dict[str, Any]:
        call = self.job.call
        body = self.body
        params = self.job.asks[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
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
        openai,
        ResponseBody,
        generates=True,
        media=BOTH,
        answer=RESPONSE,
    ),
)

"""Anthropic's /v1/messages and /v1/messages/count_tokens, in one response or streamed.

message_blocks.py turns content blocks and tools into what chat templates take.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest, TemplateError
from bloomery.sampling import SamplingParams, StructuredOutputs
from bloomery.server.answer_blocks import AnswerBlock, AnswerBlocks, BlockChange, collect_answer
from bloomery.server.errors import HttpErrorInfo, format_anthropic_error
from bloomery.server.generation import GenerationInput, GenerationJob, format_event
from bloomery.server.routes.chat import ChatMessage, to_template_messages
from bloomery.server.routes.message_blocks import (
    MessageContent,
    fold_system_messages,
    has_cache_control,
    read_message,
    read_message_tools,
    read_system,
    read_tool_choice,
)
from bloomery.server.routes.openai import merge_sampling_params
from bloomery.server.routes.response_writer import count_cache_writes
from bloomery.server.schema import ADAPTER_FIELDS, RequestBody
from bloomery.server.service import JSON_OR_EVENTS, HttpCall, PlannedResponse, Route, plan_response
from bloomery.server.shapes import ANTHROPIC_MESSAGE
from bloomery.text.outputs import CompletionDelta, CompletionState

# Reasoning is not signed here. Clients send the signature back, and any is accepted.
THINKING_SIGNATURE = "bloomery"
# Anthropic's efforts -> those of OpenAI, which plan_response takes.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
DEFAULT_EFFORT = "high"  # Anthropic's, where thinking is on and no effort is named


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: MessageContent


class CountBody(RequestBody, kw_only=True):
    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {
        **ADAPTER_FIELDS,
        "mcp_servers": "this server does not connect to MCP servers; leave it out",
        "container": "this server runs no code; leave it out",
    }
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {
            "anthropic_version",
            "betas",
            "cache_control",
            "context_management",
            "inference_geo",
            "service_tier",
            "speed",
        }
    )
    messages: list[AnthropicMessage]
    model: str | None = None
    system: MessageContent | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # what output_config.format was called before


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
    await call.select_model(body.model)
    params = message_sampling_params(call, body)
    permit = call.admit(1)
    planned = await plan_message(call, body)
    job = GenerationJob(call, permit, [GenerationInput.from_plan(planned, params)])
    formatter = MessageFormatter(job, body)
    if body.stream:
        ping = format_event({"type": "ping"}, "ping")
        return job.event_response(formatter, format_error=formatter.error_event, keepalive=ping)
    return call.json_response(await collect_answer(job, formatter))


async def count_tokens(call: HttpCall) -> ASGIApp:
    """How many tokens a conversation has."""
    body = await call.read_body(CountBody)
    await call.select_model(body.model)
    call.admit(1)
    planned = await plan_message(call, body, is_counted=True)
    return call.json_response({"input_tokens": len(planned.prompt.ids)})


def message_sampling_params(call: HttpCall, body: MessagesBody) -> SamplingParams:
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise InvalidRequest("temperature must be from 0 to 1", "temperature")
    return merge_sampling_params(
        call,
        body,
        ("temperature", "top_k", "top_p"),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
    )


async def plan_message(
    call: HttpCall, body: CountBody, is_counted: bool = False
) -> PlannedResponse:
    """The conversation's prompt; a last message of the assistant is continued.

    `is_counted`: nothing will be generated, so no grammar is needed.
    """
    if not body.messages:
        raise InvalidRequest("messages is empty: a conversation needs at least one", "messages")
    chat_messages = []
    system = read_system(body.system)
    if system is not None:
        chat_messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        chat_messages += read_message(message.role, message.content, f"messages[{index}]")
    try:
        return await _plan(call, body, chat_messages, is_counted)
    except TemplateError:
        # Some templates take a system message only at the beginning.
        folded_messages = fold_system_messages(chat_messages)
        if folded_messages == chat_messages:
            raise
        return await _plan(call, body, folded_messages, is_counted)


async def _plan(
    call: HttpCall, body: CountBody, chat_messages: list[dict[str, Any]], is_counted: bool
) -> PlannedResponse:
    tools = read_message_tools(call, body.tools or [])
    choice, parallel = read_tool_choice(body.tool_choice, bool(tools))
    effort, budget = await read_thinking(call, body)
    last = chat_messages[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    parsed_messages = msgspec.convert(chat_messages, list[ChatMessage])
    return await plan_response(
        call,
        messages=to_template_messages(parsed_messages, call.service.tokenizer.chat_templates),
        tools=tools,
        tool_choice="none" if is_counted else choice,
        parallel=parallel,
        outputs=None if is_counted else read_output_format(body),
        template_options={"continue_final_message": continues},
        reasoning_effort=effort,
        thinking_budget=budget,
        output_field="output_config.format",
    )


def read_output_format(body: CountBody) -> StructuredOutputs | None:
    """What `output_config.format` demands of the answer."""
    output_format = (body.output_config or {}).get("format") or body.output_format
    if output_format is None:
        return None
    field = "output_config.format"
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise InvalidRequest(f"{field}.type must be json_schema", f"{field}.type")
    schema = output_format.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}.schema must be a JSON schema", f"{field}.schema")
    return StructuredOutputs(json=schema)


async def read_thinking(call: HttpCall, body: CountBody) -> tuple[str | None, int | None]:
    """The reasoning effort, and the most tokens of reasoning."""
    effort = (body.output_config or {}).get("effort")
    if effort is not None and effort not in EFFORTS:
        message = f"output_config.effort must be one of {', '.join(EFFORTS)}"
        raise InvalidRequest(message, "output_config.effort")
    match (body.thinking or {}).get("type"):
        case "disabled":
            return "none", None
        case "adaptive":
            return EFFORTS[effort or DEFAULT_EFFORT], None
        case "enabled":
            budget = (body.thinking or {}).get("budget_tokens")
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                message = "thinking.budget_tokens must be a whole number, at least 1"
                raise InvalidRequest(message, "thinking.budget_tokens")
            return EFFORTS[effort or DEFAULT_EFFORT], budget
        case None if body.thinking is None:
            return await _default_effort(call), None
    message = "thinking.type must be enabled, adaptive or disabled"
    raise InvalidRequest(message, "thinking.type")


async def _default_effort(call: HttpCall) -> str | None:
    """Without `thinking` there is none, if the model's template can turn it off."""
    lookup = await call.service.find_response_format()
    if lookup.format is None or lookup.format.reasoning is None:
        return None
    from bloomery.response_format import template_reasoning_options

    template = call.service.tokenizer.chat_templates.get("default", "")
    options = template_reasoning_options(template)
    has_switch = "enable_thinking" in options or "thinking" in options
    return "none" if has_switch else None


class MessageFormatter:
    """Writes an answer as Anthropic does: one message with blocks of thinking, text and calls."""

    def __init__(self, job: GenerationJob, body: MessagesBody):
        self.job = job
        self.body = body
        self.answer_blocks = AnswerBlocks(job.inputs[0].response is not None)
        self.started = False
        self.pinged = False
        self.caches_prompt = has_cache_control(body.system, body.tools, body.messages)
        self.shows_thinking = (body.thinking or {}).get("display") != "omitted"

    @property
    def answer(self) -> CompletionState:
        return self.job.best_answers[0]

    def full_response(self) -> dict[str, Any]:
        self._finish()
        return {
            **self._head(),
            "content": [self._block(block) for block in self.answer_blocks.blocks],
            **self._stop_fields(),
            "usage": self._usage(),
        }

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        events = b"" if self.started else self._opening_event()
        self.started = True
        for change in self.answer_blocks.add_delta(delta):
            events += self._change_events(change)
        return events

    def final_events(self) -> bytes:
        events = self._finish()
        events += self._event("message_delta", delta=self._stop_fields(), usage=self._usage())
        return events + self._event("message_stop")

    def error_event(self, error: HttpErrorInfo) -> bytes:
        _, body = format_anthropic_error(error, self.job.call.request_id)
        return format_event(body, "error")

    def _finish(self) -> bytes:
        changes = self.answer_blocks.finish(complete=self.answer.finish_reason != "length")
        return b"".join(self._change_events(change) for change in changes)

    def _opening_event(self) -> bytes:
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        return self._event("message_start", message=message)

    def _change_events(self, change: BlockChange) -> bytes:
        block = change.block
        match change.action:
            case "open":
                empty_block = self._block(block, is_new=True)
                events = self._event(
                    "content_block_start", index=block.index, content_block=empty_block
                )
                if not self.pinged:
                    events += self._event("ping")
                    self.pinged = True
                return events
            case "delta":
                return self._delta_event(block, change.text)
        events = b""
        if block.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": THINKING_SIGNATURE}
            events = self._event("content_block_delta", index=block.index, delta=signature)
        return events + self._event("content_block_stop", index=block.index)

    def _delta_event(self, block: AnswerBlock, text: str) -> bytes:
        match block.kind:
            case "reasoning":
                if not self.shows_thinking:
                    return b""
                delta = {"type": "thinking_delta", "thinking": text}
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
        return self._event("content_block_delta", index=block.index, delta=delta)

    def _block(self, block: AnswerBlock, is_new: bool = False) -> dict[str, Any]:
        match block.kind:
            case "reasoning":
                thinking = block.text if self.shows_thinking and not is_new else ""
                signature = "" if is_new else THINKING_SIGNATURE
                return {"type": "thinking", "thinking": thinking, "signature": signature}
            case "text":
                return {"type": "text", "text": "" if is_new else block.text}
        arguments = {} if is_new else block.arguments
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}

    def _event(self, event_type: str, **data: Any) -> bytes:
        return format_event({"type": event_type, **data}, event_type)

    def _head(self) -> dict[str, Any]:
        call = self.job.call
        return {
            "id": f"msg_{call.unique_id}",
            "type": "message",
            "role": "assistant",
            "model": call.model_name,
        }

    def _stop_fields(self) -> dict[str, Any]:
        answer = self.answer
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(block.kind == "call" for block in self.answer_blocks.blocks):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Anthropic's input tokens are those that were neither read from nor written to the cache.

        Prompts are always cached, but writes are counted only if the client has marked them.
        """
        num_cached = sum(self.job.cached_tokens)
        num_written = count_cache_writes(self.job) if self.caches_prompt else 0
        return {
            "input_tokens": self.job.num_prompt_tokens - num_cached - num_written,
            "cache_creation_input_tokens": num_written,
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

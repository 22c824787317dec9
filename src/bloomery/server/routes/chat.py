"""OpenAI's /v1/chat/completions. Tools and reasoning are in chat_tools.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest, NonTextInput
from bloomery.sampling import SamplingParams
from bloomery.server.errors import format_openai_error
from bloomery.server.generation import GenerationInput, GenerationJob
from bloomery.server.routes.openai import (
    CompletionEnvelope,
    GenerationBody,
    format_chat_logprobs,
    format_prompt_logprobs,
    openai_finish_reason,
    openai_sampling_params,
    read_structured_outputs,
    select_openai_model,
)
from bloomery.server.service import (
    JSON_OR_EVENTS,
    HttpCall,
    PlannedResponse,
    Route,
    TokenizedPrompt,
    plan_response,
)
from bloomery.server.shapes import CHAT_COMPLETION
from bloomery.text.outputs import CompletionDelta, CompletionState

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Scalar = str | int | float | bool | None


# Fields about tools and reasoning; without any of them, chat_tools.py is not needed.
ANSWER_FIELDS = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "reasoning_effort",
    "reasoning",
    "thinking_token_budget",
    "thinking_budget",
)
# Arguments of the renderer itself, which are not variables of a chat template.
RENDERER_NAMES = frozenset(
    {
        "messages",
        "conversation",
        "chat_template",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "strftime_now",
        "raise_exception",
    }
)


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None


async def chat_completions(call: HttpCall) -> ASGIApp:
    """Answer a conversation."""
    body = await call.read_body(ChatBody)
    await select_openai_model(call, body)
    params = chat_sampling_params(call, body)
    permit = call.admit(params.num_sequences)
    planned = await plan_chat(call, body)
    job = GenerationJob(call, permit, [GenerationInput.from_plan(planned, params)])
    return await job.respond(ChatFormatter(job, body), body.stream)


def chat_sampling_params(call: HttpCall, body: ChatBody) -> SamplingParams:
    max_logprobs = call.service.limits.logprobs
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= body.top_logprobs <= max_logprobs:
            raise InvalidRequest(f"top_logprobs must be from 0 to {max_logprobs}", "top_logprobs")
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


async def plan_chat(call: HttpCall, body: ChatBody) -> PlannedResponse:
    """The prompt of a conversation, and how its answer is constrained and parsed."""
    templates = call.service.tokenizer.chat_templates
    messages = to_template_messages(body.messages, templates)
    options = template_options(body)
    constraint = read_structured_outputs(body)
    if constraint is None and not any(getattr(body, name) is not None for name in ANSWER_FIELDS):
        return await plan_response(call, messages=messages, template_options=options)
    from bloomery.server.routes.chat_tools import parse_tool_request, reasoning_request

    outputs, output_field = constraint or (None, "response_format")
    request = parse_tool_request(body)
    effort, budget = reasoning_request(body)
    return await plan_response(
        call,
        messages=messages,
        tools=request.tools,
        tool_choice=request.choice,
        allowed_tools=request.allowed,
        parallel=request.parallel,
        outputs=outputs,
        output_field=output_field,
        template_options=options,
        reasoning_effort=effort,
        thinking_budget=budget,
    )


def template_options(body: ChatBody) -> dict[str, Any]:
    """What a body sets for `apply_chat_template`, without its tools."""
    variables = body.chat_template_kwargs
    for name in variables or ():
        if name in RENDERER_NAMES:
            field = f"chat_template_kwargs.{name}"
            message = f"{field} is set by the server and cannot be changed: leave it out"
            raise InvalidRequest(message, field)
    if body.enable_thinking is not None:
        variables = {"enable_thinking": body.enable_thinking, **(variables or {})}
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
        "chat_template_kwargs": variables,
    }


async def tokenize_chat(call: HttpCall, body: ChatBody) -> TokenizedPrompt:
    """The prompt of a conversation, tools included."""
    messages = to_template_messages(body.messages, call.service.tokenizer.chat_templates)
    options = template_options(body)
    if body.tools or body.functions:
        from bloomery.server.response_plan import to_template_tool
        from bloomery.server.routes.chat_tools import parse_tool_request

        options["tools"] = [to_template_tool(tool) for tool in parse_tool_request(body).tools]
    return await call.service.apply_chat_template(messages, **options)


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
        if isinstance(message.content, list):
            check_text_parts(message.content, f"{path}.content")
        has_calls = message.tool_calls or message.function_call
        if has_calls or message.role in ("tool", "function"):
            from bloomery.server.routes.chat_tools import to_tool_message

            template_messages.append(to_tool_message(message, path))
            continue
        if message.content is None and not (message.reasoning_content or message.reasoning):
            raise InvalidRequest(f"{path}.content is missing", f"{path}.content")
        is_system = message.role == "developer" and not knows_developer
        role = "system" if is_system else message.role
        fields = msgspec.to_builtins(message)
        template_messages.append({"content": "", **fields, "role": role})
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
            raise NonTextInput(message, f"{part_path}.type")


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
        self.has_tools = bool(body.tools or body.functions)
        # How a parsed answer is shown; see chat_tools.py.
        self.parsed_options = {
            "is_legacy": body.functions is not None,
            "shows_reasoning": body.include_reasoning is not False,
        }

    def full_response(self) -> dict[str, Any]:
        more = self._prompt_token_ids()
        num_top = self.body.prompt_logprobs
        if num_top is not None:
            entries = self.job.generations[0].prompt_logprobs
            more["prompt_logprobs"] = format_prompt_logprobs(self.tokenizer, entries, num_top)
        choices = []
        for index, answer in enumerate(self.job.best_answers):
            content = {"message": self._message(answer)}
            choices.append(self._choice(index, content, answer, self._finish_reason(answer)))
        response = self.envelope.full_response(choices, **more)
        if self.body.store:
            from bloomery.server.routes.stored_chats import store_chat

            store_chat(self.job.call, self.body, response)
        return response

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        index = delta.index
        events = b""
        if index not in self.started_choices:
            more = {} if self.started_choices else self._prompt_token_ids()
            self.started_choices.add(index)
            empty_content = None if self.has_tools else ""
            opening = {"role": "assistant", "content": empty_content, "refusal": None}
            events = self.envelope.chunk_event(
                self._choice(index, {"delta": opening}), len(delta.token_ids), **more
            )
        tokens: CompletionDelta | None = delta
        for content in self._delta_contents(delta):
            choice = self._choice(index, {"delta": content}, tokens)
            events += self.envelope.chunk_event(choice)
            tokens = None  # several chunks of one token show its log-probability once
        if delta.finish_reason is not None:
            answer = self.job.all_answers[index]
            choice = self._choice(index, {"delta": {}}, None, self._finish_reason(answer))
            events += self.envelope.chunk_event(choice)
        return events

    def _message(self, answer: CompletionState) -> dict[str, Any]:
        if answer.parsed is None:
            return {"role": "assistant", "content": answer.text, "refusal": None}
        from bloomery.server.routes.chat_tools import format_parsed_message

        return format_parsed_message(answer.parsed, has_tools=self.has_tools, **self.parsed_options)

    def _delta_contents(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The deltas to send for new tokens, each in a chunk of its own."""
        contents: list[dict[str, Any]] = []
        if delta.events:
            from bloomery.server.routes.chat_tools import format_parsed_deltas

            contents = format_parsed_deltas(delta.events, **self.parsed_options)
        elif delta.text:
            contents = [{"content": delta.text}]
        if not contents and not self.skips_empty_text:
            contents = [{"content": ""}]
        return contents

    def _finish_reason(self, answer: CompletionState) -> str | None:
        """OpenAI's finish reason; a complete answer with calls ends for the sake of them."""
        has_calls = answer.parsed is not None and answer.parsed.calls
        if has_calls and answer.finish_reason == "stop":
            return "function_call" if self.parsed_options["is_legacy"] else "tool_calls"
        return openai_finish_reason(answer.finish_reason)

    def final_events(self) -> bytes:
        if self.body.store:
            self.full_response()  # stores it
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
            "finish_reason": finish_reason,
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

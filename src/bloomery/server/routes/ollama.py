"""Ollama's API: /api/chat, /api/generate, /api/embed, and what its clients ask about models.

Answers are streamed as lines of JSON unless stream is false. Durations are in nanoseconds. There is
one model, which is always loaded, so keep_alive changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, ClassVar

import msgspec
from starlette.types import ASGIApp

from bloomery import __version__
from bloomery.errors import InvalidRequest, NonTextInput
from bloomery.response_format import ToolFunction
from bloomery.sampling import SamplingParams, StructuredOutputs
from bloomery.server.answer_blocks import AnswerBlock, AnswerBlocks, collect_answer
from bloomery.server.errors import HttpErrorInfo, format_ollama_error
from bloomery.server.generation import GenerationInput, GenerationJob
from bloomery.server.routes.chat import ChatMessage, to_template_messages
from bloomery.server.routes.completions import find_gap_tokens, tokenize_gap
from bloomery.server.routes.embeddings import EmbeddingBody, embed_inputs
from bloomery.server.routes.openai import TEXT_ONLY, merge_sampling_params
from bloomery.server.schema import ADAPTER_FIELDS, RequestBody, encode_json
from bloomery.server.service import (
    JSON_MEDIA,
    HttpCall,
    PlannedResponse,
    Route,
    TokenizedPrompt,
    compile_outputs,
    plan_response,
)
from bloomery.text.outputs import CompletionDelta, CompletionState

LATEST_TAG = ":latest"  # what Ollama's clients append to a name without a tag
LINES_MEDIA = "application/x-ndjson"
JSON_OR_LINES = (*JSON_MEDIA, LINES_MEDIA)
THINK_LEVELS = ("low", "medium", "high", "max")
# Ollama's options -> fields of SamplingParams. Others tune Ollama's own engine and are ignored.
SAMPLING_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
}
NO_LOGPROBS = "use /v1/chat/completions for log-probabilities"


class OllamaBody(RequestBody, kw_only=True):
    """Fields of both routes that generate."""

    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {
        **ADAPTER_FIELDS,
        "images": TEXT_ONLY,
        "template": "the model's own template is used; leave it out",
        "logprobs": NO_LOGPROBS,
        "top_logprobs": NO_LOGPROBS,
    }
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset({"keep_alive", "truncate", "shift"})
    model: str | None = None
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[int] | None = None


class OllamaEmbedBody(RequestBody, kw_only=True):
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset({"keep_alive", "truncate", "options"})
    input: str | list[Any]
    model: str | None = None
    dimensions: int | None = None


class OllamaShowBody(RequestBody, kw_only=True):
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset({"verbose", "system", "template"})
    model: str | None = None
    name: str | None = None


# ---- generation ----------------------------------------------------------------------------


async def ollama_chat(call: HttpCall) -> ASGIApp:
    """Ollama's chat: answer a conversation."""
    body = await call.read_body(OllamaChatBody)
    await select_ollama_model(call, body.model)
    params = ollama_sampling_params(call, body)
    if not body.messages:
        return call.json_response(
            loaded_answer(call, {"message": {"role": "assistant", "content": ""}})
        )
    permit = call.admit(1)
    planned = await plan_response(
        call,
        messages=read_ollama_messages(call, body.messages),
        tools=read_ollama_tools(body.tools or []),
        outputs=read_ollama_format(body.format),
        reasoning_effort=read_think(body.think),
        output_field="format",
    )
    job = GenerationJob(call, permit, [GenerationInput.from_plan(planned, params)])
    return await respond_in_lines(job, OllamaFormatter(job, is_chat=True), body.stream)


async def ollama_generate(call: HttpCall) -> ASGIApp:
    """Ollama's generate: answer a prompt, or continue it as it is if raw is true."""
    body = await call.read_body(OllamaGenerateBody)
    await select_ollama_model(call, body.model)
    params = ollama_sampling_params(call, body)
    if not body.prompt:
        return call.json_response(loaded_answer(call, {"response": ""}))
    permit = call.admit(1)
    planned = await plan_prompt(call, body)
    if body.context:
        prompt = TokenizedPrompt([*body.context, *planned.prompt.ids])
        planned = PlannedResponse(prompt, planned.plan, planned.grammar)
    job = GenerationJob(call, permit, [GenerationInput.from_plan(planned, params)])
    return await respond_in_lines(job, OllamaFormatter(job, is_chat=False), body.stream)


async def plan_prompt(call: HttpCall, body: OllamaGenerateBody) -> PlannedResponse:
    """The prompt: in the model's chat template, as it is, or around a gap to fill."""
    service = call.service
    outputs = read_ollama_format(body.format)
    is_plain = bool(body.suffix or body.raw) or not service.tokenizer.chat_templates
    grammar = ""
    if is_plain and outputs is not None:
        grammar = await compile_outputs(call, outputs, "format")
    if body.suffix:
        gap_tokens = find_gap_tokens(service)
        prompt = await tokenize_gap(service, gap_tokens, body.prompt or "", body.suffix)
        return PlannedResponse(prompt, None, grammar)
    if is_plain:
        prompt = await service.tokenize(body.prompt or "")
        return PlannedResponse(prompt, None, grammar)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return await plan_response(
        call,
        messages=messages,
        outputs=outputs,
        reasoning_effort=read_think(body.think),
        output_field="format",
    )


async def respond_in_lines(
    job: GenerationJob, formatter: OllamaFormatter, stream: bool | None
) -> ASGIApp:
    """The answer as lines of JSON, which is the default, or as one object."""
    if stream is False:
        return job.call.json_response(await collect_answer(job, formatter))
    return job.event_response(
        formatter,
        headers={"content-type": LINES_MEDIA},
        format_error=formatter.error_line,
        keepalive=b"",
    )


def ollama_sampling_params(call: HttpCall, body: OllamaBody) -> SamplingParams:
    options = body.options or {}
    values = {}
    for name, field in SAMPLING_OPTIONS.items():
        if options.get(name) is not None:
            values[field] = options[name]
    num_predict = options.get("num_predict")
    is_number = isinstance(num_predict, int) and not isinstance(num_predict, bool)
    if num_predict is not None and not is_number:
        message = "options.num_predict must be a whole number"
        raise InvalidRequest(message, "options.num_predict")
    has_bound = (
        isinstance(num_predict, int) and num_predict > 0
    )  # -1 and -2 mean: as long as the context allows
    values["max_tokens"] = num_predict if has_bound else None
    try:
        return merge_sampling_params(call, body, (), **values)
    except InvalidRequest as error:
        error.field = f"options.{error.field}"
        raise


async def select_ollama_model(call: HttpCall, name: str | None) -> None:
    await call.select_model(name.removesuffix(LATEST_TAG) if name else name)


def read_ollama_messages(call: HttpCall, messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The conversation in the chat form. Ollama's calls have no ids, so they get some."""
    converted: list[dict[str, Any]] = []
    open_ids: list[str] = []  # of calls without a result yet
    num_calls = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.images:
            raise NonTextInput(f"{path}.images: {TEXT_ONLY}", f"{path}.images")
        if message.role not in ("system", "user", "assistant", "tool"):
            rule = "system, user, assistant or tool"
            raise InvalidRequest(f"{path}.role must be {rule}", f"{path}.role")
        entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            entry["reasoning_content"] = message.thinking
        if message.tool_calls and message.role == "assistant":
            entry["tool_calls"] = []
            for call_index, tool_call in enumerate(message.tool_calls):
                call_path = f"{path}.tool_calls[{call_index}]"
                parsed = _read_ollama_call(tool_call, num_calls, call_path)
                num_calls += 1
                open_ids.append(parsed["id"])
                entry["tool_calls"].append(parsed)
        if message.role == "tool":
            next_id = open_ids.pop(0) if open_ids else f"call_{num_calls}"
            entry["tool_call_id"] = message.tool_call_id or next_id
            if message.tool_name:
                entry["name"] = message.tool_name
        converted.append(entry)
    templates = call.service.tokenizer.chat_templates
    return to_template_messages(msgspec.convert(converted, list[ChatMessage]), templates)


def _read_ollama_call(tool_call: Mapping[str, Any], number: int, path: str) -> dict[str, Any]:
    function = tool_call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function must have a name", f"{path}.function")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call_id = tool_call.get("id")
    if not isinstance(call_id, str):
        call_id = f"call_{number}"
    named = {"name": function["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": named}


def read_ollama_tools(tools: list[dict[str, Any]]) -> list[ToolFunction]:
    if not tools:
        return []
    from bloomery.server.response_plan import create_tool

    functions = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function"
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{path} must be an object", path)
        name = function.get("name")
        description = function.get("description")
        parameters = function.get("parameters")
        functions.append(create_tool(name, description, parameters, None, path))
    return functions


def read_ollama_format(value: str | dict[str, Any] | None) -> StructuredOutputs | None:
    if value is None or value == "":
        return None
    if value == "json":
        return StructuredOutputs(json_object=True)
    if isinstance(value, dict):
        return StructuredOutputs(json=value, strict=False)
    raise InvalidRequest('format must be "json" or a JSON schema', "format")


def read_think(think: bool | str | None) -> str | None:
    """The reasoning effort."""
    if think is None:
        return None
    if isinstance(think, bool):
        return "high" if think else "none"
    if think not in THINK_LEVELS:
        levels = ", ".join(THINK_LEVELS)
        raise InvalidRequest(f"think must be true, false or one of {levels}", "think")
    return "xhigh" if think == "max" else think


def loaded_answer(call: HttpCall, content: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, with which Ollama's clients load a model."""
    return {**line_head(call), **content, "done": True, "done_reason": "load"}


def line_head(call: HttpCall) -> dict[str, Any]:
    return {"model": call.model_name, "created_at": current_time()}


def current_time() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaFormatter:
    """Writes an answer as lines of JSON. A tool call is written when it is complete.

    /api/chat has a message with content, /api/generate a response and a context.
    """

    def __init__(self, job: GenerationJob, is_chat: bool):
        self.job = job
        self.is_chat = is_chat
        self.text_field = "content" if is_chat else "response"
        self.answer_blocks = AnswerBlocks(job.inputs[0].response is not None)

    @property
    def answer(self) -> CompletionState:
        return self.job.best_answers[0]

    def delta_events(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        lines = b""
        for change in self.answer_blocks.add_delta(delta):
            is_complete_call = change.action == "close" and change.block.complete
            if change.block.kind == "call":
                if is_complete_call:
                    lines += self._line(self._call_content(change.block))
            elif change.action == "delta":
                lines += self._line(self._text_content(change.block, change.text))
        return lines

    def final_events(self) -> bytes:
        self.answer_blocks.finish(complete=True)
        return self._line({**self._empty_content(), **self._final_fields()})

    def full_response(self) -> dict[str, Any]:
        self.answer_blocks.finish(complete=True)
        return {**line_head(self.job.call), **self._whole_content(), **self._final_fields()}

    def error_line(self, error: HttpErrorInfo) -> bytes:
        return encode_json({"error": error.message}) + b"\n"

    def _line(self, content: dict[str, Any]) -> bytes:
        return encode_json({**line_head(self.job.call), "done": False, **content}) + b"\n"

    def _final_fields(self) -> dict[str, Any]:
        job = self.job
        timings = job.timings
        return {
            "done": True,
            "done_reason": "length" if self.answer.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(timings.last_token - timings.arrived),
            "load_duration": 0,
            "prompt_eval_count": job.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.first_token - timings.started),
            "eval_count": job.num_output_tokens,
            "eval_duration": nanoseconds(timings.last_token - timings.first_token),
        }

    def _text_content(self, block: AnswerBlock, text: str) -> dict[str, Any]:
        content = {self.text_field: text}
        if block.kind == "reasoning":
            content = {self.text_field: "", "thinking": text}
        return self._wrap(content)

    def _call_content(self, block: AnswerBlock) -> dict[str, Any]:
        return self._wrap({self.text_field: "", "tool_calls": [self._tool_call(block)]})

    def _tool_call(self, block: AnswerBlock) -> dict[str, Any]:
        calls = [other for other in self.answer_blocks.blocks if other.kind == "call"]
        function = {
            "index": calls.index(block),
            "name": block.name,
            "arguments": block.arguments,
        }
        return {"id": block.id, "function": function}

    def _empty_content(self) -> dict[str, Any]:
        return self._wrap({self.text_field: ""}) | self._context()

    def _whole_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {self.text_field: self._text_of("text")}
        thinking = self._text_of("reasoning")
        if thinking:
            content["thinking"] = thinking
        calls = [block for block in self.answer_blocks.blocks if block.kind == "call"]
        if calls:
            content["tool_calls"] = [self._tool_call(block) for block in calls]
        return self._wrap(content) | self._context()

    def _text_of(self, kind: str) -> str:
        blocks = self.answer_blocks.blocks
        return "".join(block.text for block in blocks if block.kind == kind)

    def _wrap(self, content: dict[str, Any]) -> dict[str, Any]:
        if not self.is_chat:
            return content
        return {"message": {"role": "assistant", **content}}

    def _context(self) -> dict[str, Any]:
        """The token ids with which /api/generate can be continued."""
        if self.is_chat:
            return {}
        return {"context": [*self.job.generations[0].prompt_ids, *self.answer.token_ids]}


def nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)


# ---- embeddings and models -----------------------------------------------------------------


async def ollama_embed(call: HttpCall) -> ASGIApp:
    """Ollama's embed: turn texts into vectors."""
    body = await call.read_body(OllamaEmbedBody)
    await select_ollama_model(call, body.model)
    embedding_body = EmbeddingBody(input=body.input, dimensions=body.dimensions)
    vectors, num_tokens = await embed_inputs(call, embedding_body)
    timings = call.timings
    return call.json_response(
        {
            "model": call.model_name,
            "embeddings": [list(vector) for vector in vectors],
            "total_duration": nanoseconds(timings.last_token - timings.arrived),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
    )


async def ollama_tags(call: HttpCall) -> ASGIApp:
    """Ollama's list of models: the one served here, under each of its names, and its adapters."""
    service = call.service
    names = (*service.settings.model_names, *await service.adapters.list_names())
    return call.json_response({"models": [describe_ollama_model(call, name) for name in names]})


async def ollama_ps(call: HttpCall) -> ASGIApp:
    """Ollama's list of loaded models."""
    settings = call.service.settings
    capacity = call.service.backend.capacity
    if capacity is None:
        return call.json_response({"models": []})
    model = {
        **describe_ollama_model(call, settings.model),
        "expires_at": "9999-12-31T23:59:59Z",  # it stays loaded
        "size_vram": 0,
        "context_length": capacity.max_model_len,
    }
    return call.json_response({"models": [model]})


async def ollama_show(call: HttpCall) -> ASGIApp:
    """Ollama's description of a model."""
    body = await call.read_body(OllamaShowBody)
    await select_ollama_model(call, body.model or body.name)
    service = call.service
    capacity = service.backend.capacity
    defaults = service.sampling_defaults
    lookup = await service.find_response_format()
    capabilities = ["completion", "embedding"]
    if lookup.format is not None and lookup.format.calls is not None:
        capabilities.append("tools")
    if lookup.format is not None and lookup.format.reasoning is not None:
        capabilities.append("thinking")
    if service.tokenizer.find_gap_tokens() is not None:
        capabilities.append("insert")
    return call.json_response(
        {
            "modelfile": f"FROM {service.settings.model}",
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "template": service.tokenizer.chat_templates.get("default", ""),
            "details": model_details(),
            "model_info": {
                "general.architecture": "bloomery",
                "bloomery.context_length": capacity and capacity.max_model_len,
                "bloomery.vocab_size": capacity and capacity.vocab,
            },
            "capabilities": capabilities,
            "modified_at": start_time(call),
        }
    )


async def ollama_version(call: HttpCall) -> ASGIApp:
    """This server's version, where Ollama's clients look for it."""
    return call.json_response({"version": __version__})


def describe_ollama_model(call: HttpCall, name: str) -> dict[str, Any]:
    full_name = name if ":" in name else name + LATEST_TAG
    return {
        "name": full_name,
        "model": full_name,
        "modified_at": start_time(call),
        "size": 0,
        "digest": sha256(name.encode()).hexdigest(),
        "details": model_details(),
    }


def start_time(call: HttpCall) -> str:
    started = datetime.fromtimestamp(call.service.started, UTC)
    return started.isoformat().replace("+00:00", "Z")


def model_details() -> dict[str, Any]:
    """Ollama's fields about the model's file, which this server does not report."""
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


ROUTES = (
    Route(
        "/api/chat",
        ollama_chat,
        format_ollama_error,
        OllamaChatBody,
        generates=True,
        media_types=JSON_OR_LINES,
    ),
    Route(
        "/api/generate",
        ollama_generate,
        format_ollama_error,
        OllamaGenerateBody,
        generates=True,
        media_types=JSON_OR_LINES,
    ),
    Route("/api/embed", ollama_embed, format_ollama_error, OllamaEmbedBody, generates=True),
    Route("/api/tags", ollama_tags, format_ollama_error),
    Route("/api/ps", ollama_ps, format_ollama_error),
    Route("/api/show", ollama_show, format_ollama_error, OllamaShowBody),
    Route("/api/version", ollama_version, format_ollama_error, quiet=True),
)

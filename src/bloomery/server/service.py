"""InferenceService, which all HTTP requests share, and HttpCall, one HTTP request.

InferenceService holds the engine, the tokenizer, the settings, admission and metrics, and turns
text into token ids. HttpCall is one request, and its Route names the handler. Nothing here knows an
API: the handlers in routes/ interpret the bodies.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from mmap import PAGESIZE
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope

from bloomery import __version__
from bloomery.engine.adapter_catalog import NamedAdapter
from bloomery.engine.turns import TurnQueue
from bloomery.errors import (
    GRAMMAR_TOO_COMPLEX,
    NO_TOKEN_LEFT,
    UNUSABLE_ADAPTER,
    InvalidRequest,
    NonTextInput,
    PromptTooLong,
    RequestFailed,
)
from bloomery.messages import EngineCapacity, EngineRequest, TokenOutput
from bloomery.response_format import FormatLookup, ResponseFormat, ResponseParser, ToolFunction
from bloomery.sampling import SamplingParams, StructuredOutputs
from bloomery.server.adapters import (
    LORA_OFF,
    READY_CHECK_SECONDS,
    AdapterSettings,
    ServedAdapters,
)
from bloomery.server.backend import InferenceBackend
from bloomery.server.conversations import ConversationStore, StoredConversation, StoredResponse
from bloomery.server.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    ErrorFormatter,
    HttpError,
    HttpErrorInfo,
    describe_error,
    overloaded_error,
    unavailable_error,
)
from bloomery.server.limits import (
    AdmissionControl,
    AdmissionPermit,
    ServerLimits,
    check_entry_counts,
    receive_body,
)
from bloomery.server.metrics import RequestTimings, ServerMetrics
from bloomery.server.schema import BodyType, RequestBody, decode_json, encode_json, parse_body
from bloomery.text.outputs import AnswerParser
from bloomery.text.tokenizer import Tokenizer
from bloomery.text.tokenizer_pool import TokenizerPool, encode_pieces

log = logging.getLogger("bloomery.server")

# Shares of `ServerLimits.memory_bytes` at which the server acts on its memory in use.
CLEAR_CONVERSATIONS_AT = 0.8
REFUSE_REQUESTS_AT = 0.9
SHED_LOAD_AT = 0.95

WARNING_HEADER = "x-bloomery-warning"
MAX_WARNING_CHARACTERS = 1000  # of the header; a proxy may refuse a response with large headers

# Words of chat templates with reasoning or marked content. Without any, no format is looked for.
REGION_WORDS = ("think", "reason", "channel")

# Mistral's chat templates refuse ids of tool calls that do not have nine characters.
SHORT_ID_CHECK = re.compile(r"length\s*!=\s*9")

# Requests taken in together, before tokens are written again. One costs as much as 20 tokens.
ARRIVAL_BATCH = 8

# A text of more characters, or a list of more token ids, goes to the tokenizer worker pool.
MAX_INLINE_LENGTH = 1000

# Model names that clients send when no model was chosen.
PLACEHOLDER_MODELS = ("", "tgi", "dummy", "default")
DEFAULTED_FIELDS = {field.name for field in fields(SamplingParams)} - {"max_tokens"}

JSON_MEDIA = ("application/json",)
EVENT_MEDIA = ("text/event-stream",)
JSON_OR_EVENTS = JSON_MEDIA + EVENT_MEDIA

_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The operator's settings of the HTTP server."""

    model: str  # the name under which the model is served
    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # API keys; without any, every request is accepted
    host: str = "127.0.0.1"  # the address the server is bound to
    allowed_hosts: tuple[str, ...] = ()  # Host names accepted besides the local ones
    cors_origins: tuple[str, ...] = ()
    open_metrics: bool = False  # /metrics without a key
    revision: str | None = None  # of the model
    response_format: Path | None = None  # a file that replaces the format found in the checkpoint
    limits: ServerLimits = field(default_factory=ServerLimits)
    warm: bool = False  # start a tokenizer worker before the first request
    prepare_grammars: bool = False  # when the engine is ready, before the first grammar comes
    text_part_only: bool = False  # a vision model, of which only the text part is served
    has_spare_cores: bool = False  # do so while the engine loads
    demo: bool = False  # the embedded model, which is there for a first look
    recommended_model: Mapping[str, Any] | None = None  # a better one for this machine
    lora: AdapterSettings = field(default_factory=AdapterSettings)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the base model; the first is the main one."""
        return (self.model, *self.aliases)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    ids: Sequence[int]
    text: str | None = None  # None: the client sent token ids
    system_length: int = 0  # see EngineRequest


@dataclass(frozen=True)
class ResponsePlan:
    """How to parse an answer: the model's format, the tools it may call, and its prompt."""

    format: ResponseFormat
    tools: tuple[ToolFunction, ...] = ()
    prompt: str = ""  # its end decides in which region the answer begins
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def create_parser(self) -> AnswerParser:
        return ResponseParser(self.format, self.tools, self.prompt, self.special_tokens)


@dataclass(frozen=True)
class PlannedResponse:
    """A prompt, and what its answer must look like."""

    prompt: TokenizedPrompt
    plan: ResponsePlan | None = None  # None: the answer is not parsed
    grammar: str = ""  # for the engine; empty: the answer is not constrained
    warnings: tuple[str, ...] = ()


class InferenceService:
    """The state that all requests of one server share."""

    def __init__(
        self,
        backend: InferenceBackend,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        routes: Sequence[Route] = (),
    ):
        limits = settings.limits
        per_key_share = limits.greed if len(settings.keys) > 1 else None
        self.backend = backend
        self.tokenizer = tokenizer
        self.settings = settings
        self.routes = routes
        self.limits = limits
        self.metrics = ServerMetrics(backend, settings.model)
        self.adapters = ServedAdapters(
            backend,
            settings.lora,
            (*settings.model_names, *PLACEHOLDER_MODELS),
            bool(settings.keys),
            self.metrics.adapters,
        )
        self.admission = AdmissionControl(limits.requests, per_key_share)
        self.arrivals = TurnQueue(ARRIVAL_BATCH)
        self.measure_memory = resident_memory_bytes
        self.memory_pressure = 0.0  # share of the memory limit in use at the last measurement
        self.tokenizer_pool = TokenizerPool(
            tokenizer,
            limits.text_processes,
            limits.template_seconds,
            limits.text_seconds,
            limits.text_bytes,
        )
        self.conversations: ConversationStore[StoredResponse] = ConversationStore(
            limits.stored_responses, limits.stored_characters
        )
        self.stored_chats: ConversationStore[Any] = ConversationStore(
            limits.stored_responses, limits.stored_characters
        )
        self.stored_conversations: ConversationStore[StoredConversation] = ConversationStore(
            limits.stored_responses, limits.stored_characters
        )
        self.fingerprint = f"bloomery-{__version__}"
        self.started = int(time.time())
        self.sampling_defaults = {
            name: value
            for name, value in tokenizer.sampling_defaults.items()
            if name in DEFAULTED_FIELDS
        }
        self.compiled_grammars: dict[str, str] = {}  # by their Lark text; see response_plan.py
        self.prepared_tools: dict[str, tuple[list[Any], tuple[str, ...]]] = {}
        # How the model writes reasoning and tool calls; None until it has been found.
        self.response_format: FormatLookup | None = None
        self._format_search: asyncio.Task[FormatLookup] | None = None
        self._grammar_preparation: asyncio.Task[None] | None = None
        self._adapter_preload: asyncio.Task[None] | None = None
        templates = "".join(tokenizer.chat_templates.values())
        self._has_short_call_ids = SHORT_ID_CHECK.search(templates) is not None
        self._may_have_regions = (
            settings.response_format is not None
            or tokenizer.response_template is not None
            or any(word in templates for word in REGION_WORDS)
        )

    # ---- capacity ----------------------------------------------------------------------------

    @property
    def capacity(self) -> EngineCapacity:
        """Capacity of the engine; 503 before it has been ready once."""
        if self.backend.capacity is None:
            raise unavailable_error("the model is being loaded", 5)
        return self.backend.capacity

    def engine_error(self) -> HttpError | None:
        """The error to send while no engine can answer, or None if one answers now or soon."""
        match self.backend.status.state:
            case "ready" | "stalled" | "restarting":
                return None
            case "loading":
                return unavailable_error("the model is being loaded", 5)
            case "failed":
                return unavailable_error("the engine has failed", 5)
        return unavailable_error("the server is shutting down", 10, connection="close")

    def explain_media_error(self, error: Exception) -> Exception:
        """Say why a vision model refuses an image. Other errors are returned unchanged."""
        if not isinstance(error, NonTextInput) or not self.settings.text_part_only:
            return error
        return NonTextInput(
            f"{error}. {self.settings.model} is a vision model, and this server runs its text part "
            "only: send text without images",
            error.field,
        )

    def check_capacity(self, key: str = "", num_sequences: int = 1) -> None:
        """Refuse a request that cannot be admitted.

        This runs before the body is read, so under overload it is all that a request costs.
        """
        error = self.engine_error()
        if error is not None:
            raise error
        has_memory = self.memory_pressure <= REFUSE_REQUESTS_AT
        if has_memory and self.admission.has_room(num_sequences, key):
            return
        if self.backend.status.state == "restarting":
            raise unavailable_error("the engine is restarting and its queue is full", 5)
        raise overloaded_error(self.admission.retry_after(self.prompt_rate))

    async def wait_for_turn(self, key: str) -> None:
        """Wait until a request may be read. Refuse it as soon as it cannot be admitted."""
        self.check_capacity(key)
        await self.arrivals.wait()
        self.check_capacity(key)  # those before it may have taken the last places

    def admit(self, num_sequences: int, key: str = "") -> AdmissionPermit:
        """Reserve places for the sequences of one request."""
        maximum = min(self.limits.fan_out, self.limits.requests)
        if num_sequences > maximum:
            request = f"{num_sequences} answers (prompts x n) were asked for"
            raise InvalidRequest(f"{request}, at most {maximum} are allowed", "n")
        self.check_capacity(key, num_sequences)
        return self.admission.admit(num_sequences, self.prompt_rate, key)

    def relieve_memory_pressure(self) -> None:
        """Measure the process's memory and free some if needed; called once a second."""
        self.memory_pressure = self.measure_memory() / self.limits.memory_bytes
        if self.memory_pressure > CLEAR_CONVERSATIONS_AT:
            self.conversations.clear()
            self.stored_chats.clear()
            self.stored_conversations.clear()
        if self.memory_pressure > SHED_LOAD_AT:
            self.admission.shed_load()

    def error_for(self, output: TokenOutput, permit: AdmissionPermit) -> Exception:
        """The error of a request that the engine ended without its answer."""
        if output.finish == "deadline":
            return DeadlineExceeded()
        if permit.was_shed:
            return overloaded_error(self.admission.retry_after(self.prompt_rate))
        if output.error in (GRAMMAR_TOO_COMPLEX, NO_TOKEN_LEFT):
            return InvalidRequest(output.error, "structured_outputs")
        if output.error and output.error.startswith(UNUSABLE_ADAPTER):
            return InvalidRequest(self.adapters.hide_paths(output.error), "model")
        return self.engine_error() or RequestFailed(
            output.error or "the engine ended the request without an answer"
        )

    def abort(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self.backend.abort(request.id)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second, over the last seconds."""
        return self.metrics.prompt_token_rate.value(time.monotonic())

    @property
    def max_waiting_tokens(self) -> int:
        """Prompt tokens that may wait for prefill."""
        capacity = self.capacity
        return self.limits.waiting_tokens or 8 * capacity.max_model_len * capacity.max_num_seqs

    async def find_adapter(self, name: str | None) -> NamedAdapter | None:
        """Return the LoRA adapter that a model name stands for, None for the base model.

        Raises 404 for a name that is not served here.
        """
        if name is None or name in (*self.settings.model_names, *PLACEHOLDER_MODELS):
            return None
        adapter = await self.adapters.find(name)
        if adapter is None:
            message = await self.adapters.describe_unknown(name)
            raise HttpError(404, message, "model_not_found")
        return adapter

    # ---- text and token ids ------------------------------------------------------------------

    async def tokenize(
        self, text: str, add_special: bool = True, field: str = "prompt"
    ) -> TokenizedPrompt:
        """Token ids of a text: computed here if it is short, else in a tokenizer worker."""
        self.check_prompt_characters(len(text), field)
        if len(text) <= MAX_INLINE_LENGTH:
            await asyncio.sleep(0)  # let other requests run between the texts of a long list
            return TokenizedPrompt(self.tokenizer.encode(text, add_special), text)
        return TokenizedPrompt(await self.tokenizer_pool.encode(text, add_special, field), text)

    async def tokenize_with_offsets(
        self, text: str, add_special: bool, last: int | None = None
    ) -> bytes:
        """A text's tokens and their offsets as JSON; only the `last` tokens, if it is given."""
        self.check_prompt_characters(len(text), "inputs")
        if len(text) <= MAX_INLINE_LENGTH:
            return encode_pieces(self.tokenizer.encode_with_offsets(text, add_special), last)
        return await self.tokenizer_pool.encode_with_offsets(text, add_special, last)

    async def detokenize(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        if len(ids) <= MAX_INLINE_LENGTH:
            return self.tokenizer.decode(ids, skip_special=False)
        return await self.tokenizer_pool.decode(ids)

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> TokenizedPrompt:
        """Messages rendered by the model's chat template and tokenized, in a tokenizer worker."""
        num_characters = sum(len(str(message.get("content"))) for message in messages)
        self.check_prompt_characters(num_characters, "messages")
        if self._has_short_call_ids:
            from bloomery.server.response_plan import shorten_call_ids

            messages = shorten_call_ids(messages)
        # Other models find any common beginning in the prefix cache.
        finds_system = any(group.state_blocks for group in self.capacity.cache_groups)
        chat = await self.tokenizer_pool.render_chat(
            messages, options, self.max_prompt_characters, finds_system
        )
        return TokenizedPrompt(chat.ids, chat.text, chat.system_length)

    def warm_up(self) -> None:
        """Do before the first request what it would otherwise wait for."""
        self.tokenizer_pool.warm_up()
        self._start_format_search()
        if self.settings.prepare_grammars:
            self._grammar_preparation = asyncio.create_task(self._prepare_grammars())
        if self.settings.lora.modules:
            self._adapter_preload = asyncio.create_task(self.adapters.preload())

    async def _prepare_grammars(self) -> None:
        """Get a tokenizer worker ready for grammars, once the engine no longer needs the cores."""
        while self.backend.capacity is None and not self.settings.has_spare_cores:
            await asyncio.sleep(READY_CHECK_SECONDS)
        await self.tokenizer_pool.prepare_grammars()

    def _start_format_search(self) -> asyncio.Task[FormatLookup]:
        if self._format_search is None:
            from bloomery.server.response_plan import search_response_format

            self._format_search = asyncio.create_task(search_response_format(self))
        return self._format_search

    async def answers_have_regions(self) -> bool:
        """Whether a plain answer has parts that must be told apart, such as reasoning."""
        if not self._may_have_regions:
            return False
        lookup = await self.find_response_format()
        return has_regions(lookup.format)

    async def find_response_format(self) -> FormatLookup:
        """How the model writes reasoning and tool calls: found once, then remembered."""
        if self.response_format is not None:
            return self.response_format
        # Shielded, because other requests wait for the same search.
        return await asyncio.shield(self._start_format_search())

    @property
    def max_prompt_characters(self) -> int:
        """A prompt with more characters than this cannot fit the context."""
        return self.limits.characters_per_token * self.capacity.max_model_len

    def check_prompt_characters(self, num_characters: int, field: str) -> None:
        """Refuse a text that cannot fit the context before it is tokenized."""
        maximum = self.max_prompt_characters
        if num_characters > maximum:
            room = f"a context of {self.capacity.max_model_len} tokens holds at most {maximum}"
            raise PromptTooLong(f"the prompt has {num_characters} characters: {room}", field)


async def plan_response(
    call: HttpCall,
    *,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[ToolFunction] = (),
    tool_choice: str = "auto",
    allowed_tools: Sequence[str] | None = None,
    parallel: bool = True,
    outputs: StructuredOutputs | None = None,
    template_options: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    thinking_budget: int | None = None,
    output_field: str = "response_format",
) -> PlannedResponse:
    """Render a conversation, and plan how its answer is constrained and parsed.

    All chat APIs use this. `tool_choice` is "none", "auto", "required" or the name of a tool; with
    `allowed_tools` only these may be called. `template_options` go to `apply_chat_template`.
    `reasoning_effort` is "none" or a level. `thinking_budget` bounds the reasoning in tokens.
    Errors of `outputs` name the request field `output_field`.
    """
    service = call.service
    if not tools and outputs is None and not await service.answers_have_regions():
        options = template_options or {}
        return PlannedResponse(await service.apply_chat_template(messages, **options))
    from bloomery.server.response_plan import ResponsePlanner

    lookup = await service.find_response_format()
    planner = ResponsePlanner(call, lookup, messages, dict(template_options or {}))
    planner.set_tools(tools, tool_choice, allowed_tools, parallel)
    planner.set_reasoning(reasoning_effort, thinking_budget)
    planned = await planner.plan(outputs, output_field)
    for warning in planned.warnings:
        call.warn(warning)
    return planned


def has_regions(response_format: ResponseFormat) -> bool:
    """Whether an answer without tool calls has parts that must be told apart."""
    return response_format.reasoning is not None or bool(response_format.content.open)


async def compile_outputs(call: HttpCall, outputs: StructuredOutputs, field: str) -> str:
    """The grammar of an answer that is not parsed, such as a completion."""
    from bloomery.structured.closed_schema import close_outputs

    outputs = await asyncio.to_thread(close_outputs, outputs, field)
    compiled = await call.service.tokenizer_pool.compile_grammar(outputs, field)
    for warning in compiled.warnings:
        call.warn(warning)
    return compiled.grammar


def resident_memory_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[1])
    except OSError:
        return 0
    return num_pages * PAGESIZE


# ---- one request ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """An entry of the route table."""

    # Exact, or with {parameters}. The only one of a path may contain slashes.
    path: str
    handler: Callable[[HttpCall], Awaitable[ASGIApp]]
    error_formatter: ErrorFormatter
    body_type: type[RequestBody] | None = None  # of a POST; None: the request has no body
    public: bool = False  # needs no API key
    generates: bool = False  # runs the model, so the request is admitted, counted and traced
    quiet: bool = False  # a successful request is logged at debug level only
    media_types: tuple[str, ...] = JSON_MEDIA
    response_shape: Any = "object"  # see shapes.py
    verb: str = ""  # the HTTP method if it is neither a POST with a body nor a GET without one

    @property
    def method(self) -> str:
        return self.verb or ("GET" if self.body_type is None else "POST")

    @property
    def summary(self) -> str:
        return " ".join((self.handler.__doc__ or "").split())


@dataclass
class HttpCall:
    """One HTTP request: its connection, its route, its timings and its log fields."""

    service: InferenceService
    route: Route
    scope: Scope
    receive: Receive
    headers: Headers
    request_id: str
    tenant: str  # prefix cache hits are shared among requests of one tenant only
    path_parameters: tuple[str, ...] = ()  # the values of {parameters} in the path
    cleanup: ExitStack = field(default_factory=ExitStack)
    log_fields: dict[str, Any] = field(default_factory=dict)  # counts and times, never text
    adapter: NamedAdapter | None = None  # the LoRA adapter it uses; None: the base model
    sampling_params: SamplingParams | None = None  # of its first prompt, once known

    def __post_init__(self) -> None:
        self.warnings: list[str] = []  # for the client, in a header of the response
        self.error_formatter = self.route.error_formatter
        self.timings = RequestTimings(time.monotonic())
        self.unique_id = uuid4().hex
        self.created = int(time.time())
        self._json: dict[str, Any] | None = None

    @property
    def path_parameter(self) -> str:
        """The value of the first {parameter} in the path."""
        return self.path_parameters[0]

    @property
    def model_name(self) -> str:
        """The model that answers, under its main name: the adapter or the base model."""
        return self.service.settings.model if self.adapter is None else self.adapter.name

    async def select_model(self, name: str | None) -> None:
        """Use the model that a body names. Raises 404 if it is not served here."""
        self._set_adapter(await self.service.find_adapter(name))

    async def select_adapter(
        self,
        adapter_id: str | None,
        scales: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Use the adapter of TGI's field adapter_id or of llama.cpp's field lora."""
        for field_name, value in (("adapter_id", adapter_id), ("lora", scales)):
            if value and not self.service.settings.lora.enabled:
                raise InvalidRequest(f"{field_name} is not supported: {LORA_OFF}", field_name)
        if adapter_id:
            await self.select_model(adapter_id)
        elif scales:
            self._set_adapter(await self.service.adapters.select_by_scale(scales))

    def _set_adapter(self, adapter: NamedAdapter | None) -> None:
        self.adapter = adapter
        if adapter is not None:
            self.log_fields["adapter"] = adapter.name

    async def read_json(self) -> dict[str, Any]:
        """The body's JSON object, which is read once."""
        if self._json is None:
            limits = self.service.limits
            is_openai_path = self.route.path.startswith("/v1/")
            max_bytes = limits.body_bytes if is_openai_path else limits.tgi_body_bytes
            data = await receive_body(self.receive, self.headers, max_bytes, limits.body_seconds)
            raw = decode_json(data)
            check_entry_counts(raw, limits)
            self._json = raw
        return self._json

    async def read_body(self, body_type: type[BodyType]) -> BodyType:
        return self.parse_body(await self.read_json(), body_type)

    def parse_body(self, raw: dict[str, Any], body_type: type[BodyType]) -> BodyType:
        """Parse a JSON object and count the fields that the body type does not declare."""
        body, unknown_fields = parse_body(raw, body_type)
        if unknown_fields:
            self.service.metrics.unknown_fields[(self.route.path,)] += len(unknown_fields)
        for unknown in unknown_fields[:8]:
            nearest = unknown.nearest_name()
            if nearest is not None:
                self.warn(
                    f"unknown field {unknown.name[:64]!r} is ignored: did you mean {nearest}?"
                )
        return body

    def warn(self, message: str) -> None:
        """Tell the client, in a header of the response, about something that is not an error."""
        log.info("request %s: %s", self.request_id, message)
        self.warnings.append(message)

    @property
    def warning_headers(self) -> dict[str, str]:
        if not self.warnings:
            return {}
        text = "; ".join(self.warnings)[:MAX_WARNING_CHARACTERS]
        printable = "".join(c if " " <= c <= "~" else "?" for c in text)
        return {WARNING_HEADER: printable}

    @property
    def deadline(self) -> float:
        """The deadline on the event loop's clock. The client may shorten it but not extend it."""
        seconds = self.service.limits.deadline_seconds
        milliseconds = self.headers.get("x-request-deadline-ms")
        if milliseconds is not None:
            if not milliseconds.isdecimal() or not 0 < len(milliseconds) < 12:
                raise InvalidRequest("X-Request-Deadline-Ms must be a whole number of milliseconds")
            seconds = min(seconds, int(milliseconds) / 1000)
        elapsed = time.monotonic() - self.timings.arrived
        return asyncio.get_running_loop().time() + seconds - elapsed

    def admit(self, num_sequences: int) -> AdmissionPermit:
        """Reserve places until the call ends. Handlers do this before any costly work."""
        permit = self.service.admit(num_sequences, self.tenant)
        self.cleanup.callback(permit.release)
        return permit

    def json_response(
        self, content: Any, headers: Mapping[str, str] | None = None, status: int = 200
    ) -> Response:
        if self.warnings:
            headers = {**self.warning_headers, **(headers or {})}
        return Response(encode_json(content), status, headers, "application/json")

    def record_failure(self, error: BaseException) -> HttpErrorInfo:
        """Count a failure, log it if it is the server's fault, and describe it for the client."""
        if isinstance(error, ClientDisconnected):
            kind = "dropped"
            info = HttpErrorInfo(499, "the client has left")
        else:
            info = describe_error(error)
            kind = info.tgi.error_type.removesuffix("_error")
        self.log_fields["error"] = kind
        if self.route.generates:
            self.service.metrics.failures[(kind,)] += 1
        if info.status == 500:
            expected = isinstance(error, RequestFailed)
            traceback = None if expected else error
            log.error("request %s failed: %s", self.request_id, error, exc_info=traceback)
        return info


def choose_request_id(headers: Headers) -> str:
    """The client's own id if it is safe in a log and a header, else a new one."""
    sent = headers.get("x-request-id", "")
    return sent if _SAFE_REQUEST_ID.fullmatch(sent) else f"req_{uuid4().hex}"

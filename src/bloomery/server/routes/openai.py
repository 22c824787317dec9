"""What OpenAI's routes share: sampling fields, log-probabilities, envelopes and finish reasons.

Additional fields have the names and meanings that they have in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import msgspec

from bloomery.errors import InvalidRequest
from bloomery.messages import TokenLogprob
from bloomery.sampling import SamplingParams, StructuredOutputs
from bloomery.server.generation import DONE_EVENT, GenerationJob, format_event
from bloomery.server.limits import check_labels, check_sampling_limits
from bloomery.server.schema import RequestBody
from bloomery.server.service import HttpCall
from bloomery.text.tokenizer import Tokenizer

TEXT_ONLY = "this server generates text only; leave it out"

# SamplingParams fields that a body sets under the same name. Each route reads the others itself.
COMMON_FIELDS = {field.name for field in fields(SamplingParams)} - {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "structured_outputs",
}
# Fields that constrain the answer. At most one of them may be given.
CONSTRAINT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "structural_tag",
)
SMALLEST_TOP_P = 1e-9  # OpenAI allows 0: the most likely token alone
MIN_SEED = -(2**63)  # OpenAI's; a negative seed is read as the same 64 bits without a sign
MIN_LOGPROB = -9999.0  # what OpenAI writes for any smaller log-probability


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(RequestBody, kw_only=True):
    """Fields of every OpenAI route that generates."""

    UNSUPPORTED_FIELDS: ClassVar[dict[str, str]] = {
        "audio": TEXT_ONLY,
        "prediction": TEXT_ONLY,
        "web_search_options": "this server does not search the web; leave it out, or give a tool",
        "prompt_embeds": TEXT_ONLY,
        "chat_template": "the model's own template is used; leave it out",
        "logits_processors": "this server runs no code of its clients; leave it out",
        "custom_logit_processor": "this server runs no code of its clients; leave it out",
        "use_beam_search": "this server samples; use n or best_of",
        "stop_regex": "use stop for fixed texts, or regex to constrain the whole answer",
    }
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "verbosity",
            "guided_decoding_backend",
            "tool_prompt",
        }
    )
    model: str | None = None
    adapter_id: str | None = None  # TGI's and LoRAX's: a LoRA adapter, instead of `model`
    lora: list[dict[str, Any]] | None = None  # llama.cpp's: [{"id": ..., "scale": ...}]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    # Structured output: OpenAI's and TGI's, vLLM's, SGLang's and llama.cpp's fields.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


async def select_openai_model(call: HttpCall, body: GenerationBody) -> None:
    """Use the model, or the LoRA adapter, that a body names."""
    await call.select_model(body.model)
    await call.select_adapter(body.adapter_id, body.lora)


def openai_sampling_params(
    call: HttpCall, body: GenerationBody, **route_values: Any
) -> SamplingParams:
    """Check the common fields and combine them with the values that the route computed."""
    check_labels(body.user, body.metadata, call.service.limits)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options may be given only with stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs cannot be streamed: leave out one of the two"
        raise InvalidRequest(message, "prompt_logprobs")
    if body.repetition_penalty is None and is_constrained(body):
        # A penalty by default would drive the model away from the quotes and braces of JSON.
        route_values["repetition_penalty"] = 1.0
    if body.logit_bias:
        route_values["logit_bias"] = {
            _parse_token_id(name): bias for name, bias in body.logit_bias.items()
        }
    return merge_sampling_params(call, body, COMMON_FIELDS, **route_values)


def merge_sampling_params(
    call: HttpCall, body: RequestBody, fields: Iterable[str], **route_values: Any
) -> SamplingParams:
    """The checkpoint's defaults, overridden by fields of the body and by `route_values`."""
    values = dict(call.service.sampling_defaults)
    for name in fields:
        value = getattr(body, name, None)
        if value is not None:
            values[name] = value
    values |= route_values
    if values.get("top_p") == 0:
        values["top_p"] = SMALLEST_TOP_P
    seed = values.get("seed")
    if seed is not None and MIN_SEED <= seed < 0:
        values["seed"] = seed % 2**64
    return check_sampling_limits(SamplingParams(**values), call.service.limits)


def is_constrained(body: GenerationBody) -> bool:
    """Whether a grammar prescribes the whole answer."""
    tool_choice = getattr(body, "tool_choice", None)
    if tool_choice not in (None, "none", "auto"):
        return True
    format_type = (body.response_format or {}).get("type", "text")
    others = [getattr(body, name) for name in CONSTRAINT_FIELDS if name != "response_format"]
    return format_type != "text" or any(value is not None for value in others)


def read_structured_outputs(body: GenerationBody) -> tuple[StructuredOutputs, str] | None:
    """What the answer must look like, and the field that says so; None if nothing is asked."""
    fields = {name: getattr(body, name) for name in CONSTRAINT_FIELDS}
    if not any(value is not None for value in fields.values()):
        return None
    from bloomery.server.routes.constraints import parse_constraints

    return parse_constraints(fields, body.guided_whitespace_pattern)


def _parse_token_id(name: str) -> int:
    if not name.isascii() or not name.isdecimal() or len(name) > 10:
        message = f"logit_bias is keyed by token ids, and {name[:64]!r} is not one"
        raise InvalidRequest(message, "logit_bias")
    return int(name)


class CompletionEnvelope:
    """The fields around an answer's choices, in a full response or in chunks."""

    def __init__(self, job: GenerationJob, body: GenerationBody, id_prefix: str, object_name: str):
        call = job.call
        options = body.stream_options or StreamOptions()
        self.job = job
        self.head = {
            "id": f"{id_prefix}-{call.unique_id}",
            "object": object_name,
            "created": call.created,
            "model": call.model_name,
        }
        self.tail = {"system_fingerprint": call.service.fingerprint}
        self.chunk_head = {**self.head, **self.tail}
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = bool(options.continuous_usage_stats)

    def full_response(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usage = self.job.openai_usage()
        return {**self.head, "choices": choices, "usage": usage, **self.tail, **more}

    def chunk_event(self, choice: dict[str, Any], num_unsent: int = 0, **more: Any) -> bytes:
        """One chunk. `num_unsent` tokens have been generated but are sent in later chunks."""
        chunk = {**self.chunk_head, "choices": [choice]}
        if self.continuous_usage:
            chunk["usage"] = self.job.openai_usage(num_unsent)
        elif self.include_usage:
            chunk["usage"] = None
        return format_event(chunk | more)

    def final_events(self) -> bytes:
        if not self.include_usage:
            return DONE_EVENT
        usage = {**self.chunk_head, "choices": [], "usage": self.job.openai_usage()}
        return format_event(usage) + DONE_EVENT


def openai_finish_reason(reason: str | None) -> str | None:
    """The finish reason in OpenAI's API, which has only "length" and "stop"."""
    if reason is None or reason == "length":
        return reason
    return "stop"


def clamp_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def format_chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], num_top: int
) -> dict[str, Any]:
    """Log-probabilities of tokens as the chat API writes them."""

    def format_token(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": clamp_logprob(logprob),
            "bytes": list(data),
        }

    content = []
    for entry in entries:
        top = [format_token(token_id, logprob) for token_id, logprob in entry.top[:num_top]]
        content.append({**format_token(entry.token, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def format_prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], num_top: int
) -> list[dict[str, Any] | None]:
    """Prompt log-probabilities in vLLM's form: keyed by token id, null for the first token."""

    def format_entry(entry: TokenLogprob) -> dict[str, Any]:
        ranked = {
            token_id: (logprob, rank)
            for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)
        }
        ranked.setdefault(entry.token, (entry.logprob, entry.rank))
        return {
            str(token_id): {
                "logprob": clamp_logprob(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for token_id, (logprob, rank) in ranked.items()
        }

    return [None, *map(format_entry, entries)]

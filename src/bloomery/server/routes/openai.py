"""What OpenAI's routes have in common: the fields that steer sampling, log-probabilities, names and finish reasons.

By OpenAI's own rules; fields beyond them are those people know from vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import msgspec

from bloomery.errors import InvalidRequest
from bloomery.messages import TokenLogprob
from bloomery.sampling import SamplingParams
from bloomery.server.call import Call
from bloomery.server.generation import Job
from bloomery.server.limits import check_labels, narrow
from bloomery.server.schema import Body
from bloomery.server.streaming import DONE, event
from bloomery.text.tokenizer import Tokenizer

TOOLS = "this server does not call tools yet; leave it out"
GRAMMAR = "this server does not constrain its output yet; leave it out"
ELSEWHERE = "this server generates text only; leave it out"
APART = {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
}  # read by each route in its own way
FIELDS = {field.name for field in fields(SamplingParams)} - APART


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body, kw_only=True):
    """Fields of every OpenAI route that generates."""

    REFUSED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("tools", "functions", "function_call"), TOOLS),
        **dict.fromkeys(
            (
                "guided_json",
                "guided_regex",
                "guided_choice",
                "guided_grammar",
                "structured_outputs",
                "grammar",
            ),
            GRAMMAR,
        ),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "prompt_embeds"), ELSEWHERE),
        "adapter_id": "this server has no adapters; leave it out",
        "chat_template": "the model's own template is used; leave it out",
        "logits_processors": "this server runs no code of its clients; leave it out",
    }
    model: str | None = None
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
    response_format: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


def sampling(call: Call, body: GenerationBody, **more: Any) -> SamplingParams:
    """The checkpoint's defaults, what the body says, and what the route makes of the rest; within the limits."""
    call.service.check_model(body.model)
    check_labels(body.user, body.metadata, call.service.limits)
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise InvalidRequest(
            f"response_format {str(kind)[:64]!r} is not supported: {GRAMMAR}", "response_format"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options may be given only with stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs cannot be streamed: leave out one of the two", "prompt_logprobs"
        )
    if body.logit_bias:
        more["logit_bias"] = {_token_id(name): bias for name, bias in body.logit_bias.items()}
    return wished(call, body, FIELDS, **more)


def wished(call: Call, body: Body, fields: Iterable[str], **more: Any) -> SamplingParams:
    """The checkpoint's defaults under those fields of the body that are there, and under `more`."""
    said = {name: value for name in fields if (value := getattr(body, name, None)) is not None}
    return narrow(SamplingParams(**{**call.service.defaults, **said, **more}), call.service.limits)


def check_tools(choice: Any) -> None:
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(f"tool_choice is not supported: {TOOLS}", "tool_choice")


def _token_id(name: str) -> int:
    if not name.isascii() or not name.isdecimal() or len(name) > 10:
        raise InvalidRequest(
            f"logit_bias is keyed by token ids, and {name[:64]!r} is none", "logit_bias"
        )
    return int(name)


class Envelope:
    """What frames an answer, whole or in chunks."""

    def __init__(self, job: Job, body: GenerationBody, id: str, kind: str):
        call = job.call
        self.job = job
        self.body = body
        self.head = {
            "id": f"{id}-{call.unique}",
            "object": kind,
            "created": call.created,
            "model": call.service.settings.model,
        }
        self.tail = {"system_fingerprint": call.service.fingerprint}
        options = body.stream_options or StreamOptions()
        self.counts = bool(options.include_usage)
        self.always = bool(options.continuous_usage_stats)

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.head, "choices": choices, "usage": self.job.usage(), **self.tail, **more}

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        usage = (
            {"usage": self.job.usage() if self.always else None}
            if self.counts or self.always
            else {}
        )
        return event({**self.head, **self.tail, "choices": [choice], **usage, **more})

    def end(self) -> bytes:
        usage = (
            {**self.head, **self.tail, "choices": [], "usage": self.job.usage()}
            if self.counts
            else None
        )
        return (event(usage) if usage else b"") + DONE


def finish_reason(reason: str | None) -> str | None:
    return "length" if reason == "length" else reason and "stop"


def value(logprob: float) -> float:
    """What OpenAI writes for a probability too small to matter."""
    return max(logprob, -9999.0)


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int
) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": value(logprob),
            "bytes": list(spelled),
        }

    content = [
        {
            **one(entry.token, entry.logprob),
            "top_logprobs": [one(*pair) for pair in entry.top[:top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any] | None]:
    """As vLLM writes them: by token id, nothing for the first."""

    def one(entry: TokenLogprob) -> dict[str, Any]:
        ranked = {
            token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)
        }
        ranked.setdefault(entry.token, (entry.logprob, entry.rank))
        return {
            str(token): {
                "logprob": value(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for token, (logprob, rank) in ranked.items()
        }

    return [None, *map(one, entries)]

"""Limits on what clients may ask for, and the admission control that enforces them.

All limits are fields of ServerLimits. `--limits name=value,...` changes them and /info reports
them. Everything is counted before work is done for it, so a refused request costs only its parsing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bloomery.config import ServerConfig
from bloomery.errors import ConfigError, InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.errors import ClientDisconnected, HttpError, overloaded_error

# Fields that may be lists of token ids: the context length bounds them, not the entries limit.
TOKEN_ID_FIELDS = ("prompt", "input", "inputs", "tokens")

# An ASGI extension of BoundedProtocol: {"abort": a function that drops the connection}
ABORT_CONNECTION = "bloomery.abort_connection"

# What clients send that do not state a media type; the second is curl's default.
UNSTATED_MEDIA_TYPES = ("", "application/x-www-form-urlencoded")

HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """All limits of a server. The names and units are public: `--limits` and /info use them."""

    header_bytes: int = 64 << 10
    headers: int = 100
    body_bytes: int = 8 << 20
    tgi_body_bytes: int = 2 << 20
    body_seconds: float = 30.0  # for the body to arrive; the request head has as long before it
    fields: int = 256  # of a body
    entries: int = 4096  # of one field, such as messages
    characters_per_token: int = 16  # a prompt may have this many for each token of the context
    requests: int = 1024  # unfinished sequences, of all keys together
    greed: int = 3  # with several keys, one key may hold this many times the places still free
    waiting_tokens: int | None = None  # prompt tokens queued; None: 8 x context x max_num_seqs
    fan_out: int = 128  # sequences of one request: n x prompts
    temperature: float = 2.0
    stop_strings: int = 4
    stop_bytes: int = 256
    logprobs: int = 20
    logit_bias: int = 1024
    bad_words: int = 128
    token_ids: int = 1024  # of stop_token_ids and of allowed_token_ids
    label_characters: int = 512  # of user and of a metadata value
    best_of: int = 2  # of TGI's API
    top_n_tokens: int = 5  # of TGI's API
    queue_seconds: float = 60.0  # a request may wait for its first step
    deadline_seconds: float = 600.0
    stall_seconds: float = 60.0  # a client may stop reading
    keepalive_seconds: float = 5.0  # between two comments on a silent event stream
    idle_seconds: float = 75.0  # of a connection without a request
    text_processes: int = 2  # tokenizer workers, for chat templates and long texts
    template_seconds: float = 1.0  # of processor time, for one chat template
    text_seconds: float = 10.0  # of processor time, for one text to tokenize
    text_bytes: int = 1 << 30  # of memory of a tokenizer worker, beyond the tokenizer itself
    memory_bytes: int = 2 << 30  # of the API process; see the thresholds in service.py
    step_seconds: float = 30.0  # a step that is longer, and 20 x longer than others, has hung
    restarts: int = 5  # of the engine within a minute
    stored_responses: int = 1000  # responses, and as many conversations and chats
    stored_characters: int = 32 << 20

    @classmethod
    def parse(cls, text: str | None) -> ServerLimits:
        """Limits from the value of `--limits`: name=value pairs, separated by commas."""
        types = {
            field.name: float if isinstance(field.default, float) else int for field in fields(cls)
        }
        values: dict[str, Any] = {}
        for pair in ServerConfig.split_list(text):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in types:
                raise ConfigError(f"limits: there is no {name!r}; there are {', '.join(types)}")
            try:
                values[name] = types[name](value)
            except ValueError:
                raise ConfigError(f"limits: {name} must be a number, not {value!r}") from None
            if not 0 < values[name] < 2**63:
                raise ConfigError(f"limits: {name} must be positive, not {value}")
        return cls(**values)


# ---- the request head and body -------------------------------------------------------------


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection with limits on the request head, in bytes and in seconds.

    The application counts headers too, but sees them only once they are complete, so a head that
    never ends must be stopped here. This class also lets the application abort a connection. If
    its client has stopped reading, it cannot be closed normally, because the last bytes are never
    sent.
    """

    max_head_bytes = ServerLimits().header_bytes
    max_head_seconds = ServerLimits().body_seconds
    head_bytes = -1  # of the head being read; -1 between two heads
    head_timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timeout()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_bytes = 0
        if self.head_timeout is None:
            self._start_head_timeout()

    def on_headers_complete(self) -> None:
        self.head_bytes = -1
        self._cancel_head_timeout()
        self.scope["extensions"] = {ABORT_CONNECTION: {"abort": self.transport.abort}}
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.head_bytes >= 0 and not self.transport.is_closing():
            self.head_bytes += len(data)
            if self.head_bytes > self.max_head_bytes:
                self.transport.write(HEADERS_TOO_LARGE)
                self.transport.close()

    def _start_head_timeout(self) -> None:
        self.head_timeout = self.loop.call_later(self.max_head_seconds, self.transport.abort)

    def _cancel_head_timeout(self) -> None:
        if self.head_timeout is not None:
            self.head_timeout.cancel()
            self.head_timeout = None


def bounded_protocol(limits: ServerLimits) -> type[BoundedProtocol]:
    """BoundedProtocol with a server's own limits; uvicorn takes a class."""

    class ConfiguredProtocol(BoundedProtocol):
        max_head_bytes = limits.header_bytes
        max_head_seconds = limits.body_seconds

    return ConfiguredProtocol


def check_headers(headers: Iterable[tuple[bytes, bytes]], limits: ServerLimits) -> None:
    """Bound the number of headers and their bytes."""
    sizes = [len(name) + len(value) for name, value in headers]
    if len(sizes) > limits.headers or sum(sizes) > limits.header_bytes:
        allowed = f"at most {limits.headers}, {limits.header_bytes} bytes in all"
        message = f"the headers are too many or too large: {allowed}"
        raise HttpError(431, message, "headers_too_large", connection="close")


async def receive_body(receive: Receive, headers: Headers, limit: int, seconds: float) -> bytes:
    """Receive the body of a JSON request, refused as early as possible."""
    _check_body_headers(headers, limit)
    parts: list[bytes] = []
    size = 0
    more = True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                part = message.get("body", b"")
                parts.append(part)
                size += len(part)
                more = message.get("more_body", False)
                if size > limit:
                    raise _body_too_large(limit)
    except TimeoutError:
        text = f"the body did not arrive within {seconds:.0f} s"
        raise HttpError(408, text, "timeout", connection="close") from None
    return b"".join(parts)


def _check_body_headers(headers: Headers, limit: int) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    # JSON without its media type is accepted from programs, which includes `curl -d`. A page of
    # another site could send it from a visitor's browser, which states where the request is from.
    is_from_browser = "origin" in headers or "sec-fetch-site" in headers
    may_be_json = media_type in UNSTATED_MEDIA_TYPES and not is_from_browser
    if not is_json and not may_be_json:
        message = "send JSON, with the header Content-Type: application/json"
        raise HttpError(415, message, "unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        message = "send the body as it is, without Content-Encoding"
        raise HttpError(415, message, "unsupported_encoding", connection="close")
    if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        message = "send the body as it is, or in chunks: no other Transfer-Encoding is known"
        raise HttpError(415, message, "unsupported_encoding", connection="close")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _body_too_large(limit)


def _body_too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is over {limit} bytes", "body_too_large", connection="close")


def check_entry_counts(raw: dict[str, Any], limits: ServerLimits) -> None:
    """Bound the fields of a body and the entries of each field before any entry is parsed.

    A body of many small values costs far more to parse and check than its bytes suggest.
    """
    if len(raw) > limits.fields:
        raise InvalidRequest(f"the body has {len(raw)} fields, at most {limits.fields} are allowed")
    for name, value in raw.items():
        if not isinstance(value, list | dict):
            continue
        count = _count_entries(name, value, limits.entries)
        if count > limits.entries:
            raise InvalidRequest(
                f"{name[:64]} may have at most {limits.entries} entries, not {count}", name[:64]
            )


def _count_entries(name: str, value: list[Any] | dict[str, Any], max_entries: int) -> int:
    """The larger of two counts: a field's entries, and the content parts of all its messages."""
    holds_objects = bool(value) and isinstance(next(iter(value)), dict)
    holds_token_ids = name in TOKEN_ID_FIELDS and not holds_objects
    num_entries = 0 if holds_token_ids else len(value)
    num_parts = 0
    # This is the fastest way to know that a list of token ids holds no object.
    if len(value) <= max_entries and dict in map(type, value):
        contents = (entry.get("content") for entry in value if isinstance(entry, dict))
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
    return max(num_entries, num_parts)


# ---- the values of one request -------------------------------------------------------------


def check_sampling_limits(
    params: SamplingParams, limits: ServerLimits, max_temperature: float | None = None
) -> SamplingParams:
    """Check a server's ranges, within those that SamplingParams has already checked."""
    if max_temperature is None:
        max_temperature = limits.temperature
    numbers: tuple[tuple[str, float | None, float], ...] = (
        ("temperature", params.temperature, max_temperature),
        ("logprobs", params.logprobs, limits.logprobs),
        ("prompt_logprobs", params.prompt_logprobs, limits.logprobs),
    )
    for name, value, maximum in numbers:
        if value is not None and value > maximum:
            raise InvalidRequest(f"{name} must be at most {maximum:g}, not {value:g}", field=name)
    lengths = (
        ("stop", len(params.stop_strings), limits.stop_strings),
        ("logit_bias", len(params.logit_bias or ()), limits.logit_bias),
        ("bad_words", len(params.bad_words or ()), limits.bad_words),
        ("stop_token_ids", len(params.stop_token_ids or ()), limits.token_ids),
        ("allowed_token_ids", len(params.allowed_token_ids or ()), limits.token_ids),
    )
    for name, count, maximum in lengths:
        if count > maximum:
            message = f"{name} may have at most {maximum} entries, not {count}"
            raise InvalidRequest(message, field=name)
    for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
        if any(len(text.encode("utf-8", "replace")) > limits.stop_bytes for text in texts):
            message = f"an entry of {name} may have at most {limits.stop_bytes} bytes"
            raise InvalidRequest(message, field=name)
    return params


def check_labels(user: str | None, metadata: dict[str, str] | None, limits: ServerLimits) -> None:
    """Bound `user` and `metadata`, which are accepted and not used."""
    maximum = limits.label_characters
    if user is not None and len(user) > maximum:
        raise InvalidRequest(f"user may have at most {maximum} characters", field="user")
    if not metadata:
        return
    too_long = any(len(name) > 64 or len(value) > maximum for name, value in metadata.items())
    if len(metadata) > 16 or too_long:
        allowed = f"of names up to 64 and values up to {maximum} characters"
        message = f"metadata may have at most 16 entries, {allowed}"
        raise InvalidRequest(message, field="metadata")


# ---- admission -----------------------------------------------------------------------------


class AdmissionControl:
    """Counts admitted sequences and the prompt tokens of those that still wait for a step.

    No request waits here: it is admitted or refused with 429. With several API keys no key can
    take all places: a key may hold `per_key_share` times the places that would remain free. With
    a share of 3, one busy key leaves a quarter of the places to others, and two busy keys get equal
    parts. `per_key_share` is None with a single key, which may take all places.
    """

    def __init__(self, max_sequences: int, per_key_share: int | None = None):
        self.max_sequences = max_sequences
        self.per_key_share = per_key_share
        self.num_admitted = 0
        self.waiting_tokens = 0
        self.admitted_by_key: Counter[str] = Counter()
        # Permits of requests that wait for their first step, oldest first -> function to abort it
        self.waiting_permits: dict[AdmissionPermit, Callable[[], None]] = {}

    def has_room(self, num_sequences: int, key: str = "") -> bool:
        """Whether `num_sequences` more sequences of `key` may be admitted."""
        num_free = self.max_sequences - self.num_admitted - num_sequences
        if num_free < 0:
            return False
        if self.per_key_share is None:
            return True
        return self.admitted_by_key[key] + num_sequences <= self.per_key_share * (num_free + 1)

    def admit(self, num_sequences: int, prompt_rate: float, key: str = "") -> AdmissionPermit:
        """Reserve places, or raise 429. `prompt_rate`: prompt tokens per second of the engine."""
        if not self.has_room(num_sequences, key):
            raise overloaded_error(self.retry_after(prompt_rate))
        self.num_admitted += num_sequences
        self.admitted_by_key[key] += num_sequences
        return AdmissionPermit(self, num_sequences, key)

    def retry_after(self, prompt_rate: float) -> int:
        """Seconds until most of the prefill backlog is done.

        Jitter keeps clients that were refused together from returning together.
        """
        seconds = self.waiting_tokens / max(prompt_rate, 1.0)
        return round(min(max(seconds, 1.0), 30.0) * random.uniform(1.0, 1.3))

    def shed_load(self) -> None:
        """Abort the newest quarter of the waiting requests, at least one."""
        num_shed = len(self.waiting_permits) // 4 or 1
        newest_first = list(reversed(self.waiting_permits))
        for permit in newest_first[:num_shed]:
            permit.was_shed = True
            abort = self.waiting_permits.pop(permit)
            abort()


class AdmissionPermit:
    """The places of one admitted request, held until `release`."""

    def __init__(self, admission: AdmissionControl, num_sequences: int, key: str):
        self.admission = admission
        self.num_sequences = num_sequences
        self.key = key
        self.waiting_tokens = 0
        self.was_shed = False  # aborted by load shedding while it waited

    def enqueue(
        self, num_tokens: int, max_tokens: int, prompt_rate: float, abort: Callable[[], None]
    ) -> None:
        """Count prompt tokens as waiting for prefill; load shedding may call `abort`."""
        admission = self.admission
        if admission.waiting_tokens and admission.waiting_tokens + num_tokens > max_tokens:
            raise overloaded_error(admission.retry_after(prompt_rate))
        self.waiting_tokens = num_tokens
        admission.waiting_tokens += num_tokens
        admission.waiting_permits[self] = abort

    def mark_started(self) -> None:
        """Stop counting the request as waiting, because its first step has been taken."""
        self.admission.waiting_tokens -= self.waiting_tokens
        self.waiting_tokens = 0
        self.admission.waiting_permits.pop(self, None)

    def release(self) -> None:
        """Return the places; a second call does nothing."""
        self.mark_started()
        admission = self.admission
        admission.num_admitted -= self.num_sequences
        admission.admitted_by_key[self.key] -= self.num_sequences
        if not admission.admitted_by_key[self.key]:
            del admission.admitted_by_key[self.key]
        self.num_sequences = 0

"""How much of everything a client may ask for, and the door that counts who is inside.

All numbers are here; `--limits name=value,...` changes them and /info tells them. What is counted is counted before
work is done for it: a request that will be refused costs nothing but its parsing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from mmap import PAGESIZE as PAGE
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from bloomery.config import ServerConfig
from bloomery.errors import ConfigError, InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.errors import ClientGone, Refusal, overloaded


@dataclass(frozen=True, kw_only=True)
class Limits:
    header_bytes: int = 64 << 10
    headers: int = 100
    body_bytes: int = 8 << 20
    tgi_body_bytes: int = 2 << 20
    body_seconds: float = 30.0  # for a body to arrive; the same for the head before it
    fields: int = 256  # of a body
    entries: int = (
        4096  # of a field of it, such as messages; token ids are bounded by the context instead
    )
    characters_per_token: int = (
        16  # a text with more characters than this many a position of the context is too long
    )
    requests: int = 1024  # sequences asked for and not finished, of all keys
    greed: int = 3  # where there are several keys, one may hold so many times what is still free
    waiting_tokens: int | None = (
        None  # prompt tokens of sequences not begun; None: 8 x context x sequences in a step
    )
    fan_out: int = 128  # sequences of one request: n x prompts
    temperature: float = 2.0
    stop_strings: int = 4
    stop_bytes: int = 256
    logprobs: int = 20
    logit_bias: int = 1024
    bad_words: int = 128
    token_ids: int = 1024  # of stop_token_ids and allowed_token_ids
    label_characters: int = 512  # of user and of a value of metadata
    best_of: int = 2  # this and the next are TGI's
    top_n_tokens: int = 5
    queue_seconds: float = 60.0  # how long a request may wait to be begun
    deadline_seconds: float = 600.0
    stall_seconds: float = 60.0  # how long a client may not read
    keepalive_seconds: float = 5.0  # between two signs of life on a silent stream
    idle_seconds: float = 75.0  # of a connection without a request
    text_processes: int = 2  # for templates and long texts
    template_seconds: float = 1.0  # of processor time, for a template
    text_seconds: float = 10.0  # the same, for a text to tokenize
    text_bytes: int = 1 << 30  # of memory, beside the tokenizer
    memory_bytes: int = (
        2 << 30
    )  # of this process: at 80 % stores are emptied, at 90 nobody is let in, at 95 some go
    step_seconds: float = (
        30.0  # a step that takes longer, and twenty times longer than others, is a hang
    )
    restarts: int = 5  # of the engine within a minute
    stored_responses: int = 1000  # conversations kept for previous_response_id
    stored_characters: int = 32 << 20

    @classmethod
    def of(cls, text: str | None) -> Limits:
        """As `--limits` has them: name=value, separated by commas."""
        kinds = {
            field.name: float if isinstance(field.default, float) else int for field in fields(cls)
        }
        found: dict[str, Any] = {}
        for part in ServerConfig.items(text):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in kinds:
                raise ConfigError(f"limits: there is no {name!r}; there are {', '.join(kinds)}")
            try:
                found[name] = kinds[name](value)
            except ValueError:
                raise ConfigError(f"limits: {name} must be a number, not {value!r}") from None
            if not 0 < found[name] < 2**63:
                raise ConfigError(f"limits: {name} must be positive, not {value}")
        return cls(**found)


def check_headers(raw: Iterable[tuple[bytes, bytes]], limits: Limits) -> None:
    sizes = [len(name) + len(value) for name, value in raw]
    if len(sizes) > limits.headers or sum(sizes) > limits.header_bytes:
        message = f"the headers are too many or too large: at most {limits.headers}, {limits.header_bytes} bytes in all"
        raise Refusal(431, message, "headers_too_large", connection="close")


async def read_body(receive: Receive, headers: Headers, limit: int, seconds: float) -> bytes:
    """The body of a JSON request, refused as early as it can be."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (
        media.startswith("application/") and media.endswith("+json")
    ):
        raise Refusal(
            415,
            "send JSON, with the header Content-Type: application/json",
            "unsupported_media_type",
        )
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refusal(
            415,
            "send the body as it is, without Content-Encoding",
            "unsupported_encoding",
            connection="close",
        )
    if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise Refusal(
            415,
            "send the body as it is, or in chunks: no other Transfer-Encoding is known",
            "unsupported_encoding",
            connection="close",
        )
    too_large = Refusal(
        413, f"the body is over {limit} bytes", "body_too_large", connection="close"
    )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    more = True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size = size + len(parts[-1])
                more = message.get("more_body", False)
                if size > limit:
                    raise too_large
    except TimeoutError:
        raise Refusal(
            408, f"the body did not arrive within {seconds:.0f} s", "timeout", connection="close"
        ) from None
    return b"".join(parts)


IDS = ("prompt", "input", "inputs", "tokens")  # fields that may be lists of token ids


def check_breadth(raw: dict[str, Any], limits: Limits) -> None:
    """Before each entry is looked at: a body of many small things costs more than its bytes."""
    if len(raw) > limits.fields:
        raise InvalidRequest(f"the body has {len(raw)} fields, at most {limits.fields} are allowed")
    for name, value in raw.items():
        if not isinstance(value, list | dict):
            continue
        ids = name in IDS and not (value and isinstance(next(iter(value)), dict))
        parts = (
            [one.get("content") for one in value if isinstance(one, dict)]
            if len(value) <= limits.entries
            else []
        )
        count = max(
            0 if ids else len(value), sum(len(part) for part in parts if isinstance(part, list))
        )
        if count > limits.entries:
            raise InvalidRequest(
                f"{name[:64]} may have at most {limits.entries} entries, not {count}", name[:64]
            )


# ---- what one request may ask for ------------------------------------------------------------------


def narrow(params: SamplingParams, limits: Limits, hottest: float | None = None) -> SamplingParams:
    """A server's ranges, within those SamplingParams has already checked."""
    counts: tuple[tuple[str, float | None, float], ...] = (
        ("temperature", params.temperature, limits.temperature if hottest is None else hottest),
        ("logprobs", params.logprobs, limits.logprobs),
        ("prompt_logprobs", params.prompt_logprobs, limits.logprobs),
    )
    for name, value, most in counts:
        if value is not None and value > most:
            raise InvalidRequest(f"{name} must be at most {most:g}, not {value:g}", field=name)
    lengths = (
        ("stop", len(params.stop_strings), limits.stop_strings),
        ("logit_bias", len(params.logit_bias or ()), limits.logit_bias),
        ("bad_words", len(params.bad_words or ()), limits.bad_words),
        ("stop_token_ids", len(params.stop_token_ids or ()), limits.token_ids),
        ("allowed_token_ids", len(params.allowed_token_ids or ()), limits.token_ids),
    )
    for name, count, most in lengths:
        if count > most:
            raise InvalidRequest(f"{name} may have at most {most} entries, not {count}", field=name)
    for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
        if any(len(text.encode("utf-8", "replace")) > limits.stop_bytes for text in texts):
            raise InvalidRequest(
                f"an entry of {name} may have at most {limits.stop_bytes} bytes", field=name
            )
    return params


def check_labels(user: str | None, metadata: dict[str, str] | None, limits: Limits) -> None:
    most = limits.label_characters
    if user is not None and len(user) > most:
        raise InvalidRequest(f"user may have at most {most} characters", field="user")
    if metadata and (
        len(metadata) > 16 or any(len(k) > 64 or len(v) > most for k, v in metadata.items())
    ):
        message = f"metadata may have at most 16 entries, of names up to 64 and values up to {most} characters"
        raise InvalidRequest(message, field="metadata")


# ---- the door --------------------------------------------------------------------------------------


class Admission:
    """Sequences inside, and the prompt tokens of those that have not begun. Nobody waits here: in, or 429.

    Where there are several keys nobody fills the house: a key may hold `greed` times what would be left free, so one
    alone leaves a quarter to a newcomer (greed 3), and two that want all get equal parts. All of it is a lone key's.
    """

    def __init__(self, requests: int, greed: int | None = None):
        self.requests = requests
        self.greed = greed
        self.inside = 0
        self.waiting = 0
        self.held: Counter[str] = Counter()  # by key
        self.queue: dict[
            Ticket, Callable[[], None]
        ] = {}  # who waits to be begun, oldest first, and how to end it

    def fits(self, sequences: int, key: str = "") -> bool:
        free = self.requests - self.inside - sequences
        return free >= 0 and (
            self.greed is None or self.held[key] + sequences <= self.greed * (free + 1)
        )

    def enter(self, sequences: int, rate: float, key: str = "") -> Ticket:
        """`rate`: prompt tokens a second the engine takes in at present."""
        if not self.fits(sequences, key):
            raise overloaded(self.retry_after(rate))
        self.inside += sequences
        self.held[key] += sequences
        return Ticket(self, sequences, key)

    def retry_after(self, rate: float) -> int:
        """About when the backlog will be gone; jittered, so that those refused together do not return together."""
        return round(min(max(self.waiting / max(rate, 1.0), 1.0), 30.0) * random.uniform(1.0, 1.3))

    def shed(self) -> None:
        """Send away the newest quarter of those who wait to be begun, one at the least."""
        for ticket in list(reversed(self.queue))[: len(self.queue) // 4 or 1]:
            ticket.dropped = True
            self.queue.pop(ticket)()


class Ticket:
    def __init__(self, door: Admission, sequences: int, key: str):
        self.door = door
        self.sequences = sequences
        self.key = key
        self.tokens = 0
        self.dropped = False  # sent away while it waited

    def wait(self, tokens: int, most: int, rate: float, end: Callable[[], None]) -> None:
        """From now on these prompt tokens wait to be computed, unless `end` is called to make room."""
        if self.door.waiting and self.door.waiting + tokens > most:
            raise overloaded(self.door.retry_after(rate))
        self.tokens = tokens
        self.door.waiting += tokens
        self.door.queue[self] = end

    def begin(self) -> None:
        self.door.waiting -= self.tokens
        self.tokens = 0
        self.door.queue.pop(self, None)

    def leave(self) -> None:
        self.begin()
        self.door.inside -= self.sequences
        self.door.held[self.key] -= self.sequences
        if not self.door.held[self.key]:
            del self.door.held[self.key]
        self.sequences = 0


def resident() -> int:
    """Bytes of memory this process holds; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0

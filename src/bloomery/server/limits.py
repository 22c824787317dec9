"""How much of everything a client may ask for, and the door that counts who is inside.

All numbers are here. What is counted is counted before work is done for it: a request that will be refused costs
nothing but its parsing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive

from bloomery.errors import InvalidRequest
from bloomery.sampling import SamplingParams
from bloomery.server.errors import ClientGone, Refusal, overloaded


@dataclass(frozen=True, kw_only=True)
class Limits:
    header_bytes: int = 64 << 10
    headers: int = 100
    body_bytes: int = 8 << 20
    tgi_body_bytes: int = 2 << 20
    body_seconds: float = 30.0
    characters_per_token: int = 16  # a text with more characters than this many a position of the context is too long
    requests: int = 1024  # sequences asked for and not finished
    waiting_tokens: int | None = None  # prompt tokens of sequences not begun; None: 8 x context x sequences in a step
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
    deadline_seconds: float = 600.0
    stall_seconds: float = 60.0  # how long a client may not read
    keepalive_seconds: float = 15.0
    stored_responses: int = 1000  # conversations kept for previous_response_id
    stored_characters: int = 32 << 20


def check_headers(raw: Iterable[tuple[bytes, bytes]], limits: Limits) -> None:
    sizes = [len(name) + len(value) for name, value in raw]
    if len(sizes) > limits.headers or sum(sizes) > limits.header_bytes:
        message = f"the headers are too many or too large: at most {limits.headers}, {limits.header_bytes} bytes in all"
        raise Refusal(431, message, "headers_too_large", connection="close")


async def read_body(receive: Receive, headers: Headers, limit: int, seconds: float) -> bytes:
    """The body of a JSON request, refused as early as it can be."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise Refusal(415, "send JSON, with the header Content-Type: application/json", "unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refusal(
            415, "send the body as it is, without Content-Encoding", "unsupported_encoding", connection="close"
        )
    too_large = Refusal(413, f"the body is over {limit} bytes", "body_too_large", connection="close")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > limit:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {seconds:.0f} s", "timeout", connection="close") from None
    return b"".join(parts)


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
            raise InvalidRequest(f"an entry of {name} may have at most {limits.stop_bytes} bytes", field=name)
    return params


def check_labels(user: str | None, metadata: dict[str, str] | None, limits: Limits) -> None:
    most = limits.label_characters
    if user is not None and len(user) > most:
        raise InvalidRequest(f"user may have at most {most} characters", field="user")
    if metadata and (len(metadata) > 16 or any(len(k) > 64 or len(v) > most for k, v in metadata.items())):
        message = f"metadata may have at most 16 entries, of names up to 64 and values up to {most} characters"
        raise InvalidRequest(message, field="metadata")


# ---- the door --------------------------------------------------------------------------------------


class Admission:
    """Sequences inside, and the prompt tokens of those that have not begun. Nobody waits here: in, or 429."""

    def __init__(self, requests: int):
        self.requests, self.inside, self.waiting = requests, 0, 0

    def enter(self, sequences: int, rate: float) -> Ticket:
        """`rate`: prompt tokens a second the engine takes in at present."""
        if self.inside + sequences > self.requests:
            raise overloaded(self.retry_after(rate))
        self.inside += sequences
        return Ticket(self, sequences)

    def retry_after(self, rate: float) -> int:
        """About when the backlog will be gone; jittered, so that those refused together do not return together."""
        return round(min(max(self.waiting / max(rate, 1.0), 1.0), 30.0) * random.uniform(1.0, 1.3))


class Ticket:
    def __init__(self, door: Admission, sequences: int):
        self.door, self.sequences, self.tokens = door, sequences, 0

    def wait(self, tokens: int, most: int, rate: float) -> None:
        """From now on these prompt tokens wait to be computed."""
        if self.door.waiting and self.door.waiting + tokens > most:
            raise overloaded(self.door.retry_after(rate))
        self.tokens = tokens
        self.door.waiting += tokens

    def begin(self) -> None:
        self.door.waiting -= self.tokens
        self.tokens = 0

    def leave(self) -> None:
        self.begin()
        self.door.inside -= self.sequences
        self.sequences = 0

"""What all calls share: the engine, the tokenizer, the settings, the door and the figures.

Text becomes token ids here, away from the event loop when it is long. Nothing here knows an API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from bloomery import __version__
from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.messages import Capacity
from bloomery.sampling import SamplingParams
from bloomery.server.backend import Backend
from bloomery.server.conversations import Conversations
from bloomery.server.errors import Refusal, unavailable
from bloomery.server.limits import Admission, Limits, Ticket
from bloomery.server.metrics import Metrics
from bloomery.text.chat import render
from bloomery.text.tokenizer import Tokenizer

LONG = 1000  # characters: a longer text is tokenized in a thread
RESERVED = ("", "tgi", "dummy", "default")  # what clients send where they know of no model
SAMPLING = {field.name for field in fields(SamplingParams)} - {"max_tokens"}
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str  # the id it is served under
    aliases: tuple[str, ...] = ()
    any_model: bool = False  # whatever name is asked for, this model answers
    keys: tuple[str, ...] = ()  # none: everybody may come in
    host: str = "127.0.0.1"  # what the server is bound to
    allowed_hosts: tuple[str, ...] = ()  # names it answers to besides the local ones
    cors_origins: tuple[str, ...] = ()
    open_metrics: bool = False  # /metrics without a key
    revision: str | None = None  # of the model
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    text: str | None = None  # None: it was given as ids


class Service:
    def __init__(self, backend: Backend, tokenizer: Tokenizer, settings: Settings, routes: Sequence[Any] = ()):
        self.backend, self.tokenizer, self.settings, self.routes = backend, tokenizer, settings, routes
        self.limits = settings.limits
        self.metrics = Metrics(backend, settings.model)
        self.door = Admission(self.limits.requests)
        self.threads = ThreadPoolExecutor(2, "tokenize")
        self.conversations = Conversations(self.limits.stored_responses, self.limits.stored_characters)
        self.fingerprint = f"bloomery-{__version__}"
        self.started = int(time.time())
        self.defaults = {name: value for name, value in tokenizer.defaults.items() if name in SAMPLING}

    # ---- may it be done ------------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity:
        """Of an engine that has been ready once; until then there is nothing to check a request against."""
        if self.backend.capacity is None:
            raise unavailable("the model is being loaded", 5)
        return self.backend.capacity

    def admit(self, sequences: int) -> Ticket:
        state = self.backend.status.state
        if state not in ("ready", "restarting"):
            why = {"loading": "the model is being loaded", "failed": "the engine has failed"}.get(state)
            raise unavailable(why, 5) if why else unavailable("the server is shutting down", 10, connection="close")
        most = min(self.limits.fan_out, self.limits.requests)
        if sequences > most:
            raise InvalidRequest(f"{sequences} answers (prompts x n) were asked for, at most {most} are allowed", "n")
        try:
            return self.door.enter(sequences, self.prompt_rate)
        except Refusal:
            if state == "restarting":
                raise unavailable("the engine is restarting and its queue is full", 5) from None
            raise

    @property
    def prompt_rate(self) -> float:
        return self.metrics.tokens_in.value(time.monotonic())

    @property
    def waiting_tokens(self) -> int:
        return self.limits.waiting_tokens or 8 * self.capacity.max_length * self.capacity.max_sequences

    def check_model(self, name: str | None) -> None:
        settings = self.settings
        if settings.any_model or name is None or name in (settings.model, *settings.aliases, *RESERVED):
            return
        message = f"the model {name[:64]!r} is not served here; GET /v1/models says which is"
        raise Refusal(404, message, "model_not_found")

    # ---- text to ids ---------------------------------------------------------------------------

    async def away(self, size: int, work: Callable[[], R]) -> R:
        """Work of a length in characters: here if it is short, in a thread if not."""
        if size <= LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def encode(self, text: str, add_special: bool = True, field: str = "prompt") -> Prompt:
        self.check_size(len(text), field)
        ids = await self.away(len(text), lambda: self.tokenizer.encode(text, add_special))
        return Prompt(ids, text)

    async def conversation(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Messages as the model's chat template writes them down, tokenized."""
        size = sum(len(str(message.get("content"))) for message in messages)
        self.check_size(size, "messages")

        def work() -> Prompt:
            text = render(self.tokenizer, messages, **options)
            self.check_size(len(text), "messages")
            return Prompt(self.tokenizer.encode(text, add_special=False), text)

        return await self.away(size, work)

    def check_size(self, characters: int, field: str) -> None:
        """Before it is tokenized: no vocabulary packs so many characters into the context."""
        most = self.limits.characters_per_token * self.capacity.max_length
        if characters > most:
            room = f"a context of {self.capacity.max_length} tokens holds at most {most}"
            raise PromptTooLong(f"the prompt has {characters} characters: {room}", field)

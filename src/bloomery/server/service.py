"""What all calls share: the engine, the tokenizer, the settings, the door and the figures.

Text becomes token ids here, away from the event loop when it is long. Nothing here knows an API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from bloomery import __version__
from bloomery.errors import InvalidRequest, PromptTooLong, RequestFailed
from bloomery.messages import EngineCapacity, EngineRequest, TokenOutput
from bloomery.sampling import SamplingParams
from bloomery.server.backend import Backend
from bloomery.server.conversations import Conversations
from bloomery.server.errors import Late, Refusal, overloaded, unavailable
from bloomery.server.limits import Admission, Limits, Ticket, resident
from bloomery.server.metrics import Metrics
from bloomery.text.apart import Apart, listed
from bloomery.text.tokenizer import Tokenizer

# of this process's memory: drop what is kept, let nobody in, send some away
EMPTY = 0.8
FULL = 0.9
DIRE = 0.95
LONG = 1000  # characters: a longer text is tokenized apart; as many tokens become text there
RESERVED = ("", "tgi", "dummy", "default")  # what clients send where they know of no model
SAMPLING = {field.name for field in fields(SamplingParams)} - {"max_tokens"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str  # the id it is served under
    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # none: everybody may come in
    host: str = "127.0.0.1"  # what the server is bound to
    allowed_hosts: tuple[str, ...] = ()  # names it answers to besides the local ones
    cors_origins: tuple[str, ...] = ()
    open_metrics: bool = False  # /metrics without a key
    revision: str | None = None  # of the model
    limits: Limits = field(default_factory=Limits)
    warm: bool = False  # processes for text are started before they are needed


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    text: str | None = None  # None: it was given as ids


class Service:
    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, settings: Settings, routes: Sequence[Any] = ()
    ):
        self.backend = backend
        self.tokenizer = tokenizer
        self.settings = settings
        self.routes = routes
        self.limits = limits = settings.limits
        self.metrics = Metrics(backend, settings.model)
        self.door = Admission(limits.requests, limits.greed if len(settings.keys) > 1 else None)
        # this process's memory, and the share of its limit last in use
        self.measure = resident
        self.pressure = 0.0
        self.apart = Apart(
            tokenizer,
            limits.text_processes,
            limits.template_seconds,
            limits.text_seconds,
            limits.text_bytes,
        )
        self.conversations = Conversations(limits.stored_responses, limits.stored_characters)
        self.fingerprint = f"bloomery-{__version__}"
        self.started = int(time.time())
        self.defaults = {
            name: value for name, value in tokenizer.defaults.items() if name in SAMPLING
        }

    # ---- may it be done ------------------------------------------------------------------------

    @property
    def capacity(self) -> EngineCapacity:
        """Of an engine that has been ready once; until then there is nothing to check a request against."""
        if self.backend.capacity is None:
            raise unavailable("the model is being loaded", 5)
        return self.backend.capacity

    def absent(self) -> Refusal | None:
        """Why there is no engine to answer and will be none for a while, if so."""
        match self.backend.status.state:
            case "ready" | "stalled" | "restarting":
                return None
            case "loading":
                return unavailable("the model is being loaded", 5)
            case "failed":
                return unavailable("the engine has failed", 5)
        return unavailable("the server is shutting down", 10, connection="close")

    def knock(self, key: str = "", sequences: int = 1) -> None:
        """Refuse who cannot be let in. Asked before a body is read: under overload this is all that a request costs."""
        if (why := self.absent()) is not None:
            raise why
        if self.pressure > FULL or not self.door.fits(sequences, key):
            if self.backend.status.state == "restarting":
                raise unavailable("the engine is restarting and its queue is full", 5)
            raise overloaded(self.door.retry_after(self.prompt_rate))

    def admit(self, sequences: int, key: str = "") -> Ticket:
        most = min(self.limits.fan_out, self.limits.requests)
        if sequences > most:
            raise InvalidRequest(
                f"{sequences} answers (prompts x n) were asked for, at most {most} are allowed", "n"
            )
        self.knock(key, sequences)
        return self.door.enter(sequences, self.prompt_rate, key)

    def relieve(self) -> None:
        """What the memory in use asks for; looked at once a second."""
        self.pressure = self.measure() / self.limits.memory_bytes
        if self.pressure > EMPTY:
            self.conversations.clear()
        if self.pressure > DIRE:
            self.door.shed()

    def failure(self, news: TokenOutput, ticket: Ticket) -> Exception:
        """What the client of a request that ended without its answer is told."""
        if news.finish == "deadline":
            return Late()
        if ticket.dropped:
            return overloaded(self.door.retry_after(self.prompt_rate))
        return self.absent() or RequestFailed(news.error or "the engine gave the request up")

    def abort(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self.backend.abort(request.id)

    @property
    def prompt_rate(self) -> float:
        return self.metrics.tokens_in.value(time.monotonic())

    @property
    def waiting_tokens(self) -> int:
        return (
            self.limits.waiting_tokens or 8 * self.capacity.max_length * self.capacity.max_num_seqs
        )

    def check_model(self, name: str | None) -> None:
        settings = self.settings
        if name is None or name in (settings.model, *settings.aliases, *RESERVED):
            return
        message = f"the model {name[:64]!r} is not served here; GET /v1/models says which is"
        raise Refusal(404, message, "model_not_found")

    # ---- text to ids ---------------------------------------------------------------------------

    async def encode(self, text: str, add_special: bool = True, field: str = "prompt") -> Prompt:
        """Here if it is short, in a process that can be killed if not."""
        self.check_size(len(text), field)
        if len(text) <= LONG:
            await asyncio.sleep(0)  # between the texts of a long list others have their turn
            return Prompt(self.tokenizer.encode(text, add_special), text)
        return Prompt(await self.apart.encode(text, add_special, field), text)

    async def pieces(self, text: str, add_special: bool, last: int | None = None) -> bytes:
        """A text's tokens and their places in it, as JSON."""
        self.check_size(len(text), "inputs")
        if len(text) <= LONG:
            return listed(self.tokenizer.pieces(text, add_special), last)
        return await self.apart.pieces(text, add_special, last)

    async def decode(self, ids: list[int]) -> str:
        """Special tokens show."""
        if len(ids) <= LONG:
            return self.tokenizer.decode(ids, skip_special=False)
        return await self.apart.decode(ids)

    async def conversation(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Messages as the model's chat template writes them down, tokenized."""
        size = sum(len(str(message.get("content"))) for message in messages)
        self.check_size(size, "messages")
        text, ids = await self.apart.conversation(messages, options, self.most_characters)
        return Prompt(ids, text)

    @property
    def most_characters(self) -> int:
        """No vocabulary packs so many into the context."""
        return self.limits.characters_per_token * self.capacity.max_length

    def check_size(self, characters: int, field: str) -> None:
        """Before it is tokenized."""
        if characters > self.most_characters:
            room = f"a context of {self.capacity.max_length} tokens holds at most {self.most_characters}"
            raise PromptTooLong(f"the prompt has {characters} characters: {room}", field)

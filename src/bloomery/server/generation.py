"""The one core: prompts and what is wanted of them in, pieces of answers out, whatever API asked.

A Job is what one HTTP request generates. It submits, detokenizes, times and counts; how an answer looks is the
route's business.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest, RequestFailed
from bloomery.messages import EngineRequest, TokenOutput
from bloomery.sampling import SamplingParams, requests
from bloomery.server.call import Call
from bloomery.server.errors import Problem
from bloomery.server.limits import Ticket
from bloomery.server.service import Prompt
from bloomery.server.streaming import Watch
from bloomery.text.answer import Answer, Delta, Generation


@dataclass(frozen=True)
class Ask:
    prompt: Prompt
    params: SamplingParams


class Author(Protocol):
    """How an API says an answer: whole, or as events for what it gains and for its end."""

    def whole(self) -> dict[str, Any]: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def end(self) -> bytes: ...


class Job:
    def __init__(self, call: Call, ticket: Ticket, asks: Sequence[Ask]):
        self.call = call
        self.ticket = ticket
        self.asks = asks
        self.timings = call.timings
        self.generations = [self._generation(index, ask) for index, ask in enumerate(asks)]
        call.params = asks[0].params
        self.silent = (
            False  # the prompt is all that is wanted; what must be generated to get it is not shown
        )
        self.cached = [0] * len(asks)  # prompt tokens found in the prefix cache
        self.latest: dict[str, float] = {}  # when a request's last token came

    def _generation(self, index: int, ask: Ask) -> Generation:
        service = self.call.service
        try:
            made = requests(
                ask.params,
                ask.prompt.ids,
                id=f"{self.call.unique}-{index}",
                entropy=secrets.randbits(64),
                vocab=service.capacity.vocab,
                max_length=service.capacity.max_length,
                eos_ids=service.tokenizer.eos_ids,
                encode=lambda word: service.tokenizer.encode(word, add_special=False),
                salt=self.call.salt,
                tenant=self.call.salt,
            )
        except InvalidRequest as error:
            if len(self.asks) > 1 and error.field == "prompt":
                error.field = f"prompt[{index}]"
            raise
        return Generation(made[0].id, ask.prompt.text, ask.params, made, service.tokenizer)

    @property
    def every(self) -> list[Answer]:
        """Those too that best_of will leave out."""
        return [answer for generation in self.generations for answer in generation.answers.values()]

    @property
    def requests(self) -> list[EngineRequest]:
        return [answer.request for answer in self.every]

    # ---- running it ------------------------------------------------------------------------------

    async def run(self) -> None:
        """To the end, unless the client leaves before."""
        async with Watch(self.call.receive, self.call.deadline), aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    async def answer(
        self, author: Author, stream: bool | None, failed: Callable[[Problem], bytes] | None = None
    ) -> ASGIApp:
        """As the client asked for it; `failed` words an error after the first event."""
        if stream:
            return self.call.events(self.stream(author), failed=failed)
        await self.run()
        return self.call.json(author.whole())

    async def stream(self, author: Author) -> AsyncGenerator[bytes, None]:
        """An event a token; those that came together are written together, so that a server that lags catches up."""
        data = b""
        async with aclosing(self.deltas()) as deltas:
            async for index, delta, more in deltas:
                data += author.delta(index, delta)
                if data and not more:
                    yield data
                    data = b""
        if data := data + author.end():
            yield data

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta, bool], None]:
        """What each prompt's answers gain, token by token, and whether the next follows at once; closing it aborts what
        is open."""
        service = self.call.service
        made = self.requests
        owners = {
            name: index
            for index, generation in enumerate(self.generations)
            for name in generation.answers
        }
        tokens = sum(len(request.prompt) for request in made)
        self.ticket.wait(
            tokens, service.waiting_tokens, service.prompt_rate, lambda: service.abort(made)
        )
        if (why := service.absent()) is not None:
            raise why
        self.timings.submitted = time.monotonic()
        lengths = [(len(request.prompt), request.max_tokens) for request in made]
        service.metrics.submit(self.timings, lengths, self.asks[0].params.n)
        async with aclosing(service.backend.stream(made)) as stream:
            async for news in stream:
                index = owners[news.request]
                generation = self.generations[index]
                if generation.answers[news.request].finish_reason is not None:
                    continue  # its stop string was found, and this was under way
                if news.finish in ("error", "abort", "deadline"):
                    raise service.failure(news, self.ticket)
                self._note(index, news)
                end = news.position + len(news.ids)
                for part in _singles(news):
                    delta, cut = generation.take(part)
                    if delta is None:
                        break
                    more = part.position + 1 < end and delta.finish_reason is None
                    yield index, delta, more
                    if delta.finish_reason is not None and self.finished:
                        self._end()
                        return
                    if cut:
                        service.backend.abort(news.request)
        raise RequestFailed("the engine's news ended before the answer did")

    def _note(self, index: int, news: TokenOutput) -> None:
        now = time.monotonic()
        metrics = self.call.service.metrics
        timings = self.timings
        before = self.latest.get(news.request)
        self.latest[news.request] = now
        if before is None and news.request == next(iter(self.generations[index].answers)):
            self.cached[index] = news.cached
        if not timings.first:
            timings.first = now
            timings.queued = news.queued
            self.ticket.begin()
            metrics.first(timings, self.prompt_tokens, news.cached)
        for i in range(len(news.ids)):
            metrics.token(0.0 if i else before and now - before, now)

    def _end(self) -> None:
        timings = self.timings
        timings.last = time.monotonic()
        reasons = [answer.finish_reason or "" for answer in self.every]
        self.call.service.metrics.finish(
            timings, reasons, [len(answer.token_ids) for answer in self.every]
        )
        self.call.facts |= {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(self.cached),
            "tokens": self.completion_tokens,
            "queue": round(timings.queued, 4),
            "first_token": round(timings.first - timings.arrived, 4),
            "per_second": round(
                self.completion_tokens / max(timings.last - timings.begun, 1e-6), 1
            ),
            "finish": reasons[0],
        }

    # ---- what became of it -----------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many answers it has."""
        return sum(len(generation.prompt_ids) for generation in self.generations)

    @property
    def completion_tokens(self) -> int:
        return 0 if self.silent else sum(len(answer.token_ids) for answer in self.every)

    @property
    def answers(self) -> list[Answer]:
        """Those to return: n of each prompt, one prompt after the other."""
        return [answer for generation in self.generations for answer in generation.best()]

    def usage(self) -> dict[str, Any]:
        """As OpenAI counts."""
        prompt = self.prompt_tokens
        completion = self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached)},
        }


def _singles(news: TokenOutput) -> Iterator[TokenOutput]:
    """One a token, also where several come at once."""
    last = len(news.ids) - 1
    if last <= 0:
        yield news
        return
    for i, id in enumerate(news.ids):
        yield TokenOutput(  # by hand: dataclasses.replace takes many times as long, and a server that lags comes here often
            news.request,
            news.position + i,
            (id,),
            news.logprobs[i : i + 1],
            () if i else news.prompt_logprobs,
            news.cached,
            news.finish if i == last else None,
            news.error,
            news.queued,
        )

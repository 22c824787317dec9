"""A prompt's answers as they grow: token ids in, text out, and the moment one must be stopped.

One Generation a prompt, one Answer a sequence (n and best_of make several). Offline use and servers share it. It
knows nothing of engines: whoever drives it hands over Tokens and aborts what `take` says has been cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bloomery.messages import EngineRequest, TokenLogprob, TokenOutput, light
from bloomery.sampling import SamplingParams, choose
from bloomery.text.detokenizer import TextStream
from bloomery.text.tokenizer import Tokenizer

Reason = Literal["stop", "length", "abort", "error", "deadline"]


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Reason | None = None
    stop_reason: int | str | None = (
        None  # the stop string or stop id that ended it; None for end of sequence
    )
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0


@light
class Delta:
    """What one answer gained: whole characters only, and on the last one why it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: Reason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Answer:
    index: int
    request: EngineRequest
    eos_ids: Sequence[int]
    stream: TextStream | None  # None: ids only
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: Reason | None = None
    stop_reason: int | str | None = None

    def take(self, news: TokenOutput) -> Delta:
        """Fold the news in. If a stop string ends the answer, what came after it is dropped."""
        ids = news.ids
        text = ""
        if self.stream is not None:
            before = self.stream.consumed
            text = self.stream.push(ids)
            if self.stream.stopped is not None:
                ids = ids[: self.stream.consumed - before]
                self.finish_reason = "stop"
                self.stop_reason = self.stream.stopped
        self.token_ids += ids
        logprobs = news.logprobs[: len(ids)]
        self.logprobs += logprobs
        if self.finish_reason is None and news.finish is not None:
            self._end(news.finish)
            text += self.stream.finish() if self.stream is not None else ""
        return Delta(self.index, text, tuple(ids), logprobs, self.finish_reason, self.stop_reason)

    def gain(self, news: TokenOutput) -> bool:
        """What `take` does with ids that nobody looks at before the end. False, and nothing done, if there is more."""
        more = (
            news.finish or news.logprobs or not news.position or self.stream or self.finish_reason
        )
        if not more:
            self.token_ids += news.ids
        return not more

    def _end(self, reason: Reason) -> None:
        self.finish_reason = reason
        if reason == "stop" and self.token_ids[-1] not in self.eos_ids:
            self.stop_reason = self.token_ids[-1]

    @property
    def text(self) -> str:
        return self.stream.text if self.stream is not None else ""

    @property
    def cumulative_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)


class Generation:
    def __init__(
        self,
        id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
    ):
        self.id = id
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self.prompt_ids = requests[0].prompt
        self.cached = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        eos_ids = tokenizer.eos_ids if tokenizer else ()
        self.answers = {
            request.id: Answer(i, request, eos_ids, self._stream(request))
            for i, request in enumerate(requests)
        }

    def _stream(self, request: EngineRequest) -> TextStream | None:
        if self.tokenizer is None or not self.params.detokenize:
            return None
        return TextStream(
            self.tokenizer,
            prompt=request.prompt,
            stop=self.params.stop_strings,
            skip_special=self.params.skip_special_tokens,
            include_stop=self.params.include_stop_str_in_output,
            min_tokens=self.params.min_tokens,
        )

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers.values())

    def take(self, news: TokenOutput) -> tuple[Delta | None, bool]:
        """What the news adds, and whether the engine must be told to stop that request."""
        answer = self.answers[news.request]
        if answer.finish_reason is not None:
            return None, False
        self.cached = max(self.cached, news.cached)
        self.prompt_logprobs = news.prompt_logprobs or self.prompt_logprobs
        delta = answer.take(news)
        return delta, delta.finish_reason is not None and news.finish is None

    def best(self) -> list[Answer]:
        """The n answers to return: all there are, or the best of them where best_of asked for more."""
        answers = list(self.answers.values())
        if len(answers) == self.params.n:
            return answers
        return [
            answers[i]
            for i in choose([answer.cumulative_logprob for answer in answers], self.params.n)
        ]

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.id,
            self.prompt,
            list(self.prompt_ids),
            [self._completion(index, answer) for index, answer in enumerate(self.best())],
            None
            if self.params.prompt_logprobs is None
            else [None, *map(self._logprobs, self.prompt_logprobs)],
            self.finished,
            self.cached,
        )

    def _completion(self, index: int, answer: Answer) -> CompletionOutput:
        asked = self.params.logprobs is not None
        return CompletionOutput(
            index,
            answer.text,
            answer.token_ids,
            answer.finish_reason,
            answer.stop_reason,
            answer.cumulative_logprob if answer.logprobs else None,
            [self._logprobs(entry) for entry in answer.logprobs] if asked else None,
        )

    def _logprobs(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """The best ones by rank, and the token's own."""

        def text(token: int) -> str:
            return self.tokenizer.token_text(token) if self.tokenizer else ""

        found = {
            token: Logprob(value, rank, text(token))
            for rank, (token, value) in enumerate(entry.top, 1)
        }
        found.setdefault(entry.token, Logprob(entry.logprob, entry.rank, text(entry.token)))
        return found

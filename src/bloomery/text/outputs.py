"""Turns generated token ids into request outputs: incremental detokenization and stop strings.

A RequestState collects the completions of one prompt; a CompletionState collects one sequence (n
and best_of make several). Offline use and the server share them. Nothing here knows the engine: the
caller passes TokenOutput in, and aborts the engine's request when add_output says so.

The text is exact: the deltas add up to what the tokenizer decodes from all ids at once, at a
constant cost per token. A delta never contains a part of a character.

An AnswerParser divides a text into reasoning, content and tool calls while it arrives. Without one,
all text is content.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from bloomery.messages import (
    EngineRequest,
    FinishReason,
    TokenLogprob,
    TokenOutput,
    lightweight_message,
)
from bloomery.sampling import SamplingParams, select_best
from bloomery.text.tokenizer import Tokenizer


@lightweight_message
class Logprob:
    """The log-probability of one token, with its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


class LogprobList(Sequence[dict[int, Logprob]]):
    """For each token of an output, the most likely tokens by rank, and the sampled one.

    The entries are made when they are read: a batch has millions of them, and they would cost more
    time than sampling. A copy made by pickle is a plain list.
    """

    def __init__(self, entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None):
        self.entries = entries
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._describe(entry) for entry in self.entries[index]]
        return self._describe(self.entries[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | LogprobList) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _describe(self, entry: TokenLogprob) -> dict[int, Logprob]:
        logprobs = {
            token: Logprob(value, rank, self._token_text(token))
            for rank, (token, value) in enumerate(entry.top, 1)
        }
        if entry.token not in logprobs:
            text = self._token_text(entry.token)
            logprobs[entry.token] = Logprob(entry.logprob, entry.rank, text)
        return logprobs

    def _token_text(self, token: int) -> str:
        return self.tokenizer.token_text(token) if self.tokenizer else ""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    # The stop string or stop token id that ended it; None for an end-of-sequence token.
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: LogprobList | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its generated sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0


@lightweight_message
class CompletionDelta:
    """New text and tokens of one completion. The last delta has a finish reason."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # What the text means, if it is parsed (ResponseEvent of response_format); `text` is then the
    # content alone.
    events: tuple[Any, ...] = ()


# ---- parsed answers ----------------------------------------------------------------------------


class AnswerParser(Protocol):
    """Divides an answer into regions; response_format.ResponseParser is one."""

    @property
    def region(self) -> str:
        """The region that the text is in: "reasoning", "content" or "calls"."""
        ...

    def feed(self, text: str) -> list[Any]:
        """Take new text and return the events that are certain now."""
        ...

    def close(self, was_cut: bool = False) -> list[Any]:
        """Return the last events, because no more text follows.

        `was_cut`: the text ends at a limit, perhaps within a marker.
        """
        ...


@dataclass(slots=True)
class ParsedCall:
    """A tool call. `arguments` is JSON text, complete unless the answer was cut off."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """The parts of an answer so far."""

    calls: list[ParsedCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    reasoning_parts: list[str] = field(default_factory=list)
    content_parts: list[str] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)

    @property
    def content(self) -> str:
        return "".join(self.content_parts)

    def add_event(self, event: Any) -> Any:
        """Add an event, and return it. A call without an id gets one."""
        match event.kind:
            case "reasoning":
                self.reasoning_parts.append(event.text)
            case "content":
                self.content_parts.append(event.text)
            case "arguments":
                self.calls[event.index].arguments += event.text
            case "call":
                event = event._replace(id=event.id or create_call_id())
                self.calls.append(ParsedCall(event.id, event.name))
        return event


def create_call_id() -> str:
    """An id for a tool call whose format has none."""
    return f"call_{secrets.token_hex(12)}"


# ---- output assembly ---------------------------------------------------------------------------


@dataclass(slots=True)
class CompletionState:
    """One sequence while it is generated."""

    index: int
    request: EngineRequest
    eos_ids: Sequence[int]
    stream: TextStream | None  # None: token ids only, no text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    parser: AnswerParser | None = None
    parsed: ParsedAnswer | None = None  # None: the text is not parsed

    def add_output(self, output: TokenOutput) -> CompletionDelta:
        """Add tokens and return the delta. Tokens after a stop string are dropped."""
        token_ids = output.ids
        text = ""
        if self.stream is not None:
            num_consumed = self.stream.num_consumed
            text = self.stream.push(token_ids)
            if self.stream.stopped is not None:
                token_ids = token_ids[: self.stream.num_consumed - num_consumed]
                self.finish_reason = "stop"
                self.stop_reason = self.stream.stopped
        self.token_ids += token_ids
        logprobs = output.logprobs[: len(token_ids)]
        self.logprobs += logprobs
        if self.finish_reason is None and output.finish is not None:
            self._finish(output.finish)
            if self.stream is not None:
                text += self.stream.finish()
        events: tuple[Any, ...] = ()
        if self.parser is not None:
            events = self._parse(self.parser, text, len(token_ids))
            text = "".join(event.text for event in events if event.kind == "content")
        return CompletionDelta(
            self.index,
            text,
            tuple(token_ids),
            logprobs,
            self.finish_reason,
            self.stop_reason,
            events,
        )

    def _parse(self, parser: AnswerParser, text: str, num_tokens: int) -> tuple[Any, ...]:
        """Feed new text to the parser, and its events to the parsed answer."""
        answer = self.parsed = self.parsed or ParsedAnswer()
        was_reasoning = parser.region == "reasoning"
        events = parser.feed(text) if text else []
        # The tokens of both markers count as reasoning.
        if was_reasoning or parser.region == "reasoning":
            answer.reasoning_tokens += num_tokens
        if self.finish_reason is not None:
            events = [*events, *parser.close(was_cut=self.finish_reason == "length")]
        return tuple([answer.add_event(event) for event in events])

    def append_token_ids(self, output: TokenOutput) -> bool:
        """Add tokens without making a delta, if nothing but ids must be recorded.

        Returns False, and does nothing, if the output needs add_output: the first and the last one,
        and any output of a completion that has text.
        """
        if output.finish or not output.position or self.stream or self.finish_reason:
            return False
        self.token_ids += output.ids
        self.logprobs += output.logprobs
        return True

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        last_id = self.token_ids[-1] if self.token_ids else None
        # A complete output of a grammar ends without a stop token.
        is_stop_token = last_id in self.request.stop_ids and last_id not in self.eos_ids
        if reason == "stop" and is_stop_token:
            self.stop_reason = last_id

    @property
    def text(self) -> str:
        """All text so far; of a parsed answer its content alone."""
        if self.stream is None:
            return ""
        if self.parsed is not None:
            return self.parsed.content
        return self.stream.text

    @property
    def cumulative_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)


class RequestState:
    """All completions of one prompt while they are generated, by the engine's request id."""

    def __init__(
        self,
        id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
        create_parser: Callable[[], AnswerParser] | None = None,
    ):
        """`create_parser` makes the parser of one completion; without it, text is not parsed."""
        self.id = id
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self.create_parser = create_parser
        self.prompt_ids = requests[0].prompt
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        eos_ids = tokenizer.eos_ids if tokenizer else ()
        self.completions = {
            request.id: CompletionState(
                i,
                request,
                eos_ids,
                self._open_stream(request),
                parser=create_parser and create_parser(),
            )
            for i, request in enumerate(requests)
        }

    def _open_stream(self, request: EngineRequest) -> TextStream | None:
        if self.tokenizer is None or not self.params.detokenize:
            return None
        # A parser sees special tokens, because some of them are markers. It drops the others.
        skip_special = self.params.skip_special_tokens and self.create_parser is None
        return TextStream(
            self.tokenizer,
            prompt=request.prompt,
            stop=self.params.stop_strings,
            skip_special=skip_special,
            include_stop=self.params.include_stop_str_in_output,
            min_tokens=self.params.min_tokens,
        )

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions.values())

    def add_output(self, output: TokenOutput) -> tuple[CompletionDelta | None, bool]:
        """Return the delta, and whether the engine must abort the request (a stop string).

        The delta is None if the completion has already finished.
        """
        completion = self.completions[output.request]
        if completion.finish_reason is not None:
            return None, False
        self.num_cached_tokens = max(self.num_cached_tokens, output.cached)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        delta = completion.add_output(output)
        must_abort = delta.finish_reason is not None and output.finish is None
        return delta, must_abort

    def select_completions(self) -> list[CompletionState]:
        """Return n completions: all of them, or the most likely if best_of made more."""
        completions = list(self.completions.values())
        if len(completions) == self.params.n:
            return completions
        logprobs = [completion.cumulative_logprob for completion in completions]
        return [completions[i] for i in select_best(logprobs, self.params.n)]

    def build_output(self) -> RequestOutput:
        """Return the output so far, as the offline API shows it."""
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.params.prompt_logprobs is not None:
            # The first token of a prompt has no log-probability.
            prompt_logprobs = [None, *LogprobList(self.prompt_logprobs, self.tokenizer)]
        outputs = [
            self._build_completion_output(index, completion)
            for index, completion in enumerate(self.select_completions())
        ]
        return RequestOutput(
            self.id,
            self.prompt,
            list(self.prompt_ids),
            outputs,
            prompt_logprobs,
            self.finished,
            self.num_cached_tokens,
        )

    def _build_completion_output(self, index: int, completion: CompletionState) -> CompletionOutput:
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = LogprobList(tuple(completion.logprobs), self.tokenizer)
        return CompletionOutput(
            index,
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.stop_reason,
            completion.cumulative_logprob if completion.logprobs else None,
            logprobs,
        )


# ---- incremental detokenization ----------------------------------------------------------------


class TextStream:
    """The text of a completion: push token ids as they arrive, then call finish once.

    `stopped` is the stop string that ended the text. `num_consumed` counts the ids up to and
    including the one that completed it: token ids and log-probabilities are cut there. Stop strings
    are ignored within the first `min_tokens` ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special)
        self._matcher = StopStringMatcher(stop, include_stop)
        self._min_tokens = min_tokens
        # A stop string that is a special token is left out of the text, so it is matched by id.
        ids = {tokenizer.token_to_id(string): string for string in stop} if skip_special else {}
        self._stop_ids = {id: stop for id, stop in ids.items() if id in tokenizer.special_ids}
        self._parts: list[str] = []
        self.num_consumed = 0

    @property
    def stopped(self) -> str | None:
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    def push(self, ids: Iterable[int]) -> str:
        """Add token ids and return the text that is certain now."""
        parts = []
        for id in ids:
            if self.stopped is not None:
                break
            self.num_consumed += 1
            can_stop = self.num_consumed > self._min_tokens
            text = self._detokenizer.push(id)
            parts.append(self._matcher.push(text, can_stop))
            if can_stop and self.stopped is None and id in self._stop_ids:
                parts.append(self._stop_at_token(self._stop_ids[id]))
        return self._record("".join(parts))

    def finish(self) -> str:
        """Return the rest: an incomplete character, and text held back for a stop string."""
        if self.stopped is not None:
            return ""
        can_stop = self.num_consumed > self._min_tokens
        last = self._matcher.push(self._detokenizer.finish(), can_stop)
        return self._record(last + self._matcher.finish())

    def _stop_at_token(self, stop: str) -> str:
        rest = self._matcher.finish() + self._detokenizer.finish()
        self._matcher.matched = stop
        if self._matcher.include:
            return rest + stop
        return rest

    def _record(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class Detokenizer:
    """Decodes token ids one by one. The bytes of an incomplete character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True):
        decoder = tokenizer.decoder
        self._token_bytes = tokenizer.token_bytes
        self._strip_leading_space = decoder.strip_leading_space
        self._replace_invalid_bytes = decoder.replace_invalid_bytes
        self._skipped_ids = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(decoder.utf8_errors)
        prompt_end = self._last_bytes(prompt)
        self._started = bool(prompt_end)
        self._utf8.decode(prompt_end)
        # If the prompt ends within a character, its bytes belong to the prompt's text. They are
        # shown here only if the completion turns them into a valid character.
        incomplete, _ = self._utf8.getstate()
        self._prompt_rest = self._replace_invalid_bytes(
            incomplete.decode("utf-8", decoder.utf8_errors)
        )

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """Return the end of the prompt's bytes, long enough for one incomplete character."""
        end = b""
        for id in reversed(prompt):
            if id not in self._skipped_ids:
                end = self._token_bytes(id) + end
            if len(end) > 3:
                break
        return end

    def push(self, id: int) -> str:
        """Add a token and return the characters that are complete now."""
        if id in self._skipped_ids:
            return ""
        data = self._token_bytes(id)
        if not data:
            return ""
        if not self._started:
            self._started = True
            data = self._strip_leading_space(data)
        return self._without_prompt_rest(self._utf8.decode(data))

    def finish(self) -> str:
        """Return replacement characters for the bytes that never became a character."""
        return self._without_prompt_rest(self._utf8.decode(b"", True))

    def _without_prompt_rest(self, text: str) -> str:
        text = self._replace_invalid_bytes(text)
        if text and self._prompt_rest:
            text = text.removeprefix(self._prompt_rest)
            self._prompt_rest = ""
        return text


class StopStringMatcher:
    """Finds stop strings in a stream, and holds back text that may be the start of one.

    The first complete stop string wins. Of two that end at the same character, the longer one wins.
    """

    def __init__(self, stops: Iterable[str], include: bool = False):
        self.include = include
        self.matched: str | None = None
        # Longest first, so that min() prefers the longer of two that end together.
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._first_character = re.compile("|".join(re.escape(stop[0]) for stop in self._stops))
        self._held_back = ""

    def push(self, text: str, can_stop: bool = True) -> str:
        """Return the text that can be shown. Unless `can_stop`, a stop string counts as text."""
        if not self._stops:
            return text
        num_held = len(self._held_back)
        text = self._held_back + text
        if self._first_character.search(text) is None:
            return text
        if can_stop:
            starts = {
                stop: text.find(stop, max(num_held - len(stop) + 1, 0)) for stop in self._stops
            }
            ends = {stop: start + len(stop) for stop, start in starts.items() if start >= 0}
            if ends:
                matched = min(ends, key=ends.__getitem__)
                self.matched = matched
                self._held_back = ""
                end = ends[matched] if self.include else starts[matched]
                return text[:end]
        self._held_back = self._possible_start(text)
        return text[: len(text) - len(self._held_back)]

    def _possible_start(self, text: str) -> str:
        """Return the longest suffix of `text` that is the start of a stop string."""
        longest = len(self._stops[0])
        for match in self._first_character.finditer(text, max(len(text) - longest + 1, 0)):
            end = text[match.start() :]
            if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stops):
                return end
        return ""

    def finish(self) -> str:
        """Return the text that was held back, because no more text follows."""
        held_back = self._held_back
        self._held_back = ""
        return held_back

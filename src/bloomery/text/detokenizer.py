"""The text of an answer while its tokens arrive: exact, whole characters only, ended by stop strings.

What the deltas add up to is what the tokenizer makes of all ids at once, at a constant cost a token. Nothing here
knows requests or transport; the offline API and the server both hold one TextStream an answer.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from bloomery.text.tokenizer import Tokenizer


class Detokenizer:
    """Ids in, text out. Bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True):
        spelling = tokenizer.spelling
        self._bytes = tokenizer.token_bytes
        self._opening = spelling.opening
        self._mend = spelling.mend
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        before = self._tail(prompt)
        self._opened = bool(before)
        self._utf8.decode(before)
        # A prompt that ends within a character: its half is the prompt's to show, unless an answer completes it.
        half, _ = self._utf8.getstate()
        self._orphans = self._mend(half.decode("utf-8", spelling.errors))

    def _tail(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt's visible text, enough to hold an unfinished character."""
        tail = b""
        for id in reversed(prompt):
            if id not in self._hidden:
                tail = self._bytes(id) + tail
            if len(tail) > 3:
                break
        return tail

    def push(self, id: int) -> str:
        if id in self._hidden or not (data := self._bytes(id)):
            return ""
        if not self._opened:
            self._opened = True
            data = self._opening(data)
        return self._owned(self._utf8.decode(data))

    def finish(self) -> str:
        """What the bytes of a character that never got whole read as."""
        return self._owned(self._utf8.decode(b"", True))

    def _owned(self, text: str) -> str:
        text = self._mend(text)
        if text and self._orphans:
            text = text.removeprefix(self._orphans)
            self._orphans = ""
        return text


class StopStrings:
    """Holds back the longest tail that may still become a stop string; the earliest to be complete wins.

    Of two complete at the same character, the longer wins.
    """

    def __init__(self, stops: Iterable[str], include: bool = False):
        self.include = include
        self.found: str | None = None
        self._stops = sorted(
            filter(None, stops), key=len, reverse=True
        )  # so that of equals the longer comes first
        self._first = re.compile("|".join(re.escape(stop[0]) for stop in self._stops))
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str:
        """What can be shown. A stop string that gets complete while not `armed` is text like any other."""
        seen = len(self._held)
        text = self._held + text
        if not self._stops or self._first.search(text) is None:
            return text
        starts = (
            {stop: text.find(stop, max(seen - len(stop) + 1, 0)) for stop in self._stops}
            if armed
            else {}
        )
        ends = {stop: start + len(stop) for stop, start in starts.items() if start >= 0}
        if ends:
            self.found = min(ends, key=ends.__getitem__)
            self._held = ""
            return text[: ends[self.found] if self.include else starts[self.found]]
        self._held = self._beginning(text)
        return text[: len(text) - len(self._held)]

    def _beginning(self, text: str) -> str:
        """The longest tail that a stop string goes on from."""
        for found in self._first.finditer(text, max(len(text) - len(self._stops[0]) + 1, 0)):
            tail = text[found.start() :]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return tail
        return ""

    def finish(self) -> str:
        held = self._held
        self._held = ""
        return held


class TextStream:
    """An answer's text: push ids as they come, show what is returned, finish once.

    `stopped` is the stop string that ended it. `consumed` counts the ids up to and with the one that did: token ids
    and log-probabilities are cut there. `min_tokens` ids go by before a stop string counts.
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
        self._stops = StopStrings(stop, include_stop)
        self._min_tokens = min_tokens
        # a stop string that is a hidden token never shows in the text, yet it was asked for
        ids = {tokenizer.id_of(stop): stop for stop in stop} if skip_special else {}
        self._stop_ids = {id: stop for id, stop in ids.items() if id in tokenizer.special_ids}
        self._shown: list[str] = []
        self.consumed = 0

    @property
    def stopped(self) -> str | None:
        return self._stops.found

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return "".join(self._shown)

    def push(self, ids: Iterable[int]) -> str:
        shown = []
        for id in ids:
            if self.stopped is not None:
                break
            self.consumed += 1
            armed = self.consumed > self._min_tokens
            shown.append(self._stops.push(self._detokenizer.push(id), armed))
            if armed and self.stopped is None and id in self._stop_ids:
                shown.append(self._end_at_token(self._stop_ids[id]))
        return self._show("".join(shown))

    def finish(self) -> str:
        """The rest: bytes that made no character, and a tail that became no stop string."""
        if self.stopped is not None:
            return ""
        last = self._stops.push(self._detokenizer.finish(), self.consumed > self._min_tokens)
        return self._show(last + self._stops.finish())

    def _end_at_token(self, stop: str) -> str:
        rest = self._stops.finish() + self._detokenizer.finish()
        self._stops.found = stop
        return rest + (stop if self._stops.include else "")

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

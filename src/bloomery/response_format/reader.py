"""Reading a text that is still arriving.

The readers are generators. They `yield` to wait for more text wherever the text so far does not
suffice to decide. A decision depends on the text alone and on whether it has ended, never on where
a delta ended. That is why every way to split a text gives the same result.

The buffer is compacted between deltas, so an index must not be held across a wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Any

Wait = Generator[None, None, Any]
EmitText = Callable[[str], None]

_BRACKET_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_SCALAR_ENDS = frozenset(",]} \t\r\n")
# Models put whitespace between these.
_MARKER_WORD = re.compile(r"<[^<>\s]*>|[\[\]{}(),]|[^\s\[\]{}(),<]+|<")
_FIRST_TAG = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]")


class UnexpectedText(Exception):
    """The text is not what must come here, or it has ended."""


class MarkerSet:
    """Several markers that are searched at once."""

    def __init__(self, markers: Iterable[str]):
        ordered = sorted(filter(None, markers), key=len, reverse=True)
        self.longest = len(ordered[0]) if ordered else 0
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.prefixes = {marker[:size] for marker in ordered for size in range(1, len(marker))}


@lru_cache(maxsize=256)
def compile_markers(markers: frozenset[str]) -> MarkerSet:
    return MarkerSet(markers)


class TextReader:
    """The text so far and a cursor in it.

    Text from the `mark` on is preserved, so that it can be given back.
    """

    def __init__(self, text: str = ""):
        self.buffer = text
        self.cursor = 0
        self.mark: int | None = None
        self.ended = False
        self.was_cut = False  # it ended at a limit, perhaps within a marker

    def compact(self) -> None:
        """Drop the text that was read. The cursor moves."""
        start = self.cursor if self.mark is None else self.mark
        self.buffer = self.buffer[start:]
        self.cursor -= start
        if self.mark is not None:
            self.mark = 0

    def read_until(self, markers: Iterable[str], emit: EmitText) -> Wait:
        """Emit the text before the leftmost marker and return the marker; None at the end.

        Of the markers that begin at the same place, the longest wins. A complete marker waits while
        a longer or an earlier one is still possible.
        """
        marker_set = compile_markers(frozenset(markers))
        while True:
            match = marker_set.pattern.search(self.buffer, self.cursor)
            stop = match.start() if match else len(self.buffer)
            safe_stop = stop
            if not self.ended or self.was_cut:
                safe_stop = self._find_begun_marker(marker_set, stop)
            if safe_stop > self.cursor:
                emit(self.buffer[self.cursor : safe_stop])
                self.cursor = safe_stop
            if match and safe_stop == stop:
                rest = self.buffer[stop:]
                if self.ended or rest not in marker_set.prefixes:
                    self.cursor = match.end()
                    return match[0]
            if self.ended:
                self.cursor = len(self.buffer)
                return None
            yield

    def _find_begun_marker(self, markers: MarkerSet, stop: int) -> int:
        """Return where the earliest marker begins that the text breaks off in, at most `stop`.

        At the end of a text that was cut off, one character is not enough to tell a marker.
        """
        first = max(self.cursor, len(self.buffer) - markers.longest + 1)
        shortest = 2 if self.ended else 1
        for start in range(first, min(stop, len(self.buffer) - shortest + 1)):
            if self.buffer[start:] in markers.prefixes:
                return start
        return stop

    def peek(self, ahead: int = 0) -> Wait:
        """Return the character `ahead` of the cursor, "" at the end of the text."""
        while len(self.buffer) <= self.cursor + ahead and not self.ended:
            yield
        place = self.cursor + ahead
        return self.buffer[place : place + 1]

    def count_blanks(self, ahead: int = 0) -> Wait:
        while (yield from self.peek(ahead)).isspace():
            ahead += 1
        return ahead

    def skip_blanks(self) -> Wait:
        size = yield from self.count_blanks()
        self.cursor += size

    def match_literal(self, literal: str, ahead: int = 0) -> Wait:
        """Return how far a literal reaches, 0 if it is not what comes next.

        Whitespace around its words does not count.
        """
        for word in _MARKER_WORD.findall(literal):
            ahead = yield from self.count_blanks(ahead)
            for character in word:
                if (yield from self.peek(ahead)) != character:
                    return 0
                ahead += 1
        return ahead

    def take(self, *literals: str) -> Wait:
        """Pass over the longest of the literals that comes next and return it, or None."""
        for literal in sorted(filter(str.strip, literals), key=len, reverse=True):
            size = yield from self.match_literal(literal)
            if size:
                self.cursor += size
                return literal
        return None

    def expect(self, *literals: str) -> Wait:
        """Pass over one of the literals, which must come next."""
        literal = yield from self.take(*literals)
        if literal is None:
            raise UnexpectedText
        return literal

    def collect_until(self, markers: Iterable[str]) -> Wait:
        """Return the text before the first of the markers, and the marker."""
        parts: list[str] = []
        marker = yield from self.read_until(markers, parts.append)
        if marker is None:
            raise UnexpectedText
        return "".join(parts), marker

    # ---- values, passed on as they arrive ------------------------------------------------------

    def pass_json(self, emit: EmitText) -> Wait:
        """Pass on one JSON value. Brackets within strings do not count."""
        first = yield from self.peek()
        if not first:
            raise UnexpectedText
        if first not in '"{[':
            end = yield from self.read_until(_SCALAR_ENDS, emit)
            self.cursor -= len(end or "")
            return
        yield from self._pass_value(('"',), (), emit)

    def collect_json(self) -> Wait:
        parts: list[str] = []
        yield from self.pass_json(parts.append)
        return "".join(parts)

    def collect_literal(self, quotes: Sequence[str], ends: Sequence[str]) -> Wait:
        """Collect a literal of a programming language, up to one of the ends.

        If the only end is that of the whole list, it stops after a string or a bracket too: the
        template forgets the commas.
        """
        parts: list[str] = []
        yield from self._pass_value(quotes, ends, parts.append)
        return "".join(parts)

    def _pass_value(self, quotes: Sequence[str], ends: Sequence[str], emit: EmitText) -> Wait:
        """Pass on a value up to an end that is in no bracket and no string.

        Without two ends to choose from, the value stops with its last bracket or quote.
        """
        depth = 0
        markers = frozenset((*quotes, *ends, *_BRACKET_DEPTH))
        while True:
            marker = yield from self.read_until(markers, emit)
            if marker is None:
                raise UnexpectedText
            if depth == 0 and marker in ends:
                self.cursor -= len(marker)
                return
            emit(marker)
            if marker in quotes:
                yield from self._pass_string_rest(marker, emit)
            depth += _BRACKET_DEPTH.get(marker, 0)
            if depth == 0 and len(ends) < 2:
                return

    def _pass_string_rest(self, quote: str, emit: EmitText) -> Wait:
        """Pass on the rest of a string. Only a quote of one character can be escaped."""
        markers = (quote, "\\") if len(quote) == 1 else (quote,)
        while True:
            marker = yield from self.read_until(markers, emit)
            if marker is None:
                raise UnexpectedText
            emit(marker)
            if marker == quote:
                return
            escaped = yield from self.peek()
            emit(escaped)
            self.cursor += len(escaped)


class BorderTrimmer:
    """Drops whitespace at the border of regions: it is held back until text follows."""

    def __init__(self, emit: EmitText, leading: bool):
        self.emit = emit
        self.leading = leading
        self.pending = ""

    def push(self, text: str) -> None:
        if self.leading:
            text = text.lstrip()
            self.leading = not text
        text = self.pending + text
        shown = text.rstrip()
        self.pending = text[len(shown) :]
        self.emit(shown)

    def is_within_line(self) -> bool:
        """Return whether the next text comes after a space, in the middle of a line."""
        return self.pending != "" and "\n" not in self.pending

    def flush(self) -> None:
        self.emit(self.pending)
        self.pending = ""

    def restart(self) -> None:
        self.leading = True
        self.pending = ""


def first_word(literal: str) -> str:
    """Return the tag or the word with which a marker begins."""
    word = literal.split()[0]
    tag = _FIRST_TAG.match(word)
    return tag[0] if tag else word


def begun_text(prompt: str, markers: Iterable[str]) -> str:
    """Return the longest beginning of a marker with which the prompt ends."""
    beginnings = [marker[:size] for marker in markers for size in range(1, len(marker) + 1)]
    return max(filter(prompt.endswith, beginnings), key=len, default="")

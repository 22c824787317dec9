"""How a model writes an answer, as data: regions, calls, arguments, and what ends a turn.

An answer consists of regions: reasoning, content, tool calls. Markers are the texts between them,
exactly as the chat template writes them, whitespace included. The grammar asks for that exact text;
the parser compares without the whitespace around a marker, because models are careless about it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from bloomery.errors import ConfigError

AnswerRegion = Literal["reasoning", "content", "calls"]

# Places in a literal text of a format that differ from call to call.
NAME_SLOT = "$name"
ID_SLOT = "$id"
ARGUMENTS_SLOT = "$arguments"
_SLOT = re.compile(r"(\$name|\$id|\$arguments)")


class FormatData(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a format, readable from JSON."""


class RegionMarkers(FormatData, frozen=True):
    """The texts around a region. An empty `open` means that the region needs no marker to begin."""

    open: str = ""
    close: str = ""


class ObjectCall(FormatData, frozen=True, tag="object", tag_field="style"):
    """The whole call is a JSON object: {"name": ..., "arguments": {...}}.

    Paths lead to its parts. An empty `name` path means that the function's name is the key of its
    arguments: {"f": {...}}. The parser takes any order of keys. `written` is the order and the
    spacing that the grammar asks for.
    """

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments",)
    id: tuple[str, ...] = ()
    written: str = '{"name": "$name", "arguments": $arguments}'


class JsonArguments(FormatData, frozen=True, tag="json", tag_field="style"):
    """The head names the function, and a JSON object holds its arguments."""


class TaggedArguments(FormatData, frozen=True, tag="tagged", tag_field="style"):
    """Each parameter has markers of its own: key_open KEY key_close VALUE value_close.

    Strings are written raw, other values as JSON. Where the text does not tell which it is, the
    schema of the tool does. Some formats write the type between key and value: `typed` then has
    that text for each JSON type.
    """

    key_open: str
    key_close: str
    value_close: str  # may hold {key}, where the closing tag repeats the key
    typed: dict[str, str] = {}
    item: str = ""  # the tag of a list's members, where values nest as tags
    quote: tuple[str, str] = ("", "")  # around a value that contains markup, such as CDATA


class LiteralArguments(FormatData, frozen=True, tag="literal", tag_field="style"):
    """A call as in a programming language: f(a='x', b=[1, 2]), or f{a:<|"|>x<|"|>,b:[1,2]}."""

    assign: str
    quotes: tuple[str, ...]
    close: str
    separator: str = ", "
    sorted_keys: bool = False  # the template sorts the keys, so the model does


ArgumentStyle = ObjectCall | JsonArguments | TaggedArguments | LiteralArguments


class CallFormat(FormatData, frozen=True):
    """A section of one or more calls. Without section markers, each call stands for itself."""

    arguments: ArgumentStyle
    section: RegionMarkers = RegionMarkers()
    call: RegionMarkers = RegionMarkers()
    head: str = ""  # after call.open, up to the arguments; has slots
    separator: str = ""
    parallel: bool = True
    # Texts that may stand between the name and the next part of the head.
    after_name: tuple[str, ...] = ()
    # How an id is made of the name and the number that was read: functions.{name}:{id}.
    id_format: str = ""

    @property
    def opening(self) -> str:
        """The text that begins calls. If empty, a call is a JSON object that begins the answer."""
        return self.section.open + self.call.open

    @property
    def call_text(self) -> str:
        """A call without its markers, with slots. Arguments in tags and literals follow it."""
        if isinstance(self.arguments, ObjectCall):
            return self.arguments.written
        return self.head + (ARGUMENTS_SLOT if isinstance(self.arguments, JsonArguments) else "")


class ResponseFormat(FormatData, frozen=True):
    """How one model writes its answers."""

    reasoning: RegionMarkers | None = None
    content: RegionMarkers = RegionMarkers()
    calls: CallFormat | None = None
    end: tuple[str, ...] = ()  # texts that end the turn
    ignored: tuple[str, ...] = ()  # texts between regions that mean nothing to a reader
    starts_in: AnswerRegion = "content"  # what the usual generation prompt has opened
    turn_start: str = ""  # the text that begins the assistant's turn in a prompt
    # The markers of reasoning are special tokens, so a model never quotes them in passing.
    special: bool = False

    def opened_by(self, prompt: str) -> AnswerRegion:
        """Return the region in which an answer to this prompt begins.

        Options such as enable_thinking change what the generation prompt opens. Earlier turns do
        not count: a user may write a marker in a question.
        """
        if self.reasoning is None:
            return "content"
        if not prompt:
            return self.starts_in
        start = prompt.rfind(self.turn_start) if self.turn_start else -1
        turn = prompt[start:] if start >= 0 else prompt
        open = self.reasoning.open.strip()
        close = self.reasoning.close.strip()
        if not open:
            return self.starts_in if close not in turn else "content"
        return "reasoning" if turn.rfind(open) > turn.rfind(close) else "content"

    def describe(self) -> str:
        """Return one line for the start-up log."""
        parts: list[str] = []
        if self.reasoning is not None:
            open = self.reasoning.open.strip() or "(start of the answer)"
            parts.append(f"reasoning {open} ... {self.reasoning.close.strip()}")
        if self.calls is not None:
            style = STYLE_NAMES[type(self.calls.arguments)]
            opening = self.calls.opening.strip().split("\n")[0] or "(no marker)"
            several = "several" if self.calls.parallel else "one at a time"
            parts.append(f"tool calls {opening} with {style}, {several}")
        return "; ".join(parts) or "content only"


STYLE_NAMES: dict[type, str] = {
    ObjectCall: "the call as a JSON object",
    JsonArguments: "arguments as a JSON object",
    TaggedArguments: "arguments in tags",
    LiteralArguments: "arguments as in a function call",
}


class ToolFunction(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    schema_field: str = "tools"  # where the request has the parameters, for errors
    input_grammar: str = ""  # Lark for the only parameter of a custom tool, a text


def split_slots(text: str) -> list[str]:
    """Split a text into its literal parts and its slots, in order; blank literals stay."""
    return [part for part in _SLOT.split(text) if part]


def is_slot(part: str) -> bool:
    return part in (NAME_SLOT, ID_SLOT, ARGUMENTS_SLOT)


def parse_response_format(text: str | bytes, source: str = "the response format") -> ResponseFormat:
    """Read a format from JSON; errors name the field and the source."""
    try:
        return msgspec.json.decode(text, type=ResponseFormat)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source} is not a valid response format: {error}") from None


def load_response_format(path: Path) -> ResponseFormat:
    """Read a format from a JSON file."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the response format {path}: {error.strerror}") from None
    return parse_response_format(contents, str(path))

"""One machine for streamed and complete answers: text in, events out.

The machine is written as generators that read the text in order and wait (`yield`) where it does
not suffice to decide (see reader.py). Every way to split a text into deltas gives the same events
once neighbours are merged. A complete answer is one delta and a close.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bloomery.response_format.format import (
    ID_SLOT,
    NAME_SLOT,
    AnswerRegion,
    CallFormat,
    JsonArguments,
    LiteralArguments,
    ObjectCall,
    RegionMarkers,
    ResponseFormat,
    TaggedArguments,
    ToolFunction,
    is_slot,
    split_slots,
)
from bloomery.response_format.reader import (
    BorderTrimmer,
    EmitText,
    TextReader,
    UnexpectedText,
    Wait,
    begun_text,
    first_word,
)
from bloomery.response_format.values import (
    convert_value,
    decode_json,
    escape_string,
    parameter_types,
    read_literal,
    to_json,
)

EventKind = Literal["reasoning", "content", "call", "arguments", "call_end"]
# What a marker means where it is found: the region that follows, or one of these.
MarkerMeaning = Literal[AnswerRegion, "reasoning_close", "border", "token", "end"]
_FUNCTION_NAME = re.compile(r"[\w.:/-]+")
_NO_FUNCTION_NAME = re.compile(r"[^\w.:/\s-]")
CODE_FENCES = ("```json", "```")
NO_CALLS = CallFormat(JsonArguments())


class ResponseEvent(NamedTuple):
    """A piece of an answer."""

    kind: EventKind
    text: str = ""  # of reasoning, content and arguments: what is new
    index: int = -1  # type: ignore[assignment]  # of the call; hides tuple.index
    name: str = ""
    id: str = ""  # with the call, or with its end where the format writes it last


@dataclass
class _ObjectState:
    """What has been read of a call that is one JSON object."""

    id: str = ""
    started: bool = False  # the name has been read
    arguments: str = "{}"  # to be emitted at the end; empty if they were passed on


class ResponseParser(TextReader):
    """Feed deltas, close once. Without tools, calls are content.

    `prompt` is the rendered prompt; it tells in which region the answer begins. The text has its
    special tokens. Those of `special_tokens` that are no marker are dropped.
    """

    def __init__(
        self,
        format: ResponseFormat,
        tools: Sequence[ToolFunction] = (),
        prompt: str = "",
        special_tokens: Collection[str] = (),
    ):
        self.format = format
        self.schemas = {tool.name: tool.parameters for tool in tools}
        self.calls = format.calls if tools and format.calls else NO_CALLS
        self.special_tokens = frozenset(special_tokens)
        self.region: AnswerRegion = format.opened_by(prompt)
        self.events: list[ResponseEvent] = []
        self.num_calls = 0
        self.call_failed = False
        self.is_bare = False  # a call without its markers is being read
        self.space_before_call = ""
        # No content since the answer or the last region began.
        self.is_blank = True
        self.after_region = self.region == "reasoning"
        self.continues_reasoning = self._continues_reasoning(prompt)
        self.triggers = self._call_triggers()
        begun = begun_text(prompt, (*self.triggers, format.content.open.strip()))
        super().__init__(begun if len(begun) > 1 else "")  # the answer continues it
        self.machine = self._read_answer()

    def feed(self, text: str) -> list[ResponseEvent]:
        self.buffer += text
        return self._advance()

    def close(self, was_cut: bool = False) -> list[ResponseEvent]:
        """End the text. If it was cut off at a limit, a marker that has begun is no text."""
        self.ended = True
        self.was_cut = was_cut
        return self._advance()

    def _advance(self) -> list[ResponseEvent]:
        try:
            next(self.machine)
        except StopIteration:  # what follows the end is dropped
            self.cursor = len(self.buffer)
        self.compact()
        events = self.events
        self.events = []
        return events

    def _continues_reasoning(self, prompt: str) -> bool:
        """Return whether the prompt has reasoning already: a first space is then text."""
        markers = self.format.reasoning
        if markers is None or self.region != "reasoning" or not prompt:
            return False
        return not prompt.rstrip().endswith(markers.open.strip() or self.format.turn_start)

    # ---- regions -----------------------------------------------------------------------------

    def _read_answer(self) -> Wait:
        readers = {
            "reasoning": self._read_reasoning,
            "content": self._read_content,
            "calls": self._read_calls,
        }
        next_region: AnswerRegion | None = self.region
        while next_region is not None:
            self.region = next_region
            next_region = yield from readers[self.region]()

    def _call_triggers(self) -> tuple[str, ...]:
        """Return what announces a call: the opening of a section, or of a call without one."""
        openings = (self.calls.section.open, self.calls.call.open, self._short_opening())
        return tuple(first_word(opening) for opening in openings if opening.strip())

    def _short_opening(self) -> str:
        """Return the last tag of a call's opening, for models that leave out those before."""
        tags = self.calls.call.open.split()
        return tags[-1] if len(tags) > 1 and tags[-1][0] in "<[" else ""

    def _read_reasoning(self) -> Wait:
        """Read up to the close, or to what can only follow it.

        Models open content or a call without closing the reasoning first.
        """
        trimmer = BorderTrimmer(self._emit_reasoning, leading=not self.continues_reasoning)
        markers = self._reasoning_markers()
        while True:
            marker = yield from self.read_until(markers, trimmer.push)
            meaning = markers.get(marker, "end")
            if meaning == "calls" and trimmer.is_within_line():
                trimmer.push(marker)  # "I could write <tool_call> now" is no call
            elif meaning != "token":
                break
        self.is_blank = True
        self.after_region = True
        self.continues_reasoning = False
        if meaning == "calls":
            self.cursor -= len(marker)
        return None if meaning == "end" else meaning

    def _reasoning_markers(self) -> dict[str, MarkerMeaning]:
        assert self.format.reasoning is not None
        close = (self.format.reasoning.close, self.format.content.open)
        # A call that is quoted in reasoning keeps its closing marker.
        quoted = self.calls.call.close + self.calls.section.close
        tokens = [token for token in self.special_tokens if token not in quoted]
        return {
            **_with_meaning("token", tokens),
            **_with_meaning("end", self.format.end),
            **_with_meaning("calls", self.triggers),
            **_with_meaning("content", close),
        }

    def _read_content(self) -> Wait:
        if (yield from self._begins_with_object()):
            return "calls"
        trimmer = BorderTrimmer(self._emit_content, leading=self.after_region)
        markers = self._content_markers()
        while True:
            marker = yield from self.read_until(markers, trimmer.push)
            if marker is None:
                trimmer.flush()
                return None
            may_be_quoted = not self.is_blank and not self.format.special
            match markers[marker]:
                case "calls":
                    self.after_region = True
                    self.space_before_call = trimmer.pending
                    self.cursor -= len(marker)
                    return "calls"
                case "end":
                    return None
                case "reasoning" | "reasoning_close" if may_be_quoted:
                    trimmer.push(marker)
                case "reasoning":
                    self.after_region = True
                    return "reasoning"
                case "reasoning_close" | "border":
                    self.after_region = True
                    trimmer.restart()

    def _content_markers(self) -> dict[str, MarkerMeaning]:
        format = self.format
        reasoning = format.reasoning or RegionMarkers()
        borders = [format.content.open, format.content.close, *format.ignored]
        if self.num_calls:
            borders += [self.calls.section.close, self.calls.call.close]
        return {
            **_with_meaning("token", self.special_tokens),
            **_with_meaning("border", borders),
            **_with_meaning("reasoning_close", [reasoning.close]),
            **_with_meaning("reasoning", [reasoning.open]),
            **_with_meaning("end", format.end),
            **_with_meaning("calls", self.triggers or self._object_start()),
        }

    def _begins_with_object(self) -> Wait:
        """Return whether content begins with a JSON object that may be a call.

        Some formats have no marker for calls. Where there is one, models forget it at times and
        write the object alone or in a code fence.
        """
        failed = self.call_failed
        self.call_failed = False
        has_marker = bool(self.calls.opening.strip())
        if self.calls is NO_CALLS or not self.is_blank or failed:
            return False
        if has_marker and not isinstance(self.calls.arguments, ObjectCall):
            return False
        ahead = 0
        for fence in CODE_FENCES if has_marker else ():
            ahead = ahead or (yield from self.match_literal(fence))
        ahead = yield from self.count_blanks(ahead)
        is_object = (yield from self.peek(ahead)) == "{"
        self.is_bare = is_object and has_marker
        return is_object

    def _object_start(self) -> Sequence[str]:
        """Return how a call begins in a format without a marker: with the key of the name."""
        style = self.calls.arguments
        if not isinstance(style, ObjectCall) or not style.name:
            return ()
        return (first_word(style.written.partition(NAME_SLOT)[0]),)

    def _emit_reasoning(self, text: str) -> None:
        self._emit(ResponseEvent("reasoning", text))

    def _emit_content(self, text: str) -> None:
        self.is_blank = self.is_blank and not text.strip()
        self._emit(ResponseEvent("content", text))

    def _emit_arguments(self, text: str) -> None:
        self._emit(ResponseEvent("arguments", text, self.num_calls - 1))

    def _emit(self, event: ResponseEvent) -> None:
        """Append an event. Neighbours of one kind become one event."""
        if not event.text and event.kind not in ("call", "call_end"):
            return
        last = self.events[-1] if self.events else None
        if last and event.text and (last.kind, last.index) == (event.kind, event.index):
            self.events[-1] = last._replace(text=last.text + event.text)
        else:
            self.events.append(event)

    # ---- calls -------------------------------------------------------------------------------

    def _read_calls(self) -> Wait:
        """Read a section of calls, or one call where there are no sections; content follows."""
        section = RegionMarkers() if self.is_bare else self.calls.section
        self.mark = self.cursor
        try:
            yield from self.take(section.open)
            yield from self._read_call()
            while section.close.strip() and not (yield from self.take(section.close)):
                yield from self.take(self.calls.separator)
                self.mark = self.cursor
                yield from self._read_call()
        except UnexpectedText:
            if self.mark is not None and self.buffer.startswith(self.format.end, self.mark):
                return None
            self._give_back()
            return "content"
        self.mark = None
        self.is_blank = True
        self.after_region = True
        return "content"

    def _give_back(self) -> None:
        """Emit the first character of what is no call as content; the rest is read again.

        How much has been read by now depends on the deltas, so the rest must not be emitted here.
        """
        self.call_failed = True
        self.is_bare = False
        if self.mark is None:
            return
        self.cursor = self.mark + 1
        self._emit_content(self.space_before_call + self.buffer[self.mark : self.cursor])
        self.mark = None
        self.space_before_call = ""
        self.after_region = False

    def _read_call(self) -> Wait:
        call = self.calls.call
        if self.is_bare:
            fence = yield from self.take(*CODE_FENCES)
            call = RegionMarkers(close=CODE_FENCES[-1] if fence else "")
        elif call.open.strip():
            yield from self.expect(call.open, self._short_opening())
        style = self.calls.arguments
        late_id = ""
        if isinstance(style, ObjectCall):
            late_id = yield from self._read_object_call(style)
        else:
            name, id = yield from self._read_head()
            self._begin_call(name, id)
            match style:
                case JsonArguments():
                    yield from self._read_json_arguments()
                case TaggedArguments():
                    yield from self._read_tagged(style, self.schemas.get(name, {}))
                case LiteralArguments():
                    yield from self._read_literal_arguments(style, self.schemas.get(name, {}))
        yield from self.take(call.close)
        self.is_bare = False
        self._emit(ResponseEvent("call_end", index=self.num_calls - 1, id=late_id))

    def _begin_call(self, name: str, id: str = "") -> None:
        self.mark = None
        self.num_calls += 1
        self._emit(ResponseEvent("call", index=self.num_calls - 1, name=name, id=id))

    def _read_head(self) -> Wait:
        """Read what stands before the arguments; return the name and the id."""
        values = {NAME_SLOT: "", ID_SLOT: ""}
        parts = [part for part in split_slots(self.calls.head) if part.strip()]
        for part, following in zip(parts, [*parts[1:], ""], strict=True):
            if is_slot(part):
                value = yield from self._read_slot(following)
                values[part] = values[part] or value
            else:
                yield from self.expect(part)
        name = values[NAME_SLOT]
        if not _FUNCTION_NAME.fullmatch(name):
            raise UnexpectedText
        id_format = self.calls.id_format or "{id}"
        return name, id_format.format(name=name, id=values[ID_SLOT])

    def _read_slot(self, following: str) -> Wait:
        """Read a name or an id, up to the text that follows it in the head."""
        parts: list[str] = []

        def collect_name(text: str) -> None:
            # Reject what cannot be a name at once, so that little of a text that is no call waits.
            if _NO_FUNCTION_NAME.search(text):
                raise UnexpectedText
            parts.append(text)

        stops = [following.split()[0]] if following else self._argument_starts()
        stop = yield from self.read_until([*stops, *self.calls.after_name], collect_name)
        if stop in self.calls.after_name:
            _, stop = yield from self.collect_until([following])
        if stop is None:
            raise UnexpectedText
        self.cursor -= len(stop)
        return "".join(parts).strip()

    def _argument_starts(self) -> list[str]:
        style = self.calls.arguments
        if isinstance(style, TaggedArguments):
            return [first_word(style.key_open), first_word(self.calls.call.close)]
        return ["{"]

    # ---- arguments in JSON -------------------------------------------------------------------

    def _read_json_arguments(self) -> Wait:
        yield from self.skip_blanks()
        if (yield from self.peek()) == "{":
            yield from self.pass_json(self._emit_arguments)
        else:
            self._emit_arguments("{}")

    def _read_object_call(self, style: ObjectCall) -> Wait:
        """Read a JSON object with name and arguments, in any order; return an id that came last."""
        yield from self.expect("{")
        state = _ObjectState()
        yield from self._read_members(style, (), state)
        if not state.started:
            raise UnexpectedText
        self._emit_arguments(state.arguments)
        return state.id

    def _read_members(self, style: ObjectCall, path: tuple[str, ...], state: _ObjectState) -> Wait:
        """Read up to the end of the object, whose brace has been read."""
        while not (yield from self.take("}")):
            yield from self.expect('"')
            self.cursor -= 1
            key = decode_json((yield from self.collect_json()))
            yield from self.expect(":")
            yield from self.skip_blanks()
            yield from self._read_member(style, (*path, key), state)
            yield from self.take(",")

    def _read_member(self, style: ObjectCall, key: tuple[str, ...], state: _ObjectState) -> Wait:
        if not style.name and not state.started:  # {"f": {...}}
            if not _FUNCTION_NAME.fullmatch(str(key[0])):
                raise UnexpectedText
            state.started = True
            state.arguments = ""
            self._begin_call(key[0])
            yield from self._read_json_arguments()
            return
        if key == style.name:
            name = decode_json((yield from self.collect_json()))
            if not self._is_callable(name):
                raise UnexpectedText
            state.started = True
            self._begin_call(name, state.id)
            return
        if key == style.arguments:
            yield from self._read_object_arguments(state)
            return
        is_object = (yield from self.peek()) == "{"
        paths = (style.name, style.arguments, style.id)
        if is_object and any(path[: len(key)] == key and path != key for path in paths):
            self.cursor += 1
            yield from self._read_members(style, key, state)
            return
        value = yield from self.collect_json()
        if key == style.id:
            state.id = str(decode_json(value))
        elif not state.started and (self.is_bare or not self.triggers) and key[-1] != "type":
            raise UnexpectedText  # an answer in JSON

    def _read_object_arguments(self, state: _ObjectState) -> Wait:
        """Pass arguments on as they come. Before the name and in a JSON text they must wait."""
        if state.started and (yield from self.peek()) == "{":
            yield from self.pass_json(self._emit_arguments)
            state.arguments = ""
            return
        text = yield from self.collect_json()
        if text.startswith('"'):
            text = str(decode_json(text))
        if text.lstrip().startswith("{"):  # otherwise null or an empty text
            state.arguments = text

    def _is_callable(self, name: Any) -> bool:
        """Where only the name tells a call from an answer in JSON, it must be that of a tool."""
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            return False
        return name in self.schemas or (bool(self.triggers) and not self.is_bare)

    # ---- arguments in tags -------------------------------------------------------------------

    def _read_tagged(self, style: TaggedArguments, schema: Mapping[str, Any]) -> Wait:
        self._emit_arguments("{")
        types = {text.strip(): type for type, text in style.typed.items()}
        types = types or {style.key_close.strip(): ""}
        lead = style.key_close[len(style.key_close.rstrip()) :]
        separator = ""
        # The opening of a parameter may begin like the close of the call, so that goes first.
        call_close = self.calls.call.close
        while not (yield from self.match_literal(call_close)):
            if not (yield from self.take(style.key_open)):
                break
            key, marker = yield from self.collect_until(types)
            if lead and (yield from self.peek()) == lead:
                self.cursor += len(lead)
            key = key.strip()
            self._emit_arguments(f"{separator}{to_json(key)}: ")
            allowed = parameter_types(schema, key)
            if types[marker]:
                allowed = {"string"} if types[marker] == "string" else {"json"}
            yield from self._read_value(style, style.value_close.replace("{key}", key), allowed)
            separator = ", "
        self._emit_arguments("}")

    def _read_value(self, style: TaggedArguments, close: str, allowed: set[str]) -> Wait:
        """Read a value. A string is passed on as it comes, anything else when it is complete."""
        is_string = allowed == {"string"}
        parts: list[str] = []
        emit: EmitText = self._emit_string_part if is_string else parts.append
        self._emit_arguments('"' if is_string else "")
        quote, unquote = style.quote
        closes = {close.rstrip(), close.strip()}
        if (yield from self.take(quote)):
            closes = {unquote + marker for marker in closes}
        while True:
            marker = yield from self.read_until(closes, emit)
            if marker is None or (yield from self._closes_value(style)):
                break
            emit(marker)  # text that looks like the marker
        self._emit_arguments('"' if is_string else convert_value("".join(parts), allowed, style))
        if marker is None:
            raise UnexpectedText

    def _emit_string_part(self, text: str) -> None:
        self._emit_arguments(escape_string(text))

    def _closes_value(self, style: TaggedArguments) -> Wait:
        """A close marker ends a value if a parameter, the end of the call or nothing follows."""
        ahead = yield from self.count_blanks()
        if not (yield from self.peek(ahead)):
            return True
        for literal in (style.key_open, self.calls.call.close):
            if literal.strip() and (yield from self.match_literal(first_word(literal))):
                return True
        return False

    # ---- arguments as in a programming language ----------------------------------------------

    def _read_literal_arguments(self, style: LiteralArguments, schema: Mapping[str, Any]) -> Wait:
        self._emit_arguments("{")
        comma = style.separator.strip()
        ends = (style.close, comma) if comma else (style.close,)
        separator = ""
        while not (yield from self.take(style.close)):
            key, _ = yield from self.collect_until([style.assign])
            key = key.strip(" \n\t\"'")
            text = yield from self.collect_literal(style.quotes, ends)
            value = read_literal(text, style.quotes, parameter_types(schema, key))
            self._emit_arguments(f"{separator}{to_json(key)}: {to_json(value)}")
            yield from self.take(comma or ",")
            separator = ", "
        self._emit_arguments("}")


def _with_meaning(meaning: MarkerMeaning, markers: Iterable[str]) -> dict[str, MarkerMeaning]:
    """Whitespace around markers does not count."""
    return {marker.strip(): meaning for marker in markers if marker.strip()}

"""From a ResponseFormat and tools to a grammar for llguidance (Lark), by the data the parser reads.

The grammar describes the whole answer: reasoning first, then calls, constrained output or free
text. llguidance's lexer does not go back, so free text must never be able to swallow a marker: it
is a terminal that excludes the markers, or one that ends with the first of them (`suffix`). Special
tokens never match free text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.errors import InvalidRequest
from bloomery.response_format.format import (
    NAME_SLOT,
    LiteralArguments,
    RegionMarkers,
    ResponseFormat,
    TaggedArguments,
    ToolFunction,
    split_slots,
)
from bloomery.response_format.parser import ResponseParser
from bloomery.response_format.reader import first_word
from bloomery.response_format.values import parameter_types
from bloomery.sampling import StructuredOutputs
from bloomery.structured.grammar import regex_to_terminal, schema_rule
from bloomery.structured.structural_tag import ANY_TEXT, quote_text

BLANKS = r"/[ \t\r\n]{1,20}/"
# Texts are cut into words, so that the lexer can tell two texts with a common beginning apart. A
# run of blanks is a template's indentation, which need not be exact.
_LITERAL_WORD = re.compile(r"<[^<>\s]*>|\w+|\s{2,}|\s|[^\w\s]")
MIN_TRIGGER = 3  # characters; a shorter text such as "[" is too common to be the trigger of a call
CALL_ID = r"/[A-Za-z0-9_.-]{1,64}/"
INTEGER = r"/-?(0|[1-9][0-9]*)/"
NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
LITERAL_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def build_response_grammar(
    format: ResponseFormat,
    *,
    tools: Sequence[ToolFunction] = (),
    tool_choice: str = "auto",
    parallel: bool = True,
    output: str = "",
    prompt: str = "",
    thinking_budget: int | None = None,
    special_tokens: Mapping[str, int] = {},
    added_tokens: Mapping[str, int] = {},
) -> str:
    """Return Lark for a whole answer, "" if nothing has to be constrained.

    `tool_choice` is "none", "auto", "required" or the name of a tool. `output` is Lark for the
    content. `special_tokens` are texts and ids of special tokens, which ordinary text never spells;
    `added_tokens` those of other single tokens. The prompt tells which region it has opened.
    """
    if tool_choice == "none":
        tools = ()
    elif tool_choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == tool_choice]
        if not tools:
            raise InvalidRequest(f"{tool_choice!r} is not the name of a tool", "tool_choice")
    if tools and format.calls is None:
        raise InvalidRequest("the model's chat template has no tool calls", "tools")
    is_forced = bool(tools) and tool_choice != "auto"
    is_triggered = bool(tools) and (has_trigger(format) or is_told_by_name(format))
    has_budget = thinking_budget is not None and format.reasoning is not None
    if not (is_forced or is_triggered or output or has_budget):
        return ""
    builder = _AnswerGrammar(format, tools, prompt, {**special_tokens}, added_tokens)
    reasoning = builder.reasoning(thinking_budget, before_text=not is_forced and not output)
    parallel = parallel and format.calls is not None and format.calls.parallel
    if is_forced:
        answer = (
            f"{builder.between()} {builder.calls(parallel, builder.begun_marker)} answer_blanks?"
        )
    elif output:
        answer = builder.structured(output)
        if tools:
            calls = builder.calls(parallel, builder.begun_marker)
            answer = f"({answer} | {builder.between()} {calls} answer_blanks?)"
    elif is_triggered:
        answer = builder.text_with_calls(parallel)
    else:
        answer = builder.free_text()
    return builder.to_lark(f"{reasoning} {answer}")


def has_trigger(format: ResponseFormat) -> bool:
    """Return whether a marker tells that a call begins, and nothing else does."""
    if format.calls is None or not format.calls.opening.strip():
        return False
    trigger = first_word(format.calls.opening)
    others = [format.content.open, *([format.reasoning.open] if format.reasoning else [])]
    is_shared = any(text.strip().startswith(trigger) for text in others)
    return len(trigger) >= MIN_TRIGGER and not is_shared


def is_told_by_name(format: ResponseFormat) -> bool:
    """Return whether a call has begun once the name of a tool is written.

    Until then `{"name": "` or `[` may be the beginning of an answer in JSON.
    """
    if format.calls is None:
        return False
    before, _, after = (format.calls.opening + format.calls.call_text).partition(NAME_SLOT)
    has_sign = after[:1] in ('"', "(")  # after which no longer name can follow
    return bool(before.strip()) and "$" not in before and has_sign


class _AnswerGrammar:
    """Collects the rules of one grammar. Names of rules begin with `answer_`."""

    def __init__(
        self,
        format: ResponseFormat,
        tools: Sequence[ToolFunction],
        prompt: str,
        special_tokens: dict[str, int],
        added_tokens: Mapping[str, int],
    ):
        self.format = format
        self.tools = tools
        self.prompt = prompt
        self.special_tokens = special_tokens
        self.added_tokens = added_tokens
        self.rules: dict[str, str] = {"answer_blanks": BLANKS}
        texts = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self.special_pattern = re.compile(f"({'|'.join(texts) or '(?!)'})")
        parser = ResponseParser(format, tools, prompt)
        self.calls_format = parser.calls
        self.begun_marker = parser.buffer
        self.triggers = parser.triggers
        if tools and not has_trigger(format):
            self.triggers = tuple(map(self._named_trigger, tools))
        reasoning = format.reasoning or RegionMarkers()
        self.openings = (*self.triggers, reasoning.open)  # of regions after content

    def to_lark(self, start: str) -> str:
        rules = [f"start: {' '.join(start.split())}"]
        rules += [f"{name}: {body}" for name, body in self.rules.items()]
        return "\n".join(rules) + "\n"

    def rule(self, name: str, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        full_name = f"answer_{name}"
        self.rules[full_name + attributes] = body
        return full_name

    # ---- texts and markers ---------------------------------------------------------------------

    def literal(self, text: str) -> str:
        """Return an exact text, in which special tokens are token ids."""
        return " ".join(self._part(part) for part in self.special_pattern.split(text) if part)

    def _part(self, part: str) -> str:
        id = self.special_tokens.get(part)
        if id is not None:
            return f"<[{id}]>"
        return " ".join(
            "answer_blanks?" if word.isspace() and len(word) > 1 else quote_text(word)
            for word in _LITERAL_WORD.findall(part)
        )

    def free_terminal(self, name: str, markers: Sequence[str]) -> str:
        """Add a terminal for text without the markers. Special tokens are never part of it."""
        texts = [text for text in dict.fromkeys(map(str.strip, markers)) if text]
        texts = [text for text in texts if not self.special_pattern.search(text)]
        name = f"ANSWER_{name.upper()}"
        self.rules[name] = ANY_TEXT
        if texts:
            pattern = "|".join(map(_marker_pattern, texts))
            self.rules[name] += f" & ~/(?s:.*)({pattern})(?s:.*)/"
        return name

    def text_until(
        self, name: str, marker: str, without: Sequence[str] = (), terminal: str = ""
    ) -> str:
        """Return text up to a marker, and the marker. The text is free, or as a terminal says.

        Whitespace around the marker does not count.
        """
        first, *rest = [part for part in self.special_pattern.split(marker.strip()) if part]
        text = terminal or self.free_terminal(name, without)
        end = self.literal("".join(rest))
        if first in self.special_tokens:
            body = self.rule(f"{name}_text", text)
            return f"{body} {self._part(first)} {end}"
        return f"{self.rule(name, text, f'[suffix=/{_marker_pattern(first)}/]')} {end}"

    # ---- regions -------------------------------------------------------------------------------

    def reasoning(self, budget: int | None, before_text: bool) -> str:
        """Reasoning that the prompt has opened must be closed; otherwise the model may open it.

        `before_text`: free text may follow.
        """
        markers = self.format.reasoning
        if markers is None:
            return ""
        if self.format.opened_by(self.prompt) == "reasoning":
            return self._thought(markers.close, budget)
        opening = markers.open.strip()
        if not opening or budget == 0:
            return ""
        thought = self._thought(markers.close, budget)
        if self.special_pattern.search(opening) or not before_text:
            return f"(answer_blanks? {self.literal(opening)} {thought})?"
        # Blanks and marker are one lexeme. Otherwise free text would swallow the blanks.
        pattern = rf"/[ \t\r\n]{{0,20}}{_marker_pattern(opening)}/"
        return f"({self.rule('open', pattern)} {thought})?"

    def _thought(self, close: str, budget: int | None) -> str:
        core = close.strip()
        if budget is None:
            return f"{self.text_until('thought', core, self.triggers)} answer_blanks?"
        # A rule with max_tokens ends without its suffix. So the close must be a token of its own:
        # then the text excludes it and the token follows.
        first, rest = self._first_token(core)
        without = self.triggers
        attributes = f"max_tokens={budget}"
        if first:
            without = (core, *without)
        else:
            # The model closes twice if it closes early. Nobody sees it: the parser drops the text.
            attributes = f"suffix={quote_text(core)}, {attributes}"
        text = self.free_terminal("thought", without)
        thought = self.rule("thought", text, f"[{attributes}]")
        return f"{thought if budget else ''} {first} {self.literal(rest)} answer_blanks?"

    def _first_token(self, marker: str) -> tuple[str, str]:
        """Return the token with which a marker begins, if one does, and the rest of the marker."""
        if marker in self.added_tokens:
            return f"<[{self.added_tokens[marker]}]>", ""
        match = self.special_pattern.match(marker)
        return (self._part(match[0]), marker[match.end() :]) if match else ("", marker)

    def between(self) -> str:
        """What may stand between reasoning and calls: ignored markers and empty content."""
        content = self.format.content
        parts = [self.literal(text) for text in self.format.ignored]
        if content.close:
            parts.append(f"({self.literal(content.open)} {self.literal(content.close)})")
        markers = " | ".join(filter(None, parts))
        return f"answer_blanks? (({markers}) answer_blanks?)*" if markers else "answer_blanks?"

    def structured(self, output: str) -> str:
        """Content that an embedded grammar constrains."""
        self.rule("output", f"%lark {{\n{output}\n}}")
        content = self.format.content
        opening = content.open.strip().removeprefix(self.begun_marker)
        ignored = [self.literal(text) for text in self.format.ignored if text != content.open]
        before = f"({' | '.join(ignored)})*" if ignored and opening else ""
        return (
            f"{before} {'answer_blanks?' if opening else ''} {self.literal(opening)} answer_output "
            f"{self.literal(content.close.strip())}"
        )

    def _markers_of_text(self) -> str:
        """Texts with special tokens that may stand within an answer: the markers of content."""
        format = self.format
        texts = dict.fromkeys((format.content.open, format.content.close, *format.ignored))
        markers = [
            self.literal(text.strip()) for text in texts if self.special_pattern.search(text)
        ]
        return f"({' | '.join(markers)})" if markers else ""

    def free_text(self) -> str:
        """Text without constraints, except that it cannot open another region unnoticed."""
        text = self.rule("free", self.free_terminal("free", self.openings))
        markers = self._markers_of_text()
        return f"({text} {markers})* {text}" if markers else text

    def text_with_calls(self, parallel: bool) -> str:
        """Text, in which a call must be valid once its first marker has been written."""
        calls = self.calls_format
        if has_trigger(self.format):
            trigger = first_word(calls.opening)
            without = [text for text in self.openings if text.strip() != trigger]
            before = self.text_until("before", trigger, without)
            text_and_calls = f"{before} {self.calls(parallel, trigger)}"
        else:
            text_and_calls = self._text_and_named_call(parallel)
        markers = self._markers_of_text()
        free = self.free_text()
        if markers:
            part = self.rule("free_part", "ANSWER_FREE")
            text_and_calls = f"({part} {markers})* ({text_and_calls})"
        begun = ""
        if self.begun_marker and calls.opening.strip().startswith(self.begun_marker):
            # The prompt ends within the marker of a call: the model may finish it or not.
            begun = f"({self.calls(parallel, self.begun_marker, 'begun_')})?"
        count = "*" if parallel else "?"
        return f"{begun} ({text_and_calls}){count} {free}"

    def _text_and_named_call(self, parallel: bool) -> str:
        """Text up to the name of a tool, and the rest of a call of that tool."""
        after = self.calls_format.call_text.split(NAME_SLOT, 1)[1]
        options = []
        for index, tool in enumerate(self.tools):
            text = self.text_until(f"before_{index}", self._named_trigger(tool))
            call = self._call(f"named_tool_{index}", tool, after[1:])
            options.append(f"{text} {call} {self._section_rest(parallel)}")
        return " | ".join(options)

    def _named_trigger(self, tool: ToolFunction) -> str:
        """A call up to the sign after the name, so that no trigger is the beginning of another."""
        before, _, after = self.calls_format.call_text.partition(NAME_SLOT)
        return self.calls_format.opening + before + tool.name + after[:1]

    # ---- calls ---------------------------------------------------------------------------------

    def calls(self, parallel: bool, written: str = "", prefix: str = "") -> str:
        """Return a section of calls, of whose opening the text `written` is there already."""
        opening = self.literal(self.calls_format.opening.lstrip().removeprefix(written))
        body = f"{opening} {self._any_call()} {self._section_rest(parallel)}"
        return self.rule(f"{prefix}calls", " ".join(body.split()))

    def _any_call(self) -> str:
        if "answer_tool" not in self.rules:
            options = [
                self.rule(f"tool_{index}", self._call(f"tool_{index}", tool))
                for index, tool in enumerate(self.tools)
            ]
            self.rule("tool", " | ".join(options))
        return "answer_tool"

    def _section_rest(self, parallel: bool) -> str:
        """What follows the first call of a section."""
        calls = self.calls_format
        close = self.literal(calls.call.close)
        more = ""
        if parallel:
            next_opening = self.literal(calls.separator + calls.call.open)
            more = f"({next_opening} {self._any_call()} {close})*"
        return f"{close} {more} {self.literal(calls.section.close)}"

    def _call(self, name: str, tool: ToolFunction, text: str | None = None) -> str:
        """Return a call, or its rest `text` if a part of it is written already."""
        style = self.calls_format.arguments
        head = self.calls_format.call_text if text is None else text
        arguments = ""
        match style:
            case TaggedArguments():
                arguments = self._tagged(style, name, tool)
            case LiteralArguments():
                arguments = self._literal_arguments(style, name, tool)
        return f"{self._fill_slots(head, name, tool)} {arguments}"

    def _fill_slots(self, text: str, name: str, tool: ToolFunction) -> str:
        return " ".join(self._fill_slot(part, name, tool) for part in split_slots(text))

    def _fill_slot(self, part: str, name: str, tool: ToolFunction) -> str:
        match part:
            case "$name":
                passed = " | ".join(map(self.literal, self.calls_format.after_name))
                after_name = rf"(({passed})+ (/[a-z]{{1,12}}/)?){{0,3}}" if passed else ""
                return f"{self.literal(tool.name)} {after_name}".rstrip()
            case "$id":
                return CALL_ID
            case "$arguments":
                rule = self._schema({"type": "object", **tool.parameters}, tool.strict)
                return self.rule(f"{name}_arguments", rule)
        return self.literal(part)

    def _schema(self, schema: Mapping[str, Any], strict: bool) -> str:
        return schema_rule(schema, StructuredOutputs(json=dict(schema), strict=strict))

    def _parameter_schemas(self, tool: ToolFunction) -> dict[str, dict[str, Any]]:
        """Return the schema of each parameter, with the definitions that it may refer to."""
        parameters = tool.parameters
        shared: dict[str, Any] = {}
        for key in ("$defs", "definitions"):
            if key in parameters:
                shared[key] = parameters[key]
        properties = parameters.get("properties")
        if not isinstance(properties, Mapping):
            return {}
        return {
            key: {**schema, **shared} if isinstance(schema, Mapping) else shared
            for key, schema in properties.items()
        }

    def _tagged(self, style: TaggedArguments, name: str, tool: ToolFunction) -> str:
        required = required_keys(tool)
        parts: list[str] = []
        for index, (key, schema) in enumerate(self._parameter_schemas(tool).items()):
            types = parameter_types(tool.parameters, key)
            kind = "string" if not types or "string" in types else sorted(types)[0]
            between = style.typed.get("number" if kind == "integer" else kind, style.key_close)
            opening = self.literal((style.key_open + key + between).rstrip())
            close = style.value_close.replace("{key}", key)
            rule = self._tagged_value(style, schema, types, tool.strict)
            if rule:
                body = self.rule(f"{name}_{index}", rule)
                value = f"answer_blanks? {body} answer_blanks? {self.literal(close.strip())}"
            else:
                line_break = r"\n?" if between.endswith("\n") else ""
                pattern = text_pattern(schema, types)
                terminal = f"/{line_break}{pattern}{line_break}/" if pattern else ""
                value = self.text_until(f"{name}_{index}", close, terminal=terminal)
            parameter = f"{opening} {value} answer_blanks?"
            parts.append(parameter if key in required else f"({parameter})?")
        return " ".join(parts)

    def _tagged_value(
        self, style: TaggedArguments, schema: Mapping[str, Any], types: set[str], strict: bool
    ) -> str:
        """Return the rule of a value; an empty one for strings, which are raw text."""
        enum = schema.get("enum")
        if isinstance(enum, list) and enum:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in enum]
            return " | ".join(map(quote_text, texts))
        is_nested = bool(style.item) and bool(types & {"object", "array"})
        if not types or "string" in types or is_nested:
            return ""
        if types == {"boolean"}:  # templates write either spelling
            return '"true" | "false" | "True" | "False"'
        return self._schema(schema, strict)

    # ---- calls as in a programming language ----------------------------------------------------

    def _literal_arguments(self, style: LiteralArguments, name: str, tool: ToolFunction) -> str:
        """Parameters in the order of the schema; separators only between those that are there."""
        self._literal_values(style)
        required = required_keys(tool)
        schemas = self._parameter_schemas(tool)
        if style.sorted_keys:
            schemas = dict(sorted(schemas.items()))
        # `first` continues a list without parameters so far, `later` one that has some.
        first = ""
        later = ""
        # A template that forgets the commas shows past calls only. The model may write them.
        separator = self.literal(style.separator) or '(", ")?'
        for index, key in reversed(list(enumerate(schemas))):
            value = self._literal_value(style, f"{name}_{index}", tool, key)
            pair = f"{self.literal(key + style.assign)} {value}"
            later_name = self.rule(f"{name}_later_{index}", later or '""')
            later = f"{separator} {pair} {later_name}"
            pair_first = f"{pair} {later_name}"
            if key not in required:
                first_name = self.rule(f"{name}_first_{index}", first or '""')
                later = f"{later} | {later_name}"
                pair_first = f"{pair_first} | {first_name}"
            first = pair_first
        arguments = f"({first})" if first else ""
        return f"{arguments} {self.literal(style.close)}"

    def _literal_value(
        self, style: LiteralArguments, name: str, tool: ToolFunction, key: str
    ) -> str:
        schema = self._parameter_schemas(tool)[key]
        types = parameter_types(tool.parameters, key)
        pattern = text_pattern(schema, types)
        if pattern and '"' in style.quotes:  # strings of Python, which have JSON's escapes
            return self.rule(name, self._schema(schema, tool.strict))
        if pattern:
            quote = style.quotes[0]
            text = self.text_until(name, quote, terminal=f"/{pattern}/")
            return f"{self.literal(quote)} {text}"
        enum = schema.get("enum")
        if isinstance(enum, list) and enum and all(isinstance(value, str) for value in enum):
            quote = self.literal(style.quotes[0])
            options = [f"{quote} {quote_text(value)} {quote}" for value in enum]
        else:
            options = [f"answer_{type}" for type in LITERAL_TYPES if type in types]
        return f"({' | '.join(options)})" if options else "answer_value"

    def _literal_values(self, style: LiteralArguments) -> None:
        """Add a rule for each type: as in Python, or as in JSON if strings have other quotes."""
        quote = style.quotes[0]
        if len(quote) == 1:
            strings = [rf"/{quote}([^{quote}\\]|\\.)*{quote}/" for quote in style.quotes]
            pair = 'answer_string ": " answer_value'
            comma = '", "'
            booleans = '"True" | "False"'
        else:
            strings = [f"{self.literal(quote)} {self.text_until('quoted', quote)}"]
            pair = r'/\w+/ ":" answer_value'
            comma = '","'
            booleans = '"true" | "false"'
        self.rule("string", " | ".join(strings))
        self.rule("boolean", booleans)
        self.rule("null", '"None" | "null"')
        self.rule("integer", INTEGER)
        self.rule("number", NUMBER)
        self.rule("array", f'"[" (answer_value ({comma} answer_value)*)? "]"')
        self.rule("object", f'"{{" ({pair} ({comma} {pair})*)? "}}"')
        options = [f"answer_{type}" for type in LITERAL_TYPES if type != "integer"]
        self.rule("value", " | ".join(options))


def required_keys(tool: ToolFunction) -> list[Any]:
    keys = tool.parameters.get("required")
    return keys if isinstance(keys, list) else []


def text_pattern(schema: Mapping[str, Any], types: set[str]) -> str:
    """Return the pattern of a whole string as Lark writes it; "" for one that matches anywhere."""
    pattern = schema.get("pattern")
    if types != {"string"} or not isinstance(pattern, str):
        return ""
    if not pattern.startswith("^") or not pattern.endswith("$"):
        return ""
    return regex_to_terminal(pattern)[1:-1]


def _marker_pattern(text: str) -> str:
    """Return a Lark pattern for a marker, within which whitespace is optional."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$/#&~-])", r"\\\1", text)
    return re.sub(r"\s+", r"[ \\t\\r\\n]{0,20}", escaped)

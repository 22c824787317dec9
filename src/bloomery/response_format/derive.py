"""From a chat template to a ResponseFormat: render conversations that differ in one thing.

Messages hold sentinels, texts that occur nowhere else. A marker is what lies between two of them,
and the difference between two renderings tells what belongs to what. Nothing here knows a model.
Whether a call is JSON is found by decoding it, not by looking for quotes, so <invoke name="f"> is
never taken for an object.

A template is untrusted: the caller gives the function that renders it (text/chat.py) and runs all
of this where it can be killed (text/tokenizer_pool.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

from msgspec.structs import replace

from bloomery.response_format.format import (
    ARGUMENTS_SLOT,
    ID_SLOT,
    NAME_SLOT,
    ArgumentStyle,
    CallFormat,
    JsonArguments,
    LiteralArguments,
    ObjectCall,
    RegionMarkers,
    ResponseFormat,
    TaggedArguments,
    ToolFunction,
)
from bloomery.response_format.reader import begun_text

# The sentinels.
THOUGHT = "Qthoughtq"
TEXT = "Qtextq"
NAME = "fun_alpha"
KEY = "argkey_one"
OTHER_KEY = "argkey_two"
VALUE = "Qvalonq"
ID = "idq000001"  # nine characters: Mistral's templates refuse other lengths
# Those of a second call.
OTHER_NAME = "fun_beta"
OTHER_VALUE = "Qvaltwq"
OTHER_ID = "idq000002"
TYPED_VALUES: dict[str, Any] = {
    "number": 90817,
    "boolean": True,
    "array": [90817],
    "object": {"inner": 90817},
}
USER = {"role": "user", "content": "Quserq"}
# Options under which templates write reasoning.
THINKING_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True, "thinking": True, "drop_thinking": False},
)
RENDER_TIME = datetime(2026, 1, 1)
MAX_END_WORDS = 8  # of a turn's end; a longer text at the end is an instruction

# Comparison goes by atoms, so that no marker is cut in two.
_ATOM = re.compile(r"<[^<>\s]*>|\[/?[A-Z_ ]+\]|\w+|\s|.", re.S)
_CLOSING_TAG = re.compile(r"\s*(</[^<>\s]+>|\[/[A-Z]+\]|<\|END_\w+\|>|<channel\|>)\s*")

Message = dict[str, Any]
ToolCall = tuple[str, Mapping[str, Any]]  # name and arguments
ONE: ToolCall = (NAME, {KEY: VALUE})
TWO: ToolCall = (OTHER_NAME, {KEY: OTHER_VALUE})
BOTH_ARGUMENTS: ToolCall = (NAME, {KEY: VALUE, OTHER_KEY: OTHER_VALUE})


class NotDerivable(Exception):
    """The template does not show how calls are written."""


RenderFunction = Callable[..., str]  # text.chat.render_template


class ChatTemplate:
    """A chat template and the variables that it is always given."""

    def __init__(self, source: str, render: RenderFunction, variables: Mapping[str, Any]):
        self.source = source
        self.render_function = render
        self.variables = {"bos_token": "", "eos_token": "", **variables}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        return self.render_function(
            self.source,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.variables, **options},
            now=RENDER_TIME,
        )


# ---- conversations -------------------------------------------------------------------------------


def make_function(name: str, **types: str) -> ToolFunction:
    properties = {key: {"type": type, "description": "a value"} for key, type in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    return ToolFunction(name, "a tool", parameters)


def tool_objects(functions: Iterable[ToolFunction]) -> list[dict[str, Any]]:
    """Return tools as chat templates get them."""
    names = ("name", "description", "parameters")
    objects = [{name: getattr(function, name) for name in names} for function in functions]
    return [{"type": "function", "function": function} for function in objects]


PARAMETERS = {KEY: "string", OTHER_KEY: "string"}
TOOLS = tool_objects(make_function(name, **PARAMETERS) for name in (NAME, OTHER_NAME))


class MessageShape(NamedTuple):
    """How a template wants its messages. Templates disagree, so several shapes are tried."""

    content: str | None = TEXT  # beside calls
    options: tuple[tuple[str, Any], ...] = ()
    id_format: str = "{id}"

    def assistant(
        self, content: Any = None, reasoning: str = "", calls: Sequence[ToolCall] = ()
    ) -> Message:
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            names = ("reasoning_content", "reasoning", "thinking")
            message |= dict.fromkeys(names, reasoning)
        if calls:
            message["tool_calls"] = [
                self._tool_call(index, name, arguments)
                for index, (name, arguments) in enumerate(calls)
            ]
        return message

    def _tool_call(self, index: int, name: str, arguments: Mapping[str, Any]) -> Message:
        id = OTHER_ID if index % 2 else ID
        id = self.id_format.format(id=id, name=name, index=index)
        function = {"name": name, "arguments": dict(arguments)}
        return {"id": id, "type": "function", "function": function}


def message_shapes(contents: Iterable[str | None]) -> Iterator[MessageShape]:
    for options in THINKING_OPTIONS:
        for id_format in ("{id}", "functions.{name}:{index}"):
            for content in contents:
                yield MessageShape(content, tuple(options.items()), id_format)


# ---- comparing texts -----------------------------------------------------------------------------


def common_start(one: str, other: str) -> str:
    pairs = zip(_ATOM.findall(one), _ATOM.findall(other), strict=False)
    return "".join(atom for atom, _ in takewhile(_is_same, pairs))


def common_end(one: str, other: str) -> str:
    pairs = zip(_ATOM.findall(one)[::-1], _ATOM.findall(other)[::-1], strict=False)
    atoms = [atom for atom, _ in takewhile(_is_same, pairs)]
    return "".join(reversed(atoms))


def _is_same(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def skip_header(text: str, header: str) -> str:
    """Return the text after a header, which may be written with other whitespace or cut off."""
    exact = common_start(text, header)
    if not header[len(exact) :].strip():
        return text[len(exact) :]
    atoms = [atom for atom in _ATOM.findall(header) if not atom.isspace()]
    for first in range(len(atoms)):
        pattern = r"\s*" + r"\s*".join(map(re.escape, atoms[first:]))
        match = re.match(pattern, text)
        if match:
            return text[match.end() :]
    return text[len(exact) :]


def after_user(text: str) -> str:
    """Return what follows the user's message. Templates may write tools around that message."""
    return text[text.index(USER["content"]) + len(USER["content"]) :]


def between(text: str, start: str, end: str) -> str:
    first = text.index(start) + len(start)
    return text[first : text.index(end, first)]


# ---- the analysis --------------------------------------------------------------------------------


class TemplateAnalysis:
    """Renders the turns of an assistant with one shape of messages."""

    def __init__(
        self,
        template: ChatTemplate,
        shape: MessageShape,
        tools: Sequence[Mapping[str, Any]] = TOOLS,
    ):
        self.template = template
        self.shape = shape
        self.tools = tools
        self.user = after_user(self._render([USER]))
        prompt = after_user(self._render([USER], add_generation_prompt=True))
        self.prompt = prompt[len(common_start(prompt, self.user)) :]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        options = dict(self.shape.options)
        return self.template.render(messages, self.tools, add_generation_prompt, **options)

    def turn(self, message: Message, *following: Message) -> tuple[str, str]:
        """Return an assistant's turn, cut where it differs from no turn at all."""
        text = after_user(self._render([USER, message, *following]))
        epilogue = common_end(text, self.user)
        if len(epilogue.split()) > MAX_END_WORDS:  # the template ends every prompt with it
            text = text.removesuffix(epilogue)
        shared = common_start(text, self.user)
        return shared, text[len(shared) :]

    def answer(
        self,
        content: Any = "",
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        is_last: bool = True,
    ) -> str:
        """Return an assistant's turn as the template writes it."""
        message = self.shape.assistant(content, reasoning, calls)
        return self.turn(message)[1] if is_last else self.turn(message, USER)[1]

    def calls_text(self, *calls: ToolCall) -> str:
        """Return what the model writes for calls, without the turn's header and content."""
        text = self.answer(self.shape.content, calls=calls)
        if TEXT not in text[: text.index(calls[0][0])]:
            return skip_header(text, self.prompt)
        text = text.split(TEXT, 1)[1]
        header = first_atom(self.prompt)
        if len(header) > 2 and header in text[: text.index(calls[0][0])]:
            # The calls are a turn of their own.
            return skip_header(text[text.index(header) :], self.prompt)
        return text

    def value_text(self, value: Any) -> str:
        """Return a call that has this value."""
        return self.calls_text((NAME, {KEY: value}))


def first_result(
    template: ChatTemplate,
    shapes: Iterable[MessageShape],
    read: Callable[[TemplateAnalysis], Any],
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> tuple[MessageShape | None, Any]:
    """Return the first shape of messages for which `read` finds something, and what it finds."""
    for shape in shapes:
        try:
            result = read(TemplateAnalysis(template, shape, tools))
        except Exception:  # a template may fail in any way on a shape it was not written for
            continue
        if result is not None:
            return shape, result
    return None, None


def first_atom(text: str) -> str:
    atom = _ATOM.match(text.strip())
    return atom[0] if atom else ""


def derive_format(template: ChatTemplate, special_tokens: Collection[str] = ()) -> ResponseFormat:
    """Return what the template shows. The table (table.py) adds what some templates hide."""
    reasoning: RegionMarkers | None
    calls: CallFormat | None
    thinking_shapes = [MessageShape(options=tuple(each.items())) for each in THINKING_OPTIONS]
    reasoning_shape, reasoning = first_result(template, thinking_shapes, _derive_reasoning)
    call_shape, calls = first_result(template, message_shapes((TEXT, "", None)), _derive_calls)
    analysis = TemplateAnalysis(template, reasoning_shape or call_shape or MessageShape())
    content, end = _derive_content(analysis, reasoning)
    if calls is not None and call_shape is not None:
        closing = calls.call.close + calls.section.close
        stops = re.findall(f"{TEXT}(<[^<>]+>)$", closing)  # content comes after the calls
        header = first_atom(analysis.prompt)
        calls = _without_end(calls, (*end, header) if len(header) > 2 else end)
        end = tuple(dict.fromkeys((*end, *stops)))
        if content.open:
            begun = begun_text(analysis.prompt, [calls.opening])
            content = replace(content, open=begun.strip() + content.open)
        if reasoning is not None:
            reasoning, content = _share_close(template, call_shape, reasoning, content)
    format = ResponseFormat(
        reasoning=reasoning,
        content=content,
        calls=calls,
        end=end,
        turn_start=_derive_turn_start(analysis, reasoning),
        special=reasoning is not None and first_atom(reasoning.close) in special_tokens,
    )
    usual_prompt = template.render([USER], TOOLS, True)
    if reasoning is not None and not reasoning.open.strip():
        return replace(format, starts_in="reasoning")
    return replace(format, starts_in=format.opened_by(usual_prompt))


def _derive_turn_start(analysis: TemplateAnalysis, reasoning: RegionMarkers | None) -> str:
    """Return what precedes an answer in a prompt, without the markers of reasoning."""
    text = analysis.prompt
    if not text.strip():
        text = analysis.user
    for marker in (reasoning.open.strip(), reasoning.close.strip()) if reasoning else ():
        text = text.split(marker)[0] if marker else text
    return text.strip()


# ---- reasoning and content -----------------------------------------------------------------------


def _derive_reasoning(analysis: TemplateAnalysis) -> RegionMarkers | None:
    markers = _reasoning_by_message(analysis) or _reasoning_by_prompt(analysis)
    return markers if markers is not None and markers.close.strip() else None


def _reasoning_by_message(analysis: TemplateAnalysis) -> RegionMarkers | None:
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": TEXT}]
    attempts: tuple[tuple[Any, str, Sequence[ToolCall]], ...] = (
        (TEXT, THOUGHT, ()),
        (parts, "", ()),
        ("", THOUGHT, [ONE]),
    )
    for content, reasoning, calls in attempts:
        try:
            text = analysis.answer(content, reasoning, calls)
        except Exception:
            continue
        # A template that knows no parts prints the list itself.
        prints_list = 'thinking"' in text or "thinking'" in text
        if THOUGHT in text and not prints_list:
            return _markers_around_thought(analysis, text)
    return None


def _markers_around_thought(analysis: TemplateAnalysis, text: str) -> RegionMarkers:
    before, after = text.split(THOUGHT, 1)
    close = re.split(f"{TEXT}|{NAME}", after)[0]
    plain_answers = (
        analysis.answer(TEXT),
        analysis.answer(TEXT, is_last=False),
        analysis.prompt,
    )
    headers = [common_start(before, plain.split(TEXT)[0]) for plain in plain_answers]
    tag = _CLOSING_TAG.match(close)
    close = tag[0] if tag else close
    opening = opening_tag(close.strip())
    if opening and opening in before:  # an empty <think></think> is always written
        return RegionMarkers(before[before.rindex(opening) :], close)
    header = min(headers, key=len)
    return RegionMarkers(opening or before[len(header) :], close)


def _reasoning_by_prompt(analysis: TemplateAnalysis) -> RegionMarkers | None:
    """For templates that drop reasoning from history.

    Their prompt opens it, or they cut messages at a marker.
    """
    template = analysis.template
    closes = re.findall(r"</[\w:|]*think[\w:|]*>|\[/THINK\]", template.source)
    for close in dict.fromkeys(closes):
        open = opening_tag(close)
        cut_answer = analysis.answer(f"{open}{THOUGHT}{close}{TEXT}")
        silent_prompt = template.render([USER], None, True, enable_thinking=False)
        prompts = (analysis.prompt.rstrip(), silent_prompt.rstrip())
        is_opened = any(prompt.endswith((open, close)) for prompt in prompts)
        if is_opened or (THOUGHT not in cut_answer and TEXT in cut_answer):
            return RegionMarkers(open, close)
    return None


def opening_tag(close: str) -> str:
    """Return the opening tag for a closing one, where tags are written that way."""
    if re.fullmatch(r"</[^<>]+>|\[/[^\[\]]+\]", close):
        return close.replace("/", "", 1)
    if re.fullmatch(r"<\|END_\w+\|>", close):
        return close.replace("END", "START", 1)
    return ""


def _derive_content(
    analysis: TemplateAnalysis, reasoning: RegionMarkers | None
) -> tuple[RegionMarkers, tuple[str, ...]]:
    """Return what wraps content, if anything does, and what ends a turn."""
    before = analysis.answer(TEXT).split(TEXT)[0]
    # A turn that a user's turn follows is certain to be closed.
    followed = analysis.answer(TEXT, is_last=False)
    after = between(followed, TEXT, USER["content"]).strip()
    wrapper = skip_header(before, analysis.prompt).strip()
    if not analysis.prompt.strip() and not re.search(r"[<>\[|]", wrapper):
        wrapper = ""  # the header of the turn, such as "assistant:"
    for marker in (reasoning.open.strip(), reasoning.close.strip()) if reasoning else ():
        wrapper = wrapper.split(marker)[-1].strip() if marker else wrapper
    close = first_atom(after)
    if not wrapper or opening_tag(close) != wrapper:
        close = ""
    rest = after.removeprefix(close)
    end = first_atom(rest)
    if len(end) <= 2:
        end = rest.split("\n")[0]
    has_end = bool(end) and not end[0].isalnum()
    return RegionMarkers(wrapper, close), (end,) if has_end else ()


# ---- calls ---------------------------------------------------------------------------------------


def _derive_calls(analysis: TemplateAnalysis) -> CallFormat:
    text = analysis.calls_text(ONE)
    style, head = (
        _find_json(text, analysis) or _find_literal(text, analysis) or _find_tagged(text, analysis)
    )
    return _with_markers(analysis, CallFormat(style, head=head), text)


def _find_call(text: str, style: ArgumentStyle, value: str) -> tuple[int, int]:
    """Return where the call with a value starts and stops, without its markers."""
    if isinstance(style, ObjectCall):
        start, stop, _ = _find_object(text, value)
        return start, stop
    start = _find_head(text)
    after = text.index(value) + len(value)
    match style:
        case LiteralArguments(close=close):
            return start, text.index(close, after) + len(close)
        case TaggedArguments(value_close=close):
            return start, after + len(close.replace("{key}", KEY))
    return start, _find_object(text, value)[1]


def _find_head(text: str) -> int:
    """Return where the first head begins: with the id, where that comes before the name."""
    head = re.search(f"{NAME}|{OTHER_NAME}|{ID}|{OTHER_ID}", text)
    if head is None:
        raise NotDerivable("the call has no name")
    return head.start()


def _find_object(text: str, needle: str) -> tuple[int, int, Any]:
    """Return start, stop and value of the first JSON object in the text that has the needle."""
    for brace in re.finditer(r"\{", text):
        try:
            value, stop = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if needle in text[brace.start() : stop]:
            return brace.start(), stop, value
    raise NotDerivable("no JSON object has the value")


def _path_to(value: Any, needle: str, path: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    if isinstance(value, dict):
        for key, item in value.items():
            item_path = _path_to(item, needle, (*path, key))
            if item_path is not None:
                return item_path
    return path if value == needle else None


StyleAndHead = tuple[ArgumentStyle, str]


def _find_json(text: str, analysis: TemplateAnalysis) -> StyleAndHead | None:
    try:
        start, stop, value = _find_object(text, VALUE)
    except NotDerivable:
        return None
    if NAME not in text[start:stop]:
        head = text[_find_head(text) : start]
        return JsonArguments(), _write_head(head, analysis)
    name = _path_to(value, NAME)
    arguments = _path_to(value, VALUE)
    if name is None or arguments is None:  # the name is a key
        return ObjectCall((), (), (), _write_object(text[start:stop], "")), ""
    id_keys = [(key,) for key in value if key.endswith("id")]
    id = _path_to(value, ID) or next(iter(id_keys), ())
    written = _write_object(text[start:stop], id[-1] if id else "")
    return ObjectCall(name, arguments[:-1], id, written), ""


def _write_object(text: str, id_key: str) -> str:
    """Return the object as the template writes it, with slots for what changes."""
    start = text.rindex("{", 0, text.index(KEY))
    _, stop = json.JSONDecoder().raw_decode(text, start)
    text = text[:start] + ARGUMENTS_SLOT + text[stop:]
    text = text.replace(NAME, NAME_SLOT).replace(ID, ID_SLOT)
    return re.sub(rf'("{id_key}": *")\d+"', rf'\1{ID_SLOT}"', text)


def _write_head(text: str, analysis: TemplateAnalysis) -> str:
    """Return the head with its slots. Where calls differ by a number, that is an id."""
    head = text.replace(NAME, NAME_SLOT).replace(ID, ID_SLOT)
    last = re.split(r"\$name|\$id", head)[-1]
    try:
        second = analysis.calls_text(ONE, TWO).split(VALUE, 1)[1]
        second = second.split(OTHER_NAME, 1)[1]
    except Exception:
        return head
    number = re.search(r"\d+", last)
    if second.startswith(last) or number is None:
        return head
    numbered = last[: number.start()] + ID_SLOT + last[number.end() :]
    return head.removesuffix(last) + numbered


def _find_literal(text: str, analysis: TemplateAnalysis) -> StyleAndHead | None:
    """Find f(a='x') or f{a:<quote>x<quote>}: a string ends with what it began with."""
    quoted = between(text, KEY, VALUE)
    after = text.split(VALUE, 1)[1]
    suffixes = (quoted[start:] for start in range(len(quoted)))
    quote = next(filter(after.startswith, suffixes), "")
    opened = between(text, NAME, KEY)
    forgets_quotes = quoted == "=" and after.startswith(")")
    if opened not in ("(", "{") or not (quote or forgets_quotes):
        return None
    backwards = analysis.calls_text((NAME, {OTHER_KEY: OTHER_VALUE, KEY: VALUE}))
    style = LiteralArguments(
        assign=quoted.removesuffix(quote),
        quotes=("'", '"') if quote in "'\"" else (quote,),
        close={"(": ")", "{": "}"}[opened],
        separator=between(analysis.calls_text(BOTH_ARGUMENTS), VALUE + quote, OTHER_KEY),
        sorted_keys=backwards.index(KEY) < backwards.index(OTHER_KEY),
    )
    return style, NAME_SLOT + opened


def _find_tagged(text: str, analysis: TemplateAnalysis) -> StyleAndHead:
    after_one = text.split(VALUE, 1)[1].replace(KEY, "{key}")
    after_two = between(analysis.calls_text(BOTH_ARGUMENTS), VALUE, OTHER_KEY)
    after_two = after_two.replace(KEY, "{key}")
    value_close = common_start(after_one, after_two)
    own_tag = re.match(r".*?\{key\}[^<]*?>", value_close)  # the closing tag repeats the key
    value_close = own_tag[0] if own_tag else value_close
    key_open = after_two[len(value_close) :]
    key_start = text.index(KEY, text.index(NAME))
    head = text[_find_head(text) : key_start]
    if not value_close.strip() or not key_open.strip() or not head.endswith(key_open):
        raise NotDerivable("parameters are not in tags")
    key_close = between(text[key_start:], KEY, VALUE)
    style = TaggedArguments(key_open, key_close, value_close)
    item = _derive_item(analysis, style) if own_tag else ""
    if item:
        style = replace(style, item=item)
    else:
        style = replace(
            style, typed=_derive_types(analysis, style), quote=_derive_quote(analysis, style)
        )
    return style, _write_head(head.removesuffix(key_open), analysis)


def _derive_item(analysis: TemplateAnalysis, style: TaggedArguments) -> str:
    """Return the tag of a list's members, if values nest as tags."""
    value = TYPED_VALUES["array"]
    tag = rf"{re.escape(style.key_open)}(\w+){re.escape(style.key_close)}{value[0]}"
    match = re.search(tag, analysis.value_text(value))
    return match[1] if match else ""


def _derive_quote(analysis: TemplateAnalysis, style: TaggedArguments) -> tuple[str, str]:
    """Return what is put around a value that contains markup."""
    value = f"<{VALUE}&>"
    text = analysis.value_text(value).split(KEY + style.key_close, 1)[1]
    open, _, rest = text.partition(value)
    close = rest.split(style.value_close)[0]
    return (open, close) if rest and open and close else ("", "")


def _derive_types(analysis: TemplateAnalysis, style: TaggedArguments) -> dict[str, str]:
    """Return the text between key and value for each type, if templates write it differently."""
    texts = {"string": style.key_close}
    for type, value in TYPED_VALUES.items():
        text = analysis.value_text(value)
        spelling = json.dumps(value)
        texts[type] = between(text, KEY, spelling if spelling in text else str(value))
    return texts if len(set(texts.values())) > 1 else {}


def _with_markers(analysis: TemplateAnalysis, calls: CallFormat, text: str) -> CallFormat:
    """Add markers: what is written once around two calls, and what around each."""
    start, stop = _find_call(text, calls.arguments, VALUE)
    before = text[:start]
    calls = replace(calls, id_format=_derive_id_format(before, calls.head))
    try:
        two = analysis.calls_text(ONE, TWO)
        _, first_stop = _find_call(two, calls.arguments, VALUE)
        rest = two[first_stop:]
        second_start, second_stop = _find_call(rest, calls.arguments, OTHER_VALUE)
    except Exception:  # the template knows one call only
        return replace(calls, call=RegionMarkers(before, text[stop:]), parallel=False)
    link = rest[:second_start]
    after = rest[second_stop:]
    call_close = common_start(link, after)
    call_open = common_end(before, link[len(call_close) :])
    return replace(
        calls,
        section=RegionMarkers(before.removesuffix(call_open), after[len(call_close) :]),
        call=RegionMarkers(call_open, call_close),
        separator=link[len(call_close) : len(link) - len(call_open)],
    )


def _derive_id_format(before: str, head: str) -> str:
    """Name and number joined by a sign are one id: functions.f:0."""
    join = re.match(r"\$name([:_.-])\$id", head)
    if join is None:
        return ""
    return re.split(r"[>\s]", before)[-1] + "{name}" + join[1] + "{id}"


def _without_end(calls: CallFormat, ends: Sequence[str]) -> CallFormat:
    """Cut what follows the last call at the end of the turn."""

    def cut(text: str) -> str:
        for marker in (TEXT, *filter(None, ends)):
            text = text.split(marker)[0]
        return text

    section = replace(calls.section, close=cut(calls.section.close))
    call = replace(calls.call, close=cut(calls.call.close))
    return replace(calls, section=section, call=call)


def _share_close(
    template: ChatTemplate, shape: MessageShape, reasoning: RegionMarkers, content: RegionMarkers
) -> tuple[RegionMarkers, RegionMarkers]:
    """Reasoning ends alike before content and before a call: what differs belongs to those."""
    try:
        text = TemplateAnalysis(template, shape).answer("", THOUGHT, [ONE])
        before_call = text.split(THOUGHT, 1)[1].split(NAME)[0]
    except Exception:
        return reasoning, content
    shared = common_start(reasoning.close, before_call)
    if not shared.strip() or shared.strip() == reasoning.close.strip():
        return reasoning, content
    content_open = reasoning.close[len(shared) :]
    return replace(reasoning, close=shared), replace(content, open=content_open)

"""Public chat templates and golden conversations, and how an answer is judged.

`templates.json.xz` holds chat templates of public projects, unchanged, with where they come from.
`golden.json.xz` holds answers and what they mean, extracted from llama.cpp's tests/test-chat.cpp
(MIT licence). benchmarks/response_formats.py prints how all of them fare.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bloomery.response_format.check import (
    MergedAnswer,
    SampleAnswer,
    SampleMessage,
    merge_events,
    render_sample,
)
from bloomery.response_format.derive import (
    USER,
    ChatTemplate,
    ToolCall,
    make_function,
    tool_objects,
)
from bloomery.response_format.format import ResponseFormat, ToolFunction
from bloomery.response_format.lookup import FormatLookup, find_response_format
from bloomery.response_format.parser import ResponseEvent, ResponseParser
from bloomery.text.chat import render_template

DATA = Path(__file__).parent / "data"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


FUNCTIONS = (
    make_function(
        "search", query="string", limit="integer", deep="boolean", tags="array", filter="object"
    ),
    make_function("ping"),
    make_function("fetch", query="string", limit="number"),
)
_FILTER = {"a": {"b": [1, {"c": None}]}, "d": 'q"}'}
_NESTED: ToolCall = (
    "search",
    {"query": "a", "limit": 3, "deep": True, "tags": ["x", "y}"], "filter": _FILTER},
)
_ODD: ToolCall = (
    "search",
    {"query": 'é "quoted" \\ back\nline 漢字 😀\ttab', "limit": -7},
)
_TRAP: ToolCall = (
    "search",
    {"query": 'see </parameter> or <tool_call>{"name": "x"} [/THINK] ]} </arg_value> here <'},
)
_CATS: ToolCall = ("search", {"query": "cats"})
MESSAGES = {
    "plain": SampleMessage("Hello, world!"),
    "unicode": SampleMessage("Füße 漢字 😀 a < b > c, {x} [y] <b>bold</b>\n\n```json\n{}\n```"),
    "reasoning": SampleMessage("Hello.", "Let me see.\nYes: a < b."),
    "call": SampleMessage(calls=[("search", {"query": "cats", "limit": 3})]),
    "two": SampleMessage(calls=[_CATS, ("fetch", {"query": "dogs", "limit": 1.5})]),
    "content+call": SampleMessage("One moment.", calls=[_CATS]),
    "all": SampleMessage("One moment.", "I need the tool.", [_CATS, ("ping", {})]),
    "empty": SampleMessage(calls=[("ping", {})]),
    "nested": SampleMessage(calls=[_NESTED]),
    "odd": SampleMessage(calls=[_ODD]),
    "trap": SampleMessage(calls=[_TRAP]),
}


class PublicTemplate(NamedTuple):
    """A chat template of a public project."""

    name: str
    origin: str
    source: str


@cache
def read_templates() -> tuple[PublicTemplate, ...]:
    entries = json.loads(lzma.decompress((DATA / "templates.json.xz").read_bytes()))
    return tuple(PublicTemplate(**entry) for entry in entries)


@cache
def read_golden() -> dict[str, Any]:
    return json.loads(lzma.decompress((DATA / "golden.json.xz").read_bytes()))


def special_tokens_in(source: str) -> set[str]:
    """Stands in for the special tokens of the tokenizer."""
    return set(re.findall(r"<\|[^<>\s]*>|<[^<>\s]*\|>", source))


def open_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, render_template, TOKENS)


@cache
def look_up(source: str) -> FormatLookup:
    return find_response_format(
        {}, source, special_tokens_in(source), None, render=render_template, variables=TOKENS
    )


# ---- the law: every way to split a text gives the same events ------------------------------------


def parse_parts(
    format: ResponseFormat,
    prompt: str,
    parts: Sequence[str],
    tools: Sequence[ToolFunction] = FUNCTIONS,
    special_tokens: Collection[str] = (),
) -> list[ResponseEvent]:
    """Return the events of a text that arrives in parts, with neighbours merged."""
    parser = ResponseParser(format, tools, prompt, special_tokens)
    events = [event for part in parts for event in parser.feed(part)]
    return merge_neighbours(events + parser.close())


def merge_neighbours(events: Sequence[ResponseEvent]) -> list[ResponseEvent]:
    merged: list[ResponseEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if last and event.text and (last.kind, last.index) == (event.kind, event.index):
            merged[-1] = last._replace(text=last.text + event.text)
        else:
            merged.append(event)
    return merged


def split_text(text: str, stride: int = 1) -> Iterator[list[str]]:
    """Yield ways to split a text: every chunk size, every `stride`-th position, random chunks."""
    for size in range(1, min(len(text), 40), 1 if stride == 1 else 7):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for place in range(1, len(text), stride):
        yield [text[:place], text[place:]]
    generator = random.Random(0)
    for longest in (3, 8, 40):
        parts: list[str] = []
        rest = text
        while rest:
            size = generator.randint(1, longest)
            parts.append(rest[:size])
            rest = rest[size:]
        yield parts


def find_bad_split(
    format: ResponseFormat,
    prompt: str,
    text: str,
    stride: int = 1,
    tools: Sequence[ToolFunction] = FUNCTIONS,
) -> list[str] | None:
    """Return a way to split the text that changes the events."""
    expected = parse_parts(format, prompt, [text], tools)
    for parts in split_text(text, stride):
        if parse_parts(format, prompt, parts, tools) != expected:
            return parts
    return None


@cache
def render_messages(source: str) -> dict[str, SampleAnswer]:
    """Return the sample messages as a template writes them; those it refuses are left out."""
    template = open_template(source)
    format = look_up(source).format
    samples: dict[str, SampleAnswer] = {}
    for name, message in MESSAGES.items():
        sample = render_sample(template, format, message, FUNCTIONS)
        if sample is not None:
            samples[name] = sample
    return samples


# ---- golden conversations ------------------------------------------------------------------------


def golden_tools(names: Sequence[str]) -> list[ToolFunction]:
    tools = read_golden()["tools"]
    return [ToolFunction(tools[name]["name"], "", tools[name]["parameters"]) for name in names]


def golden_prompt(
    template: ChatTemplate, format: ResponseFormat, case: dict[str, Any]
) -> tuple[str, str, str]:
    """Return the end of the prompt, and what of content and reasoning it has already."""
    continued = case.get("continue")
    region = format.reasoning
    if continued and region is None:
        return "", "Hello, ", ""
    if continued == "reasoning" and region:
        return region.open + "I'm", "", "I'm"
    if continued and region:
        return region.open + region.close, "Hello, ", "I'm thinking"
    thinking = case.get("enable_thinking", True)
    tools = tool_objects(golden_tools(case["tools"]))
    for options in ({"enable_thinking": thinking, "thinking": thinking}, {}):
        try:
            text = template.render([USER], tools or None, True, **options)
        except Exception:
            continue
        return text[text.rindex(USER["content"]) + len(USER["content"]) :], "", ""
    return "", "", ""


class Judgement(NamedTuple):
    """How a golden conversation was read."""

    verdict: str  # exact, trimmed (whitespace at borders differs), wrong, raw (not asked for)
    answer: MergedAnswer | None = None
    prompt: str = ""


def judge_golden(template: ChatTemplate, format: ResponseFormat, case: dict[str, Any]) -> Judgement:
    region = format.reasoning
    markers = [region.open.strip(), region.close.strip()] if region else []
    if case.get("raw_reasoning") and any(m and m in case["content"] for m in markers):
        return Judgement("raw")  # the case wants reasoning left in the content
    prompt, content_before, reasoning_before = golden_prompt(template, format, case)
    tokens = special_tokens_in(template.source)
    events = parse_parts(format, prompt, [case["text"]], golden_tools(case["tools"]), tokens)
    answer = merge_events(events)
    if case.get("raw_reasoning") and not case["reasoning"]:
        # The case wants reasoning as a part of the content.
        answer.content = answer.reasoning + answer.content
        answer.reasoning = reasoning_before = ""
    calls = zip(answer.names, answer.arguments, answer.ids, strict=True)
    same_calls = len(answer.names) == len(case["calls"]) and all(
        name == call["name"]
        and same_arguments(arguments, call["arguments"])
        and call.get("id", id) == id
        for (name, arguments, id), call in zip(calls, case["calls"], strict=True)
    )
    content = content_before + answer.content
    reasoning = reasoning_before + answer.reasoning
    if same_calls and (content, reasoning) == (case["content"], case["reasoning"]):
        return Judgement("exact", answer, prompt)
    same_content = content.strip() == case["content"].strip()
    if same_calls and same_content and reasoning.strip() == case["reasoning"].strip():
        return Judgement("trimmed", answer, prompt)
    return Judgement("wrong", answer, prompt)


def same_arguments(one: str, other: str) -> bool:
    try:
        return json.loads(one or "{}") == json.loads(other or "{}")
    except ValueError:
        return "".join(one.split()) == "".join(other.split())

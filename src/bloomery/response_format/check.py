"""Checks a format against the chat template: render sample conversations, parse them, compare.

What a template writes after its generation prompt is what the model would have written. If the
parser does not read the same message from it, tools or reasoning must not be served silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bloomery.response_format.derive import (
    ChatTemplate,
    TemplateAnalysis,
    ToolCall,
    first_result,
    make_function,
    message_shapes,
    skip_header,
    tool_objects,
)
from bloomery.response_format.format import ResponseFormat, ToolFunction
from bloomery.response_format.parser import ResponseEvent, ResponseParser
from bloomery.response_format.values import to_json


@dataclass
class MergedAnswer:
    """All events of an answer put together."""

    reasoning: str = ""
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_complete: int = 0

    def read_calls(self) -> list[tuple[str, Any]]:
        """Return the complete calls with their arguments; ValueError if those are not JSON."""
        calls = zip(self.names, map(json.loads, self.arguments), strict=True)
        return list(calls)[: self.num_complete]

    def describe(self) -> str:
        """Return what there is of the answer, in words."""
        parts = {"reasoning": self.reasoning, "content": self.content}
        parts |= {
            f"a call of {name} with": arguments
            for name, arguments in zip(self.names, self.arguments, strict=True)
        }
        texts = [f"{name} {to_json(text[:200])}" for name, text in parts.items() if text]
        return " and ".join(texts) or "nothing"


def merge_events(events: Iterable[ResponseEvent]) -> MergedAnswer:
    answer = MergedAnswer()
    for event in events:
        match event.kind:
            case "reasoning":
                answer.reasoning += event.text
            case "content":
                answer.content += event.text
            case "call":
                answer.names.append(event.name)
                answer.arguments.append("")
                answer.ids.append(event.id)
            case "arguments":
                answer.arguments[event.index] += event.text
            case "call_end":
                answer.num_complete += 1
                answer.ids[event.index] = event.id or answer.ids[event.index]
    return answer


class SampleMessage(NamedTuple):
    """An answer that a model may give."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


class SampleAnswer(NamedTuple):
    """A message as the template writes it; what the template drops is not expected."""

    text: str
    prompt: str
    message: SampleMessage


FUNCTIONS = (
    make_function("search", query="string", limit="integer", deep="boolean"),
    make_function("fetch", query="string", limit="number"),
)
SAMPLES = {
    "content": SampleMessage("Hello, world!"),
    "reasoning": SampleMessage("Hello.", "Let me see.\nYes: a < b."),
    "call": SampleMessage(calls=[("search", {"query": "cats", "limit": 3})]),
    "two calls": SampleMessage(
        calls=[("search", {"query": "cats"}), ("fetch", {"query": "dogs", "limit": 1.5})]
    ),
}


def render_sample(
    template: ChatTemplate,
    format: ResponseFormat,
    message: SampleMessage,
    functions: Sequence[ToolFunction] = FUNCTIONS,
) -> SampleAnswer | None:
    """Return the message as the template writes it, None if it does not write it at all."""
    shapes = message_shapes(dict.fromkeys((message.content, message.content or None)))

    def render(analysis: TemplateAnalysis) -> SampleAnswer | None:
        return _render_message(analysis, format, message)

    return first_result(template, shapes, render, tool_objects(functions))[1]


def _render_message(
    analysis: TemplateAnalysis, format: ResponseFormat, message: SampleMessage
) -> SampleAnswer | None:
    content, reasoning, calls = message
    turn = analysis.shape.assistant(analysis.shape.content, reasoning, calls)
    start, answer = analysis.turn(turn)
    text = skip_header(answer, analysis.prompt)
    prompt = start + answer.removesuffix(text)
    shown_calls = [call for call in calls if call[0] in text]
    values = calls[0][1].values() if calls else ()
    first_words = [value.split()[0] for value in values if isinstance(value, str)]
    if calls and (not shown_calls or any(word not in text for word in first_words)):
        return None
    last = shown_calls[-1][0] if calls else content
    for marker in format.end:  # the server stops here
        stop = text.find(marker, text.rfind(last))
        text = text[:stop] if stop >= 0 else text
    shown_content = content if content in text else ""
    shown_reasoning = reasoning if reasoning in text else ""
    return SampleAnswer(text, prompt, SampleMessage(shown_content, shown_reasoning, shown_calls))


def is_faithful(answer: MergedAnswer, message: SampleMessage) -> bool:
    """Return whether the answer is the message, up to whitespace at the border of regions."""
    try:
        calls = answer.read_calls()
    except ValueError:
        return False
    return (
        answer.reasoning.strip() == message.reasoning.strip()
        and answer.content.strip() == message.content.strip()
        and calls == [(name, dict(arguments)) for name, arguments in message.calls]
    )


def find_disagreements(template: ChatTemplate, format: ResponseFormat) -> dict[str, str]:
    """Return what goes wrong, for each sample that is not read as it was written."""
    problems: dict[str, str] = {}
    for name, message in SAMPLES.items():
        if message.calls and format.calls is None:
            continue
        if len(message.calls) > 1 and format.calls and not format.calls.parallel:
            continue
        sample = render_sample(template, format, message)
        if sample is None:
            continue
        parser = ResponseParser(format, FUNCTIONS, sample.prompt)
        answer = merge_events(parser.feed(sample.text) + parser.close())
        if not is_faithful(answer, sample.message):
            problems[name] = f"the text {to_json(sample.text[:200])} is read as {answer.describe()}"
    return problems

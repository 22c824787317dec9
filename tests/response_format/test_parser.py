"""Answers that are not as a template would write them: cut off, littered, full of look-alikes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.response_format.check import MergedAnswer, merge_events
from bloomery.response_format.format import (
    CallFormat,
    JsonArguments,
    LiteralArguments,
    ObjectCall,
    RegionMarkers,
    ResponseFormat,
    TaggedArguments,
    ToolFunction,
)
from bloomery.response_format.parser import ResponseEvent, ResponseParser
from tests.response_format.conversations import find_bad_split

TOOLS = [
    ToolFunction("f", "", {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}),
    ToolFunction(
        "g", "", {"properties": {"v": {"type": ["string", "null"]}, "on": {"type": "boolean"}}}
    ),
]
THINK = RegionMarkers("<think>\n", "\n</think>\n\n")
TOOL_CALL = RegionMarkers("<tool_call>\n", "\n</tool_call>")
HERMES = ResponseFormat(
    THINK, calls=CallFormat(ObjectCall(), call=TOOL_CALL), turn_start="<|assistant|>"
)
CODER_CALL = RegionMarkers("<tool_call>\n<function=", "</function>\n</tool_call>")
CODER_TAGS = TaggedArguments("<parameter=", ">\n", "\n</parameter>\n")
CODER = ResponseFormat(THINK, calls=CallFormat(CODER_TAGS, call=CODER_CALL, head="$name>\n"))
SECTION = CallFormat(
    JsonArguments(),
    RegionMarkers("<calls>", "</calls>"),
    RegionMarkers("<call>", "</call>"),
    "$name<sep>",
)
BARE = ResponseFormat(calls=CallFormat(ObjectCall(arguments=("parameters",))))
PYTHONIC = ResponseFormat(
    calls=CallFormat(
        LiteralArguments("=", ("'", '"'), ")"),
        RegionMarkers("[", "]"),
        head="$name(",
        separator=", ",
    )
)


def read(format: ResponseFormat, text: str, prompt: str = "") -> MergedAnswer:
    assert find_bad_split(format, prompt, text, tools=TOOLS) is None
    parser = ResponseParser(format, TOOLS, prompt)
    return merge_events(parser.feed(text) + parser.close())


def calls_of(answer: MergedAnswer) -> list[tuple[str, Any]]:
    return [
        (name, json.loads(arguments))
        for name, arguments in zip(answer.names, answer.arguments, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<think>never closed", "never closed", "", []),
        ("say <think> in passing", "", "say <think> in passing", []),
        (
            '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\u00e9 }{"}}</tool_call>',
            "",
            "",
            [("f", {"s": "</tool_call> é }{"})],
        ),
        (
            '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call> done',
            "",
            "done",
            [("f", {"n": 1})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>',
            "",
            "",
            [("f", {"n": 1})],
        ),
        ("<tool_call>is a tag.", "", "<tool_call>is a tag.", []),
        ('<tool_call>{"name": "f", "arguments": {}} garbage', "", "garbage", [("f", {})]),
        (
            '<think>so\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "so",
            "",
            [("f", {})],
        ),
        ('{"name": "f", "arguments": {"n": 1}}', "", "", [("f", {"n": 1})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", {})]),
        (
            '```json\n{\n  "name": "f",\n  "arguments": {"n": 1}\n}\n```\nDone.',
            "",
            "Done.",
            [("f", {"n": 1})],
        ),
        ('```json\n{"name": "Ada"}\n```', "", '```json\n{"name": "Ada"}\n```', []),
        ('{"n": {"name": "f"}}', "", '{"n": {"name": "f"}}', []),
        (
            "<think>I could write <tool_call> now.</think>No.",
            "I could write <tool_call> now.",
            "No.",
            [],
        ),
    ],
)
def test_json_calls(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    answer = read(HERMES, text)
    assert (answer.reasoning, answer.content, calls_of(answer)) == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'),
        (CODER, "<tool_call><function=f><parameter=n>1</parameter></function></tool_call>"),
        (ResponseFormat(calls=SECTION), '<calls><call>f<sep>{"n": 1}</call></calls>'),
        (PYTHONIC, "[f(n=1)]"),
    ],
)
def test_what_breaks_off_before_a_name_is_content(format: ResponseFormat, text: str) -> None:
    assert calls_of(read(format, text)) == [("f", {"n": 1})]
    for size in range(len(text)):
        parser = ResponseParser(format, TOOLS)
        answer = merge_events(parser.feed(text[:size]) + parser.close())
        assert answer.names == ["f"] or answer.content == text[:size]


@pytest.mark.parametrize("text", ['<tool_call>{"arguments": {}}</tool_call>', "<tool_call>{}"])
def test_an_object_without_a_name_is_content(text: str) -> None:
    answer = read(HERMES, text)
    assert (answer.content, answer.names) == (text, [])


def test_a_call_that_breaks_off_is_not_complete() -> None:
    answer = read(HERMES, '<tool_call>{"name": "f", "arguments": {"s": "ha')
    assert answer.arguments == ['{"s": "ha']
    assert answer.num_complete == 0


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [
        ("7", "n", 7),
        ("7", "s", "7"),
        ("7.5", "n", "7.5"),
        ("  x\n", "s", "  x\n"),
        ("a\n</parameter>\nb", "s", "a\n</parameter>\nb"),
        ("null", "v", None),
        ("nothing", "v", "nothing"),
        ("True", "on", True),
        ("[1]", "other", [1]),
        ("{'a': None}", "other", {"a": None}),
        ("NaN", "other", "NaN"),
        ("{1, 2}", "other", "{1, 2}"),
    ],
)
def test_values_have_the_type_that_their_schema_says(value: str, key: str, expected: Any) -> None:
    name = "g" if key in ("v", "on") else "f"
    parameter = f"<parameter={key}>\n{value}\n</parameter>\n"
    text = f"<tool_call>\n<function={name}>\n{parameter}</function>\n</tool_call>"
    assert calls_of(read(CODER, text)) == [(name, {key: expected})]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("n=1, s='a, b'", {"n": 1, "s": "a, b"}),
        ('s="it\'s", n=-2', {"s": "it's", "n": -2}),
        ("n='3'", {"n": 3}),  # some templates quote every value
        ("s=bare", {"s": "bare"}),  # and some quote none
        ("s='a\\'b'", {"s": "a'b"}),
        ("other={'k': [True, None]}", {"other": {"k": [True, None]}}),
        ("other={1, 2}", {"other": "{1, 2}"}),  # JSON has no sets
        ("other=1e999", {"other": "1e999"}),  # and no infinity
        ("s='\\ud800'", {"s": "'\\ud800'"}),  # UTF-8 has no half pairs
        ("", {}),
    ],
)
def test_calls_as_in_python(arguments: str, expected: Any) -> None:
    answer = read(PYTHONIC, f"See [1]: [f({arguments}), g()]")
    assert answer.content == "See [1]:"
    assert calls_of(answer) == [("f", expected), ("g", {})]


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    parser = ResponseParser(HERMES, TOOLS)
    assert parser.feed("a <tool_") == [ResponseEvent("content", "a")]
    assert parser.feed("box> b") == [ResponseEvent("content", " <tool_box> b")]


def test_arguments_come_as_deltas() -> None:
    parser = ResponseParser(HERMES, TOOLS)
    deltas = ['<tool_call>{"name": "f", ', '"arguments": {"s": "he', "llo", '"}}']
    events = [parser.feed(delta) for delta in deltas]
    assert events[1] == [ResponseEvent("arguments", '{"s": "he', 0)]
    assert events[2] == [ResponseEvent("arguments", "llo", 0)]


def test_a_section_and_a_call_without_its_section() -> None:
    format = ResponseFormat(calls=SECTION)
    answer = read(format, 'x<calls><call>f<sep>{"n": 1}</call><call>g<sep>{}</call></calls>y')
    assert answer.content == "xy"
    assert calls_of(answer) == [("f", {"n": 1}), ("g", {})]
    assert calls_of(read(format, '<call>f<sep>{"n": 1}</call>')) == [("f", {"n": 1})]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"n": 1}}', [("f", {"n": 1})]),
        ('Let me see.\n{"name": "f", "parameters": {"n": 1}}', [("f", {"n": 1})]),
        ('{"name": "Ada", "age": 36}', []),
        ('{"answer": 42}', []),
    ],
)
def test_without_a_marker_only_the_name_of_a_tool_makes_a_call(text: str, calls: Any) -> None:
    answer = read(BARE, text)
    assert calls_of(answer) == calls
    assert answer.content == ("" if text[0] == "{" and calls else text.split('\n{"name": "f"')[0])


def test_the_prompt_tells_where_an_answer_begins() -> None:
    assert HERMES.opened_by("<|assistant|><think>\n") == "reasoning"
    assert read(HERMES, "so\n</think>\n\nYes", "<|assistant|><think>\n").reasoning == "so"
    assert read(HERMES, "Yes", "<|assistant|><think>\n\n</think>\n\n").content == "Yes"
    # A marker in an earlier turn opens nothing.
    assert read(HERMES, "Yes", "What is <think>?<|assistant|>").content == "Yes"
    # A first space counts where the prompt has begun the reasoning.
    assert read(HERMES, " so</think>", "<|assistant|><think>I think").reasoning == " so"


def test_special_tokens_that_are_no_marker_are_dropped() -> None:
    special_tokens = {"<|noise|>", "<tool_call>"}
    parser = ResponseParser(HERMES, TOOLS, "", special_tokens)
    text = 'a<|noise|> b<tool_call>{"name": "f", "arguments": {}}</tool_call><|noise|>'
    answer = merge_events([*parser.feed(text), *parser.close()])
    assert answer.content == "a b"
    assert answer.names == ["f"]
    parser = ResponseParser(HERMES, TOOLS, "<|assistant|><think>", special_tokens)
    assert merge_events(parser.feed("x<|noise|>y</think>")).reasoning == "xy"


def test_without_tools_calls_are_content() -> None:
    parser = ResponseParser(HERMES)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert merge_events([*parser.feed(text), *parser.close()]).content == text


def test_the_region_tells_what_tokens_count_as() -> None:
    parser = ResponseParser(HERMES, TOOLS, "<|assistant|><think>\n")
    regions = [parser.region]
    for delta in ("hm", "</think>", "Yes", '<tool_call>{"name": "f", "arguments"'):
        parser.feed(delta)
        regions.append(parser.region)
    assert regions == ["reasoning", "reasoning", "content", "content", "calls"]


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
        *("<parameter=s>", "</parameter>", '{"name": "f", ', '"arguments": {', "}", '"', "\\"),
        *(
            "[f(",
            "s='",
            "')",
            "\\ud800",
            "1e999",
            "{1}",
            "]",
            "\n",
            " ",
            "a",
            "<",
            "é",
            "f",
            "<calls><call>f<sep>",
            "</call>",
        ),
    ]
)
FORMATS = st.sampled_from([HERMES, CODER, ResponseFormat(THINK, calls=SECTION), BARE, PYTHONIC])


@given(FORMATS, st.lists(PIECES, max_size=25), st.data())
def test_any_rubbish_gives_the_same_events_for_any_split(
    format: ResponseFormat, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    parts = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]

    def parse(parts: list[str]) -> MergedAnswer:
        parser = ResponseParser(format, TOOLS)
        events = [event for part in parts for event in parser.feed(part)]
        return merge_events(events + parser.close())

    answer = parse([text])
    assert parse(parts) == answer
    assert parse(list(text)) == answer
    "".join([answer.content, *answer.names, *answer.arguments, *answer.ids]).encode()


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        (HERMES, "<think>so be it</thi", MergedAnswer("so be it")),
        (HERMES, "<think>a < b and a <", MergedAnswer("a < b and a <")),
        (HERMES, "<think>yes</think>It is <to", MergedAnswer("yes", "It is ")),
        (
            CODER,
            "<tool_call><function=f><parameter=a>\nx\n</para",
            MergedAnswer(names=["f"], arguments=['{"a": "x"'], ids=[""]),
        ),
    ],
)
def test_a_marker_that_a_limit_cuts_off_is_no_text(
    format: ResponseFormat, text: str, expected: MergedAnswer
) -> None:
    for parts in ([text], list(text), [text[:-3], text[-3:]]):
        parser = ResponseParser(format, TOOLS)
        events = [event for part in parts for event in parser.feed(part)]
        answer = merge_events(events + parser.close(was_cut=True))
        assert answer == expected


def test_an_answer_that_ends_by_itself_keeps_its_last_characters() -> None:
    parser = ResponseParser(HERMES, TOOLS)
    assert merge_events(parser.feed("write </thi") + parser.close()).content == "write </thi"

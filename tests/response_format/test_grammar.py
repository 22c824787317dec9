"""Grammars of answers: they take what templates write, refuse wrong calls, and never dead-end."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bloomery.errors import InvalidRequest
from bloomery.response_format import ResponseFormat, ToolFunction, build_response_grammar
from bloomery.response_format.check import SampleMessage, render_sample
from bloomery.response_format.format import (
    CallFormat,
    JsonArguments,
    LiteralArguments,
    ObjectCall,
    RegionMarkers,
    TaggedArguments,
)
from bloomery.response_format.grammar import has_trigger
from bloomery.sampling import StructuredOutputs
from bloomery.structured.grammar import GRAMMAR_HEADER, to_lark
from bloomery.structured.matcher import TokenVocabulary
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.response_format.conversations import (
    FUNCTIONS,
    PublicTemplate,
    look_up,
    open_template,
    read_templates,
    render_messages,
)
from tests.response_format.test_parser import BARE, HERMES

STRICT = [
    tool._replace(parameters={**tool.parameters, "additionalProperties": False}, strict=True)
    for tool in FUNCTIONS
]
# Templates of every style of calls, all of whose texts their grammars take.
STYLES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "GLM-4.6",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Kimi-K2-Instruct",
    "google-gemma-4-31B-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "LFM2.5-8B-A1B",
    # No marker announces their calls, but the name of a tool does.
    "tool_chat_template_xlam_llama",
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
OUTPUT, _ = to_lark(StructuredOutputs(json=SCHEMA))


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def takes(grammar: str, text: str) -> bool:
    tokenizer = byte_tokenizer()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(GRAMMAR_HEADER + grammar))
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def find_template(name: str) -> PublicTemplate:
    return next(entry for entry in read_templates() if entry.name == name)


@pytest.mark.parametrize("name", STYLES)
def test_grammars_take_what_the_template_writes(name: str) -> None:
    template = find_template(name)
    format = look_up(template.source).format
    for sample_name, sample in render_messages(template.source).items():
        if sample_name == "trap":
            continue  # it has the markers that a grammar reserves
        options: dict[str, Any] = {"tools": STRICT, "prompt": sample.prompt}
        assert takes(build_response_grammar(format, **options), sample.text), sample
        if sample.message.calls and not sample.message.content:
            required = build_response_grammar(format, tool_choice="required", **options)
            assert takes(required, sample.text), sample


@pytest.mark.parametrize("name", STYLES)
def test_grammars_refuse_what_the_tools_do_not_allow(name: str) -> None:
    template = find_template(name)
    format = look_up(template.source).format
    wrong_calls = [
        ("search", {"limit": "three"}),
        ("nonesuch", {}),
        ("search", {"color": "red"}),
    ]
    for call in wrong_calls:
        sample = render_sample(
            open_template(template.source), format, SampleMessage(calls=[call]), FUNCTIONS
        )
        assert sample is not None
        for choice in ("required", "auto"):
            grammar = build_response_grammar(
                format, tools=STRICT, tool_choice=choice, prompt=sample.prompt
            )
            is_free_text = choice == "auto" and call[0] == "nonesuch" and not has_trigger(format)
            assert takes(grammar, sample.text) == is_free_text, (choice, call)


PYTHONIC = ResponseFormat(
    calls=CallFormat(
        LiteralArguments("=", ("'", '"'), ")"),
        RegionMarkers("[", "]"),
        head="$name(",
        separator=", ",
    )
)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


def test_choices() -> None:
    required = build_response_grammar(HERMES, tools=STRICT, tool_choice="required")
    assert takes(required, CALL)
    assert takes(required, CALL + PING)
    assert takes(required, f"<think>\nhm</think>{CALL}")
    assert not takes(required, "no")
    one_call = build_response_grammar(HERMES, tools=STRICT, tool_choice="required", parallel=False)
    assert not takes(one_call, CALL + PING)
    named = build_response_grammar(HERMES, tools=STRICT, tool_choice="ping")
    assert takes(named, PING)
    assert not takes(named, CALL)
    auto = build_response_grammar(HERMES, tools=STRICT)
    assert takes(auto, "just text")
    assert takes(auto, f"I will.\n{CALL}")
    assert not takes(auto, "<tool_call>\nno")
    assert not takes(auto, '<tool_call>\n{"name": "nonesuch", "arguments": {}}\n</tool_call>')
    assert build_response_grammar(HERMES, tools=STRICT, tool_choice="none") == ""
    # Without a marker, an object is an answer in JSON until it has the name of a tool.
    bare = build_response_grammar(BARE, tools=STRICT)
    assert takes(bare, '{"name": "ping", "arguments": {}}')
    assert takes(bare, 'So:\n{"name":"ping", "arguments": {}}')
    assert not takes(bare, '{"name": "ping", "arguments": {"color": "red"}}')
    assert takes(bare, '{"name": "Ann", "age": 3}')
    pythonic = build_response_grammar(PYTHONIC, tools=STRICT)
    assert takes(pythonic, "[search(query='x', limit=3), ping()]")
    assert not takes(pythonic, "[search(limit='x')]")
    assert takes(pythonic, "[1, 2] and [searching(x)]")
    with pytest.raises(InvalidRequest, match="not the name of a tool"):
        build_response_grammar(HERMES, tools=STRICT, tool_choice="nonesuch")
    with pytest.raises(InvalidRequest, match="no tool calls"):
        build_response_grammar(ResponseFormat(), tools=STRICT)


INPUT_PATTERN = r"^say(\n[^\n]+)+$"


WRITTEN_INPUTS = {
    "object": (
        ObjectCall(),
        "",
        '{"name": "patch", "arguments": {"input": JSON}}',
    ),
    "python": (LiteralArguments("=", ("'", '"'), ")"), "$name(", "patch(input=JSON)"),
    "quoted": (
        LiteralArguments(":", ('<|"|>',), "}", ","),
        "$name{",
        'patch{input:<|"|>RAW<|"|>}',
    ),
    "tagged": (TaggedArguments("<p=", ">", "</p>"), "$name", "patch<p=input>RAW</p>"),
    "lines": (TaggedArguments("<p=", ">\n", "\n</p>"), "$name", "patch<p=input>\nRAW\n</p>"),
}


@pytest.mark.parametrize("style", WRITTEN_INPUTS)
def test_the_pattern_of_a_text_is_enforced(style: str) -> None:
    arguments, head, written = WRITTEN_INPUTS[style]
    markers = RegionMarkers("<call>", "</call>")
    format = ResponseFormat(calls=CallFormat(arguments, call=markers, head=head))
    properties = {"input": {"type": "string", "pattern": INPUT_PATTERN}}
    parameters = {"type": "object", "properties": properties, "required": ["input"]}
    tool = ToolFunction("patch", "", parameters)
    grammar = build_response_grammar(format, tools=[tool], tool_choice="required")

    def write(text: str) -> str:
        call = written.replace("RAW", text).replace("JSON", json.dumps(text))
        return f"<call>{call}</call>"

    assert takes(grammar, write('say\na "word" \\ and\tmore\nend'))
    assert not takes(grammar, write("say"))
    assert not takes(grammar, write("say\n\nend"))


def test_structured_output_comes_after_reasoning() -> None:
    grammar = build_response_grammar(HERMES, output=OUTPUT, prompt="<|assistant|><think>\n")
    assert takes(grammar, 'any { "text</think>\n{"n": 3}')
    assert not takes(grammar, '</think>{"n": "3"}')
    assert not takes(grammar, '{"n": 3}')
    with_tools = build_response_grammar(HERMES, output=OUTPUT, tools=STRICT)
    assert takes(with_tools, '{"n": 3}')
    assert takes(with_tools, PING)
    assert not takes(with_tools, "text")


def test_an_embedded_grammar_keeps_its_texts() -> None:
    lark = 'start: "start" answer_free? /start/ // start\nanswer_free: "x"\n'
    grammar = build_response_grammar(HERMES, output=lark)
    assert takes(grammar, "startxstart")
    assert takes(grammar, "<think>hm</think>startstart")
    assert not takes(grammar, "start")


# ---- with a vocabulary that has special tokens ---------------------------------------------------


class SpecialVocabulary:
    """The tokenizer of the tests with a few special tokens, and one token that is only added."""

    def __init__(self) -> None:
        backend = Backend.from_file(str(Path(__file__).parent.parent / "server" / "tokenizer.json"))
        names = ("<|call|>", "<|/call|>", "<|/think|>", "<|end|>")
        backend.add_special_tokens([AddedToken(name, special=True) for name in names])
        backend.add_tokens([AddedToken("</think>", special=False)])
        end_id = backend.token_to_id("<|end|>")
        assert end_id is not None
        self.tokenizer = Tokenizer(backend, TokenizerConfig(eos_ids=(end_id,)))
        self.special_tokens = {name: self.id_of(name) for name in names}
        self.added_tokens = {"</think>": self.id_of("</think>")}
        self.vocabulary = TokenVocabulary(self.tokenizer)

    def id_of(self, name: str) -> int:
        id = self.tokenizer.token_to_id(name)
        assert id is not None
        return id

    def build(self, format: ResponseFormat, **options: Any) -> LLMatcher:
        grammar = build_response_grammar(
            format,
            special_tokens=self.special_tokens,
            added_tokens=self.added_tokens,
            **options,
        )
        return self.vocabulary.compile(GRAMMAR_HEADER + grammar)

    def allowed(self, matcher: LLMatcher) -> list[int]:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(id) for id in np.nonzero(bits)[0]]

    def walk(self, matcher: LLMatcher, seed: int, num_steps: int = 60) -> list[int]:
        """Take random allowed tokens. Fails where no token is allowed."""
        generator = random.Random(seed)
        ids: list[int] = []
        for _ in range(num_steps):
            allowed = self.allowed(matcher)
            assert allowed, self.tokenizer.decode(ids, skip_special=False)
            special = [id for id in allowed if id in self.special_tokens.values()]
            id = generator.choice(special if special and generator.random() < 0.3 else allowed)
            if id in self.tokenizer.eos_ids:
                assert matcher.is_accepting()
                return ids
            assert matcher.consume_token(id)
            ids.append(id)
        return ids


@cache
def special_vocabulary() -> SpecialVocabulary:
    return SpecialVocabulary()


SPECIAL = ResponseFormat(
    reasoning=RegionMarkers("<think>", "<|/think|>"),
    calls=CallFormat(ObjectCall(), call=RegionMarkers("<|call|>", "<|/call|>")),
)
ADDED = ResponseFormat(reasoning=RegionMarkers("<think>", "</think>"), calls=SPECIAL.calls)


def test_a_special_token_is_a_token_and_never_text() -> None:
    vocabulary = special_vocabulary()
    matcher = vocabulary.build(SPECIAL, tools=STRICT)
    text = 'so <|call|>{"name": "ping", "arguments": {}}<|/call|>'
    ids = vocabulary.tokenizer.encode(text, add_special=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    spelled = vocabulary.build(SPECIAL, tools=STRICT, tool_choice="required")
    assert vocabulary.special_tokens["<|call|>"] in vocabulary.allowed(spelled)
    assert vocabulary.id_of("<") in vocabulary.allowed(spelled)  # of <think>
    assert vocabulary.id_of("a") not in vocabulary.allowed(spelled)


@pytest.mark.parametrize("format", [SPECIAL, ADDED], ids=["special", "added"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_closes_the_reasoning(format: ResponseFormat, budget: int) -> None:
    vocabulary = special_vocabulary()
    assert format.reasoning is not None
    close = vocabulary.id_of(format.reasoning.close)
    matcher = vocabulary.build(format, output=OUTPUT, prompt="<think>", thinking_budget=budget)
    for _ in range(budget):
        assert matcher.consume_token(vocabulary.id_of("a"))
    assert vocabulary.allowed(matcher) == [close]
    assert matcher.consume_token(close)
    answer = vocabulary.tokenizer.encode('{"n": 3}', add_special=False)
    assert matcher.try_consume_tokens(answer) == len(answer)
    early = vocabulary.build(format, output=OUTPUT, prompt="<think>", thinking_budget=9)
    assert early.consume_token(close)
    assert vocabulary.id_of("a") not in vocabulary.allowed(early)


def test_a_budget_without_a_token_for_the_close() -> None:
    """The close is forced even if it is no token of the vocabulary."""
    vocabulary = special_vocabulary()
    format = ResponseFormat(reasoning=RegionMarkers("<r>", "</r>"))
    matcher = vocabulary.build(format, prompt="<r>", thinking_budget=2)
    for character in "aa</r>":
        assert matcher.consume_token(vocabulary.id_of(character))
    assert matcher.is_accepting()


WALKS: Mapping[str, Mapping[str, Any]] = {
    "required": {"tools": STRICT, "tool_choice": "required"},
    "auto": {"tools": STRICT},
    "one call": {"tools": STRICT, "parallel": False},
    "output": {"output": OUTPUT},
    "output or calls": {"output": OUTPUT, "tools": STRICT},
    "budget": {"thinking_budget": 4},
    "budget and calls": {"tools": STRICT, "tool_choice": "required", "thinking_budget": 4},
}


@pytest.mark.parametrize("options", WALKS.values(), ids=WALKS.keys())
@pytest.mark.parametrize("prompt", ["", "<think>"], ids=["content", "reasoning"])
def test_masks_never_dead_end(options: Mapping[str, Any], prompt: str) -> None:
    vocabulary = special_vocabulary()
    for format in (SPECIAL, ADDED):
        for seed in range(3):
            vocabulary.walk(vocabulary.build(format, prompt=prompt, **options), seed)


@pytest.mark.parametrize(
    ("format", "begun"),
    [(BARE, 'So: {"name": "search"'), (PYTHONIC, "[search(")],
    ids=["bare", "pythonic"],
)
def test_a_begun_call_never_dead_ends(format: ResponseFormat, begun: str) -> None:
    vocabulary = special_vocabulary()
    for seed in range(3):
        matcher = vocabulary.build(format, tools=STRICT)
        ids = vocabulary.tokenizer.encode(begun, add_special=False)
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert not matcher.is_accepting(), "the call has to be finished"
        vocabulary.walk(matcher, seed)


# Regions are named between shared tokens, as Kimi K3 does.
SHARED = ResponseFormat(
    content=RegionMarkers("<|call|>response<|/call|>"),
    calls=CallFormat(
        JsonArguments(),
        section=RegionMarkers("<|call|>tools<|/call|>", "<|/think|>"),
        call=RegionMarkers('tool="'),
        head='$name"',
    ),
)


def test_regions_between_shared_tokens_are_told_apart() -> None:
    vocabulary = special_vocabulary()

    def takes_text(text: str) -> bool:
        matcher = vocabulary.build(SHARED, tools=STRICT)
        ids = vocabulary.tokenizer.encode(text, add_special=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert takes_text("<|call|>response<|/call|>Hello, tools.")
    call = '<|call|>tools<|/call|>tool="ping"{}<|/think|>'
    assert takes_text(call)
    assert takes_text(f"<|call|>response<|/call|>So:{call}")
    assert not takes_text("<|call|>tools<|/call|>Hello")
    assert not takes_text(call.replace("{}", '{"color": "red"}'))


def test_definitions_of_a_schema_reach_its_parameters() -> None:
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "required": ["p"],
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}}},
    }
    tool = ToolFunction("f", "", parameters, strict=True)
    format = look_up(find_template("Qwen3-Coder").source).format
    grammar = build_response_grammar(format, tools=[tool], tool_choice="required")
    call = "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert takes(grammar, call.format("[1, 2]"))


@pytest.mark.parametrize("name", ["Qwen3-Coder", "google-gemma-4-31B-it", "Qwen-Qwen3-0.6B"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["x", None]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {}]}}},
    ],
)
def test_odd_schemas_make_a_grammar(name: str, parameters: dict[str, Any]) -> None:
    format = look_up(find_template(name).source).format
    tool = ToolFunction("f", "", parameters)
    grammar = build_response_grammar(format, tools=[tool], tool_choice="required")
    tokenizer = byte_tokenizer()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(GRAMMAR_HEADER + grammar))
    assert not matcher.is_error(), matcher.get_error()

"""From StructuredOutputs to a grammar: what it accepts, and what it refuses and why."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.maskbench import OUTCOMES, SchemaCase, check_case
from bloomery.artifacts.locate import locate_model
from bloomery.errors import InvalidRequest
from bloomery.sampling import StructuredOutputs
from bloomery.structured.grammar import (
    MAX_GRAMMAR_BYTES,
    compile_grammar,
    prepare_tool_schema,
    to_lark,
)
from bloomery.structured.matcher import TokenVocabulary
from bloomery.text.load import load_tokenizer
from bloomery.text.tokenizer import Tokenizer
from bloomery.text.tokenizer_pool import TokenizerPool
from tests.structured.byte_vocabulary import BYTES

VOCABULARY = TokenVocabulary(BYTES)
# From MaskBench (github.com/guidance-ai/jsonschemabench, MIT licence): 55 schemas of all its parts.
SAMPLE = json.loads(Path(__file__).with_name("schemas.json").read_text())
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "hi "},
            {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {"begin": "<f=a>", "content": {"type": "any_text"}, "end": "</f>"},
                    {
                        "begin": "<f=b>",
                        "content": {"type": "regex", "pattern": "[0-9]+"},
                        "end": ".",
                    },
                ],
                "at_least_one": True,
                "stop_after_first": True,
            },
        ],
    },
}
SEPARATED = {
    "format": {
        "type": "tags_with_separator",
        "separator": ",",
        "tags": [
            {"begin": "<", "content": {"type": "grammar", "grammar": 'root ::= "x"+'}, "end": ">"}
        ],
        "at_least_one": True,
    }
}


def accepts(outputs: StructuredOutputs, text: str) -> bool:
    """Whether a model may write the text and then end."""
    grammar, _ = compile_grammar(outputs, VOCABULARY, "response_format")
    matcher = VOCABULARY.compile(grammar)
    tokens = BYTES.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("options", "accepted", "rejected"),
    [
        ({"json": PERSON}, '{"name": "x", "age": 3}', '{"age": 3}'),
        ({"json": json.dumps(PERSON)}, '{"name":"x"}', '{"name": "x", "size": 1}'),
        ({"json": PERSON}, '{\n    "name": "x"\n}', '{\n\n    "name": "x"}'),
        ({"json": PERSON}, '{ "name": "x"}', '{  "name": "x"}'),
        ({"json": PERSON, "disable_any_whitespace": True}, '{"name": "x"}', '{"name":\n"x"}'),
        ({"json": PERSON, "whitespace_pattern": "[ ]{0,3}"}, '{   "name":"x"}', '{\n"name":"x"}'),
        ({"json": {"required": ["a"]}}, '{"a": null}', '{"b": 1}'),
        ({"json": True}, "[1, 2]", "[1, 2"),
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"regex": r"^\d{3}-[a-z]/+$"}, "123-x//", "12-x/"),
        ({"choice": ["yes", "no, never"]}, "no, never", "no"),
        ({"grammar": "start: WORD+\nWORD: /[a-z]+ /"}, "ab cd ", "ab 1"),
        ({"grammar": 'root ::= "a" digit+\ndigit ::= [0-9]'}, "a12", "a"),
        ({"structural_tag": STRUCTURES}, "see <f=a>12</f> and <f=a>3</f>", "see <f=a>x</f>"),
        ({"structural_tag": json.dumps(STRUCTURES)}, "no tag at all", "see <f=b>1</f>"),
        ({"structural_tag": FORMAT}, "hi you <f=a>what</f>", "hi you"),
        ({"structural_tag": FORMAT}, "hi <f=b>42.", "hi <f=b>4x."),
        ({"structural_tag": SEPARATED}, "<x>,<xx>", "<x><x>"),
    ],
)
def test_what_a_grammar_accepts(options: dict[str, Any], accepted: str, rejected: str) -> None:
    outputs = StructuredOutputs(**options)
    assert accepts(outputs, accepted)
    assert not accepts(outputs, rejected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": {"properties": {"a": {"not": {}}}}}, '"not" at #/properties/a'),
        ({"json": {"items": {"type": "string", "format": "odd"}}}, '"format" at #/items'),
        ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, '"oneOf" at #'),
        ({"json": {"$defs": {"b": {"uniqueItems": True}}, "$ref": "#/$defs/b"}}, "#/$defs/b"),
        ({"json": {"properties": {"a": {"$ref": "#/nowhere"}}}}, '"$ref" at #/properties/a'),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, '"pattern" at #'),
        ({"json": {"type": "text"}}, '"type" at #'),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[]"}, "must be an object"),
        ({"json": False}, "must be an object"),
        ({"json": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}}, "no output"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"regex": ""}, "empty"),
        ({"choice": []}, "at least one"),
        ({"choice": [""]}, "none of them empty"),
        ({"grammar": "what is this"}, "neither Lark nor GBNF"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"structural_tag": {}}, '"structures" and "triggers"'),
        ({"structural_tag": {"format": {"type": "odd"}}}, "'odd'"),
        ({"structural_tag": {**STRUCTURES, "triggers": ["<g="]}}, "'<g='"),
    ],
)
def test_what_cannot_be_enforced_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        compile_grammar(StructuredOutputs(**options), VOCABULARY, "response_format")
    assert message in str(error.value)
    assert error.value.field == "response_format"


OLD_DRAFT = "http://json-schema.org/draft-07/schema#"
NEW_DRAFT = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"format": "ipv6"}, "::ffff:192.168.0.1", "::ffff:192.168.0.256"),
        ({"format": "ipv6"}, "1:2:3:4:5:6:7::", "1:2:3:4:5:6:7:8::"),
        ({"format": "ipv6"}, "1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5:6:7:1.2.3.4"),
        ({"format": "email"}, '"a b"@example.com', "a b@example.com"),
        ({"format": "email"}, "a.b@[127.0.0.1]", "a..b@[127.0.0.1]"),
        ({"format": "email"}, "a@[IPv6:::1]", "a@[IPv6:1]"),
        ({"format": "hostname"}, "xn.x-n--a.xnn--a", "xn--a"),
        ({"format": "hostname"}, "a" * 63 + ".b", "a" * 64 + ".b"),
        ({"format": "hostname"}, "a." * 126 + "a", "a." * 127 + "a"),
        ({"format": "date", "pattern": "^20"}, "2024-02-29", "2023-02-29"),
        ({"format": "date", "pattern": "^20"}, "2023-02-28", "1923-02-28"),
        ({"pattern": r"^a\s\S[\s]$"}, "a b ", "a   "),
        ({"pattern": r"^\\s$"}, "\\s", " "),
    ],
)
def test_formats_and_escapes_are_exact(
    schema: dict[str, Any], accepted: str, rejected: str
) -> None:
    outputs = StructuredOutputs(json={"type": "string", **schema})
    assert accepts(outputs, json.dumps(accepted))
    assert not accepts(outputs, json.dumps(rejected))


def test_values_that_are_never_written_are_reported() -> None:
    schema = {"properties": {"a": {"type": "string", "format": "date-time"}, "b": {"type": "null"}}}
    _, warnings = compile_grammar(StructuredOutputs(json=schema), VOCABULARY, "response_format")
    assert warnings == (
        'never written: leap seconds in other time zones than UTC, by "format" at #/properties/a',
    )
    outputs = StructuredOutputs(json={"type": "string", "format": "time"})
    assert accepts(outputs, '"23:59:60Z"')
    assert not accepts(outputs, '"22:59:60Z"') and not accepts(outputs, '"22:59:60-01:00"')


def test_old_drafts_ignore_what_stands_beside_a_reference() -> None:
    schema = {"items": {"$ref": "#/definitions/n", "maximum": 5}, "type": "array"}
    schema["definitions"] = {"n": {"type": "integer"}}
    assert accepts(StructuredOutputs(json={"$schema": OLD_DRAFT, **schema}), "[7]")
    assert not accepts(StructuredOutputs(json={"$schema": NEW_DRAFT, **schema}), "[7]")


def test_a_tool_is_enforced_in_full_or_relaxed() -> None:
    properties = {"a": {"type": "string", "pattern": "("}, "b": {"type": ["null"]}, "c": 5}
    wrong = {"type": "object", "properties": properties, "required": ["a", 5]}
    with pytest.raises(InvalidRequest):
        prepare_tool_schema(wrong, True)
    relaxed, warnings = prepare_tool_schema(wrong, False)
    assert relaxed["properties"] == {"a": {"type": "string"}, "b": {}, "c": {}}
    assert relaxed["required"] == ["a"] and len(warnings) == 1
    look_ahead = {"properties": {"a": {"pattern": "(?=b)"}, "b": {"maxLength": 3}}}
    relaxed, warnings = prepare_tool_schema(look_ahead, False)
    assert relaxed == {"properties": {"a": {}, "b": {"maxLength": 3}}}
    assert '"pattern" at #/properties/a' in warnings[0]
    assert prepare_tool_schema(PERSON, True) == (PERSON, ())


def test_relaxed_keywords_are_reported() -> None:
    schema = {"properties": {"a": {"not": {}}, "b": {"type": "string", "format": "odd"}}}
    _, warnings = to_lark(StructuredOutputs(json=schema, strict=False))
    assert len(warnings) == 2
    assert '"not" at #/properties/a' in warnings[0]
    assert '"format" at #/properties/b' in warnings[1]
    assert to_lark(StructuredOutputs(json=PERSON))[1] == ()


@pytest.mark.parametrize("options", [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False}])
def test_exactly_one_constraint_must_be_given(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        StructuredOutputs(**options)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model(None))


def test_public_schemas_are_enforced_exactly_or_refused(tokenizer: Tokenizer) -> None:
    """Nothing invalid is accepted, and nothing valid is rejected without an error."""
    vocabulary = TokenVocabulary(tokenizer)
    outcomes = []
    for entry in SAMPLE:
        instances = [(test["data"], test["valid"]) for test in entry["tests"]]
        case = SchemaCase(entry["name"], entry["schema"], instances)
        outcome = check_case(case, vocabulary)
        assert outcome in OUTCOMES[:2], f"{outcome}: {case.name}"
        outcomes.append(outcome)
    assert outcomes.count("correct") >= 45


def nested_schema(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HOSTILE: dict[str, dict[str, Any]] = {
    "deep text": {"json": nested_schema(10_000)},
    "ten megabytes": {"json": json.dumps({"enum": ["x" * 100] * 100_000})},
    "many properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(9000)}}},
    "many choices": {"choice": [f"choice {i}" for i in range(50_000)]},
    "self reference": {"json": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}},
    "deep pattern": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "deep grammar": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "large multiple": {"json": {"type": "integer", "multipleOf": 1_000_003, "minimum": 3}},
}


@pytest.mark.slow
def test_hostile_grammars_are_refused_while_others_go_on(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        pool = TokenizerPool(tokenizer, processes=2)
        try:
            good = StructuredOutputs(json=PERSON)
            await pool.compile_grammar(good, "response_format")  # starts a worker
            for name, options in HOSTILE.items():
                hostile = asyncio.create_task(
                    pool.compile_grammar(StructuredOutputs(**options), "response_format")
                )
                compiled = await pool.compile_grammar(good, "response_format")
                assert compiled.grammar and not compiled.warnings
                with pytest.raises(InvalidRequest) as error:
                    await hostile
                assert error.value.field == "response_format", name
        finally:
            pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(a|b)*a(a|b){3000}"},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": r"(.*a.{400}b.*){50}"},
        {"json": {"type": "string", "maxLength": 10**8}},
        {"json": {"type": "array", "items": {}, "minItems": 1000, "maxItems": 10**8}},
    ],
)
def test_costly_patterns_have_quick_masks(options: dict[str, Any]) -> None:
    """llguidance builds automata lazily, so these take no more than other grammars."""
    start = time.process_time()
    compile_grammar(StructuredOutputs(**options), VOCABULARY, "response_format")
    assert time.process_time() - start < 1.0


def test_large_schemas_are_refused_before_they_are_parsed() -> None:
    text = '{"description": "' + "x" * MAX_GRAMMAR_BYTES + '"}'
    with pytest.raises(InvalidRequest, match="bytes"):
        to_lark(StructuredOutputs(json=text))

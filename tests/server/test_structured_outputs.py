"""Structured output in every API: the same constraint under each of its names.

The engine samples at random among the tokens that the real grammar allows, so a wrong or missing
mask shows as an answer that does not match. Streamed answers equal full ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bloomery.server.service import WARNING_HEADER, ServerSettings
from tests.server.conftest import HttpTestServer, start_server
from tests.server.playback import PlaybackEngine, load_tool_tokenizer
from tests.server.scripted_engine import InProcessEngine, load_test_tokenizer
from tests.server.sse import parse_events

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Describe a furnace."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bloomery", "cupola"]},
        "hot": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "hot", "name"],
    "additionalProperties": False,
}
PATTERN = "[a-c]{2}-[0-9]{3}"
CHOICES = ["iron", "slag"]
GBNF = 'root ::= "iron" | "slag"'


def check_json(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"kind", "hot", "name"}
    assert value["kind"] in ("bloomery", "cupola") and isinstance(value["hot"], bool)
    assert len(value["name"]) <= 6


def check_object(text: str) -> None:
    assert text.lstrip().startswith("{")  # it may be cut by max_tokens


def check_pattern(text: str) -> None:
    assert re.fullmatch(PATTERN, text)


def check_choice(text: str) -> None:
    assert text in CHOICES


OPENAI_SCHEMA = {"name": "furnace", "schema": SCHEMA, "strict": True}
# Each constraint as a client of some server writes it, and what its answer must be.
CONSTRAINTS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": OPENAI_SCHEMA}}, check_json),
    ({"response_format": {"type": "json_object"}}, check_object),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, check_json),
    ({"response_format": {"type": "json", "value": SCHEMA}}, check_json),
    ({"response_format": {"type": "json_schema", "value": OPENAI_SCHEMA}}, check_json),
    ({"response_format": {"type": "regex", "value": PATTERN}}, check_pattern),
    ({"structured_outputs": {"json": SCHEMA}}, check_json),
    ({"structured_outputs": {"regex": PATTERN}}, check_pattern),
    ({"structured_outputs": {"choice": CHOICES}}, check_choice),
    ({"structured_outputs": {"grammar": GBNF}}, check_choice),
    ({"structured_outputs": {"json_object": True}}, check_object),
    ({"guided_json": SCHEMA}, check_json),
    ({"guided_json": json.dumps(SCHEMA)}, check_json),
    ({"guided_regex": PATTERN, "guided_decoding_backend": "xgrammar"}, check_pattern),
    ({"guided_choice": CHOICES}, check_choice),
    ({"guided_grammar": GBNF}, check_choice),
    ({"json_schema": SCHEMA}, check_json),
    ({"regex": PATTERN}, check_pattern),
    ({"ebnf": GBNF}, check_choice),
    ({"grammar": GBNF}, check_choice),
    ({"grammar": {"type": "regex", "value": PATTERN}}, check_pattern),
]


@pytest.fixture(scope="module")
def grammar_server() -> Iterator[HttpTestServer]:
    tokenizer = load_test_tokenizer()
    with ExitStack() as exit_stack:
        engine = InProcessEngine(tokenizer)
        yield start_server(engine, tokenizer, ServerSettings(model="speaker"), exit_stack)


@pytest.mark.parametrize(("constraint", "check"), CONSTRAINTS)
def test_chats_match_and_streams_equal_them(
    grammar_server: HttpTestServer, constraint: dict[str, Any], check: Any
) -> None:
    for seed in (1, 2):
        body = {"messages": MESSAGES, "max_tokens": 200, "seed": seed, **constraint}
        response = grammar_server.post(CHAT, body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            check(text)
        events = parse_events(grammar_server.post(CHAT, {**body, "stream": True}).text)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text


@pytest.mark.parametrize(("constraint", "check"), CONSTRAINTS[::3])
def test_completions_match(
    grammar_server: HttpTestServer, constraint: dict[str, Any], check: Any
) -> None:
    body = {"prompt": ["The iron", "The slag"], "max_tokens": 200, "seed": 3, **constraint}
    response = grammar_server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    for choice in choices:
        if choice["finish_reason"] == "stop":
            check(choice["text"])
    texts = {0: "", 1: ""}
    events = parse_events(grammar_server.post("/v1/completions", {**body, "stream": True}).text)
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in choices]


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        ({"type": "json", "value": SCHEMA}, check_json),
        ({"type": "json_object", "value": SCHEMA}, check_json),
        ({"type": "json_schema", "value": {"name": "furnace", "schema": SCHEMA}}, check_json),
        ({"type": "regex", "value": PATTERN}, check_pattern),
    ],
)
def test_tgi_grammars_match(
    grammar_server: HttpTestServer, grammar: dict[str, Any], check: Any
) -> None:
    parameters = {"max_new_tokens": 200, "seed": 4, "details": True, "grammar": grammar}
    body = {"inputs": "A furnace:", "parameters": {**parameters, "do_sample": True}}
    full = grammar_server.post("/generate", body).json()
    assert full["details"]["finish_reason"] == "eos_token"
    check(full["generated_text"])
    events = parse_events(grammar_server.post("/generate_stream", body).text)
    assert events[-1]["generated_text"] == full["generated_text"]
    (instance,) = grammar_server.post("/vertex", {"instances": [body]}).json()["predictions"]
    assert instance == full["generated_text"]


def test_several_answers_follow_the_grammar_each(grammar_server: HttpTestServer) -> None:
    body = {"messages": MESSAGES, "n": 3, "guided_regex": PATTERN, "max_tokens": 50}
    choices = grammar_server.post(CHAT, body).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    for text in texts:
        check_pattern(text)
    assert len(set(texts)) > 1


def test_what_cannot_be_enforced_is_refused_or_reported(grammar_server: HttpTestServer) -> None:
    schema = {**SCHEMA, "not": {"required": ["colour"]}}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": MESSAGES, "max_tokens": 100, "response_format": response_format}
    for stream in (False, True):
        relaxed = grammar_server.post(CHAT, {**body, "stream": stream})
        assert relaxed.status_code == 200 and '"not"' in relaxed.headers[WARNING_HEADER]
    response_format["json_schema"]["strict"] = True  # type: ignore[index]
    refused = grammar_server.post(CHAT, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "response_format" and '"not"' in error["message"]
    tgi_grammar = {"type": "json", "value": schema}
    tgi_body = {"inputs": "A furnace:", "parameters": {"grammar": tgi_grammar}}
    refused = grammar_server.post("/generate", tgi_body)
    assert refused.status_code == 422 and '"not"' in refused.json()["error"]


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_regex": "(a"},
        {"guided_grammar": "start: ("},
        {"response_format": {"type": "json_object", "value": {"type": "strange"}}},
        {"structured_outputs": {"json": "{"}},
        {"structural_tag": {"type": "structural_tag"}},
    ],
)
def test_a_wrong_constraint_names_its_field(
    grammar_server: HttpTestServer, constraint: dict[str, Any]
) -> None:
    (field,) = constraint
    response = grammar_server.post(CHAT, {"messages": MESSAGES, **constraint})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(field)


def test_options_that_leave_no_token_are_the_clients_error(grammar_server: HttpTestServer) -> None:
    body = {"messages": MESSAGES, "guided_regex": "[0-9]+", "allowed_token_ids": [7]}
    response = grammar_server.post(CHAT, body)
    assert response.status_code == 400, response.text
    assert "no token is left" in response.json()["error"]["message"]


GRAMMAR_TEXT = re.compile(r"llguidance|start:|%json|x-guidance|\d+ \||\^|whitespace_pattern")


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"guided_regex": "("}, "the regular expression is not valid: unclosed group"),
        ({"response_format": {"type": "regex", "value": r"\bfoo"}}, "are not supported"),
        ({"guided_choice": [""]}, "none of them empty"),
        ({"guided_grammar": 'root ::= "a" b'}, "not valid GBNF: Rule 'b' not found"),
        ({"guided_grammar": 'start: a\na: "a" b'}, "line 2, column 4: unknown name"),
        ({"guided_json": {"properties": {"a": {"pattern": "("}}}}, '"pattern" at #/properties/a'),
        (
            {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {}}}}},
            '"not" at #',
        ),
        (
            {"structural_tag": {"format": {"type": "regex", "pattern": "[z-a]"}}},
            "the regular expression is not valid: invalid character class range",
        ),
    ],
)
def test_errors_speak_of_the_clients_own_text(
    grammar_server: HttpTestServer, constraint: dict[str, Any], message: str
) -> None:
    response = grammar_server.post(CHAT, {"messages": MESSAGES, **constraint})
    assert response.status_code == 400, response.text
    text = response.json()["error"]["message"]
    assert message in text and not GRAMMAR_TEXT.search(text), text


# ---- after reasoning -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking_server() -> Iterator[HttpTestServer]:
    """A model with reasoning and tools, whose answers are random within the grammar."""
    tokenizer = load_tool_tokenizer()
    with ExitStack() as exit_stack:
        engine = InProcessEngine(tokenizer, max_model_len=1024, num_blocks=1024)
        yield start_server(engine, tokenizer, ServerSettings(model="speaker"), exit_stack)


def test_structured_output_begins_after_the_reasoning() -> None:
    tokenizer = load_tool_tokenizer()
    answer = '{"kind": "cupola", "hot": true, "name": "a"}'
    thought = "<think>\nIt is {hot}.\n</think>\n\n"
    with ExitStack() as exit_stack:
        engine = PlaybackEngine(tokenizer, thought + answer, max_model_len=1024)
        settings = ServerSettings(model="speaker")
        server = start_server(engine, tokenizer, settings, exit_stack)
        body = {"messages": MESSAGES, "max_tokens": 200, "guided_json": SCHEMA}
        message = server.post(CHAT, body).json()["choices"][0]["message"]
        assert message["content"] == answer and message["reasoning_content"] == "It is {hot}."


@pytest.mark.parametrize("check_index", [0, 7, 8])
def test_a_budget_of_zero_leaves_only_the_constrained_answer(
    thinking_server: HttpTestServer, check_index: int
) -> None:
    constraint, check = CONSTRAINTS[check_index]
    body = {"messages": MESSAGES, "max_tokens": 300, "thinking_budget": 0, **constraint}
    for seed in (1, 2):
        (choice,) = thinking_server.post(CHAT, {**body, "seed": seed}).json()["choices"]
        assert "reasoning_content" not in choice["message"]
        if choice["finish_reason"] == "stop":
            check(choice["message"]["content"])


def test_reasoning_that_is_off_is_not_opened_again() -> None:
    """The prompt closes the region, and a small model would go on to open it."""
    tokenizer = load_tool_tokenizer()
    text = '<think>\nHm.\n</think>\n\n{"kind": "cupola", "hot": true, "name": "a"}'
    with ExitStack() as exit_stack:
        engine = PlaybackEngine(tokenizer, text, max_model_len=1024)
        settings = ServerSettings(model="speaker")
        server = start_server(engine, tokenizer, settings, exit_stack)
        body = {"messages": MESSAGES, "max_tokens": 200}
        output_config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        for path, options in (
            ("/v1/messages", {"output_config": output_config}),
            (CHAT, {"reasoning_effort": "none", "guided_json": SCHEMA}),
        ):
            assert server.post(path, {**body, **options}).status_code == 500, "it is forbidden"


def test_required_calls_are_valid(thinking_server: HttpTestServer) -> None:
    function = {"name": "heat", "parameters": SCHEMA, "strict": True}
    body = {
        "messages": MESSAGES,
        "max_tokens": 500,
        "thinking_budget": 0,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    num_complete = 0
    for seed in range(4):
        (choice,) = thinking_server.post(CHAT, {**body, "seed": seed}).json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "heat" and choice["message"]["content"] is None
        if choice["finish_reason"] == "tool_calls":
            check_json(call["function"]["arguments"])
            num_complete += 1
    assert num_complete


UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
WRONG = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
LOOK_AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)b"}}}
GOOD_TOOL = {"name": "good", "description": "Good.", "parameters": {"type": "object"}}


def tool_request(path: str, parameters: dict[str, Any], strict: bool) -> dict[str, Any]:
    """A request with two tools, as each API takes it. The second has the parameters."""
    tool = {"name": "heat", "description": "Heats.", "strict": strict}
    if path == "/v1/messages":
        tools = [{**tool, "name": "good", "input_schema": {"type": "object"}}]
        tools.append({**tool, "input_schema": parameters})
        return {"messages": MESSAGES, "max_tokens": 50, "tools": tools}
    if path == "/v1/responses":
        tools = [{"type": "function", **GOOD_TOOL}]
        tools.append({"type": "function", **tool, "parameters": parameters})
        return {"input": "Heat it.", "max_output_tokens": 50, "tools": tools}
    functions = [GOOD_TOOL, {**tool, "parameters": parameters}]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": MESSAGES, "max_tokens": 50, "tools": tools}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "tools[1].function.parameters"),
        ("/v1/messages", "tools[1].input_schema"),
        ("/v1/responses", "tools[1].parameters"),
    ],
)
@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [(UNSUPPORTED, '"not"'), (WRONG, '"pattern"'), (LOOK_AHEAD, '"pattern"')],
)
def test_a_tool_that_cannot_be_enforced_is_named(
    thinking_server: HttpTestServer,
    path: str,
    field: str,
    parameters: dict[str, Any],
    keyword: str,
) -> None:
    refused = thinking_server.post(path, tool_request(path, parameters, strict=True))
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    expected = f"{field}: the JSON schema cannot be enforced because of {keyword}"
    assert error["message"].startswith(expected + " at #/properties/a")
    assert error.get("param", field) == field
    assert not GRAMMAR_TEXT.search(error["message"]), error
    for _ in range(2):  # the second answer comes from the cache
        relaxed = thinking_server.post(path, tool_request(path, parameters, strict=False))
        assert relaxed.status_code == 200, relaxed.text
        warning = relaxed.headers[WARNING_HEADER]
        assert warning.startswith(f"{field}: not enforced: ") and keyword in warning
        assert not GRAMMAR_TEXT.search(warning), warning


def test_a_relaxed_tool_keeps_its_names_and_types(thinking_server: HttpTestServer) -> None:
    """The broken pattern is left out, and the call is still an object with its property."""
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "boolean"},
            "c": {"type": "string", "pattern": "("},
        },
        "required": ["a", "b"],
    }
    function = {"name": "heat", "parameters": parameters}
    body = {
        "messages": MESSAGES,
        "max_tokens": 200,
        "thinking_budget": 0,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    num_complete = 0
    for seed in range(6):
        (choice,) = thinking_server.post(CHAT, {**body, "seed": seed}).json()["choices"]
        if choice["finish_reason"] != "tool_calls":
            continue
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert isinstance(arguments["a"], int) and isinstance(arguments["b"], bool)
        num_complete += 1
    assert num_complete

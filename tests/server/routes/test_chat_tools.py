"""Tools and reasoning in chat completions, with answers that the test writes.

The law: a streamed answer and a full one are equal. It is checked for every text here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer, start_server
from tests.server.playback import TOOL_TEMPLATE, PlaybackEngine, load_tool_tokenizer
from tests.server.sse import parse_events

CHAT = "/v1/chat/completions"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
PARIS_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nThe user asks for the weather.\n</think>\n\n"


@pytest.fixture(scope="module")
def tool_server() -> Iterator[HttpTestServer]:
    tokenizer = load_tool_tokenizer()
    engine = PlaybackEngine(tokenizer, max_model_len=2048, num_blocks=2048)
    with ExitStack() as exit_stack:
        yield start_server(engine, tokenizer, ServerSettings(model="speaker"), exit_stack)


def ask(server: HttpTestServer, answer: str, **body: Any) -> dict[str, Any]:
    """The choice of a full response, which must equal the streamed one."""
    server.backend.set_answer(answer)
    request = {"messages": MESSAGES, "max_tokens": 400, **body}
    response = server.post(CHAT, request)
    assert response.status_code == 200, response.text
    full = response.json()
    (choice,) = full["choices"]
    options = {"include_usage": True}
    streamed = server.post(CHAT, {**request, "stream": True, "stream_options": options})
    *chunks, usage, done = parse_events(streamed.text)
    assert done == "[DONE]"
    message, finish_reason = join_chunks(chunks)
    assert without_ids(message) == without_ids(choice["message"])
    assert finish_reason == choice["finish_reason"]
    counts = ("completion_tokens", "completion_tokens_details")
    assert [usage["usage"].get(name) for name in counts] == [
        full["usage"].get(name) for name in counts
    ]
    return {**choice, "usage": full["usage"]}


def join_chunks(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message that a client assembles of chunks, and the finish reason."""
    message: dict[str, Any] = {}
    finish_reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        finish_reason = choice["finish_reason"] or finish_reason
        delta = choice["delta"]
        for name in ("role", "refusal"):
            if name in delta:
                message[name] = delta[name]
        for name in ("content", "reasoning_content"):
            if name in delta:
                old = message.get(name)
                message[name] = delta[name] if old is None else old + delta[name]
        if "function_call" in delta:
            call = message.setdefault("function_call", {"name": "", "arguments": ""})
            call["name"] += delta["function_call"].get("name", "")
            call["arguments"] += delta["function_call"]["arguments"]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                assert part["type"] == "function" and part["id"]
                assert part["function"]["name"] and part["function"]["arguments"] == ""
                calls.append({name: part[name] for name in ("id", "type", "function")})
            else:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message, finish_reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


# ---- answers -------------------------------------------------------------------------------


def test_a_call_has_null_content_and_its_own_finish_reason(tool_server: HttpTestServer) -> None:
    choice = ask(tool_server, PARIS_CALL, tools=[WEATHER, CLOCK])
    message = choice["message"]
    assert message["content"] is None and choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_content_and_parallel_calls(tool_server: HttpTestServer) -> None:
    answer = f"Let me look.\n{PARIS_CALL}\n{CLOCK_CALL}"
    message = ask(tool_server, answer, tools=[WEATHER, CLOCK])["message"]
    assert message["content"] == "Let me look."
    names = [call["function"]["name"] for call in message["tool_calls"]]
    assert names == ["get_weather", "clock"]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first != second


def test_text_without_a_call_stays_text(tool_server: HttpTestServer) -> None:
    choice = ask(tool_server, "It is 20 degrees.", tools=[WEATHER])
    assert choice["message"]["content"] == "It is 20 degrees."
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_a_cut_call_ends_with_length(tool_server: HttpTestServer) -> None:
    choice = ask(tool_server, PARIS_CALL, tools=[WEATHER], max_tokens=30)
    assert choice["finish_reason"] == "length"


def test_without_tools_a_call_is_text(tool_server: HttpTestServer) -> None:
    message = ask(tool_server, PARIS_CALL)["message"]
    assert message["content"] == PARIS_CALL and "tool_calls" not in message


def test_legacy_functions(tool_server: HttpTestServer) -> None:
    choice = ask(tool_server, PARIS_CALL, functions=[WEATHER["function"]])
    assert choice["finish_reason"] == "function_call"
    call = choice["message"]["function_call"]
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Paris"}
    assert "tool_calls" not in choice["message"]


def test_reasoning_is_kept_apart_and_counted(tool_server: HttpTestServer) -> None:
    choice = ask(tool_server, f"{THOUGHT}It is 20 degrees.")
    message = choice["message"]
    assert message["reasoning_content"] == "The user asks for the weather."
    assert message["content"] == "It is 20 degrees."
    num_reasoning = choice["usage"]["completion_tokens_details"]["reasoning_tokens"]
    tokenizer = tool_server.backend.tokenizer
    # The test tokenizer writes a marker in several tokens, which are known as one at its end.
    inner = THOUGHT.strip().removeprefix("<think>")
    least, most = (len(tokenizer.encode(text, add_special=False)) for text in (inner, THOUGHT))
    assert least <= num_reasoning <= most


def test_reasoning_before_a_call(tool_server: HttpTestServer) -> None:
    message = ask(tool_server, f"{THOUGHT}{PARIS_CALL}", tools=[WEATHER])["message"]
    assert message["reasoning_content"] == "The user asks for the weather."
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_reasoning_can_be_left_out(tool_server: HttpTestServer) -> None:
    message = ask(tool_server, f"{THOUGHT}20 degrees.", include_reasoning=False)["message"]
    assert "reasoning_content" not in message and message["content"] == "20 degrees."


def test_several_answers_are_parsed_each(tool_server: HttpTestServer) -> None:
    tool_server.backend.set_answer(PARIS_CALL)
    body = {"messages": MESSAGES, "tools": [WEATHER], "n": 2, "max_tokens": 200}
    choices = tool_server.post(CHAT, body).json()["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 2


def test_logprobs_cover_each_token_once(tool_server: HttpTestServer) -> None:
    tool_server.backend.set_answer(f"{THOUGHT}Warm.\n{PARIS_CALL}")
    body = {"messages": MESSAGES, "tools": [WEATHER], "logprobs": True, "max_tokens": 400}
    full = tool_server.post(CHAT, body).json()
    *chunks, _ = parse_events(tool_server.post(CHAT, {**body, "stream": True}).text)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [entry for value in logprobs if value is not None for entry in value["content"]]
    assert streamed == full["choices"][0]["logprobs"]["content"]
    assert len(streamed) == full["usage"]["completion_tokens"]


# ---- prompts -------------------------------------------------------------------------------


def test_tools_and_their_results_are_in_the_prompt(tool_server: HttpTestServer) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
    ]
    ask(tool_server, "It is 20 degrees.", messages=messages, tools=[WEATHER])
    prompt = tool_server.backend.last_prompt
    assert '"name": "get_weather", "description": "The weather of a city"' in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<tool_response>\n20 degrees\n</tool_response>" in prompt
    legacy = [
        *MESSAGES,
        {"role": "assistant", "function_call": call["function"]},
        {"role": "function", "name": "get_weather", "content": "20 degrees"},
    ]
    ask(tool_server, "It is 20.", messages=legacy, functions=[WEATHER["function"]])
    assert tool_server.backend.last_prompt == prompt


def test_tokenizing_a_chat_counts_its_tools(tool_server: HttpTestServer) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER]}
    count = tool_server.post("/tokenize", body).json()["count"]
    tool_server.backend.set_answer("Warm.")
    usage = tool_server.post(CHAT, {**body, "max_tokens": 2}).json()["usage"]
    assert usage["prompt_tokens"] == count


def test_thinking_is_switched_off_by_each_name(tool_server: HttpTestServer) -> None:
    for option in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
    ):
        message = ask(tool_server, "20 degrees.", **option)["message"]
        assert message["content"] == "20 degrees."
        assert tool_server.backend.last_prompt.endswith("<think>\n\n</think>\n\n"), option
    ask(tool_server, "20 degrees.", reasoning_effort="high")
    assert tool_server.backend.last_prompt.endswith("<|im_start|>assistant\n")


# ---- constraints that reach the engine -----------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"tools": [WEATHER], "tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"thinking_budget": 8},
        {"thinking_token_budget": 8},
        {"reasoning": {"max_tokens": 8}},
        {"reasoning_effort": "low"},
    ],
)
def test_a_constraint_becomes_a_grammar(tool_server: HttpTestServer, body: dict[str, Any]) -> None:
    if "tools" in body:
        body["tools"] = [WEATHER, CLOCK]
    tool_server.backend.set_answer('{"a": 1}' if "response_format" in body else PARIS_CALL)
    response = tool_server.post(CHAT, {"messages": MESSAGES, "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    assert tool_server.backend.received[-1].grammar


def test_plain_answers_have_no_grammar(tool_server: HttpTestServer) -> None:
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "none"}):
        ask(tool_server, "20 degrees.", **body)
        assert tool_server.backend.received[-1].grammar == ""


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "tools"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [WEATHER], "tool_choice": "shout"}, "tool_choice", "shout"),
        ({"tools": [WEATHER], "tool_choice": {"a": 1}}, "tool_choice", "must be"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "schema",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools", "get_weather"),
        ({"tools": [WEATHER], "functions": [{"name": "a"}]}, "functions", "only one"),
        ({"functions": [{"name": "a"}], "function_call": 3}, "function_call", "must be"),
        ({"reasoning_effort": "immense"}, "reasoning_effort", "high"),
        ({"thinking_budget": -1}, "thinking_budget", "at least 0"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a+"},
            "guided_regex",
            "response_format and guided_regex",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
            "schema",
        ),
        ({"guided_choice": []}, "guided_choice", "list"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "yaml"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "only one"),
    ],
)
def test_wrong_requests_name_their_field(
    tool_server: HttpTestServer, body: dict[str, Any], field: str, text: str
) -> None:
    response = tool_server.post(CHAT, {"messages": MESSAGES, "max_tokens": 4, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field and text in error["message"], error


def test_wrong_messages_name_their_field(tool_server: HttpTestServer) -> None:
    for message, field in (
        ({"role": "tool", "tool_call_id": "a"}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 3}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
    ):
        response = tool_server.post(CHAT, {"messages": [*MESSAGES, message]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


def test_a_model_without_tools_says_why(server: HttpTestServer) -> None:
    response = server.post(CHAT, {"messages": MESSAGES, "tools": [WEATHER]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools" and "no tool calls" in error["message"]


def test_an_unfinished_call_in_the_history_is_no_error(tool_server: HttpTestServer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"a": '}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "failed", "tool_call_id": "a"},
    ]
    ask(tool_server, "Sorry.", messages=messages, tools=[CLOCK])


def test_a_strict_tool_is_refused_if_its_schema_cannot_be_enforced(
    tool_server: HttpTestServer,
) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    function = {"name": "f", "parameters": parameters}
    tool_server.backend.set_answer("Warm.")
    body = {"messages": MESSAGES, "max_tokens": 20, "tools": [{"function": function}]}
    relaxed = tool_server.post(CHAT, body)
    assert relaxed.status_code == 200, relaxed.text
    function["strict"] = True
    refused = tool_server.post(CHAT, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "tools[0].function.parameters" and "not" in error["message"], error


def test_an_effort_goes_to_a_template_with_levels() -> None:
    levels = "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}"
    tokenizer = load_tool_tokenizer(levels + TOOL_TEMPLATE)
    with ExitStack() as exit_stack:
        engine = PlaybackEngine(tokenizer, "20 degrees.")
        server = start_server(engine, tokenizer, ServerSettings(model="speaker"), exit_stack)
        for effort, level in (("high", "high"), ("minimal", "low")):
            ask(server, "20 degrees.", reasoning_effort=effort)
            assert engine.last_prompt.startswith(f"Effort: {level}\n")
            assert engine.received[-1].grammar == "", "a level needs no budget"

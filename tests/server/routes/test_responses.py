"""/v1/responses: items, tools, reasoning, structured output, stored and background responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bloomery.server.answer_blocks import AnswerBlock
from bloomery.server.routes.response_items import CustomInputStream, read_input_items, to_messages
from bloomery.server.service import WARNING_HEADER
from tests.server.conftest import HttpTestServer
from tests.server.playing_engine import start_playing_server
from tests.server.sse import parse_events
from tests.waiting import wait_until

ROUTE = "/v1/responses"
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path"],
    },
}
THOUGHT = "<think>\nThe file will say it.\n</think>\n\n"
LOOK_CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"path": "é.txt", "lines": 3}}\n</tool_call>'
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def play(prompt: str) -> str:
    """Call a tool, answer its result, write JSON, or call two tools."""
    last_turn = prompt.rsplit("<|im_start|>user", 1)[1]
    if "<tool_response>" in last_turn:
        return "It says iron."
    if "both" in last_turn:
        return LOOK_CALL + LOOK_CALL
    if "person" in last_turn:
        return '{"name": "Tubal", "age": 3}'
    if "patch" in last_turn:
        arguments = json.dumps({"input": 'a "line"\nand é 🔥'}, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
    if "agent" in last_turn:
        arguments = '{"target": "a"}'
        return f'<tool_call>\n{{"name": "team__close", "arguments": {arguments}}}\n</tool_call>'
    if "plain" in last_turn:
        return "Iron comes from ore."
    return f"{THOUGHT}Let me look.\n{LOOK_CALL}"


@pytest.fixture(scope="module")
def player() -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        yield start_playing_server(play, exit_stack)


def create(server: HttpTestServer, **body: Any) -> dict[str, Any]:
    response = server.post(ROUTE, body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def stream(server: HttpTestServer, **body: Any) -> tuple[list[Any], dict[str, Any]]:
    """The events, and the response that they describe, rebuilt from the deltas alone."""
    response = server.post(ROUTE, {**body, "stream": True})
    assert response.status_code == 200, response.text
    events = parse_events(response.text)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    items: dict[int, dict[str, Any]] = {}
    for name, event in events:
        assert name == event["type"]
        match name.removeprefix("response."):
            case "output_item.added":
                items[event["output_index"]] = dict(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"] = [dict(event["part"])]
            case "output_text.delta" | "reasoning_text.delta":
                items[event["output_index"]]["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "output_item.done":
                rebuilt = {**items[event["output_index"]], "status": event["item"]["status"]}
                assert rebuilt == event["item"], "the deltas add up to the item"
    last = events[-1][1]["response"]
    assert [{**item, "status": "completed"} for item in items.values()] == last["output"]
    return events, last


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


@pytest.mark.parametrize("question", ["look", "both", "plain", "person", "patch", "agent"])
def test_streamed_and_whole_answers_are_equal(player: HttpTestServer, question: str) -> None:
    tools = [
        LOOK,
        {"type": "custom", "name": "patch", "description": "Apply a patch."},
        {
            "type": "namespace",
            "name": "team",
            "tools": [{**LOOK, "name": "close", "parameters": {"type": "object"}}],
        },
    ]
    body: dict[str, Any] = {"input": question, "tools": tools}
    if question == "person":
        body = {
            "input": question,
            "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}},
        }
    full = create(player, **body)
    _, streamed = stream(player, **body)
    assert without_ids(full["output"]) == without_ids(streamed["output"])
    usage = [full["usage"], streamed["usage"]]
    assert usage[0]["output_tokens"] == usage[1]["output_tokens"] > 0


def test_reasoning_text_and_a_call_are_items_in_order(player: HttpTestServer) -> None:
    response = create(player, input="look", tools=[LOOK])
    reasoning, message, call = response["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "The file will say it."}]
    assert reasoning["encrypted_content"] is None and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Let me look."
    assert call["type"] == "function_call" and call["name"] == "look"
    assert json.loads(call["arguments"]) == {"path": "é.txt", "lines": 3}
    assert call["call_id"].startswith("call_") and call["status"] == "completed"
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < 30
    assert response["tools"] == [LOOK] and response["status"] == "completed"


def test_custom_tools_take_free_text(player: HttpTestServer) -> None:
    tools = [{"type": "custom", "name": "patch", "description": "Apply a patch."}]
    (call,) = create(player, input="patch", tools=tools)["output"]
    assert call["type"] == "custom_tool_call" and call["input"] == 'a "line"\nand é 🔥'
    events, _ = stream(player, input="patch", tools=tools)
    names = [name for name, _ in events]
    assert names.count("response.custom_tool_call_input.delta") > 3
    assert "response.custom_tool_call_input.done" in names


def test_the_grammar_of_a_custom_tool_is_enforced(player: HttpTestServer) -> None:
    def tool(lark: str) -> list[dict[str, Any]]:
        text_format = {"type": "grammar", "syntax": "lark", "definition": lark}
        return [{"type": "custom", "name": "patch", "format": text_format}]

    lines = 'start: "a " /.*/ "\\n" /.*/\n'
    (call,) = create(player, input="patch", tools=tool(lines))["output"]
    assert call["input"] == 'a "line"\nand é 🔥'
    other = player.post(ROUTE, {"input": "patch", "tools": tool('start: "x"')})
    assert other.status_code == 500
    recursive = tool('start: "(" start ")" | "x"')
    described = player.post(ROUTE, {"input": "patch", "tools": recursive})
    assert described.status_code == 200
    assert "the grammar is not enforced" in described.headers["x-bloomery-warning"]


def test_a_namespace_comes_back_with_its_call(player: HttpTestServer) -> None:
    close = {**LOOK, "name": "close", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "team", "tools": [close]}]
    (call,) = create(player, input="agent", tools=tools)["output"]
    assert (call["namespace"], call["name"]) == ("team", "close")
    assert '"team__close"' in player.backend.executor.prompts[-1]


def test_a_call_and_its_output_continue_by_items_and_by_id(player: HttpTestServer) -> None:
    first = create(player, input="look", tools=[LOOK])
    call = first["output"][2]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "iron"}
    by_id = create(player, input=[output], tools=[LOOK], previous_response_id=first["id"])
    prompt = player.backend.executor.prompts[-1]
    question = {"role": "user", "content": "look"}
    by_items = create(player, input=[question, *first["output"], output], tools=[LOOK])
    assert player.backend.executor.prompts[-1] == prompt
    assert "<think>\nThe file will say it.\n</think>" in prompt and '"path": "é.txt"' in prompt
    for response in (by_id, by_items):
        assert response["output"][0]["content"][0]["text"] == "It says iron."
    assert by_id["usage"]["input_tokens_details"]["cached_tokens"] > 100


def test_tools_that_openai_runs_are_ignored_with_a_warning(player: HttpTestServer) -> None:
    body = {"input": "plain", "tools": [{"type": "web_search"}, LOOK]}
    response = player.post(ROUTE, body)
    assert "web_search" in response.headers[WARNING_HEADER]
    assert '"web_search"' not in player.backend.executor.prompts[-1]
    streamed = player.post(ROUTE, {**body, "stream": True})
    assert "web_search" in streamed.headers[WARNING_HEADER]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tools": ["look"]}, "tools[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True, "store": False}, "store"),
        ({"input": None}, "input"),
        ({"input": [{"type": "poem"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
    ],
)
def test_bad_fields_are_named(player: HttpTestServer, body: dict[str, Any], param: str) -> None:
    response = player.post(ROUTE, {"input": "plain", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param is None or error["param"] == param
    assert create(player, input="plain")["status"] == "completed", "the server goes on"


def test_a_choice_reaches_the_grammar(player: HttpTestServer) -> None:
    choices: list[Any] = [
        "required",
        {"type": "allowed_tools", "mode": "required", "tools": [LOOK]},
    ]
    for choice in choices:
        create(player, input="both", tools=[LOOK], tool_choice=choice)
        assert player.backend.received[-1].grammar
    create(player, input="plain", tools=[LOOK], tool_choice="none")
    assert not player.backend.received[-1].grammar


def test_a_cut_answer_and_its_items_are_incomplete(player: HttpTestServer) -> None:
    response = create(player, input="both", tools=[LOOK], max_output_tokens=20)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    message = create(player, input="plain", max_output_tokens=2)["output"][0]
    assert message["status"] == "incomplete"


def test_logprobs_come_through_include(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    body: dict[str, Any] = {
        "input": "What is slag?",
        "temperature": 0,
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    entries = create(server, **body)["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 5 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = parse_events(server.post(ROUTE, {**body, "stream": True}).text)
    deltas = [event for name, event in events if name == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event["logprobs"]]
    assert streamed == entries[: len(streamed)] and len(streamed) >= 4


def test_stored_responses_are_read_listed_and_deleted(player: HttpTestServer) -> None:
    items = [{"role": "user", "content": f"plain {number}"} for number in range(3)]
    created = create(player, input=items)
    path = f"{ROUTE}/{created['id']}"
    assert player.get(path).json() == created
    listed = player.get(f"{path}/input_items?limit=2").json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["plain 2", "plain 1"] and listed["has_more"]
    rest = player.get(f"{path}/input_items?after={listed['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["plain 0"]
    assert not rest["has_more"]
    assert player.get(f"{path}/input_items?order=asc&limit=1").json()["data"][0] == rest["data"][0]
    for query in ("limit=x", "order=up", "after=item_no"):
        assert player.get(f"{path}/input_items?{query}").status_code == 400
    assert player.get(f"{path}?stream=true").status_code == 400
    assert player.post(f"{path}/cancel", None).status_code == 400
    assert player.client.delete(path).json()["deleted"] is True
    for response in (player.get(path), player.client.delete(path)):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"


def test_input_tokens_are_those_of_the_response(player: HttpTestServer) -> None:
    body = {"input": "plain", "tools": [LOOK], "instructions": "Be brief."}
    counted = player.post(f"{ROUTE}/input_tokens", body).json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == create(player, **body)["usage"]["input_tokens"]


def test_a_background_response_is_polled_and_its_stream_resumed(player: HttpTestServer) -> None:
    created = create(player, input="plain", background=True)
    path = f"{ROUTE}/{created['id']}"
    assert created["status"] == "queued" and created["background"] is True
    assert wait_until(lambda: player.get(path).json()["status"] == "completed")
    assert player.get(path).json()["output"][0]["content"][0]["text"] == "Iron comes from ore."
    events = parse_events(player.get(f"{path}?stream=true").text)
    names = [name for name, _ in events]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert names[-1] == "response.completed"
    resumed = parse_events(player.get(f"{path}?stream=true&starting_after=4").text)
    assert resumed == events[5:]
    continued = create(player, input="plain", previous_response_id=created["id"])
    assert continued["status"] == "completed"


def test_a_background_response_is_cancelled(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(step_seconds=0.02)
    created = create(server, input="hi", background=True, max_output_tokens=400)
    path = f"{ROUTE}/{created['id']}"
    assert wait_until(lambda: server.get(path).json()["status"] == "in_progress")
    busy = server.post(ROUTE, {"input": "hi", "previous_response_id": created["id"]})
    assert busy.status_code == 400
    cancelled = server.post(f"{path}/cancel", None).json()
    assert cancelled["status"] == "cancelled" == server.get(path).json()["status"]
    assert wait_until(lambda: server.backend.is_idle), "the engine's request was aborted"
    assert server.post(f"{path}/cancel", None).json()["status"] == "cancelled"


def test_a_deleted_background_response_stops(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(step_seconds=0.02)
    created = create(server, input="hi", background=True, max_output_tokens=400)
    assert wait_until(lambda: not server.backend.is_idle)
    server.client.delete(f"{ROUTE}/{created['id']}")
    assert wait_until(lambda: server.backend.is_idle)


def test_a_background_response_that_fails_says_so(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    server.backend.poison_token = 1  # in every prompt that a template made
    created = create(server, input="The iron", background=True)
    path = f"{ROUTE}/{created['id']}"
    assert wait_until(lambda: server.get(path).json()["status"] == "failed")
    error = server.get(path).json()["error"]
    assert error["code"] == "generation_failed" and "0xdeadbeef" not in error["message"]
    assert wait_until(lambda: server.backend.is_idle)


def test_items_of_one_turn_become_one_message() -> None:
    items = read_input_items(
        [
            {"role": "user", "content": "Go."},
            {"type": "reasoning", "summary": [], "content": [{"text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": "I look."},
            {"type": "function_call", "name": "look", "call_id": "1", "arguments": "{}"},
            {"type": "web_search_call", "status": "completed"},
            {"type": "custom_tool_call", "name": "patch", "call_id": "2", "input": "x"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_text", "text": "iron"}],
            },
            {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
            {"role": "assistant", "content": "Done."},
            {"role": "assistant", "content": "Really."},
        ]
    )
    messages = to_messages(items)
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    turn = messages[1]
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.", "I look.")
    names = [call["function"]["name"] for call in turn["tool_calls"]]
    assert names == ["look", "patch"]
    assert turn["tool_calls"][1]["function"]["arguments"] == '{"input": "x"}'
    assert messages[2]["content"] == "iron"


def test_custom_input_is_read_at_every_cut() -> None:
    text = 'a "quoted"\n\\line\té 🔥\u2028 end'
    for is_ascii in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
        for size in range(1, len(arguments) + 1):
            reader = CustomInputStream()
            parts = [arguments[i : i + size] for i in range(0, len(arguments), size)]
            assert "".join(map(reader.feed, parts)) == text


def test_arguments_of_a_cut_call_are_empty() -> None:
    assert AnswerBlock("call", 0, text='{"a": 1}').arguments == {"a": 1}
    assert AnswerBlock("call", 0, text='{"a": ').arguments == {}
    assert AnswerBlock("call", 0).arguments == {}

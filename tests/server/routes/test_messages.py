"""/v1/messages: tools, thinking, structured output and the prompts of Claude Code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bloomery.server.limits import ServerLimits
from bloomery.server.routes.message_blocks import (
    fold_system_messages,
    has_cache_control,
    read_message,
    read_system,
)
from bloomery.server.service import WARNING_HEADER, ServerSettings
from tests.server.conftest import HttpTestServer
from tests.server.playing_engine import start_playing_server
from tests.server.sse import parse_events

ROUTE = "/v1/messages"
LOOK = {
    "name": "look",
    "description": "Look at a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
LOOK_CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "é.txt"}}\n</tool_call>'
ADAPTIVE = {"thinking": {"type": "adaptive"}}


def play(prompt: str) -> str:
    last_turn = prompt.rsplit("<|im_start|>user", 1)[1]
    thought = "" if prompt.endswith("</think>\n\n") else "<think>\nThe file says it.\n</think>\n\n"
    if "<tool_response>" in last_turn:
        return "It says iron."
    if "json" in last_turn:
        return f'{thought}{{"name": "Tubal"}}'
    if "two" in last_turn:
        return LOOK_CALL + LOOK_CALL
    if "plain" in last_turn:
        return "Iron comes from ore."
    return f"{thought}Let me look.\n{LOOK_CALL}"


@pytest.fixture(scope="module")
def player() -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        yield start_playing_server(play, exit_stack)


def ask(text: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 300, **body}


def create(server: HttpTestServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(ROUTE, body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def stream(server: HttpTestServer, body: dict[str, Any]) -> dict[str, Any]:
    """The message that the events describe, built as Anthropic's client does it."""
    response = server.post(ROUTE, {**body, "stream": True})
    assert response.status_code == 200, response.text
    events = parse_events(response.text)
    message: dict[str, Any] = dict(events[0][1]["message"])
    inputs: dict[int, str] = {}
    open_blocks: set[int] = set()
    for name, event in events[1:]:
        assert name == event["type"]
        match name:
            case "content_block_start":
                assert event["index"] == len(message["content"]) and not open_blocks
                message["content"].append(event["content_block"])
                open_blocks.add(event["index"])
            case "content_block_delta":
                assert event["index"] in open_blocks
                block = message["content"][event["index"]]
                delta = event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        text = inputs.get(event["index"], "") + delta["partial_json"]
                        inputs[event["index"]] = text
            case "content_block_stop":
                open_blocks.remove(event["index"])
                if event["index"] in inputs:
                    content = json.loads(inputs[event["index"]])
                    message["content"][event["index"]]["input"] = content
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    assert events[-1][0] == "message_stop" and not open_blocks
    return message


def without_ids(message: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = message["content"]
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize("question", ["look", "two", "plain", "json"])
@pytest.mark.parametrize("thinking", [{}, ADAPTIVE])
def test_streamed_and_whole_answers_are_equal(
    player: HttpTestServer, question: str, thinking: dict[str, Any]
) -> None:
    body = ask(question, tools=[LOOK], **thinking)
    if question == "json":
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        body = ask(question, **thinking)
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    full = create(player, body)
    streamed = stream(player, body)
    assert without_ids(full) == without_ids(streamed)
    assert full["stop_reason"] == streamed["stop_reason"]
    assert full["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] > 0


def test_thinking_text_and_a_call_are_blocks_in_order(player: HttpTestServer) -> None:
    message = create(player, ask("look", tools=[LOOK], **ADAPTIVE))
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "The file says it.")
    assert thinking["signature"]
    assert (text["type"], text["text"]) == ("text", "Let me look.")
    assert (call["type"], call["name"]) == ("tool_use", "look")
    assert call["input"] == {"path": "é.txt"}
    assert message["stop_reason"] == "tool_use"


def test_thinking_is_off_unless_it_is_asked_for(player: HttpTestServer) -> None:
    for body in (
        ask("look", tools=[LOOK]),
        ask("look", tools=[LOOK], thinking={"type": "disabled"}),
    ):
        types = [block["type"] for block in create(player, body)["content"]]
        assert types == ["text", "tool_use"]
    omitted = ask("look", tools=[LOOK], thinking={"type": "adaptive", "display": "omitted"})
    for message in (create(player, omitted), stream(player, omitted)):
        assert message["content"][0]["thinking"] == ""
        assert message["content"][0]["signature"]


def test_a_budget_is_part_of_the_grammar(player: HttpTestServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    player.post(ROUTE, ask("look", tools=[LOOK], thinking=thinking))
    assert "max_tokens=1024" in player.backend.received[-1].grammar.replace(" ", "")


def test_a_tool_result_is_answered(player: HttpTestServer) -> None:
    first = create(player, ask("look", tools=[LOOK], **ADAPTIVE))
    call = first["content"][2]
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "iron"}, {"type": "text", "text": "slag"}],
    }
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    body = ask("look", tools=[LOOK], **ADAPTIVE)
    body["messages"] += [
        {"role": "assistant", "content": [redacted, *first["content"]]},
        {"role": "user", "content": [result]},
    ]
    answer = create(player, body)
    assert answer["content"] == [{"type": "text", "text": "It says iron."}]
    assert answer["stop_reason"] == "end_turn"
    prompt = player.backend.executor.prompts[-1]
    assert "<tool_response>\niron\nslag\n</tool_response>" in prompt
    assert "<think>\nThe file says it.\n</think>" in prompt and '"path": "é.txt"' in prompt
    assert answer["usage"]["cache_read_input_tokens"] > 100


def test_tool_choices_are_enforced(player: HttpTestServer) -> None:
    two = create(player, ask("two", tools=[LOOK], tool_choice={"type": "any"}))
    assert [block["type"] for block in two["content"]] == ["tool_use", "tool_use"]
    single = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (single, {"type": "tool", "name": "look"}):
        answer = player.post(ROUTE, ask("two", tools=[LOOK], tool_choice=choice))
        grammar = player.backend.received[-1].grammar
        assert grammar and answer.status_code == 500, "the second call breaks the grammar"
    create(player, ask("plain", tools=[LOOK], tool_choice={"type": "none"}))
    assert not player.backend.received[-1].grammar


def test_counting_includes_tools(player: HttpTestServer) -> None:
    body = ask("plain", tools=[LOOK])
    usage = create(player, body)["usage"]
    del body["max_tokens"]
    counted = player.post(f"{ROUTE}/count_tokens", body).json()["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    del body["tools"]
    assert player.post(f"{ROUTE}/count_tokens", body).json()["input_tokens"] < counted


def test_tools_of_anthropic_are_ignored_with_a_warning(player: HttpTestServer) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    response = player.post(ROUTE, ask("plain", tools=[search, LOOK]))
    assert "web_search_20250305" in response.headers[WARNING_HEADER]
    assert '"web_search"' not in player.backend.executor.prompts[-1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "content[0].tool_use_id",
        ),
    ],
)
def test_bad_fields_are_named(player: HttpTestServer, body: dict[str, Any], field: str) -> None:
    response = player.post(ROUTE, {**ask("plain"), **body})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


def test_the_billing_header_does_not_defeat_the_prefix_cache(player: HttpTestServer) -> None:
    usages = []
    for version in ("1.2.3", "1.2.4"):
        header = f"x-anthropic-billing-header: cc_version={version}; cch=ab{version};"
        system = [
            {"type": "text", "text": header},
            {"type": "text", "text": "Forge " * 40, "cache_control": {"type": "ephemeral"}},
        ]
        usages.append(create(player, ask("plain", system=system))["usage"])
        assert "billing" not in player.backend.executor.prompts[-1]
    first, second = usages
    assert first["cache_creation_input_tokens"] > 200 and first["cache_read_input_tokens"] < 20
    assert second["cache_read_input_tokens"] > 200 and second["cache_creation_input_tokens"] == 0
    for usage in usages:
        total = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        assert total + usage["cache_read_input_tokens"] > 200
    text = "x-anthropic-billing-header: cch=1;\nForge."
    assert read_system(text) == "Forge." and read_system("Forge.") == "Forge."


def test_pings_are_sent_while_the_stream_is_silent(serve: Callable[..., HttpTestServer]) -> None:
    limits = ServerLimits(keepalive_seconds=0.05)
    server = serve(ServerSettings(model="speaker", limits=limits), step_seconds=0.2)
    body = {**ask("hi"), "max_tokens": 3, "stream": True}
    events = parse_events(server.post(ROUTE, body).text)
    assert [name for name, _ in events].count("ping") > 3
    assert events[-1][0] == "message_stop"


def test_a_late_system_message_reaches_templates_that_refuse_it() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('system must be first') }}{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    late = {"role": "system", "content": "Be brief."}
    with ExitStack() as exit_stack:
        server = start_playing_server(play, exit_stack, template=template)
        body = ask("plain", system="You forge.")
        body["messages"].append(late)
        create(server, body)
        assert "user\nplain\n\nBe brief.<|im_end|>" in server.backend.executor.prompts[-1]
    user = {"role": "user", "content": "hi"}
    assert fold_system_messages([late, user]) == [late, user]
    folded = fold_system_messages([user, {"role": "assistant", "content": "a"}, late])
    assert folded[-1] == {"role": "user", "content": "Be brief."}


def test_results_come_before_the_text_beside_them() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "1", "content": "a"},
        {"type": "tool_result", "tool_use_id": "2"},
        {"type": "text", "text": "Go on."},
    ]
    messages = read_message("user", blocks, "messages[0]")
    assert [message["role"] for message in messages] == ["tool", "tool", "user"]
    assert [message["content"] for message in messages] == ["a", "", "Go on."]
    assert has_cache_control([{"content": [{"cache_control": {"type": "ephemeral"}}]}])
    assert not has_cache_control(None, "text", [{"type": "text"}])

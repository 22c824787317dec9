"""Ollama's API: lines of JSON, options, tools, thinking and formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.conftest import HttpTestServer
from tests.server.playing_engine import start_playing_server

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
LOOK_CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "é.txt"}}\n</tool_call>'


def play(prompt: str) -> str:
    last_turn = prompt.rsplit("<|im_start|>user", 1)[-1]
    if "<tool_response>" in last_turn:
        return "It says iron."
    if "json" in last_turn:
        return '{"name": "Tubal"}'
    if "plain" in last_turn:
        return "Iron comes from ore."
    return f"<think>\nThe file says it.\n</think>\n\nLet me look.\n{LOOK_CALL}"


@pytest.fixture(scope="module")
def player() -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        yield start_playing_server(play, exit_stack)


def ask(text: str, **body: Any) -> dict[str, Any]:
    return {"model": "player", "messages": [{"role": "user", "content": text}], **body}


def lines(server: HttpTestServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def post_unstreamed(server: HttpTestServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {**body, "stream": False})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def test_a_streamed_chat_equals_the_whole_one(player: HttpTestServer) -> None:
    body = ask("look", tools=[LOOK], think=True)
    *deltas, last = lines(player, "/api/chat", body)
    messages = [line["message"] for line in deltas]
    message = post_unstreamed(player, "/api/chat", body)["message"]
    assert "".join(part["content"] for part in messages) == message["content"] == "Let me look."
    thinking = "".join(part.get("thinking", "") for part in messages)
    assert thinking == message["thinking"] == "The file says it."
    calls = [call for part in messages for call in part.get("tool_calls", ())]
    functions = [call["function"] for call in calls]
    assert functions == [call["function"] for call in message["tool_calls"]]
    assert functions == [{"index": 0, "name": "look", "arguments": {"path": "é.txt"}}]
    assert last["done"] and last["done_reason"] == "stop" and not any(d["done"] for d in deltas)
    assert last["eval_count"] > 20 and last["prompt_eval_count"] > 20
    assert last["total_duration"] >= last["eval_duration"] > 0


def test_a_tool_result_is_answered(player: HttpTestServer) -> None:
    message = post_unstreamed(player, "/api/chat", ask("look", tools=[LOOK]))["message"]
    body = ask("look", tools=[LOOK])
    body["messages"] += [message, {"role": "tool", "content": "iron", "tool_name": "look"}]
    assert post_unstreamed(player, "/api/chat", body)["message"]["content"] == "It says iron."
    assert '"path": "é.txt"' in player.backend.executor.prompts[-1]


def test_formats_become_grammars(player: HttpTestServer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    for value in ("json", schema):
        message = post_unstreamed(player, "/api/chat", ask("json", format=value))["message"]
        assert json.loads(message["content"]) == {"name": "Tubal"}
        assert player.backend.received[-1].grammar
        body = {"prompt": "json", "format": value}
        assert json.loads(post_unstreamed(player, "/api/generate", body)["response"])
        assert player.backend.received[-1].grammar


def test_generate_continues_from_its_context(player: HttpTestServer) -> None:
    first = post_unstreamed(player, "/api/generate", {"prompt": "plain", "system": "You forge."})
    assert first["response"] == "Iron comes from ore."
    assert "You forge." in player.backend.executor.prompts[-1]
    *_, last = lines(player, "/api/generate", {"prompt": "plain", "context": first["context"]})
    assert last["prompt_eval_count"] > len(first["context"])
    post_unstreamed(player, "/api/generate", {"prompt": "plain as it is", "raw": True})
    assert player.backend.executor.prompts[-1].endswith("plain as it is")


def test_options_reach_the_engine(player: HttpTestServer) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "seed": 11,
        "stop": ["ore"],
        "num_ctx": 4096,
    }
    answer = post_unstreamed(player, "/api/chat", ask("plain", options=options))
    assert answer["done_reason"] == "length" and answer["eval_count"] == 3
    request = player.backend.received[-1]
    sampling = request.sampling
    assert request.max_tokens == 3 and sampling.seed == 11 and sampling.top_k == 7
    assert (sampling.temperature, sampling.repetition_penalty) == (0.5, 1.1)
    unbounded = post_unstreamed(player, "/api/chat", ask("plain", options={"num_predict": -1}))
    assert unbounded["done_reason"] == "stop"


def test_an_empty_request_loads_the_model(player: HttpTestServer) -> None:
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        response = player.post(path, {"model": "player", **body}).json()
        assert response["done"] and response["done_reason"] == "load"


def test_models_are_described(player: HttpTestServer) -> None:
    (model,) = player.get("/api/tags").json()["models"]
    assert model["name"] == "player:latest"
    (running,) = player.get("/api/ps").json()["models"]
    assert running["context_length"] == 8192
    shown = player.post("/api/show", {"model": "player:latest"}).json()
    assert {"completion", "tools", "thinking"} <= set(shown["capabilities"])
    assert "tool_call" in shown["template"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "other", "messages": []}, 404, "--served-model-name"),
        ("/api/chat", ask("plain", options={"temperature": -1}), 400, "temperature"),
        ("/api/chat", ask("plain", options={"num_predict": "3"}), 400, "num_predict"),
        ("/api/chat", ask("plain", format="xml"), 400, "format"),
        ("/api/chat", ask("plain", think="much"), 400, "think"),
        ("/api/chat", ask("plain", logprobs=True), 400, "logprobs"),
        ("/api/chat", {"messages": [{"role": "bard", "content": "x"}]}, 400, "messages[0].role"),
        ("/api/generate", {"prompt": "x", "images": ["aaaa"]}, 400, "images"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "fill in the middle"),
        ("/api/nothing", {}, 404, "no such route"),
    ],
)
def test_errors_have_ollamas_form(
    player: HttpTestServer, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    response = player.post(path, body)
    assert response.status_code == status
    assert set(response.json()) == {"error"} and text in response.json()["error"]

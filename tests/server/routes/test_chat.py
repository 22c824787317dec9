"""/v1/chat/completions: its fields, its errors, and stored completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bloomery.server.limits import ServerLimits
from bloomery.server.service import WARNING_HEADER, ServerSettings
from tests.server.conftest import HttpTestServer
from tests.server.sse import parse_events

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is slag?"}], "max_tokens": 4}


def test_negative_seeds_and_a_top_p_of_zero_are_accepted(server: HttpTestServer) -> None:
    body = {**QUESTION, "seed": -3, "top_p": 0, "temperature": 1.0}
    answers = [server.post(CHAT, body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.json()["choices"] for answer in answers)
    assert first == second, "a seed repeats its answer"
    sampling = server.backend.received[-1].sampling
    assert sampling.seed == 2**64 - 3 and 0 < sampling.top_p < 1e-6


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_integers_beyond_64_bits_name_their_field(server: HttpTestServer, number: int) -> None:
    part = {"type": "text", "text": "What is slag?", "size": number}
    in_part = {"messages": [{"role": "user", "content": [part]}]}
    in_options = {**QUESTION, "chat_template_kwargs": {"depth": number}}
    fields = ("messages[0].content[0].size", "chat_template_kwargs.depth")
    for body, field in zip((in_part, in_options), fields, strict=True):
        response = server.post(CHAT, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
    allowed = {**QUESTION, "chat_template_kwargs": {"depth": 2**64 - 1}}
    assert server.post(CHAT, allowed).status_code == 200


def test_a_conversation_too_long_for_the_template_limit_has_its_code(
    serve: Callable[..., HttpTestServer],
) -> None:
    # The messages pass the limit of characters, the rendered text does not.
    limits = ServerLimits(characters_per_token=1)
    server = serve(ServerSettings(model="speaker", limits=limits))
    body = {"messages": [{"role": "user", "content": "slag " * 98}] * 1}
    response = server.post(CHAT, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded" and "shorten" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_regex", "a+"),
        ("use_beam_search", True),
        ("web_search_options", {"search_context_size": "low"}),
        ("web_search_options", {}),  # with OpenAI it means: search with the defaults
        ("audio", {"voice": "alloy"}),
        ("adapter_id", "a"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    server: HttpTestServer, field: str, value: Any
) -> None:
    response = server.post(CHAT, {**QUESTION, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field} is not supported")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "tools", "add_generation_prompt"])
def test_names_of_the_renderer_are_no_template_variables(server: HttpTestServer, name: str) -> None:
    response = server.post(CHAT, {**QUESTION, "chat_template_kwargs": {name: "x"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"chat_template_kwargs.{name}"


def test_a_misspelt_field_is_named_in_a_header(server: HttpTestServer) -> None:
    body = {**QUESTION, "temprature": 0, "x_request_tag": "a"}
    for stream in (False, True):
        response = server.post(CHAT, {**body, "stream": stream})
        assert response.status_code == 200
        warning = response.headers[WARNING_HEADER]
        assert "temprature" in warning and "temperature" in warning
        assert "x_request_tag" not in warning, "an unknown field is not always a mistake"
    assert WARNING_HEADER not in server.post(CHAT, QUESTION).headers


def test_a_hostile_field_name_cannot_break_the_header(server: HttpTestServer) -> None:
    body = {**QUESTION, "temperature\r\nx-evil: 1": 0, "temperatüre": 1}
    response = server.post(CHAT, body)
    assert response.status_code == 200 and "x-evil" not in response.headers


def test_an_unknown_model_names_the_flag(server: HttpTestServer) -> None:
    response = server.post(CHAT, {**QUESTION, "model": "gpt-4"})
    assert response.status_code == 404
    assert "--served-model-name" in response.json()["error"]["message"]


# ---- stored completions --------------------------------------------------------------------


def store_answers(server: HttpTestServer, count: int, **more: Any) -> list[str]:
    ids = []
    for index in range(count):
        body = {**QUESTION, "store": True, "metadata": {"number": str(index)}, **more}
        response = server.post(CHAT, body)
        if more.get("stream"):
            ids.append(parse_events(response.text)[0]["id"])
        else:
            ids.append(response.json()["id"])
    return ids


def test_stored_completions_are_read_changed_and_deleted(
    serve: Callable[..., HttpTestServer],
) -> None:
    server = serve()
    (completion_id,) = store_answers(server, 1, temperature=0)
    stored = server.get(f"{CHAT}/{completion_id}").json()
    assert stored["id"] == completion_id and stored["metadata"] == {"number": "0"}
    assert stored["choices"][0]["message"]["content"]
    changed = server.post(f"{CHAT}/{completion_id}", {"metadata": {"kind": "test"}}).json()
    assert changed["metadata"] == {"kind": "test"} and changed["choices"] == stored["choices"]
    messages = server.get(f"{CHAT}/{completion_id}/messages").json()
    assert [message["content"] for message in messages["data"]] == ["What is slag?"]
    deleted = server.client.delete(f"{CHAT}/{completion_id}").json()
    assert deleted == {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    assert server.get(f"{CHAT}/{completion_id}").status_code == 404


def test_stored_completions_are_listed_by_page(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    ids = store_answers(server, 2) + store_answers(server, 1, stream=True)
    server.post(CHAT, QUESTION)  # not stored
    page = server.get(f"{CHAT}?limit=2").json()
    assert [entry["id"] for entry in page["data"]] == ids[:2] and page["has_more"]
    rest = server.get(f"{CHAT}?limit=2&after={page['last_id']}").json()
    assert [entry["id"] for entry in rest["data"]] == ids[2:] and not rest["has_more"]
    assert rest["data"][0]["object"] == "chat.completion", "a streamed answer is stored whole"
    matching = server.get(f"{CHAT}?metadata[number]=1").json()["data"]
    assert [entry["id"] for entry in matching] == ids[1:2]
    newest = server.get(f"{CHAT}?order=desc&limit=1").json()["data"]
    assert [entry["id"] for entry in newest] == ids[2:]
    for query in ("limit=0", "limit=1000", "order=up", "after=unknown"):
        response = server.get(f"{CHAT}?{query}")
        field = query.partition("=")[0]
        assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_stored_completions_belong_to_their_key(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", keys=("first", "second")))
    first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
    body = {**QUESTION, "store": True}
    completion_id = server.post(CHAT, body, headers=first).json()["id"]
    path = f"{CHAT}/{completion_id}"
    assert server.get(path, headers=first).status_code == 200
    assert server.get(path, headers=second).status_code == 404
    assert server.get(CHAT, headers=second).json()["data"] == []

"""Conversation objects: their items, and responses that read them and add to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer
from tests.server.playing_engine import start_playing_server

ROUTE = "/v1/conversations"
RESPONSES = "/v1/responses"
HELLO = {"role": "user", "content": "Hello"}


def play(prompt: str) -> str:
    """Say how many users' turns the prompt has."""
    return f"turn {prompt.count('<|im_start|>user')}"


@pytest.fixture(scope="module")
def player() -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        yield start_playing_server(play, exit_stack)


def create(server: HttpTestServer, **body: Any) -> str:
    response = server.post(ROUTE, body)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def texts(server: HttpTestServer, path: str, query: str = "order=asc") -> list[str]:
    page = server.get(f"{path}/items?{query}").json()
    assert all(item["status"] == "completed" for item in page["data"])
    return [item["content"][0]["text"] for item in page["data"]]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_read_a_conversation_and_add_to_it(
    player: HttpTestServer, is_streamed: bool
) -> None:
    conversation_id = create(player, items=[HELLO])
    path = f"{ROUTE}/{conversation_id}"
    body: dict[str, Any] = {"input": "And now?", "stream": is_streamed}
    first = player.post(RESPONSES, {**body, "conversation": conversation_id})
    assert first.status_code == 200 and "turn 2" in first.text
    assert conversation_id in first.text
    second = player.post(RESPONSES, {"input": "Then?", "conversation": {"id": conversation_id}})
    assert second.json()["output"][0]["content"][0]["text"] == "turn 3"
    assert second.json()["conversation"] == {"id": conversation_id}
    assert texts(player, path) == ["Hello", "And now?", "turn 2", "Then?", "turn 3"]


def test_items_are_added_listed_and_deleted(player: HttpTestServer) -> None:
    path = f"{ROUTE}/{create(player)}"
    added = player.post(f"{path}/items", {"items": [HELLO, {**HELLO, "content": "Bye"}]}).json()
    item_id = added["first_id"]
    assert added["data"][0]["id"] == item_id and not added["has_more"]
    assert texts(player, path, "") == ["Bye", "Hello"], "the newest comes first"
    assert texts(player, path, "limit=1") == ["Bye"]
    assert texts(player, path, f"order=asc&after={item_id}") == ["Bye"]
    assert player.get(f"{path}/items/{item_id}").json() == added["data"][0]
    assert player.client.delete(f"{path}/items/{item_id}").json()["object"] == "conversation"
    assert player.get(f"{path}/items/{item_id}").status_code == 404
    assert texts(player, path) == ["Bye"]


def test_a_conversation_has_metadata_and_is_deleted(player: HttpTestServer) -> None:
    path = f"{ROUTE}/{create(player, metadata={'a': 'b'})}"
    assert player.get(path).json()["metadata"] == {"a": "b"}
    assert player.post(path, {"metadata": {"c": "d"}}).json()["metadata"] == {"c": "d"}
    assert player.get(path).json()["metadata"] == {"c": "d"}
    deleted = player.client.delete(path).json()
    assert deleted["object"] == "conversation.deleted" and deleted["deleted"]
    for suffix in ("", "/items", "/items/x"):
        assert player.get(path + suffix).status_code == 404


def test_a_conversation_deleted_during_an_answer_stays_deleted(player: HttpTestServer) -> None:
    conversation_id = create(player)
    body = {"input": "Hello", "conversation": conversation_id, "stream": True}
    with player.client.stream("POST", RESPONSES, json=body) as response:
        player.client.delete(f"{ROUTE}/{conversation_id}")
        response.read()
    assert response.status_code == 200 and "response.completed" in response.text
    assert player.get(f"{ROUTE}/{conversation_id}").status_code == 404


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (ROUTE, {"items": [{"role": "king", "content": "x"}]}, "items[0].role"),
        (ROUTE, {"items": [HELLO] * 21}, "items"),
        (RESPONSES, {"input": "x", "conversation": {"name": "x"}}, "conversation"),
        (
            RESPONSES,
            {"input": "x", "conversation": "c", "previous_response_id": "r"},
            "conversation",
        ),
    ],
)
def test_bad_requests_are_refused(
    player: HttpTestServer, route: str, body: dict[str, Any], field: str
) -> None:
    response = player.post(route, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_an_unknown_conversation_is_not_found(player: HttpTestServer) -> None:
    response = player.post(RESPONSES, {"input": "x", "conversation": "conv_unknown"})
    assert response.status_code == 404 and "conv_unknown" in response.json()["error"]["message"]


def test_a_conversation_belongs_to_its_tenant() -> None:
    with ExitStack() as exit_stack:
        settings = ServerSettings(model="player", keys=("one", "two"))
        server = start_playing_server(play, exit_stack, settings)
        headers = [{"Authorization": f"Bearer {key}"} for key in settings.keys]
        created = server.client.post(ROUTE, json={"items": [HELLO]}, headers=headers[0]).json()
        path = f"{ROUTE}/{created['id']}/items"
        statuses = [server.client.get(path, headers=header).status_code for header in headers]
        assert statuses == [200, 404]

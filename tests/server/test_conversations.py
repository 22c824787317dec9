"""Conversations that continue by previous_response_id: bounds and separation of keys."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.server.conversations import ConversationStore
from bloomery.server.limits import ServerLimits
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer


def test_a_response_continues_a_stored_conversation(serve: Callable[..., HttpTestServer]) -> None:
    server = serve()
    first = server.post(
        "/v1/responses",
        {
            "input": "What is slag?",
            "temperature": 0,
            "max_output_tokens": 4,
            "instructions": "Be brief.",
        },
    ).json()
    text = first["output"][0]["content"][0]["text"]
    second = server.post(
        "/v1/responses",
        {
            "input": "And ash?",
            "temperature": 0,
            "max_output_tokens": 4,
            "previous_response_id": first["id"],
        },
    ).json()
    conversation = [
        {"role": "user", "content": "What is slag?"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And ash?"},
    ]
    chat = server.post(
        "/v1/chat/completions", {"messages": conversation, "temperature": 0, "max_tokens": 4}
    ).json()
    assert second["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_unstored_responses_and_those_of_other_keys_are_unknown(
    serve: Callable[..., HttpTestServer],
) -> None:
    server = serve(ServerSettings(model="speaker", keys=("a", "b")))
    body = {"input": "hi", "max_output_tokens": 2}
    unstored = server.post(
        "/v1/responses", {**body, "store": False}, headers={"x-api-key": "a"}
    ).json()["id"]
    stored = server.post("/v1/responses", body, headers={"x-api-key": "a"}).json()["id"]
    for key, id, status in (("a", unstored, 400), ("a", stored, 200), ("b", stored, 400)):
        response = server.post(
            "/v1/responses", {**body, "previous_response_id": id}, headers={"x-api-key": key}
        )
        assert response.status_code == status


def test_the_oldest_conversation_is_evicted_first(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(stored_responses=2)))
    ids = [
        server.post("/v1/responses", {"input": "hi", "max_output_tokens": 1}).json()["id"]
        for _ in range(3)
    ]
    statuses = [
        server.post(
            "/v1/responses",
            {"input": "hi", "max_output_tokens": 1, "store": False, "previous_response_id": id},
        ).status_code
        for id in ids
    ]
    assert statuses == [400, 200, 200]


class SizedEntry:
    """An entry of a given size that counts how often it was discarded."""

    def __init__(self, num_characters: int):
        self.num_characters = num_characters
        self.num_discards = 0

    def discard(self) -> None:
        self.num_discards += 1


def test_the_store_stays_within_its_bounds() -> None:
    store: ConversationStore[SizedEntry] = ConversationStore(100, 1000)
    all_entries = []
    for number in range(500):
        entry = SizedEntry(number % 90)
        all_entries.append(entry)
        store.put(("", str(number)), entry)
        assert len(store.entries) <= 100 and store.num_characters <= 1000
        assert store.num_characters == sum(size for _, size in store.entries.values())
    stored = list(store.entries_of(""))
    assert all(entry.num_discards == (entry not in stored) for entry in all_entries)
    store.put(("", "huge"), SizedEntry(5000))
    assert store.num_characters <= 1000 and store.get(("", "huge")) is None


def test_an_entry_that_grows_is_counted_again() -> None:
    store: ConversationStore[SizedEntry] = ConversationStore(10, 1000)
    entry = SizedEntry(10)
    store.put(("a", "x"), entry)
    entry.num_characters = 30
    store.put(("a", "x"), entry)
    assert (store.num_characters, entry.num_discards) == (30, 0)
    assert list(store.entries_of("b")) == [] and not store.delete(("b", "x"))
    assert store.delete(("a", "x")) and (store.num_characters, entry.num_discards) == (0, 1)

"""Conversations that go on: previous_response_id, its bounds, and whose they are."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.server.conversations import Conversations
from bloomery.server.limits import Limits
from bloomery.server.service import Settings
from tests.server.conftest import Running


def test_a_response_goes_on_with_another(serve: Callable[..., Running]) -> None:
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
    said = first["output"][0]["content"][0]["text"]
    second = server.post(
        "/v1/responses",
        {
            "input": "And ash?",
            "temperature": 0,
            "max_output_tokens": 4,
            "previous_response_id": first["id"],
        },
    ).json()
    talk = [
        {"role": "user", "content": "What is slag?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And ash?"},
    ]
    chat = server.post(
        "/v1/chat/completions", {"messages": talk, "temperature": 0, "max_tokens": 4}
    ).json()
    assert second["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_what_is_not_stored_or_is_anothers_is_not_known(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", keys=("a", "b")))
    ask = {"input": "hi", "max_output_tokens": 2}
    unstored = server.post(
        "/v1/responses", {**ask, "store": False}, headers={"x-api-key": "a"}
    ).json()["id"]
    stored = server.post("/v1/responses", ask, headers={"x-api-key": "a"}).json()["id"]
    for key, id, status in (("a", unstored, 400), ("a", stored, 200), ("b", stored, 400)):
        answer = server.post(
            "/v1/responses", {**ask, "previous_response_id": id}, headers={"x-api-key": key}
        )
        assert answer.status_code == status


def test_the_oldest_are_forgotten(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(stored_responses=2)))
    ids = [
        server.post("/v1/responses", {"input": "hi", "max_output_tokens": 1}).json()["id"]
        for _ in range(3)
    ]
    status = [
        server.post(
            "/v1/responses",
            {"input": "hi", "max_output_tokens": 1, "store": False, "previous_response_id": id},
        ).status_code
        for id in ids
    ]
    assert status == [400, 200, 200]


def test_bounds_hold_whatever_is_put() -> None:
    kept = Conversations(100, 1000)
    for number in range(500):
        kept.put(("", str(number)), [{"role": "user", "content": "x" * (number % 90)}])
        assert len(kept.kept) <= 100 and kept.held <= 1000
        assert kept.held == sum(
            len(message["content"]) for said in kept.kept.values() for message in said
        )
    kept.put(("", "huge"), [{"role": "user", "content": "x" * 5000}])
    assert kept.held <= 1000 and kept.get(("", "huge")) is None

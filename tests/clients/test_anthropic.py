"""Anthropic's own client: full and streamed messages, token counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

anthropic = pytest.importorskip(
    "anthropic", reason="the client is not installed; `make test` installs it"
)

GREEDY: Any = {"temperature": 0}  # the client no longer has this parameter
MESSAGES: Any = [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_full_and_streamed_messages_agree(client: Any) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "system": "Be brief.", "max_tokens": 12}
    full = client.messages.create(extra_body=GREEDY, **options)
    assert full.stop_reason == "max_tokens" and full.usage.output_tokens == 12
    with client.messages.stream(extra_body=GREEDY, **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == full.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


def test_count_tokens_equals_the_input_tokens(client: Any) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count


def test_a_stop_sequence_ends_the_message(client: Any) -> None:
    answer = client.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=40, stop_sequences=["iron"], extra_body=GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "iron")
    assert "iron" not in answer.content[0].text


def test_errors_raise_the_clients_own_exceptions(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model=MODEL, messages=MESSAGES, max_tokens=1, extra_body={"temperature": 3}
        )
    with (
        pytest.raises(anthropic.AuthenticationError),
        anthropic.Anthropic(base_url=url, api_key="no") as unauthorized,
    ):
        unauthorized.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)

"""Anthropic's own client: messages whole and streamed, counting, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

anthropic = pytest.importorskip(
    "anthropic", reason="the client is not installed; `make test` installs it"
)

GREEDY: Any = {"temperature": 0}  # the client itself knows no temperature any more
ASKED: Any = [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def test_messages_whole_and_streamed(client: Any) -> None:
    wishes: Any = {"model": MODEL, "messages": ASKED, "system": "Be brief.", "max_tokens": 12}
    whole = client.messages.create(extra_body=GREEDY, **wishes)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    with client.messages.stream(extra_body=GREEDY, **wishes) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


def test_counting_is_what_the_model_reads(client: Any) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    usage = client.messages.create(model=MODEL, messages=ASKED, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count


def test_a_stop_sequence(client: Any) -> None:
    answer = client.messages.create(
        model=MODEL, messages=ASKED, max_tokens=40, stop_sequences=["iron"], extra_body=GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "iron")
    assert "iron" not in answer.content[0].text


def test_errors_are_the_clients_own(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=ASKED, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model=MODEL, messages=ASKED, max_tokens=1, extra_body={"temperature": 3}
        )
    with (
        pytest.raises(anthropic.AuthenticationError),
        anthropic.Anthropic(base_url=url, api_key="no") as stranger,
    ):
        stranger.messages.create(model=MODEL, messages=ASKED, max_tokens=1)

"""Hugging Face's InferenceClient with the server's address: TGI's own route, and chat."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.clients.conftest import KEY

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]


@pytest.fixture(scope="module")
def client(url: str) -> InferenceClient:
    return InferenceClient(url, token=KEY, timeout=120)


def test_text_generation(client: InferenceClient) -> None:
    assert client.text_generation(PROMPT, max_new_tokens=4).startswith(" Paris")
    with_prompt = client.text_generation(PROMPT, max_new_tokens=2, return_full_text=True)
    assert with_prompt.startswith(PROMPT)


def test_text_generation_with_details(client: InferenceClient) -> None:
    answer = client.text_generation(
        PROMPT,
        max_new_tokens=4,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        seed=3,
        temperature=0.5,
    )
    assert answer.details is not None
    assert answer.details.generated_tokens == 4 == len(answer.details.tokens)
    assert answer.details.finish_reason == "length" and answer.details.seed == 3
    assert "".join(token.text for token in answer.details.prefill) == PROMPT
    assert answer.details.prefill[0].logprob is None
    assert all(len(top) == 2 for top in answer.details.top_tokens or [])


def test_streamed_text_equals_the_full_text(client: InferenceClient) -> None:
    full = client.text_generation(PROMPT, max_new_tokens=6)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=6, stream=True)) == full
    stream = client.text_generation(PROMPT, max_new_tokens=6, stream=True, details=True)
    events = list(stream)
    last = events[-1]
    assert "".join(event.token.text for event in events) == full == last.generated_text
    assert last.details is not None and last.details.input_length == 5
    assert [event.index for event in events] == list(range(1, 7))


def test_streamed_chat_equals_the_full_chat(client: InferenceClient) -> None:
    full = client.chat_completion(
        MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=1
    )
    text = full.choices[0].message.content
    assert text and full.usage.completion_tokens == 8
    chunks = client.chat_completion(MESSAGES, max_tokens=8, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == text


def test_an_error_states_its_reason(client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="`top_p` must be > 0.0 and < 1.0"):
        client.text_generation(PROMPT, max_new_tokens=4, top_p=1.5)

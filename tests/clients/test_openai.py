"""OpenAI's own client: chat, completions, responses, embeddings, models and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

openai = pytest.importorskip(
    "openai", reason="the client is not installed; `make test` installs it"
)

MESSAGES: Any = [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]
GREEDY: Any = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_models_are_listed(client: Any) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "bloomery"


def test_streamed_chat_equals_the_full_chat(client: Any) -> None:
    chat = client.chat.completions
    full = chat.create(
        messages=MESSAGES, max_completion_tokens=6, logprobs=True, top_logprobs=2, **GREEDY
    )
    (choice,) = full.choices
    assert choice.finish_reason == "length" and "iron" in choice.message.content.lower()
    assert full.usage.completion_tokens == 6 == len(choice.logprobs.content)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    stream = chat.create(
        messages=MESSAGES,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.total_tokens == full.usage.total_tokens


def test_a_seed_repeats_several_answers(client: Any) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 6,
        "n": 2,
        "seed": 7,
        "temperature": 1.0,
        "model": MODEL,
    }
    first, second = (client.chat.completions.create(**body) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 2


def test_completions(client: Any) -> None:
    full = client.completions.create(
        prompt=["The capital of France is", "Two plus two is"],
        max_tokens=4,
        logprobs=1,
        echo=True,
        **GREEDY,
    )
    assert [choice.index for choice in full.choices] == [0, 1]
    assert full.choices[0].text.startswith("The capital of France is Paris")
    assert full.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(
        client.completions.create(
            prompt="The capital of France is", max_tokens=4, stream=True, **GREEDY
        )
    )
    assert "Paris" in "".join(chunk.choices[0].text for chunk in chunks)


def test_responses_continue_a_conversation(client: Any) -> None:
    first = client.responses.create(
        input="My name is Tubal. Say hello.", max_output_tokens=8, **GREEDY
    )
    assert first.status == "incomplete" and first.output_text
    again = client.responses.create(
        input="Who?", previous_response_id=first.id, max_output_tokens=4, **GREEDY
    )
    assert again.usage.input_tokens > first.usage.total_tokens, (
        "the earlier messages are part of the prompt"
    )
    with client.responses.stream(input="Say hello.", **GREEDY) as stream:
        first_event, *events = stream
        final = stream.get_final_response()
    assert first_event.type == "response.created" and events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert final.output_text == text != ""


def test_embeddings_in_both_encodings(client: Any) -> None:
    """The client asks for base64 by default."""
    texts = [
        "The cat sat on the mat.",
        "A cat is sitting on a mat.",
        "Interest rates rose by a quarter point.",
    ]
    base64_response = client.embeddings.create(input=texts, model=MODEL)
    float_response = client.embeddings.create(input=texts, model=MODEL, encoding_format="float")
    vectors = [entry.embedding for entry in base64_response.data]
    assert [entry.index for entry in base64_response.data] == [0, 1, 2]
    for vector, entry in zip(vectors, float_response.data, strict=True):
        # The batches differ, so the vectors are equal up to the rounding of 8-bit activations.
        assert sum(a * b for a, b in zip(vector, entry.embedding, strict=True)) > 0.999
        assert sum(x * x for x in vector) == pytest.approx(1)

    def similarity(i: int, j: int) -> float:
        return float(sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)))

    assert similarity(0, 1) > similarity(0, 2), "the two sentences about a cat are closest"
    short = client.embeddings.create(input=texts[0], model=MODEL, dimensions=8).data[0].embedding
    head = vectors[0][:8]
    length = sum(x * x for x in head) ** 0.5
    assert short == pytest.approx([x / length for x in head], abs=0.02)
    last = client.embeddings.create(
        input=[[504, 2644]], model=MODEL, extra_body={"pooling": "last"}
    )
    assert last.usage.prompt_tokens == 2


def test_errors_raise_the_clients_own_exceptions(client: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=MESSAGES, model="gpt-4o")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(messages=MESSAGES, model=MODEL, temperature=9)
    assert hot.value.param == "temperature" and hot.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="iron " * 2000, model=MODEL, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wide:
        client.embeddings.create(input="a", model=MODEL, dimensions=100_000)
    assert wide.value.param == "dimensions"
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{url}/v1", api_key="no") as unauthorized,
    ):
        unauthorized.models.list()


def test_a_closed_stream_does_not_disturb_the_next_request(client: Any) -> None:
    """The client closes the stream after its first chunk."""
    stream = client.chat.completions.create(
        messages=MESSAGES, max_tokens=500, stream=True, model=MODEL
    )
    next(iter(stream))
    stream.close()
    completion = client.completions.create(
        prompt="The capital of France is", max_tokens=2, **GREEDY
    )
    assert completion.choices[0].text

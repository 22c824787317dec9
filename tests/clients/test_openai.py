"""OpenAI's own client: conversations, completions, responses, embeddings, models and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

openai = pytest.importorskip(
    "openai", reason="the client is not installed; `make test` installs it"
)

ASKED: Any = [{"role": "user", "content": "What is iron made from? Answer in one sentence."}]
GREEDY: Any = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def test_models(client: Any) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "bloomery"


def test_chat_whole_and_streamed(client: Any) -> None:
    chat = client.chat.completions
    whole = chat.create(
        messages=ASKED, max_completion_tokens=6, logprobs=True, top_logprobs=2, **GREEDY
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and "iron" in choice.message.content.lower()
    assert whole.usage.completion_tokens == 6 == len(choice.logprobs.content)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    stream = chat.create(
        messages=ASKED, max_tokens=6, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    )
    assert (
        chunks[0].choices[0].delta.role == "assistant"
        and chunks[-1].choices[0].finish_reason == "length"
    )
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens


def test_several_answers_with_a_seed(client: Any) -> None:
    asked = {
        "messages": ASKED,
        "max_tokens": 6,
        "n": 2,
        "seed": 7,
        "temperature": 1.0,
        "model": MODEL,
    }
    one, two = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) == 2


def test_completions(client: Any) -> None:
    whole = client.completions.create(
        prompt=["The capital of France is", "Two plus two is"],
        max_tokens=4,
        logprobs=1,
        echo=True,
        **GREEDY,
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text.startswith("The capital of France is Paris")
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(
        client.completions.create(
            prompt="The capital of France is", max_tokens=4, stream=True, **GREEDY
        )
    )
    assert "Paris" in "".join(chunk.choices[0].text for chunk in chunks)


def test_responses_that_go_on(client: Any) -> None:
    first = client.responses.create(
        input="My name is Tubal. Say hello.", max_output_tokens=8, **GREEDY
    )
    assert first.status == "incomplete" and first.output_text
    again = client.responses.create(
        input="Who?", previous_response_id=first.id, max_output_tokens=4, **GREEDY
    )
    assert again.usage.input_tokens > first.usage.total_tokens, "what was said before is read again"
    with client.responses.stream(input="Say hello.", **GREEDY) as stream:
        first_event, *events = stream
        final = stream.get_final_response()
    assert first_event.type == "response.created" and events[-1].type == "response.completed"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert final.output_text == said != ""


def test_embeddings_by_both_encodings(client: Any) -> None:
    """The client asks for base64 unless told otherwise."""
    texts = [
        "The cat sat on the mat.",
        "A cat is sitting on a mat.",
        "Interest rates rose by a quarter point.",
    ]
    packed = client.embeddings.create(input=texts, model=MODEL)
    plain = client.embeddings.create(input=texts, model=MODEL, encoding_format="float")
    vectors = [entry.embedding for entry in packed.data]
    assert [entry.index for entry in packed.data] == [0, 1, 2]
    for got, want in zip(vectors, plain.data, strict=True):
        # Of different batches, so equal up to what 8-bit activations round.
        assert sum(a * b for a, b in zip(got, want.embedding, strict=True)) > 0.999
        assert sum(x * x for x in got) == pytest.approx(1)

    def alike(one: int, two: int) -> float:
        return float(sum(a * b for a, b in zip(vectors[one], vectors[two], strict=True)))

    assert alike(0, 1) > alike(0, 2), "two sentences about a cat are closer than one about money"
    last = client.embeddings.create(
        input=[[504, 2644]], model=MODEL, extra_body={"pooling": "last"}
    )
    assert last.usage.prompt_tokens == 2


def test_errors_are_the_clients_own(client: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=ASKED, model="gpt-4o")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(messages=ASKED, model=MODEL, temperature=9)
    assert hot.value.param == "temperature" and hot.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="iron " * 2000, model=MODEL, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as cut:
        client.embeddings.create(input="a", model=MODEL, dimensions=8)
    assert cut.value.param == "dimensions"
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{url}/v1", api_key="no") as stranger,
    ):
        stranger.models.list()


def test_leaving_a_stream(client: Any) -> None:
    """A client that has read enough; the next one is answered as if it had never been."""
    stream = client.chat.completions.create(
        messages=ASKED, max_tokens=500, stream=True, model=MODEL
    )
    next(iter(stream))
    stream.close()
    assert (
        client.completions.create(prompt="The capital of France is", max_tokens=2, **GREEDY)
        .choices[0]
        .text
    )

"""OpenAI's own client for /v1/responses: tools, schemas, streams, stored and background ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from tests.clients.conftest import KEY, MODEL
from tests.server.playing_engine import start_playing_server
from tests.waiting import wait_until

openai = pytest.importorskip("openai", reason="the client is not installed")
pydantic = pytest.importorskip("pydantic", reason="the client is not installed")

QUESTION = "How warm is it in Paris?"
CALL = (
    "<think>\nThe tool knows.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "CityWeather", "arguments": {"city": "Paris"}}\n</tool_call>'
)


class CityWeather(pydantic.BaseModel):  # type: ignore[misc]
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


def answer_weather(prompt: str) -> str:
    return "It is 20 degrees." if "<tool_response>" in prompt else CALL


@pytest.fixture(scope="module")
def tool_client() -> Iterator[Any]:
    with ExitStack() as exit_stack:
        server = start_playing_server(answer_weather, exit_stack)
        url = f"http://127.0.0.1:{server.address[1]}/v1"
        yield exit_stack.enter_context(openai.OpenAI(base_url=url, api_key=KEY, max_retries=0))


def test_a_conversation_is_shared_by_responses(tool_client: Any) -> None:
    conversation = tool_client.conversations.create(
        items=[{"type": "message", "role": "user", "content": QUESTION}], metadata={"a": "b"}
    )
    first = tool_client.responses.create(model="player", input="Now", conversation=conversation.id)
    assert first.conversation is not None and first.conversation.id == conversation.id
    items = tool_client.conversations.items.list(conversation.id, order="asc").data
    assert [item.type for item in items[:2]] == ["message", "message"]
    assert items[0].content[0].text == QUESTION and len(items) > 2
    tool_client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    changed = tool_client.conversations.update(conversation.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert tool_client.conversations.delete(conversation.id).deleted


@pytest.fixture(scope="module")
def model_client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_a_tool_is_called_and_its_output_answered(tool_client: Any) -> None:
    tools = [openai.pydantic_function_tool(CityWeather)["function"] | {"type": "function"}]
    full = tool_client.responses.parse(model="player", input=QUESTION, tools=tools)
    with tool_client.responses.stream(model="player", input=QUESTION, tools=tools) as stream:
        event_types = {event.type for event in stream}
        final = stream.get_final_response()
    assert {
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    } <= event_types
    for response in (full, final):
        reasoning, message, call = response.output
        assert reasoning.content[0].text == "The tool knows."
        assert message.content[0].text == response.output_text == "Let me look."
        assert json.loads(call.arguments) == {"city": "Paris"}
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert response.usage.input_tokens_details.cache_write_tokens >= 0
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
    for history in (
        {"input": [output], "previous_response_id": final.id},
        {"input": [{"role": "user", "content": QUESTION}, *final.output, output]},
    ):
        answer = tool_client.responses.create(model="player", tools=tools, **history)
        assert answer.output_text == "It is 20 degrees."
        assert answer.usage.input_tokens_details.cached_tokens > 100


def test_stored_responses(tool_client: Any) -> None:
    responses = tool_client.responses
    created = responses.create(model="player", input=QUESTION)
    assert responses.retrieve(created.id).output == created.output
    (item,) = list(responses.input_items.list(created.id))
    assert item.content[0].text == QUESTION
    counted = responses.input_tokens.count(model="player", input=QUESTION)
    assert counted.input_tokens == created.usage.input_tokens
    responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(created.id)


def test_background_responses(tool_client: Any) -> None:
    responses = tool_client.responses
    created = responses.create(model="player", input=QUESTION, background=True)
    assert created.status == "queued"
    assert wait_until(lambda: responses.retrieve(created.id).status == "completed")
    events = list(responses.retrieve(created.id, stream=True, starting_after=2))
    assert events[0].sequence_number == 3 and events[-1].type == "response.completed"
    assert responses.cancel(created.id).status == "completed", "it had ended before"


def test_a_schema_is_parsed(model_client: Any) -> None:
    """The embedded model writes what the schema demands."""
    options: Any = {"model": MODEL, "input": "Which city?", "max_output_tokens": 60}
    parsed = model_client.responses.parse(text_format=CityWeather, **options)
    assert parsed.output_parsed.city in ("Paris", "Rome")
    with model_client.responses.stream(text_format=CityWeather, **options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed.city in ("Paris", "Rome")
    free = model_client.responses.create(text={"format": {"type": "json_object"}}, **options)
    assert free.status == "incomplete" or json.loads(free.output_text) is not None


def test_logprobs(model_client: Any) -> None:
    response = model_client.responses.create(
        model=MODEL,
        input="Say hello.",
        max_output_tokens=5,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    entries = response.output[0].content[0].logprobs
    assert len(entries) == 5 and all(len(entry.top_logprobs) == 2 for entry in entries)

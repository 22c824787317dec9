"""Tools, reasoning and schemas with official clients: openai (with `.parse()`), huggingface_hub.

Schemas run on the embedded model. It has no tools, so tool calls come from an engine that answers
with given texts or at random within the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from bloomery.server.service import ServerSettings
from tests.clients.conftest import KEY, MODEL
from tests.server.conftest import HttpTestServer, start_server
from tests.server.playback import PlaybackEngine, load_tool_tokenizer

openai = pytest.importorskip("openai", reason="the client is not installed")
pydantic = pytest.importorskip("pydantic", reason="the client is not installed")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="the client is not installed")

MESSAGES: Any = [{"role": "user", "content": "How warm is it in Paris?"}]
CALLS = (
    "<think>\nThe user asks for the weather.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Paris", "unit": "celsius"}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Rome", "unit": "celsius"}}\n'
    "</tool_call>"
)


class GetWeather(pydantic.BaseModel):  # type: ignore[misc]
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


class FurnaceAnswer(pydantic.BaseModel):  # type: ignore[misc]
    kind: Literal["bloomery", "cupola"]
    hot: bool
    size: int


@pytest.fixture(scope="module")
def tool_server() -> Iterator[HttpTestServer]:
    tokenizer = load_tool_tokenizer()
    engine = PlaybackEngine(tokenizer, CALLS, max_model_len=4096, num_blocks=2048)
    with ExitStack() as exit_stack:
        yield start_server(engine, tokenizer, ServerSettings(model=MODEL), exit_stack)


@pytest.fixture(scope="module")
def tool_client(tool_server: HttpTestServer) -> Iterator[Any]:
    url = f"http://127.0.0.1:{tool_server.address[1]}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model_client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def check_calls(message: Any) -> None:
    assert message.content == "Let me look."
    assert message.reasoning_content == "The user asks for the weather."
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Paris", "Rome"]


def test_openai_parses_tool_calls(tool_client: Any) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    completion = tool_client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=tools)
    (choice,) = completion.choices
    check_calls(choice.message)
    assert choice.finish_reason == "tool_calls"
    arguments = [call.function.parsed_arguments for call in choice.message.tool_calls]
    assert arguments == [
        GetWeather(city="Paris", unit="celsius"),
        GetWeather(city="Rome", unit="celsius"),
    ]
    assert completion.usage.completion_tokens_details.reasoning_tokens > 0


def test_openai_streams_tool_calls(tool_client: Any) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": tools}
    with tool_client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    check_calls(completion.choices[0].message)


def test_openai_continues_after_a_tool(tool_client: Any, tool_server: HttpTestServer) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    options: Any = {"model": MODEL, "tools": tools}
    first = tool_client.chat.completions.create(messages=MESSAGES, **options)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "20"} for call in message.tool_calls
    ]
    tool_server.backend.set_answer("It is 20 degrees in both.")
    try:
        messages = [*MESSAGES, message, *results]
        second = tool_client.chat.completions.create(messages=messages, **options)
    finally:
        tool_server.backend.set_answer(CALLS)
    assert second.choices[0].message.content == "It is 20 degrees in both."
    assert second.choices[0].finish_reason == "stop"


def test_openai_parses_a_schema(model_client: Any) -> None:
    """The embedded model writes the object, the client checks it."""
    messages: Any = [{"role": "user", "content": "Describe a furnace."}]
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 80}
    completion = model_client.chat.completions.parse(
        messages=messages, response_format=FurnaceAnswer, **options
    )
    furnace = completion.choices[0].message.parsed
    assert isinstance(furnace, FurnaceAnswer)
    with model_client.chat.completions.stream(
        messages=messages, response_format=FurnaceAnswer, **options
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == furnace


def test_openai_stores_completions(model_client: Any) -> None:
    chat = model_client.chat.completions
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    completion = chat.create(store=True, metadata={"kind": "test"}, **options)
    assert completion.id in [stored.id for stored in chat.list()]
    assert chat.retrieve(completion.id).choices == completion.choices
    assert chat.update(completion.id, metadata={"kind": "other"}).metadata == {"kind": "other"}
    assert [message.content for message in chat.messages.list(completion.id)] == [
        MESSAGES[0]["content"]
    ]
    assert chat.delete(completion.id).deleted
    with pytest.raises(openai.NotFoundError):
        chat.retrieve(completion.id)


def test_huggingface_hub_calls_tools(tool_server: HttpTestServer) -> None:
    client = huggingface_hub.InferenceClient(
        f"http://127.0.0.1:{tool_server.address[1]}", timeout=120
    )
    function = {"name": "GetWeather", "parameters": GetWeather.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    options: Any = {"messages": MESSAGES, "tools": tools, "tool_choice": "auto"}
    message = client.chat_completion(max_tokens=400, **options).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["GetWeather"] * 2
    arguments = ""
    for chunk in client.chat_completion(max_tokens=400, stream=True, **options):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == 0:
                arguments += call.function.arguments
    assert json.loads(arguments) == {"city": "Paris", "unit": "celsius"}


def test_huggingface_hub_generates_by_a_grammar(url: str) -> None:
    client = huggingface_hub.InferenceClient(url, token=KEY, timeout=120)
    grammar = {"type": "json", "value": FurnaceAnswer.model_json_schema()}
    text = client.text_generation("A furnace:", grammar=grammar, max_new_tokens=400)
    assert FurnaceAnswer.model_validate_json(text)
    response_format = {
        "type": "json_schema",
        "json_schema": {
            "name": "furnace",
            "schema": FurnaceAnswer.model_json_schema(),
            "strict": True,
        },
    }
    answer = client.chat_completion(
        messages=MESSAGES, response_format=response_format, max_tokens=80, temperature=0
    )
    assert FurnaceAnswer.model_validate_json(answer.choices[0].message.content)

"""Anthropic's own client: full and streamed messages, token counts, tools, thinking, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from tests.clients.conftest import KEY, MODEL
from tests.server.playing_engine import start_playing_server

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


def test_models_are_listed(client: Any) -> None:
    (model,) = list(client.models.list())
    assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
    assert client.models.retrieve(MODEL).id == MODEL


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


# ---- tools, thinking and schemas ---------------------------------------------------------------

TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
WEATHER_QUESTION: Any = {"role": "user", "content": "How warm is it in Paris?"}
CALL = (
    "<think>\nThe tool knows.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)


def answer_weather(prompt: str) -> str:
    """What the model plays: a call, then an answer to its result."""
    return "It is 20 degrees." if "<tool_response>" in prompt else CALL


@pytest.fixture(scope="module")
def tool_client() -> Iterator[Any]:
    """A client of a server whose model calls a tool."""
    with ExitStack() as exit_stack:
        server = start_playing_server(answer_weather, exit_stack)
        url = f"http://127.0.0.1:{server.address[1]}"
        yield exit_stack.enter_context(anthropic.Anthropic(base_url=url, api_key=KEY))


def check_call(message: Any) -> Any:
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "The tool knows.")
    assert text.text == "Let me look."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    return call


def test_a_tool_is_called_and_its_result_answered(tool_client: Any) -> None:
    options: Any = {
        "model": "player",
        "max_tokens": 300,
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
    }
    full = tool_client.messages.create(messages=[WEATHER_QUESTION], **options)
    check_call(full)
    with tool_client.messages.stream(messages=[WEATHER_QUESTION], **options) as stream:
        event_types = [event.type for event in stream]
        final = stream.get_final_message()
    call = check_call(final)
    assert {"thinking", "signature", "text", "input_json"} <= set(event_types)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20"}
    history = [
        WEATHER_QUESTION,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [result]},
    ]
    answer = tool_client.messages.create(messages=history, **options)
    assert answer.content[-1].text == "It is 20 degrees." and answer.stop_reason == "end_turn"
    assert answer.usage.cache_read_input_tokens > 100


def test_the_tool_runner_finishes_a_conversation(tool_client: Any) -> None:
    """The client's own loop: it calls the function and sends the result."""
    cities: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "20"

    runner = tool_client.beta.messages.tool_runner(
        model="player",
        max_tokens=300,
        tools=[get_weather],
        messages=[WEATHER_QUESTION],
        thinking={"type": "adaptive"},
    )
    *_, last = list(runner)
    assert cities == ["Paris"] and last.content[-1].text == "It is 20 degrees."


def test_a_schema_is_parsed(client: Any) -> None:
    """The embedded model writes what the schema demands."""
    pydantic = pytest.importorskip("pydantic")

    class SmithingTool(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        kind: Literal["hammer", "tongs"]
        heavy: bool

    message = client.messages.parse(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "Describe a hammer."}],
        output_format=SmithingTool,
    )
    assert isinstance(message.parsed_output, SmithingTool)

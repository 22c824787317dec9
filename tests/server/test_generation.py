"""Streams: deltas add up to the full response, and clients may disconnect, stall or be slow."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import pytest

from bloomery.server.errors import ClientStalled
from bloomery.server.generation import EventStreamResponse
from bloomery.server.limits import ServerLimits
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer
from tests.server.sse import parse_events
from tests.waiting import WAIT_SECONDS, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def open_request(
    server: HttpTestServer, path: str, body: dict[str, Any], buffer_bytes: int | None = None
) -> socket.socket:
    """A connection on which a request has been sent and nothing has been read."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    if buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.settimeout(WAIT_SECONDS)
    connection.connect(server.address)
    head = (
        f"POST {path} HTTP/1.1\r\n"
        f"host: localhost\r\n"
        f"content-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


# ---- streamed and full responses agree -----------------------------------------------------


def test_chat_deltas_add_up_to_the_full_response(server: HttpTestServer) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 40,
        "seed": 5,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    full = server.post(CHAT, body).json()
    stream_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = parse_events(server.post(CHAT, stream_body).text)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    *chunks, usage_chunk = events[:-1]
    assert usage_chunk["choices"] == []
    for usage in (usage_chunk["usage"], full["usage"]):
        usage.pop("prompt_tokens_details")  # the second request has a prefix hit
    assert usage_chunk["usage"] == full["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in full["choices"]:
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        deltas = [part["delta"] for part in parts]
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
        assert "role" in deltas[0]
        text = "".join(delta.get("content", "") for delta in deltas)
        assert text == choice["message"]["content"]
        reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] and deltas[-1] == {}
        logprobs = [
            entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
        ]
        assert logprobs == choice["logprobs"]["content"]


def test_completion_deltas_add_up_to_the_full_response(server: HttpTestServer) -> None:
    body = {
        "prompt": [[295, 359], [290, 291, 292]],
        "max_tokens": 12,
        "temperature": 0,
        "n": 2,
        "echo": True,
        "logprobs": 1,
    }
    full = server.post(COMPLETIONS, body).json()
    events = parse_events(server.post(COMPLETIONS, {**body, "stream": True}).text)
    assert events.pop() == "[DONE]"
    assert [choice["index"] for choice in full["choices"]] == [0, 1, 2, 3]
    for choice in full["choices"]:
        parts = [
            part
            for event in events
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for part in parts for value in part["logprobs"][name]]
            assert streamed == choice["logprobs"][name]
    assert full["usage"]["prompt_tokens"] == 5


def test_tgi_events_add_up_to_the_full_response(server: HttpTestServer) -> None:
    body = {
        "inputs": "The iron",
        "parameters": {"max_new_tokens": 30, "details": True, "top_n_tokens": 2},
    }
    full = server.post("/generate", body).json()
    details = full["details"]
    response = server.post("/generate_stream", body)
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-characters"] == "8"
    events = parse_events(response.text)
    assert "[DONE]" not in events
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["token"] for event in events] == details["tokens"]
    assert [event["top_tokens"] for event in events] == details["top_tokens"]
    assert {event["generated_text"] for event in events[:-1]} == {None}
    assert events[-1]["generated_text"] == full["generated_text"]
    num_tokens = events[-1]["details"]["generated_tokens"]
    assert num_tokens == len(events) == details["generated_tokens"]
    assert parse_events(server.post("/", {**body, "stream": True}).text) == events


def test_continuous_usage_is_in_every_chunk(server: HttpTestServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "messages": HELLO,
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
    }
    events = parse_events(server.post(CHAT, body).text)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts[0] == 0, "the chunk with the role has no token"
    assert counts == sorted(counts) and counts[-1] == 5
    for no_options in ({}, None):
        body = {"messages": HELLO, "max_tokens": 2, "stream": True, "stream_options": no_options}
        events = parse_events(server.post(CHAT, body).text)
        assert all("usage" not in event for event in events[:-1])


# ---- stop strings --------------------------------------------------------------------------


def test_stop_strings_never_show_and_no_text_is_lost(server: HttpTestServer) -> None:
    body = {"prompt": "The iron", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    for start in range(2, len(text) - 5, 7):
        stop = text[start : start + 4]
        expected = text[: text.index(stop)]
        stream_body = {**body, "stop": [stop, "never-generated"], "stream": True}
        events = parse_events(server.post(COMPLETIONS, stream_body).text)
        choices = [event["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["finish_reason"] == "stop"
        parameters = {"max_new_tokens": 40, "stop": [stop], "details": True}
        tgi_body = {"inputs": "The iron", "parameters": parameters}
        tgi = server.post("/generate", tgi_body).json()
        if tgi["details"]["finish_reason"] == "stop_sequence":
            assert tgi["generated_text"] == expected + stop
    assert wait_until(lambda: server.backend.is_idle)


def test_a_stop_string_ends_one_of_several_answers(server: HttpTestServer) -> None:
    body = {"prompt": "The iron", "max_tokens": 60, "n": 3, "seed": 3, "ignore_eos": True}
    texts = [choice["text"] for choice in server.post(COMPLETIONS, body).json()["choices"]]
    stop = texts[1][4:12]
    assert stop not in texts[0] + texts[2]
    choices = server.post(COMPLETIONS, {**body, "stop": stop}).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]
    cut_text = texts[1][: texts[1].index(stop)]
    assert [choice["text"] for choice in choices] == [texts[0], cut_text, texts[2]]
    assert server.backend.received and wait_until(lambda: server.backend.is_idle)


# ---- clients that disconnect, stall, or are slow ------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "full"])
@pytest.mark.parametrize("path", [CHAT, "/"], ids=["openai", "tgi"])
def test_a_disconnected_client_frees_its_blocks(
    serve: Callable[..., HttpTestServer], path: str, stream: bool
) -> None:
    server = serve(step_seconds=0.02)
    body = {"messages": HELLO, "n": 4, "max_tokens": 400, "ignore_eos": True}
    num_sequences = 4
    if path != CHAT:
        body = {"inputs": "The iron", "parameters": {"max_new_tokens": 400}}
        num_sequences = 1
    connection = open_request(server, path, {**body, "stream": stream})
    assert wait_until(lambda: server.backend.num_steps > 3)
    assert len(server.backend.scheduler.by_request) == num_sequences
    connection.close()
    steps_before = server.backend.num_steps
    assert wait_until(lambda: not server.backend.scheduler.by_request)
    assert server.backend.num_steps - steps_before < 100, "the requests ran to their end"
    assert wait_until(lambda: server.backend.is_idle)
    assert wait_until(lambda: 'err="dropped"' in server.get("/metrics").text)


def test_a_slow_reader_gets_everything(serve: Callable[..., HttpTestServer]) -> None:
    limits = ServerLimits(stall_seconds=10 * WAIT_SECONDS)
    server = serve(ServerSettings(model="speaker", limits=limits), max_model_len=1100)
    body = {
        "prompt": "The iron",
        "max_tokens": 1000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
    }
    data = b""
    with open_request(server, COMPLETIONS, body, buffer_bytes=4096) as connection:
        assert wait_until(lambda: server.backend.is_idle), "the engine does not wait for the reader"
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(4096)
    assert data.count(b'"finish_reason":"length"') == 1 and data.count(b"[DONE]") == 1
    assert data.count(b"token_logprobs") == 1000


def test_a_stalled_reader_is_dropped(serve: Callable[..., HttpTestServer]) -> None:
    limits = ServerLimits(stall_seconds=0.3)
    server = serve(ServerSettings(model="speaker", limits=limits), step_seconds=0.005)
    body = {
        "prompt": "The iron",
        "max_tokens": 500,
        "n": 8,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    with open_request(server, COMPLETIONS, body, buffer_bytes=4096) as connection:
        assert wait_until(lambda: server.backend.num_steps)
        assert wait_until(lambda: server.backend.is_idle)
        assert server.backend.num_steps < 490, "the requests ran to their end"
        assert wait_until(lambda: 'err="dropped"' in server.get("/metrics").text)
        # The connection ends after what was sent before: it is closed, not merely abandoned.
        with suppress(ConnectionResetError):
            while connection.recv(65536):
                pass


@pytest.mark.parametrize("num_sent", [2, 3], ids=["at an event", "at the end"])
def test_a_stalled_reader_closes_the_generator(num_sent: int) -> None:
    closed = []
    sent = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
        finally:
            closed.append(True)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if len(sent) == num_sent:
            await asyncio.Event().wait()
        sent.append(message)

    async def respond() -> None:
        response = EventStreamResponse(
            events(),
            lambda _: b"",
            deadline=asyncio.get_running_loop().time() + 2 * WAIT_SECONDS,
            keepalive_seconds=WAIT_SECONDS,
            stall_seconds=0.1,
            headers={},
        )
        with pytest.raises(ClientStalled):
            await asyncio.wait_for(response({}, receive, send), WAIT_SECONDS)

    asyncio.run(respond())
    assert closed == [True] and len(sent) == num_sent


def test_keepalive_comments_on_a_silent_stream(serve: Callable[..., HttpTestServer]) -> None:
    server = serve(ServerSettings(model="speaker", limits=ServerLimits(keepalive_seconds=0.1)))
    server.backend.max_steps = 0
    text = ""
    body = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", CHAT, json=body) as response:
        for part in response.iter_text():
            text += part
            if text.count(": keep-alive") == 4:
                server.backend.max_steps = None
    assert text.startswith(": keep-alive\n\n" * 4) and parse_events(text)[-1] == "[DONE]"


# ---- errors --------------------------------------------------------------------------------


def test_an_error_ends_an_openai_stream_without_done(
    serve: Callable[..., HttpTestServer],
) -> None:
    server = serve()
    server.backend.poison_token = 300
    streamed = server.post(COMPLETIONS, {"prompt": [300], "stream": True, "ignore_eos": True})
    assert streamed.status_code == 200
    events = parse_events(streamed.text)
    assert "[DONE]" not in events and events[-1]["error"]["type"] == "server_error"
    assert "0x" not in streamed.text and ".py" not in streamed.text
    assert set(events[-2]["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    full = server.post(COMPLETIONS, {"prompt": [300], "ignore_eos": True})
    assert full.status_code == 500 and full.json()["error"]["code"] == "generation_failed"


def test_an_error_ends_the_streams_of_the_other_apis(
    serve: Callable[..., HttpTestServer], tokenizer: Any
) -> None:
    server = serve()
    server.backend.poison_token = tokenizer.encode("bellows")[0]
    body = {"inputs": "bellows", "parameters": {"max_new_tokens": 9}}
    events = parse_events(server.post("/generate_stream", body).text)
    assert [event.get("index") for event in events] == [1, 2, None]
    assert events[-1]["error_type"] == "generation"
    assert events[-1]["error"].startswith("Request failed during generation")
    full = server.post("/generate", body)
    assert full.status_code == 424 and full.json()["error_type"] == "generation"
    messages_body = {
        "messages": [{"role": "user", "content": "bellows"}],
        "max_tokens": 9,
        "temperature": 0,
        "stream": True,
    }
    anthropic = parse_events(server.post("/v1/messages", messages_body).text)
    assert anthropic[-1][0] == "error"
    responses_body = {"input": "bellows", "temperature": 0, "stream": True}
    responses = parse_events(server.post("/v1/responses", responses_body).text)
    name, data = responses[-1]
    assert name == "error" and data["sequence_number"] == len(responses) - 1


@pytest.mark.parametrize("source", ["header", "limit"])
def test_deadlines_end_requests_before_and_after_the_first_token(
    serve: Callable[..., HttpTestServer], source: str
) -> None:
    """The engine has stopped, so that without a deadline the requests would wait forever."""
    # A text prompt: a chat template would start a tokenizer worker.
    body = {"prompt": "The iron", "max_tokens": 100, "ignore_eos": True}
    for seconds in (0.3, 3.0, 30.0):  # a busy machine may miss a short deadline's first token
        limits = ServerLimits(deadline_seconds=seconds) if source == "limit" else ServerLimits()
        headers = {}
        if source == "header":
            headers = {"x-request-deadline-ms": str(int(1000 * seconds))}
        server = serve(ServerSettings(model="speaker", limits=limits))
        server.backend.max_steps = 1
        streamed = server.post(COMPLETIONS, {**body, "stream": True}, headers=headers)
        full = server.post(COMPLETIONS, body, headers=headers)
        assert full.status_code == 504 and full.json()["error"]["code"] == "deadline_exceeded"
        server.backend.max_steps = None
        assert wait_until(lambda server=server: server.backend.is_idle)
        if streamed.status_code == 200:
            break
        assert streamed.status_code == 504
    events = parse_events(streamed.text)
    assert events[0]["choices"] and events[-1]["error"]["code"] == "deadline_exceeded"


def test_an_invalid_deadline_header_is_refused(server: HttpTestServer) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    for value in ("soon", "-1", "1.5", "9" * 30):
        response = server.post(CHAT, body, headers={"x-request-deadline-ms": value})
        assert response.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "iron", "max_tokens": 1}),
        ("/v1/responses", {"input": "iron", "max_output_tokens": 1}),
        ("/generate", {"inputs": "iron", "parameters": {"max_new_tokens": 1}}),
    ],
)
def test_priority_and_deadline_reach_the_engine(
    server: HttpTestServer, path: str, body: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"priority": -3, "deadline_ms": 60_000}
    if "parameters" in body:
        more = {"parameters": body["parameters"] | more}
    assert server.post(path, body | more).status_code == 200
    request = server.backend.received[-1]
    assert request.priority == -3 and request.deadline == 60.0

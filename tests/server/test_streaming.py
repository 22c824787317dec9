"""Streams: what they add up to, how they end, and what becomes of readers that leave, stop or are slow."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import pytest

from bloomery.server.errors import Stalled
from bloomery.server.limits import Limits
from bloomery.server.service import Settings
from bloomery.server.streaming import EventStream
from tests.server.conftest import Running
from tests.server.events import parse
from tests.waiting import LONG, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def idle(server: Running) -> bool:
    blocks = server.backend.blocks
    return not server.backend.loop.busy and blocks.available == blocks.count


def opened(
    server: Running, path: str, body: dict[str, Any], buffer: int | None = None
) -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(LONG)
    connection.connect(server.address)
    kind = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\n".encode() + data)
    return connection


# ---- the same as not streamed --------------------------------------------------------------------------


def test_chat_deltas_add_up(server: Running) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 40,
        "seed": 5,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = server.post(CHAT, body).json()
    events = parse(
        server.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}).text
    )
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    assert events[-2]["choices"] == []
    counts = [
        {name: value for name, value in one["usage"].items() if name != "prompt_tokens_details"}
        for one in (events[-2], whole)
    ]
    assert counts[0] == counts[1]
    assert all(chunk["usage"] is None for chunk in events[:-2])
    for choice in whole["choices"]:
        chunks = [
            c for event in events[:-2] for c in event["choices"] if c["index"] == choice["index"]
        ]
        assert [c["delta"]["role"] for c in chunks if "role" in c["delta"]] == [
            "assistant"
        ] and "role" in chunks[0]["delta"]
        assert (
            "".join(c["delta"].get("content", "") for c in chunks) == choice["message"]["content"]
        )
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [
            choice["finish_reason"]
        ]
        assert chunks[-1]["finish_reason"] and chunks[-1]["delta"] == {}
        logprobs = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]


def test_completion_deltas_add_up(server: Running) -> None:
    body = {
        "prompt": [[295, 359], [290, 291, 292]],
        "max_tokens": 12,
        "temperature": 0,
        "n": 2,
        "echo": True,
        "logprobs": 1,
    }
    whole = server.post(COMPLETIONS, body).json()
    events = parse(server.post(COMPLETIONS, {**body, "stream": True}).text)
    assert events.pop() == "[DONE]"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in chunks) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for c in chunks for value in c["logprobs"][name]] == choice["logprobs"][
                name
            ]
    assert whole["usage"]["prompt_tokens"] == 5


def test_tgi_events_add_up(server: Running) -> None:
    body = {
        "inputs": "The iron",
        "parameters": {"max_new_tokens": 30, "details": True, "top_n_tokens": 2},
    }
    whole = server.post("/generate", body).json()
    answer = server.post("/generate_stream", body)
    assert (
        answer.headers["x-accel-buffering"] == "no"
        and answer.headers["x-compute-characters"] == "8"
    )
    events = parse(answer.text)
    assert "[DONE]" not in events
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event["top_tokens"] for event in events] == whole["details"]["top_tokens"]
    assert {event["generated_text"] for event in events[:-1]} == {None}
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert (
        events[-1]["details"]["generated_tokens"]
        == len(events)
        == whole["details"]["generated_tokens"]
    )
    assert parse(server.post("/", {**body, "stream": True}).text) == events


def test_usage_on_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = parse(
        server.post(
            CHAT,
            {
                "messages": HELLO,
                "max_tokens": 5,
                "temperature": 0,
                "stream": True,
                "stream_options": options,
            },
        ).text
    )
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] == 5
    for none in ({}, None):
        body = {"messages": HELLO, "max_tokens": 2, "stream": True, "stream_options": none}
        assert all("usage" not in event for event in parse(server.post(CHAT, body).text)[:-1])


# ---- stop strings --------------------------------------------------------------------------------------


def test_stop_strings_never_show_and_nothing_is_lost(server: Running) -> None:
    body = {"prompt": "The iron", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    for start in range(2, len(text) - 5, 7):
        stop = text[start : start + 4]
        expected = text[: text.index(stop)]
        events = parse(
            server.post(COMPLETIONS, {**body, "stop": [stop, "never-said"], "stream": True}).text
        )
        pieces = [event["choices"][0]["text"] for event in events[:-1]]
        assert "".join(pieces) == expected
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        tgi = {"max_new_tokens": 40, "stop": [stop], "details": True}
        said = server.post("/generate", {"inputs": "The iron", "parameters": tgi}).json()
        if said["details"]["finish_reason"] == "stop_sequence":
            assert said["generated_text"] == expected + stop
    assert until(lambda: idle(server))


def test_one_of_several_stops_alone(server: Running) -> None:
    body = {"prompt": "The iron", "max_tokens": 60, "n": 3, "seed": 3, "ignore_eos": True}
    texts = [choice["text"] for choice in server.post(COMPLETIONS, body).json()["choices"]]
    stop = texts[1][4:12]
    assert stop not in texts[0] + texts[2]
    choices = server.post(COMPLETIONS, {**body, "stop": stop}).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]
    assert [choice["text"] for choice in choices] == [
        texts[0],
        texts[1][: texts[1].index(stop)],
        texts[2],
    ]
    lengths = [len(request.emitted) for request in server.backend.seen]
    assert lengths and until(lambda: idle(server))


# ---- readers that leave, stop, or are slow ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", [CHAT, "/"], ids=["openai", "tgi"])
def test_a_client_that_leaves_frees_its_blocks(
    serve: Callable[..., Running], path: str, stream: bool
) -> None:
    server = serve(pace=0.02)
    long = {"messages": HELLO, "n": 4, "max_tokens": 400, "ignore_eos": True}
    body = long if path == CHAT else {"inputs": "The iron", "parameters": {"max_new_tokens": 400}}
    connection = opened(server, path, {**body, "stream": stream})
    assert until(lambda: server.backend.steps > 3)
    held = len(server.backend.scheduler.by_request)
    assert held == (4 if path == CHAT else 1)
    connection.close()
    before = server.backend.steps
    assert until(lambda: not server.backend.scheduler.by_request)
    assert server.backend.steps - before < 100, "it was left to its end"
    assert until(lambda: idle(server))
    assert until(lambda: 'err="dropped"' in server.get("/metrics").text)


def test_a_slow_reader_gets_everything(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(stall_seconds=10 * LONG)), context=1100)
    body = {
        "prompt": "The iron",
        "max_tokens": 1000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
    }
    data = b""
    with opened(server, COMPLETIONS, body, buffer=4096) as connection:
        assert until(lambda: idle(server)), "the engine does not wait for the reader"
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(4096)
    assert data.count(b'"finish_reason":"length"') == 1 and data.count(b"[DONE]") == 1
    assert data.count(b"token_logprobs") == 1000


def test_a_reader_that_stops_is_dropped(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(stall_seconds=0.3)), pace=0.005)
    body = {
        "prompt": "The iron",
        "max_tokens": 500,
        "n": 8,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    with opened(server, COMPLETIONS, body, buffer=4096) as connection:
        assert until(lambda: server.backend.steps) and until(lambda: idle(server))
        assert server.backend.steps < 490, "it was not waited for to the end"
        assert until(lambda: 'err="dropped"' in server.get("/metrics").text)
        with suppress(
            ConnectionResetError
        ):  # what had left before, and then an end: it is dropped, not merely left
            while connection.recv(65536):
                pass


@pytest.mark.parametrize("stuck", [2, 3], ids=["at an event", "at the end"])
def test_a_reader_that_stops_holds_nothing_for_long(stuck: int) -> None:
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
        if len(sent) == stuck:
            await asyncio.Event().wait()
        sent.append(message)

    async def respond() -> None:
        deadline = asyncio.get_running_loop().time() + 2 * LONG
        stream = EventStream(
            events(), lambda _: b"", deadline=deadline, keepalive=LONG, stall=0.1, headers={}
        )
        with pytest.raises(Stalled):
            await asyncio.wait_for(stream({}, receive, send), LONG)

    asyncio.run(respond())
    assert closed == [True] and len(sent) == stuck


def test_silence_is_filled_with_comments(serve: Callable[..., Running]) -> None:
    server = serve(Settings(model="speaker", limits=Limits(keepalive_seconds=0.1)))
    server.backend.hold = 0
    text = ""
    body = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", CHAT, json=body) as answer:
        for part in answer.iter_text():
            text += part
            if text.count(": keep-alive") == 4:
                server.backend.hold = None
    assert text.startswith(": keep-alive\n\n" * 4) and parse(text)[-1] == "[DONE]"


# ---- errors ----------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_ends_the_stream_without_done(serve: Callable[..., Running]) -> None:
    server = serve()
    server.backend.poison = 300
    openai = server.post(COMPLETIONS, {"prompt": [300], "stream": True, "ignore_eos": True})
    assert openai.status_code == 200
    events = parse(openai.text)
    assert "[DONE]" not in events and events[-1]["error"]["type"] == "server_error"
    assert "0x" not in openai.text and ".py" not in openai.text
    assert set(events[-2]["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    whole = server.post(COMPLETIONS, {"prompt": [300], "ignore_eos": True})
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "generation_failed"


def test_tgis_error_in_the_middle(serve: Callable[..., Running], tokenizer: Any) -> None:
    server = serve()
    server.backend.poison = tokenizer.encode("bellows")[0]
    body = {"inputs": "bellows", "parameters": {"max_new_tokens": 9}}
    events = parse(server.post("/generate_stream", body).text)
    assert [event.get("index") for event in events] == [1, 2, None]
    assert events[-1]["error_type"] == "generation" and events[-1]["error"].startswith(
        "Request failed during generation"
    )
    whole = server.post("/generate", body)
    assert whole.status_code == 424 and whole.json()["error_type"] == "generation"
    messages = {
        "messages": [{"role": "user", "content": "bellows"}],
        "max_tokens": 9,
        "temperature": 0,
        "stream": True,
    }
    assert parse(server.post("/v1/messages", messages).text)[-1][0] == "error"
    responses = parse(
        server.post("/v1/responses", {"input": "bellows", "temperature": 0, "stream": True}).text
    )
    assert responses[-1][0] == "error" and responses[-1][1]["sequence_number"] == len(responses) - 1


@pytest.mark.parametrize("by", ["header", "limit"])
def test_deadlines(serve: Callable[..., Running], by: str) -> None:
    """While an engine that has stopped would keep everybody waiting for ever; before and after the first token."""
    body = {
        "prompt": "The iron",
        "max_tokens": 100,
        "ignore_eos": True,
    }  # no template, to start no process
    for seconds in (0.3, 3.0, 30.0):  # a machine may be too busy to say a first word in time
        limits = Limits(deadline_seconds=seconds) if by == "limit" else Limits()
        headers = {"x-request-deadline-ms": str(int(1000 * seconds))} if by == "header" else {}
        server = serve(Settings(model="speaker", limits=limits))
        server.backend.hold = 1
        streamed = server.post(COMPLETIONS, {**body, "stream": True}, headers=headers)
        whole = server.post(COMPLETIONS, body, headers=headers)
        assert whole.status_code == 504 and whole.json()["error"]["code"] == "deadline_exceeded"
        server.backend.hold = None
        assert until(lambda server=server: idle(server))
        if streamed.status_code == 200:
            break
        assert streamed.status_code == 504
    events = parse(streamed.text)
    assert events[0]["choices"] and events[-1]["error"]["code"] == "deadline_exceeded"


def test_a_deadline_that_is_no_number(server: Running) -> None:
    for value in ("soon", "-1", "1.5", "9" * 30):
        answer = server.post(
            CHAT, {"messages": HELLO, "max_tokens": 1}, headers={"x-request-deadline-ms": value}
        )
        assert answer.status_code == 400


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
    server: Running, path: str, body: dict[str, Any]
) -> None:
    more = {"priority": -3, "deadline_ms": 60_000}
    if "parameters" in body:
        more = {"parameters": body["parameters"] | more}
    assert server.post(path, body | more).status_code == 200
    asked = server.backend.seen[-1]
    assert asked.priority == -3 and asked.deadline == 60.0

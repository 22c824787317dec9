"""Framed messages: any split of the bytes preserves them, and malformed frames are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.ipc import (
    ENGINE_CODEC,
    FRAME_HEADER,
    MAX_BODY_BYTES,
    BlockingChannel,
    EngineMessage,
    FrameDecoder,
    ProtocolError,
    is_peer_closed,
)
from bloomery.messages import AbortRequest, EngineRequest, ResolvedSampling, TokenOutput

MESSAGE_TYPES = ENGINE_CODEC.message_types
LEAF_VALUES = {
    int: st.integers(0, 2**63 - 1) | st.integers(-(2**31), 2**64 - 1),
    float: st.floats(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
}


def strategy_for(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of an annotated type."""
    arguments = typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{name: strategy_for(hint) for name, hint in hints.items()})
    if typing.get_origin(annotation) is typing.Literal:
        return st.sampled_from(arguments)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return st.one_of(map(strategy_for, arguments))
    if typing.get_origin(annotation) is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy_for(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(annotation) is tuple:
        return st.tuples(*map(strategy_for, arguments))
    return LEAF_VALUES[annotation]


messages = st.one_of(map(strategy_for, MESSAGE_TYPES))


def encode(message: EngineMessage) -> bytes:
    return ENGINE_CODEC.encode(message)


def decode_all(data: bytes) -> list[EngineMessage]:
    return list(FrameDecoder(ENGINE_CODEC).feed(data))


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    """Split data into pieces of these sizes, and the rest."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@settings(deadline=None)
@given(sent=st.lists(messages, max_size=4), sizes=st.lists(st.integers(0, 40), max_size=20))
def test_messages_survive_any_split(sent: list[EngineMessage], sizes: list[int]) -> None:
    decoder = FrameDecoder(ENGINE_CODEC)
    data = b"".join(map(encode, sent))
    received = [message for piece in split(data, sizes) for message in decoder.feed(piece)]
    assert [type(message) for message in received] == [type(message) for message in sent]
    # Compare the encoded forms: NaN is not equal to itself.
    assert list(map(encode, received)) == list(map(encode, sent))
    assert not decoder.buffer


@settings(deadline=None)
@given(message=messages, at=st.integers(0), change=st.integers(1, 255))
def test_a_changed_byte_gives_a_message_or_a_protocol_error(
    message: EngineMessage, at: int, change: int
) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] ^= change
    with contextlib.suppress(ProtocolError):
        for received in decode_all(bytes(data)):
            assert isinstance(received, MESSAGE_TYPES)


@given(noise=st.binary(max_size=200))
def test_noise_raises_nothing_but_protocol_errors(noise: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_all(noise)


def create_frame(message_type: type[EngineMessage], body: bytes) -> bytes:
    return FRAME_HEADER.pack(len(body), MESSAGE_TYPES.index(message_type)) + body


def encode_body(message: EngineMessage) -> bytes:
    return encode(message)[FRAME_HEADER.size :]


REQUEST = EngineRequest("a", (1, 2), ResolvedSampling(), 3)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (FRAME_HEADER.pack(MAX_BODY_BYTES + 1, 1), "bad frame header"),
        (FRAME_HEADER.pack(3, len(MESSAGE_TYPES)), f"type {len(MESSAGE_TYPES)}, 3 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad frame header"),
        (
            create_frame(EngineRequest, encode_body(AbortRequest("a"))),
            "EngineRequest of 6 bytes: .*required field `prompt`",
        ),
        (create_frame(EngineRequest, encode_body(REQUEST)[:-1]), "EngineRequest .* truncated"),
        (
            create_frame(EngineRequest, encode_body(REQUEST).replace(b"\x01\x02", b"\xc3\x02")),
            r"Expected `int`, got `bool`",
        ),
        (create_frame(AbortRequest, encode_body(AbortRequest("a")) + b"\x00"), "trailing"),
        (create_frame(AbortRequest, b"\x81\xa2id\xa1\xff"), "AbortRequest of 6 bytes: .*utf-8"),
        (create_frame(AbortRequest, b"\x81\xa1x" + b"\x91" * 100_000), "recursion"),
    ],
)
def test_a_malformed_frame_is_refused_with_a_reason(data: bytes, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
        decode_all(data)


def test_messages_before_a_malformed_frame_arrive() -> None:
    received = []
    with pytest.raises(ProtocolError):
        data = encode(AbortRequest("good")) + b"\xff" * 8
        for message in FrameDecoder(ENGINE_CODEC).feed(data):
            received.append(message)
    assert received == [AbortRequest("good")]


def test_a_frame_over_the_limit_is_not_sent() -> None:
    assert ENGINE_CODEC.encode(AbortRequest("a" * 90), max_bytes=100)
    with pytest.raises(ProtocolError, match="AbortRequest: 106 bytes are over the limit of 100"):
        ENGINE_CODEC.encode(AbortRequest("a" * 100), max_bytes=100)


def test_a_blocking_channel_waits_or_polls_and_notices_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = BlockingChannel(theirs, ENGINE_CODEC)
        assert channel.receive(0) == [] and channel.receive(0.01) == []
        long = EngineRequest("long", tuple(range(100_000)), ResolvedSampling(), 1)
        data = encode(AbortRequest("a")) + encode(long)
        ours.sendall(data[:20])
        assert channel.receive(None) == [AbortRequest("a")]
        ours.setblocking(False)
        received = []
        unsent = data[20:]
        while unsent:
            unsent = unsent[ours.send(unsent) :]
            received += channel.receive(0)
        assert received == [long]
        ours.setblocking(True)
        ours.sendall(encode(AbortRequest("last")))
        ours.close()
        assert channel.receive(None) == [AbortRequest("last")]
        with pytest.raises(EOFError):
            channel.receive(None)


def test_a_closed_peer_is_noticed_even_while_its_data_can_be_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        assert not is_peer_closed(theirs)
        ours.send(b"a task")
        assert not is_peer_closed(theirs)
        ours.close()
        assert is_peer_closed(theirs)


def test_token_outputs_travel_only_within_an_engine_output() -> None:
    with pytest.raises(KeyError):
        ENGINE_CODEC.encode(TokenOutput("a", 0))  # type: ignore[arg-type]

"""Frames: whatever a message holds comes back equal, in whatever pieces it travels; what is no frame is refused."""

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

from bloomery.engine.wire import HEADER, KINDS, LIMIT, Channel, Frames, Message, WireError, encode
from bloomery.messages import AbortRequest, EngineRequest, ResolvedSampling, TokenOutput

LEAVES = {
    int: st.integers(0, 2**63 - 1) | st.integers(-(2**31), 2**64 - 1),
    float: st.floats(),
    str: st.text(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
}


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotated type."""
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: anything(hint) for name, hint in hints.items()})
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(arguments)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return st.one_of(map(anything, arguments))
    if typing.get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return st.lists(anything(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(anything, arguments))
    return LEAVES[kind]


messages = st.one_of(map(anything, KINDS))


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    cut = []
    for size in sizes:
        cut.append(data[:size])
        data = data[size:]
    return [*cut, data]


@settings(deadline=None)
@given(said=st.lists(messages, max_size=4), sizes=st.lists(st.integers(0, 40), max_size=20))
def test_messages_survive_any_cut(said: list[Message], sizes: list[int]) -> None:
    frames = Frames()
    data = b"".join(map(encode, said))
    heard = [message for piece in pieces(data, sizes) for message in frames.feed(piece)]
    assert [type(message) for message in heard] == [type(message) for message in said]
    assert [encode(message) for message in heard] == [
        encode(message) for message in said
    ]  # NaN is not equal to itself
    assert not frames.buffer


@settings(deadline=None)
@given(message=messages, at=st.integers(0), change=st.integers(1, 255))
def test_a_changed_byte_is_a_message_or_a_wire_error(
    message: Message, at: int, change: int
) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] ^= change
    with contextlib.suppress(WireError):
        for heard in Frames().feed(bytes(data)):
            assert isinstance(heard, KINDS)


@given(noise=st.binary(max_size=200))
def test_noise_never_raises_anything_else(noise: bytes) -> None:
    with contextlib.suppress(WireError):
        list(Frames().feed(noise))


def frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind) + body


def body(message: Message) -> bytes:
    return encode(message)[HEADER.size :]


REQUEST = EngineRequest("a", (1, 2), ResolvedSampling(), 3)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (HEADER.pack(LIMIT + 1, 1), "not the head of a frame"),
        (HEADER.pack(3, len(KINDS)), f"kind {len(KINDS)}, 3 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "not the head of a frame"),
        (
            frame(KINDS.index(EngineRequest), body(AbortRequest("a"))),
            "a Request of 6 bytes: .*required field `prompt`",
        ),
        (frame(KINDS.index(EngineRequest), body(REQUEST)[:-1]), "a Request .* truncated"),
        (
            frame(KINDS.index(EngineRequest), body(REQUEST).replace(b"\x01\x02", b"\xc3\x02")),
            r"Expected `int`, got `bool`",
        ),
        (frame(KINDS.index(AbortRequest), body(AbortRequest("a")) + b"\x00"), "trailing"),
        (frame(KINDS.index(AbortRequest), b"\x81\xa2id\xa1\xff"), "a Abort of 6 bytes: .*utf-8"),
        (frame(KINDS.index(AbortRequest), b"\x81\xa1x" + b"\x91" * 100_000), "recursion"),
    ],
)
def test_what_is_refused_and_how(data: bytes, what: str) -> None:
    with pytest.raises(WireError, match=what):
        list(Frames().feed(data))


def test_what_came_before_a_bad_frame_is_heard() -> None:
    heard = []
    with pytest.raises(WireError):
        for message in Frames().feed(encode(AbortRequest("good")) + b"\xff" * 8):
            heard.append(message)
    assert heard == [AbortRequest("good")]


def test_a_frame_over_the_limit_is_not_sent() -> None:
    assert encode(AbortRequest("a" * 90), limit=100)
    with pytest.raises(WireError, match="a Abort of 106 bytes is over the limit of 100"):
        encode(AbortRequest("a" * 100), limit=100)


def test_a_channel_waits_looks_and_notices_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        assert channel.receive(0) == [] and channel.receive(0.01) == []
        long = EngineRequest("long", tuple(range(100_000)), ResolvedSampling(), 1)
        data = encode(AbortRequest("a")) + encode(long)
        ours.sendall(data[:20])
        assert channel.receive(None) == [AbortRequest("a")]
        ours.setblocking(False)
        heard = []
        left = data[20:]
        while left:
            left = left[ours.send(left) :]
            heard += channel.receive(0)
        assert heard == [long]
        ours.setblocking(True)
        ours.sendall(encode(AbortRequest("last")))
        ours.close()
        assert channel.receive(None) == [AbortRequest("last")]
        with pytest.raises(EOFError):
            channel.receive(None)


def test_tokens_are_no_message_of_their_own() -> None:
    """They travel in News, a step's in one frame."""
    with pytest.raises(KeyError):
        encode(TokenOutput("a", 0))  # type: ignore[arg-type]

"""How messages look between the API process, the engine and its ranks: frames of msgpack over a socket.

A frame is its body's length, its kind and its body: one message. Only the kinds below exist and each body is checked
against its type, so nothing that arrives can name a class, a method or a file. This file knows no request and no time.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from bloomery.config import Plan
from bloomery.errors import BloomeryError
from bloomery.messages import (
    AbortRequest,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    ScheduledStep,
    StepOutput,
)

HEADER = struct.Struct(">IB")  # length of the body, kind
LIMIT = 1 << 28  # bytes of a body; the largest prompt with its log-probabilities stays far below
CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Hello:
    """The client's first words: what to load, and which engine of its life this is."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Join:
    """An executor's first words to a rank: what to load, who it is, and where the others are met."""

    plan: Plan
    rank: int
    meeting: str  # a file, or host:port
    interface: str  # of the network: what ranks say to each other goes by no other


@dataclass(frozen=True, slots=True)
class Order:
    """A step for all ranks, and the last tokens of its sequences where they were drawn by another stage."""

    step: ScheduledStep
    drawn: tuple[tuple[int, int], ...] = ()


Message = (
    Hello
    | EngineRequest
    | AbortRequest
    | EngineStatus
    | EngineCapacity
    | AdmittedRequests
    | EngineOutput
    | Join
    | Order
    | StepOutput
)
KINDS: tuple[type[Message], ...] = (
    Hello,
    EngineRequest,
    AbortRequest,
    EngineStatus,
    EngineCapacity,
    AdmittedRequests,
    EngineOutput,
    Join,
    Order,
    StepOutput,
)
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
DECODERS: tuple[msgspec.msgpack.Decoder[Message], ...] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in KINDS
)
ENCODER = msgspec.msgpack.Encoder()


class WireError(BloomeryError):
    """A frame that cannot be read, may not be sent or makes no sense. The connection it came by is of no more use."""


def encode(message: Message, limit: int = LIMIT) -> bytes:
    body = ENCODER.encode(message)
    if len(body) > limit:
        raise WireError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {limit}"
        )
    return HEADER.pack(len(body), NUMBERS[type(message)]) + body


class Frames:
    """Bytes in as they come, messages out as they are complete."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self.buffer += data
        while len(self.buffer) >= HEADER.size:
            length, kind = HEADER.unpack_from(self.buffer)
            if length > LIMIT or kind >= len(KINDS):
                raise WireError(f"not the head of a frame: kind {kind}, {length} bytes")
            end = HEADER.size + length
            if len(self.buffer) < end:
                return
            body = bytes(memoryview(self.buffer)[HEADER.size : end])
            del self.buffer[:end]
            try:
                message = DECODERS[kind].decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise WireError(f"a {KINDS[kind].__name__} of {length} bytes: {error}") from None
            yield message


class Channel:
    """The engine's end: it waits for messages when idle, and merely looks for them between steps."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.frames = Frames()
        connection.setblocking(True)
        self.poll = select.poll()  # unlike select, at ease with descriptors over 1,023
        self.poll.register(connection, select.POLLIN)

    def send(self, message: Message) -> None:
        self.connection.sendall(encode(message))

    def receive(self, seconds: float | None) -> list[Message]:
        """All that has arrived, after up to `seconds` of waiting for something. EOFError once the other end is gone."""
        found: list[Message] = []
        if not self.poll.poll(None if seconds is None else seconds * 1000):
            return found
        while True:
            try:
                data = self.connection.recv(CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            if not data and found:
                return found  # the end will be met again
            if not data:
                raise EOFError("the other end has closed the connection")
            found += self.frames.feed(data)

"""Child processes, and the framed messages that parent and child exchange over a socket.

The engine process, the tensor parallel ranks and the tokenizer workers are all started here. A
child inherits one end of a socket pair, so there is no path to find, no port to reach and nothing
to clean up: both ends disappear with their processes.

A frame is the length of its body, the number of its message type and a msgpack body. A codec knows
a fixed list of message types and checks every body against its type, so nothing that arrives can
name a class, a method or a file. This module knows no request, no clock and no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from bloomery.config import EnginePlan, child_environment
from bloomery.errors import BloomeryError
from bloomery.messages import (
    AbortRequest,
    AdapterInfo,
    AdapterRefusal,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    LoadAdapter,
    ScheduledStep,
    StepOutput,
    UnloadAdapter,
)

MessageT = TypeVar("MessageT")

FRAME_HEADER = struct.Struct(">IB")  # length of the body in bytes, number of the message type
# Limit of one body in bytes, 256 MiB. The largest prompt with its log-probabilities needs far less.
MAX_BODY_BYTES = 1 << 28
RECEIVE_BYTES = 1 << 18  # most bytes that one recv() call reads
# Seconds to wait for the exit status of a child that has closed its connection.
EXIT_STATUS_SECONDS = 0.5
PROGRESS_INTERVAL_SECONDS = 0.1  # between two load reports of one process
ENGINE_COMMAND = (sys.executable, "-m", "bloomery.engine_main")
PR_SET_PDEATHSIG = 1  # prctl option of Linux: the signal a process gets when its parent dies


class ProtocolError(BloomeryError):
    """A frame cannot be read, may not be sent or makes no sense. Its connection is unusable."""


# ---- messages and frames -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineHello:
    """The client's first message to an engine: the plan to load, and the engine's number."""

    epoch: int
    plan: EnginePlan


@dataclass(frozen=True, slots=True)
class RankJoin:
    """An executor's first message to a rank: the plan to load, its rank and the rendezvous."""

    plan: EnginePlan
    rank: int
    rendezvous: str  # a file, or host:port
    interface: str  # the only network interface that ranks use among themselves


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step for all ranks.

    `last_tokens` holds (sequence, token) for tokens that another pipeline stage has sampled.
    """

    step: ScheduledStep
    last_tokens: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RankMasks:
    """The token masks of the last step, for the ranks that sample: one row a masked sequence."""

    masks: bytes  # [sequences, words] int32


EngineMessage = (
    EngineHello
    | EngineRequest
    | AbortRequest
    | EngineStatus
    | EngineCapacity
    | AdmittedRequests
    | EngineOutput
    | RankJoin
    | RankStep
    | RankMasks
    | StepOutput
    | LoadAdapter
    | UnloadAdapter
    | AdapterInfo
    | AdapterRefusal
)


class MessageCodec(Generic[MessageT]):
    """Turns messages of a fixed list of types into frames and back.

    The position of a type in the list is its number in the frame header.
    """

    def __init__(self, *message_types: type[MessageT]):
        self.message_types = message_types
        self.type_numbers = {
            message_type: number for number, message_type in enumerate(message_types)
        }
        self.encoder = msgspec.msgpack.Encoder()
        self.decoders = [msgspec.msgpack.Decoder(message_type) for message_type in message_types]

    def encode(self, message: MessageT, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the frame of a message. Raises ProtocolError if its body is too long."""
        body = self.encoder.encode(message)
        if len(body) > max_bytes:
            raise ProtocolError(
                f"{type(message).__name__}: {len(body)} bytes are over the limit of {max_bytes}"
            )
        return FRAME_HEADER.pack(len(body), self.type_numbers[type(message)]) + body

    def decode(self, type_number: int, body: bytes) -> MessageT:
        """Return the message. Raises ProtocolError if the body does not fit its type."""
        try:
            return self.decoders[type_number].decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            name = self.message_types[type_number].__name__
            raise ProtocolError(f"{name} of {len(body)} bytes: {error}") from None


ENGINE_CODEC: MessageCodec[EngineMessage] = MessageCodec(
    EngineHello,
    EngineRequest,
    AbortRequest,
    EngineStatus,
    EngineCapacity,
    AdmittedRequests,
    EngineOutput,
    RankJoin,
    RankStep,
    RankMasks,
    StepOutput,
    LoadAdapter,
    UnloadAdapter,
    AdapterInfo,
    AdapterRefusal,
)


class FrameDecoder(Generic[MessageT]):
    """Takes bytes in pieces of any size and yields each message once it is complete."""

    def __init__(self, codec: MessageCodec[MessageT]) -> None:
        self.codec = codec
        self.buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        self.buffer += data
        while len(self.buffer) >= FRAME_HEADER.size:
            length, type_number = FRAME_HEADER.unpack_from(self.buffer)
            if length > MAX_BODY_BYTES or type_number >= len(self.codec.message_types):
                raise ProtocolError(f"bad frame header: type {type_number}, {length} bytes")
            end = FRAME_HEADER.size + length
            if len(self.buffer) < end:
                return
            body = bytes(memoryview(self.buffer)[FRAME_HEADER.size : end])
            del self.buffer[:end]
            yield self.codec.decode(type_number, body)


class BlockingChannel(Generic[MessageT]):
    """Messages over a socket for a process without an event loop.

    `receive` waits for messages while the process is idle, or only looks for them between two
    steps.
    """

    def __init__(self, connection: socket.socket, codec: MessageCodec[MessageT]):
        self.connection = connection
        self.codec = codec
        self.decoder = FrameDecoder(codec)
        connection.setblocking(True)
        self.poll = select.poll()  # select() fails on descriptors over 1,023
        self.poll.register(connection, select.POLLIN)
        self.send_lock = threading.Lock()  # frames of several threads must not mix

    def send(self, message: MessageT) -> None:
        frame = self.codec.encode(message)
        with self.send_lock:
            self.connection.sendall(frame)

    def receive(self, timeout_seconds: float | None) -> list[MessageT]:
        """Return all messages that have arrived; wait up to `timeout_seconds` (None: for ever).

        Raises EOFError once the other end is closed and everything before that was returned.
        """
        messages: list[MessageT] = []
        timeout_ms = None if timeout_seconds is None else timeout_seconds * 1000
        if not self.poll.poll(timeout_ms):
            return messages
        while True:
            try:
                data = self.connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data and messages:
                return messages  # the next call reads the end of the stream again and raises
            if not data:
                raise EOFError("the other end has closed the connection")
            messages += self.decoder.feed(data)


class AsyncChannel(Generic[MessageT]):
    """Messages over a socket for asyncio code that sends one and then waits for the answer."""

    def __init__(self, connection: socket.socket, codec: MessageCodec[MessageT]):
        self.connection = connection
        self.codec = codec
        self.decoder = FrameDecoder(codec)
        connection.setblocking(False)

    async def send(self, message: MessageT) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, self.codec.encode(message))

    async def receive(self) -> MessageT:
        """Wait for one message. Raises EOFError once the other end is closed."""
        loop = asyncio.get_running_loop()
        message = next(self.decoder.feed(b""), None)
        while message is None:
            data = await loop.sock_recv(self.connection, RECEIVE_BYTES)
            if not data:
                raise EOFError("the other end has closed the connection")
            message = next(self.decoder.feed(data), None)
        return message


def is_peer_closed(connection: socket.socket) -> bool:
    """Whether the other end is closed, even if data it has sent can still be read."""
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is always reported
    return bool(poll.poll(0))


# ---- the parent's side ---------------------------------------------------------------------------


class ChildHandle(NamedTuple):
    """A child process and the parent's end of its socket pair."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def kill(self) -> None:
        """Close the connection, kill the process and reap it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def spawn_child(command: Sequence[str], inherited_fds: Sequence[int] = ()) -> ChildHandle:
    """Start `command` and append the descriptor of the child's end of a socket pair to it."""
    parent_end, child_end = socket.socketpair()
    with child_end:
        try:
            # In a process group of its own: Ctrl-C in a terminal reaches only the parent, which
            # then ends the child.
            process = subprocess.Popen(
                [*command, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno(), *inherited_fds],
                process_group=0,
                env=child_environment(),
            )
        except OSError:
            parent_end.close()
            raise
    return ChildHandle(process, parent_end)


def build_engine_command(
    log_format: str, preload_device: str | None = None, log_level: str = "info"
) -> tuple[str, ...]:
    """Return the command line of an engine process, for `spawn_child`.

    With `preload_device`, cpu or cuda, the process imports everything that a worker on this device
    needs before it gets its plan.
    """
    preload = () if preload_device is None else (preload_device,)
    return (*ENGINE_COMMAND, *preload, log_format, log_level)


class ChildConnection(asyncio.Protocol, Generic[MessageT]):
    """A child process and its connection, for a parent that uses asyncio.

    This class knows neither the meaning of a message nor what to do when the child dies.
    """

    def __init__(
        self,
        codec: MessageCodec[MessageT],
        on_message: Callable[[MessageT], None],
    ):
        self.codec = codec
        self.on_message = on_message
        self.decoder = FrameDecoder(codec)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process: subprocess.Popen[bytes] | None = None
        self.transport: asyncio.Transport | None = None
        self.exit_reason = ""  # why the child is gone, as a predicate: "was killed by signal 9"

    async def connect(self, handle: ChildHandle) -> None:
        """Take over a child that has been spawned."""
        self.process = handle.process
        loop = asyncio.get_running_loop()
        try:
            self.transport, _ = await loop.create_unix_connection(
                lambda: self, sock=handle.connection
            )
        except BaseException:
            handle.kill()
            raise

    def send(self, message: MessageT) -> None:
        if self.transport is not None:
            self.transport.write(self.codec.encode(message))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.decoder.feed(data):
                self.on_message(message)
        except ProtocolError as error:
            self.exit_reason = f"broke the protocol: {error}"
            if self.transport is not None:
                self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    async def terminate(self, grace_seconds: float = 0.0) -> None:
        """End and reap the child. With `grace_seconds` it gets SIGTERM and that time to exit."""
        if self.process is not None:
            if grace_seconds:
                self.process.terminate()
                wait_seconds = grace_seconds
            else:
                wait_seconds = EXIT_STATUS_SECONDS if self.lost.done() else 0.0
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self.process.wait, wait_seconds)
            finally:
                was_running = self.process.poll() is None
                self.process.kill()
            status = await asyncio.to_thread(self.process.wait)
            if not self.exit_reason and was_running:
                self.exit_reason = "closed its connection; its log may say why"
            elif not self.exit_reason:
                self.exit_reason = describe_exit(status)
        if self.transport is not None:
            self.transport.abort()


def describe_exit(status: int) -> str:
    """Describe how a process ended, from the return code of `Popen.wait`."""
    if status < 0:
        return f"was killed by signal {-status}"
    return f"exited with status {status}"


# ---- the child's side ----------------------------------------------------------------------------


def open_inherited_channel(
    descriptor: int, codec: MessageCodec[MessageT]
) -> BlockingChannel[MessageT]:
    """Open the child's channel to its parent. Children of this child do not inherit it."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    return BlockingChannel(connection, codec)


def die_with_parent() -> None:
    """Exit on SIGTERM, ignore Ctrl-C, and have the kernel kill this process with its parent.

    Linux takes the thread that spawned the process for its parent. Call this only in a child whose
    parent thread lives as long as the parent process.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def create_progress_reporter(
    send: Callable[[EngineStatus], None],
) -> Callable[[str, int, int], None]:
    """Return a function that reports load progress to the parent, at a limited rate."""
    last_sent = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if now - last_sent >= PROGRESS_INTERVAL_SECONDS:
            last_sent = now
            fraction = min(done / max(total, 1), 1.0)
            send(EngineStatus("loading", fraction, what))

    return report

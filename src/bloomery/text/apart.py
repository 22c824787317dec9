"""Work on text that its author can stretch, in processes that can be killed: chat templates, and tokenizing long texts.

A template is a stranger's program and a long text may meet a slow corner of a tokenizer; a thread could not be stopped.
A child has a limit on processor time for each task, set by itself with a timer that kills it, and one on memory. It
gets the vocabulary and the templates as data through a descriptor, and afterwards tasks and answers as frames of
msgpack: nothing that arrives names a class or a file. Children come when they are missed, and stay: one for most
conversations, a few where many speak at once.

    python -m bloomery.text.apart TASKS VOCABULARY SECONDS_OF_TEMPLATE SECONDS_OF_TEXT BYTES    descriptors and limits
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from bloomery.config import child_environment
from bloomery.errors import InvalidRequest, TemplateError
from bloomery.text.chat import render
from bloomery.text.tokenizer import Extras, Piece, Tokenizer

LENGTH = struct.Struct(">I")
CHUNK = 1 << 18
WAITING = 20.0  # times its processor time a task may take by the clock, on a machine that is busy
NICENESS = 5  # streams that are running come first
PR_SET_PDEATHSIG = 1


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    text: str
    add_special: bool


class Pieces(msgspec.Struct, frozen=True, tag="pieces"):
    text: str
    add_special: bool
    last: int | None  # only so many, from the end


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    ids: list[int]


class Conversation(msgspec.Struct, frozen=True, tag="conversation"):
    messages: list[Any]
    options: dict[str, Any]
    limit: int  # characters of the result


class Done(msgspec.Struct, frozen=True, tag="done"):
    ids: list[int] = []
    text: str = ""
    pieces: bytes = b""  # as JSON: a long text has so many that the parent should not touch each


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str
    field: str | None


class Vocabulary(msgspec.Struct, frozen=True):
    backend: str
    chat_templates: dict[str, str]
    special_tokens: dict[str, str]


Task = Encode | Pieces | Decode | Conversation
ENCODER = msgspec.msgpack.Encoder()
TASKS: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)
ANSWERS: msgspec.msgpack.Decoder[Done | Refused] = msgspec.msgpack.Decoder(Done | Refused)


class Apart:
    """The parent's side."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        processes: int = 2,
        template_seconds: float = 1.0,
        text_seconds: float = 10.0,
        memory: int = 1 << 30,
    ):
        self.tokenizer = tokenizer
        self.limits = (template_seconds, text_seconds, memory)
        self.template_seconds = template_seconds
        self.text_seconds = text_seconds
        self.places = asyncio.Semaphore(processes)
        self.idle: list[Hand] = []
        self.vocabulary: int | None = None  # a descriptor
        self.warming: asyncio.Task[None] | None = None

    async def encode(self, text: str, add_special: bool, field: str = "prompt") -> list[int]:
        return (await self._run(Encode(text, add_special), self.text_seconds, field)).ids

    async def pieces(
        self, text: str, add_special: bool, last: int | None = None, field: str = "inputs"
    ) -> bytes:
        return (await self._run(Pieces(text, add_special, last), self.text_seconds, field)).pieces

    async def decode(self, ids: list[int]) -> str:
        return (await self._run(Decode(ids), self.text_seconds, "tokens")).text

    async def conversation(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], limit: int
    ) -> tuple[str, list[int]]:
        """As the chat template writes it down, at most `limit` characters, and tokenized."""
        plain = msgspec.to_builtins([dict(message) for message in messages])
        task = Conversation(plain, msgspec.to_builtins(dict(options)), limit)
        done = await self._run(task, self.template_seconds, "messages")
        return done.text, done.ids

    def warm(self) -> None:
        """Have a child ready before it is missed."""
        self.warming = asyncio.create_task(self._warm())

    def close(self) -> None:
        while self.idle:
            self.idle.pop().end()
        if self.vocabulary is not None:
            os.close(self.vocabulary)
            self.vocabulary = None

    async def _warm(self) -> None:
        async with self.places:
            if not self.idle:
                self.idle.append(await self._hire())

    async def _run(self, task: Task, seconds: float, field: str) -> Done:
        async with self.places:
            while self.idle and (lost := self.idle[-1]).process.poll() is not None:
                self.idle.remove(lost)  # by nobody's fault who is here now
                lost.end()
            hand = self.idle.pop() if self.idle else await self._hire()
            try:
                async with asyncio.timeout(WAITING * seconds):
                    answer = await hand.ask(task)
            except (OSError, EOFError, TimeoutError):
                await asyncio.to_thread(
                    hand.end
                )  # the system takes a while to clear up after a large process
                what = (
                    "the chat template did not come to an end"
                    if field == "messages"
                    else "the text takes too long"
                )
                kind = TemplateError if field == "messages" else InvalidRequest
                raise kind(
                    f"{what}: it may use {seconds:g} s and a bounded amount of memory", field
                ) from None
            except BaseException:
                hand.end()  # an answer nobody waits for may still come
                raise
            self.idle.append(hand)
        if isinstance(answer, Refused):
            raise TemplateError(answer.message, answer.field)
        return answer

    async def _hire(self) -> Hand:
        if self.vocabulary is None:
            self.vocabulary = await asyncio.to_thread(packed, self.tokenizer)
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = theirs.fileno(), self.vocabulary
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bloomery.text.apart",
                    *map(str, (*descriptors, *self.limits)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,
                env=child_environment(),
            )
        ours.setblocking(False)
        return Hand(process, ours)


class Hand:
    """One child, as its parent holds it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket):
        self.process = process
        self.line = line

    async def ask(self, task: Task) -> Done | Refused:
        body = ENCODER.encode(task)
        await asyncio.get_running_loop().sock_sendall(self.line, LENGTH.pack(len(body)) + body)
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        return ANSWERS.decode(await self._read(length))

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(
                self.line, min(size - len(data), CHUNK)
            )
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()


def packed(tokenizer: Tokenizer) -> int:
    """A descriptor of all that a child must know, in memory where the system can do that."""
    known = Vocabulary(
        tokenizer.backend.to_str(), dict(tokenizer.chat_templates), dict(tokenizer.special_tokens)
    )
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("vocabulary")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(ENCODER.encode(known))
    return descriptor


# ---- the child ---------------------------------------------------------------------------------------


def main(
    tasks: int, vocabulary: int, template_seconds: float, text_seconds: float, memory: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # in the middle of a task, too
    os.nice(NICENESS)
    line = socket.socket(fileno=tasks)
    if left(line):  # before that was asked for
        return
    data = os.pread(vocabulary, os.fstat(vocabulary).st_size, 0)
    os.close(vocabulary)
    known = msgspec.msgpack.decode(data, type=Vocabulary)
    del data
    tokenizer = Tokenizer(
        Backend.from_str(known.backend),
        Extras(special_tokens=known.special_tokens, chat_templates=known.chat_templates),
    )
    del known
    trim()
    bound(memory)
    with line.makefile("rwb") as stream:
        while head := stream.read(LENGTH.size):
            task = TASKS.decode(stream.read(LENGTH.unpack(head)[0]))
            signal.setitimer(
                signal.ITIMER_PROF,
                template_seconds if isinstance(task, Conversation) else text_seconds,
            )  # whose signal nobody handles
            answer = ENCODER.encode(work(tokenizer, task))
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(LENGTH.pack(len(answer)) + answer)
            stream.flush()


def trim() -> None:
    """Back to the system with what reading a vocabulary leaves behind: half of what this process holds by then."""
    with contextlib.suppress(AttributeError, OSError):  # the C library of another system
        ctypes.CDLL(None).malloc_trim(0)


def left(line: socket.socket) -> bool:
    """Whether there is nobody at the other end, whatever was said before."""
    poll = select.poll()
    poll.register(line, 0)  # a hang-up is always told
    return bool(poll.poll(0))


def bound(memory: int) -> None:
    """So many bytes beside what is there already."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # a system that does not tell does not hold processes to it either
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def listed(pieces: Sequence[Piece], last: int | None) -> bytes:
    return msgspec.json.encode(pieces[-last:] if last else pieces)


def work(tokenizer: Tokenizer, task: Task) -> Done | Refused:
    match task:
        case Encode(text, add_special):
            return Done(tokenizer.encode(text, add_special))
        case Pieces(text, add_special, last):
            return Done(pieces=listed(tokenizer.pieces(text, add_special), last))
        case Decode(ids):
            return Done(text=tokenizer.decode(ids, skip_special=False))
        case Conversation(messages, options, limit):
            try:
                written = render(tokenizer, messages, **options, limit=limit)
            except TemplateError as error:
                return Refused(str(error), error.field)
            return Done(tokenizer.encode(written, add_special=False), written)


if __name__ == "__main__":
    main(
        int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    )

"""A pool of worker processes for chat templates and for tokenizing long texts.

A chat template is a program that comes with the model and is not trusted, and a long text may hit a
slow path of a tokenizer. A thread cannot be stopped, but a process can. A worker limits its memory,
and a timer kills it if a task uses too much processor time. A worker reads the vocabulary and the
templates as data from an inherited descriptor. It then gets tasks as framed messages (see ipc.py).
Workers start when they are needed and keep running. One is enough for most servers.

    python -m bloomery.text.tokenizer_pool VOCABULARY_FD TEMPLATE_SECONDS TEXT_SECONDS BYTES TASK_FD
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from bloomery.errors import InvalidRequest, TemplateError
from bloomery.ipc import (
    AsyncChannel,
    ChildHandle,
    MessageCodec,
    ProtocolError,
    die_with_parent,
    is_peer_closed,
    open_inherited_channel,
    spawn_child,
)
from bloomery.text.chat import render_chat
from bloomery.text.tokenizer import EncodedToken, Tokenizer, TokenizerConfig

# The wall-clock limit of a task over its limit of processor time. The machine may be busy. Chosen.
WALL_TIME_FACTOR = 20.0
NICENESS = 5  # of worker processes, so that running streams come first


class EncodeTask(msgspec.Struct, frozen=True):
    """Tokenize a text."""

    text: str
    add_special: bool


class PiecesTask(msgspec.Struct, frozen=True):
    """Tokenize a text and return each token with its place in the text: a piece."""

    text: str
    add_special: bool
    last: int | None  # return only this many pieces, from the end


class DecodeTask(msgspec.Struct, frozen=True):
    """Turn token ids into text."""

    ids: list[int]


class RenderChatTask(msgspec.Struct, frozen=True):
    """Render a conversation with the chat template and tokenize it."""

    messages: list[Any]
    options: dict[str, Any]
    max_characters: int


class TaskResult(msgspec.Struct, frozen=True):
    """The result of a task. Each kind of task fills its own fields."""

    ids: list[int] = []
    text: str = ""
    # JSON, so that the parent need not decode the many pieces of a long text.
    pieces: bytes = b""


class TaskError(msgspec.Struct, frozen=True):
    """A chat template refused its messages."""

    message: str
    field: str | None


TokenizerTask = EncodeTask | PiecesTask | DecodeTask | RenderChatTask
TaskMessage = TokenizerTask | TaskResult | TaskError
TASK_CODEC: MessageCodec[TaskMessage] = MessageCodec(
    EncodeTask, PiecesTask, DecodeTask, RenderChatTask, TaskResult, TaskError
)


class TokenizerData(msgspec.Struct, frozen=True):
    """The tokenizer as a worker process receives it."""

    backend: str
    chat_templates: dict[str, str]
    special_tokens: dict[str, str]


# ---- the parent ----------------------------------------------------------------------------------


class TokenizerPool:
    """Runs tasks in worker processes, at most `processes` at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        processes: int = 2,
        template_seconds: float = 1.0,
        text_seconds: float = 10.0,
        memory_bytes: int = 1 << 30,
    ):
        """Set the limits of one task.

        A task may use `template_seconds` or `text_seconds` of processor time, and
        `memory_bytes` more than an idle worker.
        """
        self.tokenizer = tokenizer
        self.template_seconds = template_seconds
        self.text_seconds = text_seconds
        self.memory_bytes = memory_bytes
        self.slots = asyncio.Semaphore(processes)
        self.idle_workers: list[TokenizerWorker] = []
        self.vocabulary_fd: int | None = None
        self.warm_up_task: asyncio.Task[None] | None = None

    async def encode(self, text: str, add_special: bool, field: str = "prompt") -> list[int]:
        result = await self._run(EncodeTask(text, add_special), self.text_seconds, field)
        return result.ids

    async def encode_with_offsets(
        self, text: str, add_special: bool, last: int | None = None, field: str = "inputs"
    ) -> bytes:
        """Return the tokens with their places in the text, as JSON."""
        result = await self._run(PiecesTask(text, add_special, last), self.text_seconds, field)
        return result.pieces

    async def decode(self, ids: list[int]) -> str:
        result = await self._run(DecodeTask(ids), self.text_seconds, "tokens")
        return result.text

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        max_characters: int,
    ) -> tuple[str, list[int]]:
        """Render a conversation with the chat template; return the text and its token ids."""
        task = RenderChatTask(
            msgspec.to_builtins([dict(message) for message in messages]),
            msgspec.to_builtins(dict(options)),
            max_characters,
        )
        result = await self._run(task, self.template_seconds, "messages")
        return result.text, result.ids

    def warm_up(self) -> None:
        """Start a worker before the first task needs it."""
        self.warm_up_task = asyncio.create_task(self._warm_up())

    def close(self) -> None:
        while self.idle_workers:
            self.idle_workers.pop().kill()
        if self.vocabulary_fd is not None:
            os.close(self.vocabulary_fd)
            self.vocabulary_fd = None

    async def _warm_up(self) -> None:
        async with self.slots:
            if not self.idle_workers:
                self.idle_workers.append(await self._start_worker())

    async def _run(self, task: TokenizerTask, seconds: float, field: str) -> TaskResult:
        """Run a task in an idle or new worker. Errors name the request field `field`."""
        async with self.slots:
            worker = await self._take_worker()
            try:
                async with asyncio.timeout(WALL_TIME_FACTOR * seconds):
                    answer = await worker.run(task)
            except (OSError, EOFError, TimeoutError):
                # Reaping a large process takes a while, so it happens in a thread.
                await asyncio.to_thread(worker.kill)
                raise create_limit_error(seconds, field) from None
            except BaseException:
                worker.kill()  # otherwise a later task could get the answer to this one
                raise
            self.idle_workers.append(worker)
        if isinstance(answer, TaskError):
            raise TemplateError(answer.message, answer.field)
        return answer

    async def _take_worker(self) -> TokenizerWorker:
        """Return an idle worker, or start one."""
        while self.idle_workers:
            worker = self.idle_workers.pop()
            if worker.is_running():
                return worker
            worker.kill()  # the worker died while it was idle
        return await self._start_worker()

    async def _start_worker(self) -> TokenizerWorker:
        if self.vocabulary_fd is None:
            self.vocabulary_fd = await asyncio.to_thread(write_vocabulary, self.tokenizer)
        arguments = (
            self.vocabulary_fd,
            self.template_seconds,
            self.text_seconds,
            self.memory_bytes,
        )
        command = (sys.executable, "-m", "bloomery.text.tokenizer_pool", *map(str, arguments))
        return TokenizerWorker(spawn_child(command, [self.vocabulary_fd]))


class TokenizerWorker:
    """The pool's handle of one worker process."""

    def __init__(self, handle: ChildHandle):
        self.handle = handle
        self.process = handle.process
        self.channel = AsyncChannel(handle.connection, TASK_CODEC)

    def is_running(self) -> bool:
        return self.process.poll() is None

    async def run(self, task: TokenizerTask) -> TaskResult | TaskError:
        await self.channel.send(task)
        answer = await self.channel.receive()
        if not isinstance(answer, TaskResult | TaskError):
            raise ProtocolError(f"a tokenizer worker sent a {type(answer).__name__}")
        return answer

    def kill(self) -> None:
        self.handle.kill()


def create_limit_error(seconds: float, field: str) -> InvalidRequest:
    """Create the error for a task whose worker exceeded a limit and was killed."""
    limits = f"it may use {seconds:g} s and a bounded amount of memory"
    if field == "messages":
        return TemplateError(f"the chat template did not come to an end: {limits}", field)
    return InvalidRequest(f"the text takes too long: {limits}", field)


def write_vocabulary(tokenizer: Tokenizer) -> int:
    """Write the TokenizerData to a file, in memory if possible, and return its descriptor."""
    data = TokenizerData(
        tokenizer.backend.to_str(), dict(tokenizer.chat_templates), dict(tokenizer.special_tokens)
    )
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("vocabulary")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(data))
    return descriptor


# ---- the worker process --------------------------------------------------------------------------


def main(
    vocabulary_fd: int,
    template_seconds: float,
    text_seconds: float,
    memory_bytes: int,
    task_fd: int,
) -> None:
    die_with_parent()
    os.nice(NICENESS)
    channel = open_inherited_channel(task_fd, TASK_CODEC)
    if is_peer_closed(channel.connection):  # the parent died before die_with_parent took effect
        return
    tokenizer = read_vocabulary(vocabulary_fd)
    release_free_memory()
    limit_memory(memory_bytes)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            for task in channel.receive(None):
                is_template = isinstance(task, RenderChatTask)
                limit_seconds = template_seconds if is_template else text_seconds
                # When the timer expires, its signal kills the process.
                signal.setitimer(signal.ITIMER_PROF, limit_seconds)
                answer = run_task(tokenizer, task)
                frame = TASK_CODEC.encode(answer)
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.connection.sendall(frame)


def read_vocabulary(descriptor: int) -> Tokenizer:
    contents = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    data = msgspec.msgpack.decode(contents, type=TokenizerData)
    extras = TokenizerConfig(special_tokens=data.special_tokens, chat_templates=data.chat_templates)
    return Tokenizer(Backend.from_str(data.backend), extras)


def release_free_memory() -> None:
    """Return free heap memory to the system.

    Reading a vocabulary leaves half of the process's memory free but allocated.
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space of this process to `memory_bytes` more than it uses now."""
    try:
        with open("/proc/self/statm") as file:
            used_pages = int(file.read().split()[0])
    except OSError:
        return  # not Linux; other systems do not enforce RLIMIT_AS
    limit = used_pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_task(tokenizer: Tokenizer, task: TaskMessage) -> TaskResult | TaskError:
    """Run one task in this worker process."""
    match task:
        case EncodeTask(text, add_special):
            return TaskResult(tokenizer.encode(text, add_special))
        case PiecesTask(text, add_special, last):
            pieces = tokenizer.encode_with_offsets(text, add_special)
            return TaskResult(pieces=encode_pieces(pieces, last))
        case DecodeTask(ids):
            return TaskResult(text=tokenizer.decode(ids, skip_special=False))
        case RenderChatTask(messages, options, max_characters):
            try:
                text = render_chat(tokenizer, messages, **options, limit=max_characters)
            except TemplateError as error:
                return TaskError(str(error), error.field)
            return TaskResult(tokenizer.encode(text, add_special=False), text)
        case _:
            raise ProtocolError(f"a tokenizer worker takes no {type(task).__name__}")


def encode_pieces(pieces: Sequence[EncodedToken], last: int | None) -> bytes:
    """Return the pieces, or only the `last` ones, as JSON."""
    return msgspec.json.encode(pieces[-last:] if last else pieces)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        float(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
        int(sys.argv[5]),
    )

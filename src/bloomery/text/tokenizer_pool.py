"""A pool of worker processes for chat templates, grammars, and for tokenizing long texts.

A chat template is a program that comes with the model and is not trusted, a client's grammar may be
hostile, and a long text may hit a slow path of a tokenizer. A thread cannot be stopped, but a
process can. A worker limits its memory, and a timer kills it if a task uses too much processor
time. A worker reads the vocabulary and the templates as data from an inherited descriptor. It then
gets tasks as framed messages (see ipc.py).
Workers start when they are needed and keep running. One is enough for most servers.

    python -m bloomery.text.tokenizer_pool VOCABULARY_FD TEMPLATE_SECONDS TEXT_SECONDS BYTES TASK_FD
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from bloomery.errors import InvalidRequest, RenderedChatTooLong, TemplateError
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
from bloomery.sampling import StructuredOutputs
from bloomery.text.chat import render_chat, render_template
from bloomery.text.system_message import count_system_tokens
from bloomery.text.tokenizer import EncodedToken, Tokenizer, TokenizerConfig

log = logging.getLogger("bloomery.text")

# The wall-clock limit of a task over its limit of processor time. The machine may be busy. Chosen.
WALL_TIME_FACTOR = 20.0
ANY_GRAMMAR = 'start: "a"\n'  # compiled only so that a worker builds its vocabulary
GRAMMAR_SECONDS = 2.0  # of processor time to compile a grammar; most take milliseconds
# The search for the end of a system message has processor time of its own, and is left out where
# rendering has taken long: a chat within its limit must not fail for the sake of a hint.
MAX_RENDER_SECONDS = 0.1
SYSTEM_SECONDS = 1.0
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
    finds_system: bool = False  # count the tokens of the system message, too


class GrammarTask(msgspec.Struct, frozen=True):
    """Compile a grammar: the fields of a StructuredOutputs, or Lark text if there are none."""

    outputs: dict[str, Any]
    lark: str
    field: str


class ToolsTask(msgspec.Struct, frozen=True):
    """Make the parameters of tools enforceable.

    A tool is given as its parameters, whether it is strict, the grammar of its input and its field
    in the request. The result is JSON text: the parameters of each.
    """

    tools: list[tuple[dict[str, Any], bool, str, str]]


class FindFormatTask(msgspec.Struct, frozen=True):
    """Find out how the model writes reasoning and tool calls; the result is JSON text."""


class TaskResult(msgspec.Struct, frozen=True):
    """The result of a task. Each kind of task fills its own fields."""

    ids: list[int] = []
    text: str = ""
    system_length: int = 0  # tokens of a chat up to the end of its system message
    # JSON, so that the parent need not decode the many pieces of a long text.
    pieces: bytes = b""
    warnings: tuple[str, ...] = ()


class TaskError(msgspec.Struct, frozen=True):
    """A chat template refused its messages, or a grammar is wrong."""

    message: str
    field: str | None
    too_long: bool = False  # a rendered conversation cannot fit the context


TokenizerTask = (
    EncodeTask | PiecesTask | DecodeTask | RenderChatTask | GrammarTask | ToolsTask | FindFormatTask
)
TaskMessage = TokenizerTask | TaskResult | TaskError
TASK_CODEC: MessageCodec[TaskMessage] = MessageCodec(
    EncodeTask,
    PiecesTask,
    DecodeTask,
    RenderChatTask,
    GrammarTask,
    ToolsTask,
    FindFormatTask,
    TaskResult,
    TaskError,
)


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar as an engine takes it, and what it does not enforce."""

    grammar: str
    warnings: tuple[str, ...] = ()


class TokenizerData(msgspec.Struct, frozen=True):
    """The tokenizer as a worker process receives it."""

    backend: str
    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...] = ()
    response_template: Any = None


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
        # The last one is taken first. Those that have compiled a grammar come last.
        self.idle_workers: list[TokenizerWorker] = []
        self.preparation = asyncio.Lock()  # held while a worker is prepared for grammars
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
        finds_system: bool = False,
    ) -> TaskResult:
        """Render a conversation with the chat template; the result has the text and its token ids.

        With `finds_system` it also has the tokens up to the end of the system message.
        """
        task = RenderChatTask(
            msgspec.to_builtins([dict(message) for message in messages]),
            msgspec.to_builtins(dict(options)),
            max_characters,
            finds_system,
        )
        return await self._run(task, self.template_seconds, "messages")

    async def compile_grammar(
        self, outputs: StructuredOutputs | str, field: str
    ) -> CompiledGrammar:
        """Compile what an answer must match; `outputs` may be ready Lark text.

        Raises InvalidRequest, which names `field` and, if it can, the keyword of a schema.
        """
        lark = outputs if isinstance(outputs, str) else ""
        options: dict[str, Any] = {}
        try:
            if not isinstance(outputs, str):
                options = msgspec.to_builtins(vars(outputs))
            task = GrammarTask(options, lark, field)
            async with self.preparation:
                pass  # a worker that is being prepared is ready sooner than another would be
            result = await self._run(task, GRAMMAR_SECONDS, field)
        except RecursionError:
            raise InvalidRequest("the schema is nested too deeply: flatten it", field) from None
        return CompiledGrammar(result.text, result.warnings)

    async def prepare_tools(
        self, tools: Sequence[tuple[dict[str, Any], bool, str, str]]
    ) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """Return the parameters of tools as they can be enforced, and warnings.

        See ToolsTask. Raises InvalidRequest for a strict tool that cannot be enforced.
        """
        try:
            result = await self._run(ToolsTask(list(tools)), GRAMMAR_SECONDS, "tools")
        except RecursionError:
            message = "a tool's parameters are nested too deeply: flatten them"
            raise InvalidRequest(message, "tools") from None
        return msgspec.json.decode(result.text), result.warnings

    async def find_response_format(self, override: Path | None = None) -> Any:
        """Find out how the model writes reasoning and tool calls; a file takes precedence."""
        from bloomery.response_format import FormatLookup, ResponseFormat, load_response_format

        if override is not None:
            return FormatLookup(load_response_format(override), "file")
        try:
            result = await self._run(FindFormatTask(), self.text_seconds, "messages")
        except InvalidRequest as error:
            problem = f"the response format cannot be found: {error}"
            return FormatLookup(ResponseFormat(), "none", (problem,), problem)
        return msgspec.json.decode(result.text, type=FormatLookup)

    def warm_up(self) -> None:
        """Start a worker before the first task needs it."""
        self.warm_up_task = asyncio.create_task(self._warm_up())

    async def prepare_grammars(self) -> None:
        """Replace the idle workers by one that is ready to compile grammars.

        Building its vocabulary takes up to a second. Meanwhile the others serve other tasks.
        """
        async with self.preparation:
            worker = await self._start_worker()
            try:
                async with asyncio.timeout(WALL_TIME_FACTOR * GRAMMAR_SECONDS):
                    await worker.run(GrammarTask({}, ANY_GRAMMAR, "grammar"))
            except (OSError, EOFError, TimeoutError):  # the first grammar starts another one
                log.warning("a tokenizer worker could not be prepared for structured output")
                await asyncio.to_thread(worker.kill)
                return
            except BaseException:
                worker.kill()
                raise
            for idle_worker in self.idle_workers:
                idle_worker.kill()
            self.idle_workers = [worker]

    def close(self) -> None:
        while self.idle_workers:
            self.idle_workers.pop().kill()
        if self.vocabulary_fd is not None:
            os.close(self.vocabulary_fd)
            self.vocabulary_fd = None

    async def _warm_up(self) -> None:
        async with self.slots:
            if not self.idle_workers:
                self._add_idle(await self._start_worker())

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
                raise create_limit_error(task, seconds, field) from None
            except OverflowError:  # nothing was sent
                self._add_idle(worker)
                raise InvalidRequest(f"a number in {field} has more than 64 bits", field) from None
            except BaseException:
                worker.kill()  # otherwise a later task could get the answer to this one
                raise
            self._add_idle(worker)
        if isinstance(answer, TaskError):
            is_grammar = isinstance(task, GrammarTask | ToolsTask)
            error = InvalidRequest if is_grammar else TemplateError
            if answer.too_long:
                error = RenderedChatTooLong
            raise error(answer.message, answer.field)
        return answer

    def _add_idle(self, worker: TokenizerWorker) -> None:
        index = len(self.idle_workers) if worker.has_vocabulary else 0
        self.idle_workers.insert(index, worker)

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
        self.has_vocabulary = False  # for grammars

    def is_running(self) -> bool:
        return self.process.poll() is None

    async def run(self, task: TokenizerTask) -> TaskResult | TaskError:
        await self.channel.send(task)
        answer = await self.channel.receive()
        if not isinstance(answer, TaskResult | TaskError):
            raise ProtocolError(f"a tokenizer worker sent a {type(answer).__name__}")
        self.has_vocabulary = self.has_vocabulary or isinstance(task, GrammarTask)
        return answer

    def kill(self) -> None:
        self.handle.kill()


def create_limit_error(task: TokenizerTask, seconds: float, field: str) -> InvalidRequest:
    """Create the error for a task whose worker exceeded a limit and was killed."""
    limits = f"it may use {seconds:g} s and a bounded amount of memory"
    if isinstance(task, GrammarTask | ToolsTask):
        return InvalidRequest(f"the grammar is too complex: {limits}. Simplify it", field)
    if field == "messages":
        return TemplateError(f"the chat template did not come to an end: {limits}", field)
    return InvalidRequest(f"the text takes too long: {limits}", field)


def write_vocabulary(tokenizer: Tokenizer) -> int:
    """Write the TokenizerData to a file, in memory if possible, and return its descriptor."""
    data = TokenizerData(
        tokenizer.backend.to_str(),
        dict(tokenizer.chat_templates),
        dict(tokenizer.special_tokens),
        tuple(tokenizer.eos_ids),
        tokenizer.response_template,
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
    vocabulary: Any = None  # a TokenVocabulary, built when the first grammar comes
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            for task in channel.receive(None):
                limit_seconds = text_seconds
                if isinstance(task, RenderChatTask):
                    limit_seconds = template_seconds
                elif isinstance(task, GrammarTask | ToolsTask):
                    limit_seconds = GRAMMAR_SECONDS
                    vocabulary = vocabulary or build_vocabulary(tokenizer)
                # When the timer expires, its signal kills the process.
                signal.setitimer(signal.ITIMER_PROF, limit_seconds)
                answer = run_task(tokenizer, task, vocabulary)
                frame = TASK_CODEC.encode(answer)
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.connection.sendall(frame)


def read_vocabulary(descriptor: int) -> Tokenizer:
    contents = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    data = msgspec.msgpack.decode(contents, type=TokenizerData)
    extras = TokenizerConfig(
        eos_ids=data.eos_ids,
        special_tokens=data.special_tokens,
        chat_templates=data.chat_templates,
        response_template=data.response_template,
    )
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


def build_vocabulary(tokenizer: Tokenizer) -> Any:
    """Build the TokenVocabulary for grammars. It takes up to a second and is not part of a task."""
    from bloomery.structured.matcher import TokenVocabulary

    vocabulary = TokenVocabulary(tokenizer)
    release_free_memory()
    return vocabulary


def run_task(
    tokenizer: Tokenizer, task: TaskMessage, vocabulary: Any = None
) -> TaskResult | TaskError:
    """Run one task in this worker process."""
    match task:
        case EncodeTask(text, add_special):
            return TaskResult(tokenizer.encode(text, add_special))
        case PiecesTask(text, add_special, last):
            pieces = tokenizer.encode_with_offsets(text, add_special)
            return TaskResult(pieces=encode_pieces(pieces, last))
        case DecodeTask(ids):
            return TaskResult(text=tokenizer.decode(ids, skip_special=False))
        case RenderChatTask():
            return run_chat_task(tokenizer, task)
        case GrammarTask(options, lark, field) if vocabulary is not None:
            return run_grammar_task(options, lark, vocabulary, field)
        case ToolsTask(tools):
            return run_tools_task(tools)
        case FindFormatTask():
            return TaskResult(text=find_format(tokenizer))
        case _:
            raise ProtocolError(f"a tokenizer worker takes no {type(task).__name__}")


def run_chat_task(tokenizer: Tokenizer, task: RenderChatTask) -> TaskResult | TaskError:
    options = {**task.options, "limit": task.max_characters}
    begin = time.process_time()
    try:
        text = render_chat(tokenizer, task.messages, **options)
    except TemplateError as error:
        return TaskError(str(error), error.field, isinstance(error, RenderedChatTooLong))
    # To find the system message, it is rendered again, which takes no longer than this.
    is_fast = time.process_time() - begin <= MAX_RENDER_SECONDS
    encoding = tokenizer.encode_text(text, add_special=False)
    system_length = 0
    if task.finds_system and is_fast:
        add_time(SYSTEM_SECONDS)
        system_length = count_system_tokens(tokenizer, text, encoding, task.messages, **options)
    return TaskResult(encoding.ids, text, system_length)


def add_time(seconds: float) -> None:
    """Let the task that runs use more processor time, if it is limited."""
    seconds_left, _ = signal.getitimer(signal.ITIMER_PROF)
    if seconds_left:
        signal.setitimer(signal.ITIMER_PROF, seconds_left + seconds)


def find_format(tokenizer: Tokenizer) -> str:
    """Return a FormatLookup as JSON."""
    from bloomery.response_format import find_response_format

    templates = tokenizer.chat_templates
    lookup = find_response_format(
        {"response_template": tokenizer.response_template},
        templates.get("tool_use") or templates.get("default"),
        [tokenizer.token_name(id) for id in tokenizer.special_ids],
        None,
        render=render_template,
        variables=tokenizer.special_tokens,
    )
    return msgspec.json.encode(lookup).decode()


def run_grammar_task(
    options: dict[str, Any], lark: str, vocabulary: Any, field: str
) -> TaskResult | TaskError:
    from bloomery.structured.grammar import compile_grammar

    try:
        outputs = StructuredOutputs(**options) if options else lark
        grammar, warnings = compile_grammar(outputs, vocabulary, field)
    except InvalidRequest as error:
        return TaskError(str(error), error.field)
    return TaskResult(text=grammar, warnings=warnings)


def run_tools_task(tools: list[tuple[dict[str, Any], bool, str, str]]) -> TaskResult | TaskError:
    from bloomery.structured.grammar import add_input_pattern, prepare_tool_schema

    prepared: list[dict[str, Any]] = []
    warnings: list[str] = []
    for schema, strict, grammar, field in tools:
        try:
            dropped = add_input_pattern(schema, grammar) if grammar else ()
            parameters, relaxed = prepare_tool_schema(schema, strict)
        except InvalidRequest as error:
            return TaskError(f"{field}: {error}", field)
        prepared.append(parameters)
        warnings += [f"{field}: {warning}" for warning in (*relaxed, *dropped)]
    return TaskResult(text=msgspec.json.encode(prepared).decode(), warnings=tuple(warnings))


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

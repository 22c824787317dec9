"""Offline use of the engine: the same loop a server runs, driven from Python.

    from bloomery import LLM, SamplingParams
    llm = LLM("path-or-id")
    for out in llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(out.outputs[0].text)

`LLM` runs the loop in the caller's thread; `AsyncLLM` in a thread of its own, for asyncio. A composition root: here
the towers are put together, and nothing is decided.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from bloomery.config import Config, Plan
from bloomery.describe import plan_for
from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.policy import policy_for
from bloomery.engine.scheduler import Scheduler
from bloomery.errors import BloomeryError, ConfigError, InvalidRequest, RequestFailed, TemplateError
from bloomery.executors.chosen import chosen
from bloomery.messages import EngineCapacity, PoolingType, EngineRequest, TokenOutput
from bloomery.sampling import SamplingParams, embedding_request, requests
from bloomery.text.answer import Answer, Delta, Generation, RequestOutput
from bloomery.text.chat import render
from bloomery.text.load import load_tokenizer
from bloomery.text.tokenizer import Tokenizer

log = logging.getLogger("bloomery")
T = TypeVar("T")
P = ParamSpec("P")

SWITCH = 5e-4  # seconds until the event loop hands the interpreter to the engine's thread, back from the device
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
# What peers call some options.
PEERS = {"quantization": "quantize", "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp"}


# ---- putting the towers together ---------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """A model, ready: its text side, its engine, and what was resolved on the way."""

    plan: Plan
    capacity: EngineCapacity
    tokenizer: Tokenizer | None
    executor: Executor
    loop: Loop


def build(config: Config, tokenizer: bool = True, progress: bool = False) -> Stack:
    """Locate, plan, load. Torch is imported here and no earlier."""
    plan, artifact = plan_for(config)
    words = load_tokenizer(artifact) if tokenizer else None
    executor = chosen(plan, progress=progress)
    capacity = executor.start(plan)
    prepare(executor, progress)
    for note in capacity.notes:
        log.warning(note)
    blocks = Blocks(capacity.blocks, capacity.block_size, plan.prefix_cache)
    policy = policy_for(plan, capacity)
    scheduler = Scheduler(
        blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs, policy, capacity.stages
    )
    return Stack(plan, capacity, words, executor, Loop(scheduler, executor, plan.depth))


def prepare(executor: Executor, progress: bool) -> None:
    """All at once what a server does in its spare time: whoever measures wants it done."""
    from bloomery.runtime.progress import bar as counted

    left = executor.spare()
    with counted("graphs", left, progress and left > 0) as advance:
        while left:
            left = executor.spare()
            advance()


def configure(model: str | None, enable_prefix_caching: bool, options: Mapping[str, Any]) -> Config:
    named = {PEERS.get(name, name): value for name, value in options.items()}
    try:
        return Config(model, prefix_cache=enable_prefix_caching, **named)
    except TypeError as error:
        raise ConfigError(f"{error}; the options are those of `bloomery generate --help`") from None


class Front:
    """Prompts to Generations, for both ways of running the loop. Options are Config's fields."""

    def __init__(
        self,
        model: str | None = None,
        *,
        skip_tokenizer_init: bool = False,
        enable_prefix_caching: bool = True,
        progress: bool = False,
        **options: Any,
    ):
        self.stack = build(
            configure(model, enable_prefix_caching, options), not skip_tokenizer_init, progress
        )
        self.tokenizer = self.stack.tokenizer
        self.numbers = itertools.count()

    @property
    def default_params(self) -> SamplingParams:
        """What the checkpoint's generation_config asks for."""
        said: Mapping[str, Any] = self.tokenizer.defaults if self.tokenizer else {}
        known = {field.name for field in fields(SamplingParams)}
        return SamplingParams(
            **{"max_tokens": None, **{name: said[name] for name in said if name in known}}
        )

    def generation(self, prompt: Prompt, params: SamplingParams) -> Generation:
        text, ids = self._ids(prompt)
        name = str(next(self.numbers))
        tokenizer = self.tokenizer
        capacity = self.stack.capacity
        made = requests(
            params,
            ids,
            id=name,
            entropy=secrets.randbits(64),
            vocab=capacity.vocab,
            max_length=capacity.max_length,
            eos_ids=tokenizer.eos_ids if tokenizer else (),
            encode=(lambda word: tokenizer.encode(word, add_special=False)) if tokenizer else None,
        )
        return Generation(name, text, params, made, tokenizer)

    def embedding(self, prompt: Prompt, pooling: PoolingType) -> EngineRequest:
        capacity = self.stack.capacity
        name = str(next(self.numbers))
        (_, ids) = self._ids(prompt)
        return embedding_request(
            ids, pooling, id=name, vocab=capacity.vocab, max_length=capacity.max_length
        )

    def _ids(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if isinstance(ids, Mapping):
            text = ids.get("prompt")
            ids = ids.get("prompt_token_ids")
        if ids is not None:
            return text, ids
        if not isinstance(text, str):
            raise InvalidRequest(
                "a prompt is a string, a list of token ids, or a dict with prompt_token_ids",
                "prompt",
            )
        return text, self.words.encode(text)

    def conversation(self, messages: Sequence[Message], **options: Any) -> Prompt:
        """Messages as the model's chat template writes them down."""
        text = render(self.words, messages, **options)
        return {"prompt": text, "prompt_token_ids": self.words.encode(text, add_special=False)}

    @property
    def words(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "text needs a tokenizer and this model was loaded without one: give token ids",
                "prompt",
            )
        return self.tokenizer


def many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string, a dict and a list of ids are one."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


# ---- in the caller's thread --------------------------------------------------------------------------


def undivided(work: Callable[P, T]) -> Callable[P, T]:
    """Ctrl-C comes before it or after it and never inside, where it would leave the engine and its model apart."""

    @wraps(work)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return work(*args, **kwargs)
        came = list[int]()
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
        try:
            return work(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if came:
                raise KeyboardInterrupt

    return whole


class LLM:
    def __init__(self, model: str | None = None, **options: Any):
        """`model` is a folder, a .gguf file, a Hub id or None for the embedded one; options are those of Front."""
        if options.get("policy", "auto") == "auto":
            options["policy"] = "fcfs"  # all prompts are there, and nobody watches one of them
        self.front = Front(model, **options)
        self.tokenizer = self.front.tokenizer
        self.loop = self.front.stack.loop
        # by request: whose it is, and where to put what it gains if somebody looks on
        self.arrivals: dict[str, tuple[Generation, Answer, deque[Delta] | None]] = {}
        self.embedded: dict[str, list[float]] = {}  # by request

    @property
    def default_params(self) -> SamplingParams:
        return self.front.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """All prompts in one go, answers in their order; one params for all, or one each."""
        asked = many(prompts)
        given = sampling_params if sampling_params is not None else self.default_params
        params = [given] * len(asked) if isinstance(given, SamplingParams) else list(given)
        if len(params) != len(asked):
            raise InvalidRequest(
                f"{len(asked)} prompts but {len(params)} sampling_params", "sampling_params"
            )
        made = [
            self.front.generation(prompt, one) for prompt, one in zip(asked, params, strict=True)
        ]
        for generation in made:
            self._submit(generation, None)
        ours = {generation.id for generation in made}
        try:
            with bar(len(made), use_tqdm) as advance:
                left = len(made)
                while left:
                    done, tokens = self._step()
                    ended = len(done & ours)
                    left -= ended
                    advance(ended, tokens)
        finally:
            for generation in made:
                self._drop(generation)
        return [generation.output() for generation in made]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """One conversation or several, through the model's chat template."""
        if not messages:
            raise TemplateError("a conversation needs at least one message", "messages")
        several = messages if not isinstance(messages[0], Mapping) else [messages]
        prompts = [self.front.conversation(one, **template) for one in several]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: PoolingType = "mean"
    ) -> list[list[float]]:
        """A vector of length 1 each: the mean of a prompt's final hidden states, or its last token's."""
        made = [self.front.embedding(prompt, pooling) for prompt in many(prompts)]
        try:
            for request in made:
                self.loop.add(request)
            while any(request.id not in self.embedded for request in made):
                self._step()
            return [self.embedded[request.id] for request in made]
        finally:
            for request in made:
                self.loop.abort(request.id)
                self.embedded.pop(request.id, None)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """The answer piece by piece. Closing the iterator stops it; several may run side by side."""
        generation = self.front.generation(prompt, sampling_params or self.default_params)
        ready: deque[Delta] = deque()
        self._submit(generation, ready)
        try:
            while not generation.finished or ready:
                if ready:
                    yield ready.popleft()
                else:
                    self._step()
        finally:
            self._drop(generation)

    def close(self) -> None:
        self.front.stack.executor.close()

    @undivided
    def _submit(self, generation: Generation, ready: deque[Delta] | None) -> None:
        for name, answer in generation.answers.items():
            self.loop.add(answer.request)
            self.arrivals[name] = generation, answer, ready

    @undivided
    def _step(self) -> tuple[set[str], int]:
        """One step of the loop, its news handed to whom they concern; which generations ended, how many tokens came."""
        count = 0
        ended = set()
        for news in self.loop.step():
            count += len(news.ids)
            if news.embedding:
                self.embedded[news.request] = list(news.embedding)
            found = self.arrivals.get(news.request)
            if found is None:
                continue
            generation, answer, ready = found
            if ready is None and answer.gain(news):
                continue
            delta, cut = generation.take(news)
            if delta is not None:
                if ready is not None:
                    ready.append(delta)
                if delta.finish_reason is not None and generation.finished:
                    ended.add(generation.id)
            if cut:
                self.loop.abort(news.request)
        return ended, count

    @undivided
    def _drop(self, generation: Generation) -> None:
        for name in generation.answers:
            self.arrivals.pop(name, None)
            self.loop.abort(name)


@contextmanager
def bar(total: int, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of answers and tokens a second, or nothing."""
    if not show:
        yield lambda done, tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        "answers",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as drawn:
        task = drawn.add_task("", total=total, speed="")
        produced = 0

        def advance(done: int, tokens: int) -> None:
            nonlocal produced
            produced += tokens
            elapsed = drawn.tasks[0].elapsed or 0.0
            drawn.update(task, advance=done, speed=f"{produced / max(elapsed, 1e-3):.0f} tokens/s")

        yield advance


# ---- for asyncio -------------------------------------------------------------------------------------


class AsyncLLM:
    """The loop in a thread of its own; `stream` from any number of tasks of one event loop."""

    def __init__(self, model: str | None = None, **options: Any):
        """As for LLM."""
        self.front = Front(model, **options)
        self.tokenizer = self.front.tokenizer
        self.inbox: queue.SimpleQueue[EngineRequest | str | None] = (
            queue.SimpleQueue()
        )  # a str aborts, None ends
        self.listeners: dict[str, asyncio.Queue[TokenOutput | BaseException]] = {}
        self.events: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        sys.setswitchinterval(SWITCH)
        self.thread = threading.Thread(target=self._run, name="bloomery-engine", daemon=True)
        self.thread.start()

    @property
    def default_params(self) -> SamplingParams:
        return self.front.default_params

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """The answer piece by piece; leaving the iterator stops it."""
        if self.failure is not None:
            raise RequestFailed("the engine has stopped") from self.failure
        self.events = asyncio.get_running_loop()
        generation = self.front.generation(prompt, sampling_params or self.default_params)
        news: asyncio.Queue[TokenOutput | BaseException] = asyncio.Queue()
        for name, answer in generation.answers.items():
            self.listeners[name] = news
            self.inbox.put(answer.request)
        try:
            while not generation.finished:
                arrived = await news.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                delta, cut = generation.take(arrived)
                if cut:
                    self.inbox.put(arrived.request)
                if delta is not None:
                    yield delta
        finally:
            for name in generation.answers:
                self.listeners.pop(name, None)
                self.inbox.put(name)

    def close(self) -> None:
        self.inbox.put(None)
        self.thread.join()
        self.front.stack.executor.close()

    def _run(self) -> None:
        loop = self.front.stack.loop
        try:
            while self._read(loop.patience() if loop.busy else None):
                if news := loop.step():
                    self._post(self._deliver, [(entry.request, entry) for entry in news])
        except BaseException as error:
            self.failure = error
            log.exception("the engine has stopped")
            self._post(self._fail, error)

    def _read(self, patience: float | None) -> bool:
        """Take in what arrives within so long, or what has once something has (None); False when asked to end."""
        loop = self.front.stack.loop
        while patience != 0 or not self.inbox.empty():
            try:
                order = self.inbox.get(timeout=patience)
            except queue.Empty:
                break
            patience = loop.patience()
            if order is None:
                return False
            if isinstance(order, str):
                loop.abort(order)
                continue
            try:
                loop.add(order)
            except BloomeryError as error:
                self._post(self._deliver, [(order.id, error)])
        return True

    def _post(self, tell: Callable[[T], None], what: T) -> None:
        """To the event loop; until one has asked for something, nobody listens."""
        if self.events is not None:
            self.events.call_soon_threadsafe(tell, what)

    def _deliver(self, news: Sequence[tuple[str, TokenOutput | BloomeryError]]) -> None:
        for name, entry in news:
            if listener := self.listeners.get(name):
                listener.put_nowait(entry)

    def _fail(self, error: BaseException) -> None:
        for listener in self.listeners.values():
            listener.put_nowait(RequestFailed(f"the engine has stopped: {error}"))

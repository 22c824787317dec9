"""The offline API: generate text from Python, without an HTTP server.

    from bloomery import LLM, SamplingParams
    llm = LLM("path-or-id")
    for out in llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(out.outputs[0].text)

`LLM` runs the engine loop in the caller's thread. `AsyncLLM` is for asyncio: its engine runs in a
process of its own, so a busy caller cannot slow the engine down. This module only connects the
parts: it decides nothing about scheduling, sampling or text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import signal
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from bloomery.artifacts.locate_adapter import locate_adapter
from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.adapter_catalog import AdapterCatalog, LoRARequest, NamedAdapter
from bloomery.engine.background import run_in_background
from bloomery.engine.build import build_engine
from bloomery.engine.client import EngineClient, EngineTimeouts
from bloomery.errors import BloomeryError, ConfigError, InvalidRequest, RequestFailed, TemplateError
from bloomery.executors.select import select_executor
from bloomery.ipc import ENGINE_COMMAND
from bloomery.logs import show_load_progress
from bloomery.messages import EngineCapacity, EngineRequest, EngineStats, PoolingType, TokenOutput
from bloomery.sampling import (
    SamplingParams,
    StructuredOutputs,
    build_embedding_request,
    build_requests,
)
from bloomery.text.chat import render_chat
from bloomery.text.load import load_tokenizer
from bloomery.text.outputs import CompletionDelta, CompletionState, RequestOutput, RequestState
from bloomery.text.system_message import count_system_tokens
from bloomery.text.tokenizer import Tokenizer

log = logging.getLogger("bloomery")

ResultT = TypeVar("ResultT")
ParamsT = ParamSpec("ParamsT")
Prompt = str | Sequence[int] | Mapping[str, Any]
ChatMessage = Mapping[str, Any]


# ---- shared by LLM and AsyncLLM ------------------------------------------------------------------


class RequestBuilder:
    """Turns prompts and sampling params into requests for one loaded model."""

    def __init__(
        self, tokenizer: Tokenizer | None, capacity: EngineCapacity, enable_lora: bool = False
    ):
        self.tokenizer = tokenizer
        self.enable_lora = enable_lora
        self.catalog = AdapterCatalog()
        self.adapters: dict[LoRARequest, NamedAdapter] = {}
        self.capacity = capacity
        self.request_numbers = itertools.count()
        self.vocabulary: Future[Any] | None = None  # a TokenVocabulary, built on first use
        # What the last request had to match, and its grammar: most requests repeat it.
        self.last_grammar: tuple[StructuredOutputs | None, str] = (None, "")

    def build_generation(
        self, prompt: Prompt, params: SamplingParams, lora_request: LoRARequest | None = None
    ) -> RequestState:
        """Return the state of a new request, which holds one EngineRequest per completion."""
        text, token_ids = self._encode_prompt(prompt)
        request_id = str(next(self.request_numbers))
        tokenizer = self.tokenizer
        requests = build_requests(
            params,
            token_ids,
            id=request_id,
            entropy=secrets.randbits(64),
            vocab_size=self.capacity.vocab,
            max_model_len=self.capacity.max_model_len,
            eos_ids=tokenizer.eos_ids if tokenizer else (),
            encode=self._encode_word if tokenizer else None,
            grammar=self._compile_grammar(params.structured_outputs),
            system_length=prompt.get("system_length", 0) if isinstance(prompt, Mapping) else 0,
            **self._adapter_fields(lora_request),
        )
        return RequestState(request_id, text, params, requests, tokenizer)

    def build_embedding(
        self, prompt: Prompt, pooling: PoolingType, lora_request: LoRARequest | None = None
    ) -> EngineRequest:
        _, token_ids = self._encode_prompt(prompt)
        return build_embedding_request(
            token_ids,
            pooling,
            id=str(next(self.request_numbers)),
            vocab_size=self.capacity.vocab,
            max_model_len=self.capacity.max_model_len,
            **self._adapter_fields(lora_request),
        )

    def _adapter_fields(self, lora_request: LoRARequest | None) -> dict[str, Any]:
        """Return the fields of an EngineRequest that name its adapter, which is found once."""
        if lora_request is None:
            return {}
        if not isinstance(lora_request, LoRARequest):
            raise InvalidRequest("lora_request must be a LoRARequest or None", "lora_request")
        if not self.enable_lora:
            raise InvalidRequest(
                "lora_request needs an engine with adapters: create it with enable_lora=True",
                "lora_request",
            )
        adapter = self.adapters.get(lora_request)
        if adapter is None:
            path = str(locate_adapter(lora_request.lora_path))
            adapter = self.catalog.create(lora_request.lora_name, path, lora_request.lora_path)
            self.adapters[lora_request] = adapter
        return {"lora": adapter.engine_name, "lora_path": adapter.path}

    def build_chat_prompt(self, messages: Sequence[ChatMessage], **options: Any) -> Prompt:
        """Render messages with the model's chat template."""
        tokenizer = self._require_tokenizer()
        text = render_chat(tokenizer, messages, **options)
        encoding = tokenizer.encode_text(text, add_special=False)
        prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": encoding.ids}
        if any(group.state_blocks for group in self.capacity.cache_groups):
            prompt["system_length"] = count_system_tokens(
                tokenizer, text, encoding, messages, **options
            )
        return prompt

    def _encode_prompt(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """Return the text of a prompt, if it has one, and its token ids."""
        text: Any = None
        token_ids: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            token_ids = prompt.get("prompt_token_ids")
        else:
            token_ids = prompt
        if token_ids is not None:
            return text, token_ids
        if not isinstance(text, str):
            raise InvalidRequest(
                "a prompt is a string, a list of token ids, or a dict with prompt_token_ids",
                "prompt",
            )
        return text, self._require_tokenizer().encode(text)

    def load_vocabulary(self) -> Future[Any]:
        """Build the vocabulary for grammars on another thread, once."""
        if self.vocabulary is None:
            from bloomery.structured.matcher import TokenVocabulary

            self.vocabulary = run_in_background(partial(TokenVocabulary, self._require_tokenizer()))
        return self.vocabulary

    def _compile_grammar(self, outputs: StructuredOutputs | None) -> str:
        """Return the grammar that the output must match, "" if there is none."""
        if outputs is None:
            return ""
        if outputs != self.last_grammar[0]:
            from bloomery.structured.closed_schema import close_outputs
            from bloomery.structured.grammar import compile_grammar

            vocabulary = self.load_vocabulary().result()
            field = "structured_outputs"
            grammar, warnings = compile_grammar(close_outputs(outputs, field), vocabulary, field)
            for warning in warnings:
                log.warning("structured output: %s", warning)
            self.last_grammar = (outputs, grammar)
        return self.last_grammar[1]

    def _encode_word(self, word: str) -> list[int]:
        return self._require_tokenizer().encode(word, add_special=False)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "text needs a tokenizer and this model was loaded without one: give token ids",
                "prompt",
            )
        return self.tokenizer


def build_engine_config(
    model: str | None, enable_prefix_caching: bool, options: Mapping[str, Any]
) -> EngineConfig:
    """Build the config; an unknown option raises ConfigError."""
    try:
        return EngineConfig(model, prefix_cache=enable_prefix_caching, **options)
    except TypeError as error:
        raise ConfigError(f"{error}; the options are those of `bloomery generate --help`") from None


def read_default_params(tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the sampling params that the checkpoint's generation_config asks for."""
    defaults: Mapping[str, Any] = tokenizer.sampling_defaults if tokenizer else {}
    known = {field.name for field in fields(SamplingParams)}
    known_defaults = {name: value for name, value in defaults.items() if name in known}
    return SamplingParams(**{"max_tokens": None, **known_defaults})


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list; a string, dict or list of ids is one prompt."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def list_adapters(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
) -> list[LoRARequest | None]:
    """Return the adapter of each prompt."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * num_prompts
    adapters = list(lora_request)
    if len(adapters) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts but {len(adapters)} lora_request", "lora_request"
        )
    return adapters


# ---- in the caller's thread ----------------------------------------------------------------------


def defer_interrupt(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Delay Ctrl-C until `function` has returned.

    An interrupt within it would leave the scheduler and the worker in different states.
    """

    @wraps(function)
    def wrapper(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT)
        if not in_main_thread or handler is not signal.default_int_handler:
            return function(*args, **kwargs)
        received = list[int]()
        signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
        try:
            return function(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if received:
                raise KeyboardInterrupt

    return wrapper


class OpenCompletion(NamedTuple):
    """A completion in progress. `deltas` receives its output if the request is streamed."""

    request: RequestState
    completion: CompletionState
    deltas: deque[CompletionDelta] | None


class StepSummary(NamedTuple):
    """The result of one engine step, for the progress bar."""

    finished: set[str]  # ids of the requests that finished in the step
    num_tokens: int
    failed: Mapping[str, str]  # errors by the id of the engine's request


class LLM:
    """A model in the caller's process; every call runs the engine loop until it has its result."""

    def __init__(
        self,
        model: str | None = None,
        *,
        skip_tokenizer_init: bool = False,
        enable_prefix_caching: bool = True,
        progress: bool = False,
        **options: Any,
    ):
        """Load a model.

        `model` is a folder, a .gguf file, a Hub id or None for the embedded model. `progress` shows
        bars while it loads. `options` are the fields of EngineConfig.
        """
        if options.get("policy", "auto") == "auto":
            # All prompts arrive at once, and no user waits for a single one.
            options["policy"] = "fcfs"
        config = build_engine_config(model, enable_prefix_caching, options)
        self.plan, artifact = build_engine_plan(config)
        self.tokenizer = (
            None if skip_tokenizer_init else load_tokenizer(artifact, config.chat_template)
        )
        self.executor = select_executor(self.plan, progress=progress)  # imports torch
        self.capacity = self.executor.start(self.plan)
        for note in self.capacity.notes:
            log.warning(note)
        self.request_builder = RequestBuilder(self.tokenizer, self.capacity, self.plan.enable_lora)
        load_vocabulary = self.request_builder.load_vocabulary if self.tokenizer else None
        self.loop = build_engine(
            self.plan, self.executor, self.capacity, load_vocabulary=load_vocabulary
        )
        self.open_completions: dict[str, OpenCompletion] = {}  # by engine request id
        self.embeddings: dict[str, list[float]] = {}  # by engine request id

    @property
    def default_params(self) -> SamplingParams:
        """The sampling params that the checkpoint's generation_config asks for."""
        return read_default_params(self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts in one batch and return the outputs in the order of the prompts.

        `sampling_params` is one object for all prompts, or one for each. So is `lora_request`, the
        LoRA adapter; None is the base model.
        """
        prompt_list = list_prompts(prompts)
        adapters = list_adapters(lora_request, len(prompt_list))
        if sampling_params is None:
            sampling_params = self.default_params
        if isinstance(sampling_params, SamplingParams):
            params_list = [sampling_params] * len(prompt_list)
        else:
            params_list = list(sampling_params)
        if len(params_list) != len(prompt_list):
            raise InvalidRequest(
                f"{len(prompt_list)} prompts but {len(params_list)} sampling_params",
                "sampling_params",
            )
        requests = [
            self.request_builder.build_generation(prompt, params, adapter)
            for prompt, params, adapter in zip(prompt_list, params_list, adapters, strict=True)
        ]
        for request in requests:
            self._submit(request, None)
        own_ids = {request.id for request in requests}
        num_open = len(requests)
        try:
            with generation_progress(num_open, use_tqdm) as advance:
                while num_open:
                    summary = self._step()
                    num_finished = len(summary.finished & own_ids)
                    num_open -= num_finished
                    advance(num_finished, summary.num_tokens)
        finally:
            for request in requests:
                self._remove(request)
        return [request.build_output() for request in requests]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        if not messages:
            raise TemplateError("a conversation needs at least one message", "messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.build_chat_prompt(conversation, **template_options)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def build_chat_prompt(self, messages: Sequence[ChatMessage], **template_options: Any) -> Prompt:
        """Render a conversation with the model's chat template, for `generate` or `stream`."""
        return self.request_builder.build_chat_prompt(messages, **template_options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: PoolingType = "mean",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[list[float]]:
        """Return one vector of unit norm per prompt.

        It is the mean of the final hidden states, or the final hidden state of the last token.
        """
        builder = self.request_builder
        prompt_list = list_prompts(prompts)
        adapters = list_adapters(lora_request, len(prompt_list))
        requests = [
            builder.build_embedding(prompt, pooling, adapter)
            for prompt, adapter in zip(prompt_list, adapters, strict=True)
        ]
        try:
            for request in requests:
                self.loop.add(request)
            while any(request.id not in self.embeddings for request in requests):
                failed = self._step().failed
                for request in requests:
                    if request.id in failed:
                        raise RequestFailed(failed[request.id])
            return [self.embeddings[request.id] for request in requests]
        finally:
            for request in requests:
                self.loop.abort(request.id)
                self.embeddings.pop(request.id, None)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[CompletionDelta]:
        """Yield the completion piece by piece.

        Closing the iterator aborts the request. Several iterators may run side by side.
        """
        params = sampling_params or self.default_params
        request = self.request_builder.build_generation(prompt, params, lora_request)
        deltas: deque[CompletionDelta] = deque()
        self._submit(request, deltas)
        try:
            while not request.finished or deltas:
                if deltas:
                    yield deltas.popleft()
                else:
                    self._step()
        finally:
            self._remove(request)

    def close(self) -> None:
        """Unload the model and end the tensor parallel ranks, if there are any."""
        self.executor.close()

    @defer_interrupt
    def _submit(self, request: RequestState, deltas: deque[CompletionDelta] | None) -> None:
        for request_id, completion in request.completions.items():
            self.loop.add(completion.request)
            self.open_completions[request_id] = OpenCompletion(request, completion, deltas)

    @defer_interrupt
    def _step(self) -> StepSummary:
        """Run one step of the engine loop and hand out its outputs."""
        num_tokens = 0
        finished = set[str]()
        failed = dict[str, str]()
        for output in self.loop.step():
            if output.finish == "error":
                failed[output.request] = output.error or "the engine could not finish this request"
            num_tokens += len(output.ids)
            if output.embedding:
                self.embeddings[output.request] = list(output.embedding)
            entry = self.open_completions.get(output.request)
            if entry is None:
                continue
            if entry.deltas is None and entry.completion.append_token_ids(output):
                continue
            delta, must_abort = entry.request.add_output(output)
            if delta is not None:
                if entry.deltas is not None:
                    entry.deltas.append(delta)
                if delta.finish_reason is not None and entry.request.finished:
                    finished.add(entry.request.id)
            if must_abort:
                self.loop.abort(output.request)
        return StepSummary(finished, num_tokens, failed)

    @defer_interrupt
    def _remove(self, request: RequestState) -> None:
        for request_id in request.completions:
            self.open_completions.pop(request_id, None)
            self.loop.abort(request_id)


@contextmanager
def generation_progress(total: int, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of finished requests and tokens per second.

    Yields a function that takes the number of newly finished requests and of new tokens.
    """
    if not show:
        yield lambda num_finished, num_tokens: None
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
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, speed="")
        total_tokens = 0

        def advance(num_finished: int, num_tokens: int) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            tokens_per_second = total_tokens / max(elapsed, 1e-3)
            bar.update(task, advance=num_finished, speed=f"{tokens_per_second:.0f} tokens/s")

        yield advance


# ---- for asyncio ---------------------------------------------------------------------------------


class OutputQueue:
    """The outputs of one stream, read in the event loop that created the queue."""

    def __init__(self) -> None:
        self.reader_loop = asyncio.get_running_loop()
        self.outputs: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()

    async def get(self) -> TokenOutput:
        output = await self.outputs.get()
        if isinstance(output, Exception):
            raise output
        return output


class OutputHandover:
    """Hands outputs from the engine client's event loop to the event loops of the readers.

    Outputs of several streams that arrive together are handed over together, because it is
    expensive to wake another event loop.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[OutputQueue, TokenOutput | Exception]] = []

    def put(self, queue: OutputQueue, output: TokenOutput | Exception) -> None:
        if not self.pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self.pending.append((queue, output))

    def _flush(self) -> None:
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[Any]](list)
        for queue, output in self.pending:
            by_loop[queue.reader_loop].append((queue, output))
        self.pending = []
        for reader_loop, entries in by_loop.items():
            if not reader_loop.is_closed():
                reader_loop.call_soon_threadsafe(self._deliver, entries)

    @staticmethod
    def _deliver(entries: list[tuple[OutputQueue, TokenOutput | Exception]]) -> None:
        for queue, output in entries:
            queue.outputs.put_nowait(output)


class AsyncLLM:
    """A model in an engine process of its own; `stream` works in any number of tasks and loops.

    The engine client runs in a private thread with its own event loop, so the object can be created
    inside a running event loop or outside of one. A crashed engine process is restarted and open
    streams continue after the last token they delivered.
    """

    # The program of the engine process; a subclass may run another engine.
    engine_command: Sequence[str] = ENGINE_COMMAND

    def __init__(
        self,
        model: str | None = None,
        *,
        skip_tokenizer_init: bool = False,
        enable_prefix_caching: bool = True,
        progress: bool = False,
        **options: Any,
    ):
        """Start the engine process and return when its model is loaded. Arguments as for LLM."""
        config = build_engine_config(model, enable_prefix_caching, options)
        self.plan, artifact = build_engine_plan(config)
        # Offline, requests may wait in the queue for as long as it takes.
        timeouts = replace(EngineTimeouts.for_device(self.plan.device), queue_seconds=math.inf)
        self.client = EngineClient(self.plan, self.engine_command, timeouts)
        self.handover = OutputHandover()
        self.client_loop = asyncio.new_event_loop()
        self.thread = threading.Thread(
            target=self.client_loop.run_forever, name="bloomery engine client", daemon=True
        )
        self.thread.start()
        loading = asyncio.run_coroutine_threadsafe(self._start_engine(progress), self.client_loop)
        try:
            self.tokenizer = (
                None if skip_tokenizer_init else load_tokenizer(artifact, config.chat_template)
            )
            self.capacity = loading.result()
        except BaseException:
            loading.cancel()
            self.close()
            raise
        for note in self.capacity.notes:
            log.warning(note)
        self.request_builder = RequestBuilder(self.tokenizer, self.capacity, self.plan.enable_lora)

    @property
    def default_params(self) -> SamplingParams:
        """The sampling params that the checkpoint's generation_config asks for."""
        return read_default_params(self.tokenizer)

    @property
    def stats(self) -> EngineStats:
        """The statistics that the engine process last reported."""
        return self.client.stats

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[CompletionDelta]:
        """Yield the completion piece by piece; leaving the iterator aborts the request."""
        if not self.thread.is_alive():
            raise RequestFailed("the engine is closed")
        params = sampling_params or self.default_params
        request = self.request_builder.build_generation(prompt, params, lora_request)
        engine_requests = [completion.request for completion in request.completions.values()]
        outputs = OutputQueue()
        forwarding = asyncio.run_coroutine_threadsafe(
            self._forward_outputs(engine_requests, outputs), self.client_loop
        )
        try:
            while not request.finished:
                output = await outputs.get()
                if request.completions[output.request].finish_reason is not None:
                    continue  # a stop string ended this completion before the output arrived
                if output.finish == "error":
                    raise RequestFailed(output.error or "the engine could not finish this request")
                delta, must_abort = request.add_output(output)
                if must_abort:
                    self.client_loop.call_soon_threadsafe(self.client.abort, output.request)
                if delta is not None:
                    yield delta
        finally:
            forwarding.cancel()

    def close(self) -> None:
        """End the engine process. Open streams fail with RequestFailed."""
        if not self.thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._stop_engine(), self.client_loop).result()
        self.client_loop.call_soon_threadsafe(self.client_loop.stop)
        self.thread.join()
        self.client_loop.close()

    # ---- in the client's thread ----

    async def _start_engine(self, progress: bool) -> EngineCapacity:
        """Start the engine and wait until its model is loaded and its CUDA graphs are captured."""
        await self.client.start()
        ready = asyncio.create_task(self.client.ready())
        if progress:
            await show_load_progress(ready, self._load_progress)
        try:
            capacity = await ready
        except BloomeryError as error:
            raise BloomeryError(self.client.status.detail or str(error)) from None
        return capacity

    async def _stop_engine(self) -> None:
        await self.client.close()
        await self.client_loop.shutdown_default_executor()

    def _load_progress(self) -> tuple[str, float]:
        status = self.client.status
        return status.detail, status.progress or 0.0

    async def _forward_outputs(
        self, requests: Sequence[EngineRequest], outputs: OutputQueue
    ) -> None:
        """Stream the requests and hand every output to the caller; when cancelled, abort them."""
        try:
            async with aclosing(self.client.stream(requests)) as stream:
                async for output in stream:
                    if outputs.reader_loop.is_closed():
                        return
                    self.handover.put(outputs, output)
        except Exception as error:
            self.handover.put(outputs, error)

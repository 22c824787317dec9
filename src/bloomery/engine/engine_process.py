"""The engine as a process: receive messages, run a step, send outputs, all in one thread.

The process keeps no state that its client cannot restore, and it handles no failures: any failure
beyond a single request ends the process, and the client starts another one. The process knows
neither which executor it drives nor what the client does with the outputs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from bloomery.config import EnginePlan
from bloomery.engine.background import run_in_background
from bloomery.engine.build import build_engine
from bloomery.engine.executor import Executor, LoadProgress
from bloomery.engine.loop import UtilizationMonitor
from bloomery.engine.prefix_cache import PrefixCache
from bloomery.errors import BloomeryError
from bloomery.ipc import (
    ENGINE_CODEC,
    EngineHello,
    EngineMessage,
    ProtocolError,
    create_progress_reporter,
    die_with_parent,
    open_inherited_channel,
)
from bloomery.messages import (
    AbortRequest,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineStatus,
    LoadAdapter,
    ScheduledStep,
    TokenOutput,
    UnloadAdapter,
)

log = logging.getLogger("bloomery.engine")

HEARTBEAT_SECONDS = 0.5  # between two outputs of an idle engine


def run_engine_process(
    descriptor: int,
    create_executor: Callable[[EnginePlan, LoadProgress], Executor],
    load_vocabulary: Callable[[EnginePlan], object] | None = None,
    prepare_grammars: bool = True,
    has_spare_cores: bool = False,
) -> int:
    """Serve the client at the inherited socket `descriptor` until the client is gone.

    The first message must be EngineHello. Its plan is loaded, and then steps run. Returns the exit
    status of the process. `load_vocabulary` loads what requests with a grammar need: as soon as
    the engine is idle if `prepare_grammars`, otherwise when the first of them arrives.
    A machine with spare cores does so while the weights load.
    """
    die_with_parent()
    channel = open_inherited_channel(descriptor, ENGINE_CODEC)
    with contextlib.ExitStack() as cleanup:
        try:
            messages: list[EngineMessage] = []
            while not messages:  # the first frame may arrive in parts
                messages = channel.receive(None)
            hello, *early_messages = messages
            if not isinstance(hello, EngineHello):
                raise ProtocolError(f"expected EngineHello, got {type(hello).__name__}")
            get_vocabulary = None
            if load_vocabulary is not None:
                get_vocabulary = start_loading(load_vocabulary, hello.plan, has_spare_cores)
            try:
                executor = create_executor(hello.plan, create_progress_reporter(channel.send))
                cleanup.callback(executor.close)
                # The connection closes before the executor, so the client need not wait for that.
                cleanup.callback(channel.connection.close)
                capacity = executor.start(hello.plan)
            except BloomeryError as error:  # another attempt would fail, too
                channel.send(EngineStatus("failed", detail=str(error)))
                return 1
            process = EngineProcess(
                channel,
                hello,
                executor,
                capacity,
                load_vocabulary=get_vocabulary,
                prepare_grammars=prepare_grammars,
            )
            process.run(early_messages)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except ProtocolError as error:
            log.error("the engine ends on a malformed frame: %s", error)
        except Exception:
            log.exception("the engine ends on an error")
        return 1


def start_loading(
    load_vocabulary: Callable[[EnginePlan], object], plan: EnginePlan, has_spare_cores: bool
) -> Callable[[], Future[Any]]:
    """Return a function that gets the vocabulary for grammars, which loads on another thread.

    With a GPU or spare cores it loads now, while the weights are copied. Otherwise it would take
    the cores that load the model, so it loads when that function is called.
    """
    load = partial(load_vocabulary, plan)
    if plan.device == "cpu" and not has_spare_cores:
        return partial(run_in_background, load)
    vocabulary = run_in_background(load)
    return lambda: vocabulary


class ClientChannel(Protocol):
    """The part of a channel to the client that the engine process uses."""

    def send(self, message: EngineMessage) -> None: ...
    def receive(self, timeout_seconds: float | None) -> list[EngineMessage]: ...


class StepSize(NamedTuple):
    """What one submitted step computes."""

    sequences: int
    positions: int
    has_prefill: bool


class EngineProcess:
    """The engine loop, driven by messages of the client, with the statistics it reports."""

    def __init__(
        self,
        channel: ClientChannel,
        hello: EngineHello,
        executor: Executor,
        capacity: EngineCapacity,
        clock: Callable[[], float] = time.monotonic,
        load_vocabulary: Callable[[], Future[Any]] | None = None,
        prepare_grammars: bool = False,
    ):
        self.channel = channel
        self.epoch = hello.epoch
        self.capacity = capacity
        self.clock = clock
        self.loop = build_engine(
            hello.plan,
            executor,
            capacity,
            clock,
            self.on_submit,
            load_vocabulary,
            self.on_adapter_load,
        )
        self.scheduler = self.loop.scheduler
        self.block_pool = self.scheduler.block_pool
        self.stats = EngineStats(kv_blocks=capacity.blocks)
        self.utilization = UtilizationMonitor()
        self.submitted_steps = 0
        self.step_sizes: deque[StepSize] = deque()  # of the steps in flight, oldest first
        self.last_output_time = 0.0
        self.prepares_grammars = prepare_grammars  # still to be done, once the engine is idle

    def run(self, early_messages: list[EngineMessage]) -> None:
        """Report the capacity, then run until the client is gone or a step fails."""
        self.channel.send(self.capacity)
        self.handle_messages(early_messages)
        while True:
            self.run_once()

    def run_once(self) -> None:
        """Handle what has arrived, run one step, and send its outputs."""
        was_busy = self.loop.busy
        begin = self.clock()
        self.receive_messages()
        if not was_busy:
            begin = self.clock()  # waiting for the first request is no part of the step
        outputs = self.loop.step()
        for answer in self.loop.take_adapter_answers():
            self.channel.send(answer)
        now = self.clock()
        completed_steps = self.submitted_steps - len(self.loop.in_flight)
        has_progress = completed_steps > self.stats.steps
        if has_progress:
            self.count_steps(completed_steps, now - begin)
        if has_progress or outputs or now - self.last_output_time >= HEARTBEAT_SECONDS:
            self.last_output_time = now
            self.send_outputs(tuple(outputs))

    def receive_messages(self) -> None:
        """Handle messages until the batching window closes.

        A request that arrives early in the window does not start the next step early.
        """
        if self.loop.busy:
            wait_seconds = self.loop.compute_batching_window()
        else:
            wait_seconds = HEARTBEAT_SECONDS
        while messages := self.channel.receive(wait_seconds):
            self.handle_messages(messages)
            wait_seconds = self.loop.compute_batching_window()
            if not wait_seconds:
                return
        if self.prepares_grammars and wait_seconds == HEARTBEAT_SECONDS:
            self.prepare_grammars()

    def prepare_grammars(self) -> None:
        """Load what grammars need, now that no request has come for a while.

        Loading holds Python's global lock for up to half a second, which a busy engine would feel.
        """
        self.prepares_grammars = False
        try:
            self.loop.prepare_grammars()
        except Exception:  # the first request with a grammar tries again
            log.exception("structured output could not be prepared")

    def count_steps(self, completed_steps: int, seconds: float) -> None:
        """Add the steps that have completed since the last call to the statistics."""
        new_steps = completed_steps - self.stats.steps
        sizes = [self.step_sizes.popleft() for _ in range(new_steps)]
        self.stats = replace(
            self.stats,
            steps=completed_steps,
            step_seconds=self.stats.step_seconds + seconds,
            sequences=self.stats.sequences + sum(size.sequences for size in sizes),
            positions=self.stats.positions + sum(size.positions for size in sizes),
            prefill_steps=self.stats.prefill_steps + sum(size.has_prefill for size in sizes),
        )

    def handle_messages(self, messages: list[EngineMessage]) -> None:
        for message in messages:
            if isinstance(message, EngineRequest):
                self.add_request(message)
            elif isinstance(message, AbortRequest):
                self.loop.abort(message.id)
            elif isinstance(message, LoadAdapter):
                self.loop.load_adapter(message.name, message.path)
            elif isinstance(message, UnloadAdapter):
                self.loop.unload_adapter(message.name)
            else:
                raise ProtocolError(f"an engine takes no {type(message).__name__}")

    def add_request(self, request: EngineRequest) -> None:
        """Add a request, or send its refusal. A request with an id in use is ignored."""
        if self.loop.holds(request.id):
            return
        try:
            self.loop.add(request)
        except BloomeryError as error:
            self.refuse_request(request, str(error))
        except Exception:
            log.exception("a request could not be added")
            self.refuse_request(request, "the engine could not take this request")
        else:
            if not request.emitted:
                tokens_in = self.stats.tokens_in + len(request.prompt)
                self.stats = replace(self.stats, tokens_in=tokens_in)

    def refuse_request(self, request: EngineRequest, reason: str) -> None:
        position = len(request.emitted)
        refusal = TokenOutput(request.id, position, finish="error", error=reason)
        self.send_outputs((refusal,))

    def on_submit(self, step: ScheduledStep) -> None:
        """Count a step and report the requests it admits, before it can crash this process."""
        self.submitted_steps += 1
        decodes = len(step.decodes)
        chunk_positions = sum(chunk.count for chunk in step.chunks)
        has_prefill = any(chunk.new_request is not None or chunk.count > 1 for chunk in step.chunks)
        size = StepSize(decodes + len(step.chunks), decodes + chunk_positions, has_prefill)
        self.step_sizes.append(size)
        admitted_ids = []
        prefix_queried = self.stats.prefix_queried
        prefix_hit = self.stats.prefix_hit
        for chunk in step.chunks:
            if chunk.new_request is not None:
                admitted_ids.append(self.scheduler.running[chunk.sequence].request.id)
                prefix_queried += len(chunk.new_request.tokens)
                prefix_hit += chunk.start
        if admitted_ids:
            self.channel.send(AdmittedRequests(self.epoch, tuple(admitted_ids)))
            self.stats = replace(self.stats, prefix_queried=prefix_queried, prefix_hit=prefix_hit)

    def on_adapter_load(self, request_ids: list[str]) -> None:
        """Report the requests for which an adapter is read: it might crash this process."""
        self.channel.send(AdmittedRequests(self.epoch, tuple(request_ids), has_started=False))

    def count_adapters(self) -> None:
        """Bring the statistics about LoRA adapters up to date."""
        store = self.loop.adapter_store
        if store is None:
            return
        slots = self.scheduler.adapter_slots
        waiting = sum(len(entry.requests) for entry in slots.waiting.values())
        self.stats = replace(
            self.stats,
            adapter_slots=tuple([slot.adapter for slot in slots.slots]),
            adapters_in_memory=len(store.adapters),
            waiting_for_adapters=waiting + store.num_waiting,
            adapter_slot_loads=slots.num_loads,
            adapter_file_loads=store.num_loads,
            adapter_evictions=store.num_evictions,
        )

    def send_outputs(self, outputs: tuple[TokenOutput, ...]) -> None:
        """Send outputs with the current statistics. Without outputs this is a heartbeat."""
        self.count_adapters()
        if self.scheduler.state_pool is not None:
            self.stats = count_checkpoints(self.stats, self.scheduler.state_pool.cache)
        self.stats = replace(
            self.stats,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + self.loop.num_waiting_for_files,
            kv_used=self.block_pool.num_blocks - self.block_pool.num_free_blocks,
            kv_used_by_group=tuple(self.block_pool.used_by_group),
            tokens_out=self.stats.tokens_out + sum(len(output.ids) for output in outputs),
            preemptions=self.scheduler.num_preemptions,
            scheduling_overhead_seconds=self.scheduler.policy.overhead_seconds,
            timing=self.loop.timing,
            roofline_share=self.utilization.observe(self.loop.timing, self.clock()),
        )
        self.channel.send(EngineOutput(self.epoch, self.stats, outputs))


def count_checkpoints(stats: EngineStats, cache: PrefixCache) -> EngineStats:
    """Add what is known of the checkpoints of recurrent states."""
    return replace(
        stats,
        checkpoints=len(cache.checkpoints),
        checkpoint_blocks=cache.num_checkpoint_blocks,
        checkpoints_saved=cache.checkpoints.num_saved,
        checkpoint_hits=cache.checkpoints.num_hits,
        checkpoints_evicted=cache.checkpoints.num_evicted,
    )

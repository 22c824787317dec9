"""The API process's side of the engine: starts it, talks to it, and restarts it when it fails.

Streams survive engine crashes: the journal holds what the next engine needs, so a reader notices
only a pause. Everything runs in one event loop. This module knows no HTTP, no text and no devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from bloomery.config import EnginePlan
from bloomery.engine.journal import JournalEntry, RequestJournal
from bloomery.engine.turns import TurnQueue
from bloomery.errors import BloomeryError, InvalidRequest, RequestFailed
from bloomery.ipc import (
    ENGINE_CODEC,
    ENGINE_COMMAND,
    ChildConnection,
    ChildHandle,
    EngineHello,
    EngineMessage,
    ProtocolError,
    spawn_child,
)
from bloomery.messages import (
    AbortRequest,
    AdapterInfo,
    AdapterRefusal,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    EngineStatus,
    LoadAdapter,
    TokenOutput,
    UnloadAdapter,
    add_timings,
)

log = logging.getLogger("bloomery.engine")

STEP_TIME_WINDOW = 512  # latest steps that the hang limit is derived from
MIN_TIMED_STEPS = 16  # in the first steps kernels may still be compiling
# A step is a hang when it takes this many times the slowest of the latest steps.
HANG_FACTOR = 20
# An engine is reported as stalled after this many seconds without progress, or after this many
# times its slowest step if that is longer.
STALL_SECONDS = 5.0
STALL_FACTOR = 4
# An engine that crashes while it has no request may have been killed by one that was aborted within
# this many seconds.
ABORT_BLAME_SECONDS = 5.0
WAKEUP_BATCH = 32  # readers woken in one iteration of the event loop
MAX_LOAD_CRASHES = 2  # engine crashes after which an adapter that was to be loaded is given up


@dataclass(frozen=True)
class EngineTimeouts:
    """Time limits of an engine in seconds, and how often it may be restarted."""

    step_seconds: float = 30.0  # without progress; an idle engine sends a heartbeat twice a second
    first_step_seconds: float = 300.0  # the same before its step time is known
    load_seconds: float = 600.0  # between two progress reports while it loads
    shutdown_seconds: float = 5.0  # between SIGTERM and SIGKILL
    queue_seconds: float = 60.0  # that a request may wait for its first step
    # Crashes allowed within `restart_window_seconds`, not counting those that a request explains.
    # Crashes before an engine is ready all count.
    max_restarts: int = 5
    restart_window_seconds: float = 60.0
    # The delay before the second restart in a row. Each further restart waits this much longer.
    restart_delay_seconds: float = 0.5

    @classmethod
    def for_device(cls, device: str, step_seconds: float = 30.0) -> EngineTimeouts:
        """Allow a CPU ten times as long: one step of a large model may take minutes there."""
        factor = 10 if device == "cpu" else 1
        return cls(step_seconds=factor * step_seconds)


class StreamListener:
    """Wakes the reader of one stream and tells it which of its journal entries have output."""

    def __init__(self, wakeups: TurnQueue) -> None:
        self.entries_with_output = dict[JournalEntry, None]()
        self.wakeup: asyncio.Future[None] | None = None  # None: the reader is not waiting
        self.wakeups = wakeups

    def notify(self, entry: JournalEntry) -> None:
        if self.wakeup is not None and not self.entries_with_output:
            self.wakeups.add(self.wakeup)
        self.entries_with_output[entry] = None

    async def next_entry(self) -> JournalEntry:
        """Wait for an entry that has output."""
        if not self.entries_with_output:
            self.wakeup = asyncio.get_running_loop().create_future()
            await self.wakeup
            self.wakeup = None
        entry = next(iter(self.entries_with_output))
        del self.entries_with_output[entry]
        return entry


@dataclass(eq=False)
class PendingAdapter:
    """An adapter that the engine was asked to load, and those who wait for the answer."""

    path: str
    waiters: list[asyncio.Future[AdapterInfo]] = field(default_factory=list)
    num_crashes: int = 0  # of engines that had the message


class EngineChild(ChildConnection[EngineMessage]):
    """One engine process as the client sees it, and how long it has made no progress."""

    def __init__(self, on_message: Callable[[EngineChild, EngineMessage], None]):
        super().__init__(ENGINE_CODEC, lambda message: on_message(self, message))
        self.loaded = False
        self.idle_seconds = 0.0  # since the last sign of progress

    async def start(self, command: Sequence[str], prestarted: ChildHandle | None) -> None:
        """Start the process, or take over one that is running."""
        await self.connect(prestarted or spawn_child(command))


class EngineClient:
    """Streams requests through one engine process and keeps such a process running."""

    def __init__(
        self,
        plan: EnginePlan,
        command: Sequence[str] = ENGINE_COMMAND,
        timeouts: EngineTimeouts | None = None,
        create_child: Callable[
            [Callable[[EngineChild, EngineMessage], None]], EngineChild
        ] = EngineChild,
        prestarted: ChildHandle | None = None,
    ):
        """`prestarted` is the first engine process, if it is already running."""
        self.plan = plan
        self.command = command
        self.create_child = create_child
        self.prestarted = prestarted
        self.timeouts = timeouts or EngineTimeouts.for_device(plan.device)
        self.journal = RequestJournal()
        self.wakeups = TurnQueue(WAKEUP_BATCH)
        self.reported_status = EngineStatus("loading")
        self.capacity: EngineCapacity | None = None
        self.epoch = 0  # engines started so far
        self.child: EngineChild | None = None
        self.supervisor: asyncio.Task[None] | None = None
        self.last_crash_time = 0.0  # on the clock of the event loop
        self.last_abort_time = -ABORT_BLAME_SECONDS  # of a request that an engine had
        self.step_times: deque[float] = deque(maxlen=STEP_TIME_WINDOW)
        self.current_stats = EngineStats()  # of the current engine
        self.past_stats = EngineStats()  # sums over all earlier engines
        self.settled = asyncio.Event()  # the engine is ready, or the client has failed or is closed
        self.failed = asyncio.Event()
        self.step_observers: list[Callable[[EngineStats, EngineStats], None]] = []
        self.pending_adapters: dict[str, PendingAdapter] = {}  # by name

    # ---- for the server ----

    async def start(self) -> None:
        """Start the engine process and return at once. The engine loads in the background."""
        self.supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def ready(self) -> EngineCapacity:
        """Wait until the engine is loaded, or loaded again, and return its capacity."""
        await self.settled.wait()
        status = self.reported_status
        if status.state not in ("ready", "draining") or self.capacity is None:
            raise BloomeryError(f"the engine is not available: {status.detail or status.state}")
        return self.capacity

    def add_step_observer(self, observer: Callable[[EngineStats, EngineStats], None]) -> None:
        """Call `observer` after every step with the engine's statistics before and after it."""
        self.step_observers.append(observer)

    async def wait_failed(self) -> str:
        """Wait until the client gives up and return the reason. The server should then exit."""
        await self.failed.wait()
        return self.reported_status.detail

    @property
    def status(self) -> EngineStatus:
        """The engine's status. A ready engine that makes no progress is reported as stalled."""
        status = self.reported_status
        if status.state != "ready" or not self._is_stalled():
            return status
        detail = f"the engine has made no progress for {self.idle_seconds:.0f} seconds"
        return EngineStatus("stalled", detail=detail)

    @property
    def num_restarts(self) -> int:
        """Engines started after the first one."""
        return max(self.epoch - 1, 0)

    @property
    def num_open_requests(self) -> int:
        return len(self.journal.entries)

    @property
    def pid(self) -> int | None:
        """Process id of the current engine, until it has been reaped."""
        process = self.child.process if self.child is not None else None
        return process.pid if process is not None and process.returncode is None else None

    @property
    def idle_seconds(self) -> float:
        """Seconds since the engine made progress or, without requests, sent a heartbeat."""
        return self.child.idle_seconds if self.child is not None else 0.0

    @property
    def stats(self) -> EngineStats:
        """Statistics summed over all engines. Requests count as waiting while no engine runs."""
        waiting = max(len(self.journal.entries) - self.current_stats.running, 0)
        return replace(add_stats(self.past_stats, self.current_stats), waiting=waiting)

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        """Yield outputs of the requests until each has finished.

        A slow reader gets several outputs as one. Closing the iterator aborts the requests that
        have not finished. `contextlib.aclosing` closes it without delay.
        """
        state = self.reported_status.state
        if state in ("draining", "failed", "closed"):
            raise RequestFailed(f"the engine takes no more requests: it is {state}")
        listener = StreamListener(self.wakeups)
        entries = list[JournalEntry]()
        try:
            now = asyncio.get_running_loop().time()
            for request in requests:  # a refusal raises, and the earlier requests are aborted below
                entries.append(self.journal.open(request, listener, now))
            self._send_unsent()
            num_open = len(entries)
            while num_open:
                entry = await listener.next_entry()
                output = entry.take_output()
                num_open -= output.finish is not None
                yield output
        finally:
            for entry in entries:
                self._abort(entry)

    def abort(self, id: str) -> bool:
        """End a request with the finish reason "abort". Returns False if it is not open."""
        entry = self.journal.by_request.get(id)
        if entry is not None:
            self._abort(entry)
        return entry is not None

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Have the engine read a LoRA adapter. Raises InvalidRequest if it cannot be used.

        This is a check and saves the first request the time. An engine reads any adapter that a
        request names, so another engine after a crash needs no list of them.
        """
        if self.reported_status.state in ("draining", "failed", "closed"):
            raise RequestFailed(f"the engine loads nothing: it is {self.reported_status.state}")
        answer: asyncio.Future[AdapterInfo] = asyncio.get_running_loop().create_future()
        pending = self.pending_adapters.setdefault(name, PendingAdapter(path))
        pending.waiters.append(answer)
        if len(pending.waiters) == 1 and self.child is not None and self.child.loaded:
            self.child.send(LoadAdapter(name, path))
        return await answer

    def unload_adapter(self, name: str) -> None:
        """Let the engine drop an adapter when the requests that use it have ended."""
        self._answer_adapter(name, InvalidRequest(f"the adapter {name!r} was unloaded"))
        if self.child is not None and self.child.loaded and not self.child.lost.done():
            self.child.send(UnloadAdapter(name))

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let open requests finish for `drain_seconds`, fail the others, and end the engine.

        A second call ends everything at once.
        """
        if self.reported_status.state not in ("failed", "closed"):
            self._set_state("draining")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_drained(), drain_seconds)
            self._fail_open_requests("the server is shutting down")
        if self.supervisor is not None:
            self.supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.supervisor
        if self.reported_status.state != "failed":
            self._set_state("closed")
        self.settled.set()

    # ---- supervision ----

    async def _supervise(self) -> None:
        """Run one engine after the other until the client is closed or gives up."""
        try:
            while not self.failed.is_set():
                self.epoch += 1
                self.child = self.create_child(self._on_message)
                await self._run_engine(self.child)
                if not self.failed.is_set():
                    self._handle_crash(self.child)
                    repeated_crashes = max(len(self.journal.crashes) - 1, 0)
                    await asyncio.sleep(self.timeouts.restart_delay_seconds * repeated_crashes)
        except Exception:
            log.exception("the engine's supervisor has failed")
            self._fail("the engine's supervisor has failed")

    async def _run_engine(self, child: EngineChild) -> None:
        """Start one engine and watch it until it has ended."""
        try:
            prestarted = self.prestarted
            self.prestarted = None
            await child.start(self.command, prestarted)
            child.send(EngineHello(self.epoch, self.plan))
            await self._watch(child)
        except OSError as error:
            child.exit_reason = f"could not be started: {error}"
        except asyncio.CancelledError:
            await child.terminate(self.timeouts.shutdown_seconds)
            raise
        if not self.failed.is_set():
            self.settled.clear()
            self._set_state("restarting")
        await child.terminate()

    async def _watch(self, child: EngineChild) -> None:
        """Return when the engine is gone or has made no progress for too long.

        Time is counted in ticks of this loop, so a stall of this process kills no engine.
        """
        while not child.lost.done():
            limit = self._compute_hang_limit(child)
            tick = min(limit / 20, 1.0)
            await asyncio.wait([child.lost], timeout=tick)
            child.idle_seconds += tick
            self._expire_requests()
            if child.idle_seconds > limit and not child.lost.done():
                child.exit_reason = f"made no progress for {limit:.0f} seconds"
                return

    def _compute_hang_limit(self, child: EngineChild) -> float:
        """Seconds without progress after which the engine is killed."""
        if not child.loaded:
            return self.timeouts.load_seconds
        if len(self.step_times) < MIN_TIMED_STEPS:
            return max(self.timeouts.first_step_seconds, self.timeouts.step_seconds)
        return max(self.timeouts.step_seconds, HANG_FACTOR * max(self.step_times))

    def _is_stalled(self) -> bool:
        """Whether the engine has made no progress for too long to be reported as ready.

        An idle engine is judged by its heartbeats, a busy one by the duration of its steps. Each
        request asks this several times, and the slowest step takes longer to find than the rest.
        """
        if self.idle_seconds <= min(STALL_SECONDS, self.timeouts.step_seconds / 2):
            return False
        if not self._has_sent_requests():
            return True
        if len(self.step_times) < MIN_TIMED_STEPS:
            slowest_step = self.timeouts.first_step_seconds
        else:
            slowest_step = max(self.step_times)
        return self.idle_seconds > STALL_FACTOR * slowest_step

    def _handle_crash(self, child: EngineChild) -> None:
        """Record the crash in the journal and decide whether to start another engine."""
        log.error("the engine %s", child.exit_reason)
        self.past_stats = add_stats(self.past_stats, self.current_stats)
        self.current_stats = EngineStats(kv_blocks=self.current_stats.kv_blocks)
        now = asyncio.get_running_loop().time()
        self.last_crash_time = now
        self.journal.record_crash(now)
        for name, pending in list(self.pending_adapters.items()):
            pending.num_crashes += child.loaded
            if pending.num_crashes >= MAX_LOAD_CRASHES:
                error = f"the engine stopped {MAX_LOAD_CRASHES} times while it loaded {name!r}"
                self._answer_adapter(name, InvalidRequest(error, "lora_path"))
        if child.loaded:
            self._forgive_crashes(now)
        num_crashes = self.journal.count_unexplained_crashes()
        if num_crashes > self.timeouts.max_restarts:
            self._fail(f"the engine died {num_crashes} times in a row; it {child.exit_reason}")
        else:
            self._set_state("restarting", f"the engine {child.exit_reason}")

    def _forgive_crashes(self, now: float) -> None:
        """Forget old crashes, and this one if a request that was just aborted may explain it.

        A client that sends a harmful request and leaves must not be able to end the server.
        """
        journal = self.journal
        journal.count_unexplained_crashes(now - self.timeouts.restart_window_seconds)
        last = journal.crashes[-1] if journal.crashes else None
        was_idle = last is not None and last.time == now and not last.possible_causes
        if was_idle and now - self.last_abort_time < ABORT_BLAME_SECONDS:
            journal.crashes.pop()

    def _fail(self, detail: str) -> None:
        """Give up: no engine is started any more."""
        self.reported_status = EngineStatus("failed", detail=detail)
        log.critical("%s", detail)
        self._fail_open_requests("the engine has failed")
        self.failed.set()
        self.settled.set()

    def _set_state(self, state: EngineState, detail: str = "") -> None:
        """Change the state; a draining client stays in that state until it is closed."""
        if self.reported_status.state == "draining" and state != "closed":
            state = "draining"
        self.reported_status = EngineStatus(state, detail=detail)

    # ---- messages ----

    def _on_message(self, child: EngineChild, message: EngineMessage) -> None:
        if isinstance(message, EngineOutput | AdmittedRequests) and message.epoch != self.epoch:
            return  # from an earlier engine
        if isinstance(message, EngineOutput):
            self._on_output(child, message)
        elif isinstance(message, AdmittedRequests):
            now = asyncio.get_running_loop().time()
            for engine_id in message.requests:
                self.journal.record_admission(engine_id, now, message.has_started)
        elif isinstance(message, EngineCapacity):
            self.capacity = message
            child.loaded = True
            if self.num_restarts:
                self._log_recovery()
            child.idle_seconds = 0.0
            self._set_state("ready")
            self.settled.set()
            for name, pending in self.pending_adapters.items():
                child.send(LoadAdapter(name, pending.path))
            self._send_unsent()
        elif isinstance(message, EngineStatus):
            child.idle_seconds = 0.0
            if message.state != "failed":
                self.reported_status = replace(message, state=self.reported_status.state)
            elif self.capacity is None:
                self._fail(message.detail)
            else:  # an engine has loaded this plan before, so another attempt may succeed
                child.exit_reason = f"could not load: {message.detail}"
        elif isinstance(message, AdapterInfo):
            self._answer_adapter(message.name, message)
        elif isinstance(message, AdapterRefusal):
            self._answer_adapter(message.name, InvalidRequest(message.error, "lora_path"))
        else:
            raise ProtocolError(f"a client takes no {type(message).__name__}")

    def _answer_adapter(self, name: str, answer: AdapterInfo | BloomeryError) -> None:
        """Tell those who asked for an adapter that it is there, or why it is not."""
        pending = self.pending_adapters.pop(name, None)
        for waiter in pending.waiters if pending is not None else ():
            if waiter.done():
                continue
            if isinstance(answer, AdapterInfo):
                waiter.set_result(answer)
            else:
                waiter.set_exception(answer)

    def _log_recovery(self) -> None:
        seconds = asyncio.get_running_loop().time() - self.last_crash_time
        num_open = self.num_open_requests
        log.info("the engine is back after %.1f s; %d open requests continue", seconds, num_open)

    def _on_output(self, child: EngineChild, message: EngineOutput) -> None:
        before = self.current_stats
        after = message.stats
        self.current_stats = after
        has_progress = after.steps > before.steps
        if has_progress:
            self.step_times.append(after.step_seconds - before.step_seconds)
            for observer in self.step_observers:
                observer(before, after)
        # A heartbeat counts as progress only if the engine has no requests, or all of them wait for
        # a file. An engine that is idle although requests were sent to it has lost a message.
        waits_for_files = 0 < after.waiting_for_adapters == after.waiting and not after.running
        is_idle = not self._has_sent_requests() or waits_for_files
        if has_progress or (child.loaded and is_idle):
            child.idle_seconds = 0.0
        for output in message.tokens:
            self.journal.record_output(output)
        self._send_unsent()

    def _has_sent_requests(self) -> bool:
        return any(entry.sent for entry in self.journal.entries.values())

    def _send_unsent(self) -> None:
        """Send all requests that the journal allows to send, if an engine is ready."""
        child = self.child
        if child is None or not child.loaded or child.lost.done():
            return
        now = asyncio.get_running_loop().time()
        for entry in self.journal.take_sendable():
            try:
                child.send(entry.replay_request(now))
            except ProtocolError as error:
                self.journal.finish(entry, "error", str(error))

    def _abort(self, entry: JournalEntry) -> None:
        if entry.finish is None:
            self.journal.finish(entry, "abort")
            self._send_abort(entry)
            self._send_unsent()

    def _send_abort(self, entry: JournalEntry) -> None:
        if entry.sent and self.child is not None:
            self.last_abort_time = asyncio.get_running_loop().time()
            self.child.send(AbortRequest(entry.engine_id))

    def _expire_requests(self) -> None:
        now = asyncio.get_running_loop().time()
        for entry in self.journal.expire(now, self.timeouts.queue_seconds):
            self._send_abort(entry)

    def _fail_open_requests(self, error: str) -> None:
        for entry in list(self.journal.entries.values()):
            self.journal.finish(entry, "error", error)
        for name in list(self.pending_adapters):
            self._answer_adapter(name, RequestFailed(error))

    async def _wait_drained(self) -> None:
        while self.journal.entries:
            await asyncio.sleep(0.02)


def add_stats(past: EngineStats, current: EngineStats) -> EngineStats:
    """Add up the sums. Current figures, such as the running requests, are those of `current`."""
    return replace(
        current,
        steps=past.steps + current.steps,
        step_seconds=past.step_seconds + current.step_seconds,
        tokens_in=past.tokens_in + current.tokens_in,
        tokens_out=past.tokens_out + current.tokens_out,
        prefix_queried=past.prefix_queried + current.prefix_queried,
        prefix_hit=past.prefix_hit + current.prefix_hit,
        preemptions=past.preemptions + current.preemptions,
        scheduling_overhead_seconds=past.scheduling_overhead_seconds
        + current.scheduling_overhead_seconds,
        sequences=past.sequences + current.sequences,
        positions=past.positions + current.positions,
        prefill_steps=past.prefill_steps + current.prefill_steps,
        adapter_slot_loads=past.adapter_slot_loads + current.adapter_slot_loads,
        adapter_file_loads=past.adapter_file_loads + current.adapter_file_loads,
        adapter_evictions=past.adapter_evictions + current.adapter_evictions,
        timing=add_timings(past.timing, current.timing),
        checkpoints_saved=past.checkpoints_saved + current.checkpoints_saved,
        checkpoint_hits=past.checkpoint_hits + current.checkpoint_hits,
        checkpoints_evicted=past.checkpoints_evicted + current.checkpoints_evicted,
    )

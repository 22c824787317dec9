"""The API process's hold on the engine: starts it, talks to it, and starts another when it dies or hangs.

Streams outlive engines: the journal has what the next one needs, so all that a reader may notice is a pause.
Everything here runs in one event loop; this file must not know HTTP, text or devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from bloomery.config import Plan
from bloomery.engine.birth import COMMAND, Born
from bloomery.engine.child import Child
from bloomery.engine.journal import Entry, Journal
from bloomery.engine.loop import total
from bloomery.engine.wire import Hello, Message, WireError
from bloomery.errors import BloomeryError, RequestFailed
from bloomery.messages import (
    AbortRequest,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    EngineStatus,
    TokenOutput,
)

log = logging.getLogger("bloomery.engine")

SUMS = (
    "steps",
    "step_seconds",
    "tokens_in",
    "tokens_out",
    "prefix_queried",
    "prefix_hit",
    "preemptions",
    "tax_seconds",
    "sequences",
    "positions",
    "prompt_steps",
)
PACE = 512  # steps by which an engine's pace is judged
DOUBT = 5.0  # seconds without progress after which it is not called ready any more, or four steps if that is longer
WARM = 16  # steps before it is judged at all: kernels may still be compiling
TOGETHER = 32  # readers woken in one turn of the event loop
SLOWER = 20  # times the slowest of those steps is no step any more but a hang


@dataclass(frozen=True)
class Patience:
    """How long an engine may be silent, in seconds, and how often it may die."""

    silence: float = 30.0  # between two steps; an idle engine gives a sign of life twice a second
    first: float = 300.0  # the same before its pace is known
    loading: float = 600.0  # between two reports while it loads
    grace: float = 5.0  # between being asked to end and being killed
    queue: float = 60.0  # a request may wait to be begun
    restarts: int = 5  # so many within `window`, and without limit in time while none gets ready
    window: float = 60.0
    pause: float = 0.5  # before the second restart in a row; then twice, three times that

    @classmethod
    def for_device(cls, device: str, step: float = 30.0) -> Patience:
        """One step of a large model may take minutes on a small CPU."""
        return cls(silence=10 * step if device == "cpu" else step)


class Turns:
    """Wakes readers a few at a time. A thousand woken at once would keep whoever else wants something of the event
    loop, such as a newcomer to be refused, waiting for as long as all of them take."""

    def __init__(self) -> None:
        self.due = deque[asyncio.Event]()

    def wake(self, reader: asyncio.Event) -> None:
        self.due.append(reader)
        if len(self.due) == 1:
            asyncio.get_running_loop().call_soon(self._some)

    def _some(self) -> None:
        for _ in range(min(len(self.due), TOGETHER)):
            self.due.popleft().set()
        if self.due:
            asyncio.get_running_loop().call_soon(self._some)


class Bell:
    """A stream's side of the journal: which of its entries have news."""

    def __init__(self, turns: Turns) -> None:
        self.rung = dict[Entry, None]()
        self.event = asyncio.Event()
        self.turns = turns

    def ring(self, entry: Entry) -> None:
        if not self.rung:
            self.turns.wake(self.event)
        self.rung[entry] = None

    async def next(self) -> Entry:
        while not self.rung:
            self.event.clear()
            await self.event.wait()
        entry = next(iter(self.rung))
        del self.rung[entry]
        return entry


class EngineClient:
    def __init__(
        self,
        plan: Plan,
        command: Sequence[str] = COMMAND,
        patience: Patience | None = None,
        birth: Callable[[Callable[[Child, Message], None]], Child] = Child,
        born: Born | None = None,
    ):
        self.plan = plan
        self.command = command
        self.birth = birth
        self.born = born  # the first engine, where it was started before this
        self.patience = patience or Patience.for_device(plan.device)
        self.journal = Journal()
        self.turns = Turns()
        self.said = EngineStatus("loading")
        self.capacity: EngineCapacity | None = None
        self.epoch = 0  # engines started so far
        self.child: Child | None = None
        self.supervisor: asyncio.Task[None] | None = None
        self.deaths: list[float] = []
        self.pace: deque[float] = deque(maxlen=PACE)
        # of the engine of now, sums of those before
        self.latest = EngineStats()
        self.former = EngineStats()
        self.settled = asyncio.Event()
        self.failed = asyncio.Event()
        self.watchers: list[Callable[[EngineStats, EngineStats], None]] = []

    # ---- for the server --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to load; returns at once."""
        self.supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def ready(self) -> EngineCapacity:
        """What the engine can hold, once it is loaded, or loaded again."""
        await self.settled.wait()
        if self.said.state not in ("ready", "draining") or self.capacity is None:
            raise BloomeryError(
                f"the engine is not available: {self.said.detail or self.said.state}"
            )
        return self.capacity

    def observe(self, watcher: Callable[[EngineStats, EngineStats], None]) -> None:
        """Have it told of every step: an engine's figures before and after."""
        self.watchers.append(watcher)

    async def wait_failed(self) -> str:
        """Returns, with the reason, when there will be no engine any more; time for the owner to exit."""
        await self.failed.wait()
        return self.said.detail

    @property
    def status(self) -> EngineStatus:
        """Ready is an engine that makes progress with what it was given, not one that merely exists."""
        if (
            self.said.state == "ready"
            and self.child is not None
            and self.child.silent > self._doubt()
        ):
            return EngineStatus(
                "stalled",
                detail=f"the engine has made no progress for {self.child.silent:.0f} seconds",
            )
        return self.said

    @property
    def pid(self) -> int | None:
        """Of the engine of now, if it has not been buried yet."""
        process = self.child.process if self.child is not None else None
        return process.pid if process is not None and process.returncode is None else None

    @property
    def silent(self) -> float:
        """Seconds since the engine last made progress or, idle, gave a sign of life: what a true health check asks."""
        return self.child.silent if self.child is not None else 0.0

    @property
    def stats(self) -> EngineStats:
        """Sums are over all engines; whoever is not running waits, be it for an engine."""
        waiting = max(len(self.journal.entries) - self.latest.running, 0)
        return replace(summed(self.former, self.latest), waiting=waiting)

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        """News of the requests until each has finished; to a slow reader, several come as one.

        Leaving the iterator aborts what is open; `contextlib.aclosing` makes that prompt.
        """
        if self.said.state in ("draining", "failed", "closed"):
            raise RequestFailed(f"the engine takes no more requests: it is {self.said.state}")
        bell = Bell(self.turns)
        entries = list[Entry]()
        try:
            now = asyncio.get_running_loop().time()
            for request in requests:
                entries.append(
                    self.journal.open(request, bell, now)
                )  # if one is refused, the others end
            self._send_due()
            left = len(entries)
            while left:
                news = (await bell.next()).take()
                left -= news.finish is not None
                yield news
        finally:
            for entry in entries:
                self._abort(entry)

    def abort(self, id: str) -> bool:
        """End a request; its stream gets finish "abort". False if it is not open."""
        entry = self.journal.by_request.get(id)
        if entry is not None:
            self._abort(entry)
        return entry is not None

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let open requests finish for so long, end the others with an error, then end the engine; again: at once."""
        if self.said.state not in ("failed", "closed"):
            self._become("draining")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained(), drain_seconds)
            self._end_all("the server is shutting down")
        if self.supervisor is not None:
            self.supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.supervisor
        if self.said.state != "failed":
            self._become("closed")
        self.settled.set()

    # ---- one engine after the other ----------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            while not self.failed.is_set():
                self.epoch += 1
                child = self.child = self.birth(self._hear)
                await self._run(child)
                if not self.failed.is_set():
                    self._bury(child)
                    await asyncio.sleep(self.patience.pause * max(len(self.deaths) - 1, 0))
        except Exception:
            log.exception("the engine's supervisor has failed")
            self._fail("the engine's supervisor has failed")

    async def _run(self, child: Child) -> None:
        """One engine from birth to death."""
        try:
            born = self.born
            self.born = None
            await child.spawn(self.command, born)
            child.send(Hello(self.epoch, self.plan))
            await self._watch(child)
        except OSError as error:
            child.fault = f"could not be started: {error}"
        except asyncio.CancelledError:
            await child.end(self.patience.grace)
            raise
        if not self.failed.is_set():
            self.settled.clear()
            self._become("restarting")
        await child.end()

    async def _watch(self, child: Child) -> None:
        """Until it is gone or silent for too long; counted in ticks, so that nobody dies of a stall of this process."""
        while not child.lost.done():
            limit = self._limit(child)
            tick = min(limit / 20, 1.0)
            await asyncio.wait([child.lost], timeout=tick)
            child.silent += tick
            self._expire()
            if child.silent > limit and not child.lost.done():
                child.fault = f"made no progress for {limit:.0f} seconds"
                return

    def _limit(self, child: Child) -> float:
        if not child.ready:
            return self.patience.loading
        if len(self.pace) < WARM:
            return max(self.patience.first, self.patience.silence)
        return max(self.patience.silence, SLOWER * max(self.pace))

    def _doubt(self) -> float:
        """Idle, an engine gives signs of life; at work it is judged by its steps, once there were some."""
        idle = not any(entry.sent for entry in self.journal.entries.values())
        slowest = 0.0 if idle else max(self.pace) if len(self.pace) >= WARM else self.patience.first
        return max(min(DOUBT, self.patience.silence / 2), 4 * slowest)

    def _bury(self, child: Child) -> None:
        """Count the death, blame the batch, and see whether there shall be another engine."""
        log.error("the engine %s", child.fault)
        self.former = summed(self.former, self.latest)
        self.latest = EngineStats(kv_blocks=self.latest.kv_blocks)
        now = asyncio.get_running_loop().time()
        if child.ready:
            self.deaths = [death for death in self.deaths if death > now - self.patience.window]
        if not self.journal.crash():  # a culprit found is an end to the trouble, not a part of it
            self.deaths.append(now)
        if len(self.deaths) > self.patience.restarts:
            self._fail(f"the engine died {len(self.deaths)} times in a row; it {child.fault}")
        else:
            self._become("restarting", f"the engine {child.fault}")

    def _fail(self, detail: str) -> None:
        self.said = EngineStatus("failed", detail=detail)
        log.critical("%s", detail)
        self._end_all("the engine has failed")
        self.failed.set()
        self.settled.set()

    def _become(self, state: EngineState, detail: str = "") -> None:
        """Who drains goes on draining until closed."""
        kept = self.said.state == "draining" and state != "closed"
        self.said = EngineStatus("draining" if kept else state, detail=detail)

    # ---- what is said ------------------------------------------------------------------------------------

    def _hear(self, child: Child, message: Message) -> None:
        if isinstance(message, EngineOutput | AdmittedRequests) and message.epoch != self.epoch:
            return
        if isinstance(message, EngineOutput):
            self._hear_news(child, message)
        elif isinstance(message, AdmittedRequests):
            now = asyncio.get_running_loop().time()
            for serial in message.requests:
                self.journal.admit(serial, now)
        elif isinstance(message, EngineCapacity):
            self.capacity = message
            child.ready = True
            child.silent = 0.0
            self._become("ready")
            self.settled.set()
            self._send_due()
        elif isinstance(message, EngineStatus):
            child.silent = 0.0
            if message.state != "failed":
                self.said = replace(message, state=self.said.state)
            elif self.capacity is None:
                self._fail(message.detail)
            else:  # what could be loaded before may be loaded again
                child.fault = f"could not load: {message.detail}"
        else:
            raise WireError(f"a {type(message).__name__} is not for a client")

    def _hear_news(self, child: Child, news: EngineOutput) -> None:
        before = self.latest
        self.latest = news.stats
        moved = self.latest.steps > before.steps
        if moved:
            self.pace.append(self.latest.step_seconds - before.step_seconds)
            for watcher in self.watchers:
                watcher(before, self.latest)
        if moved or (
            child.ready and not any(entry.sent for entry in self.journal.entries.values())
        ):
            child.silent = 0.0  # an engine that is idle while we wait for it has lost something
        for tokens in news.tokens:
            self.journal.accept(tokens)
        self._send_due()

    def _send_due(self) -> None:
        child = self.child
        if child is None or not child.ready or child.lost.done():
            return
        now = asyncio.get_running_loop().time()
        for entry in self.journal.due():
            try:
                child.send(entry.replay(now))
            except WireError as error:
                self.journal.end(entry, "error", str(error))

    def _abort(self, entry: Entry) -> None:
        if entry.finish is None:
            self.journal.end(entry, "abort")
            if entry.sent and self.child is not None:
                self.child.send(AbortRequest(entry.serial))
            self._send_due()

    def _expire(self) -> None:
        for entry in self.journal.expire(asyncio.get_running_loop().time(), self.patience.queue):
            if entry.sent and self.child is not None:
                self.child.send(AbortRequest(entry.serial))

    def _end_all(self, error: str) -> None:
        for entry in list(self.journal.entries.values()):
            self.journal.end(entry, "error", error)

    async def _drained(self) -> None:
        while self.journal.entries:
            await asyncio.sleep(0.02)


def summed(former: EngineStats, latest: EngineStats) -> EngineStats:
    sums = {name: getattr(former, name) + getattr(latest, name) for name in SUMS}
    return replace(latest, timing=total(former.timing, latest.timing), **sums)

"""Client, journal, engine, scheduler and block pool in one event loop with virtual time and faults.

These components are the real ones. Three things are simulated: the connection between the
processes, the model (a fake executor whose KV cache holds token ids), and time. The event loop
never waits, it jumps to the next event. Messages are delayed, dropped and duplicated. Engines are
killed, hang, fail to start and fail within a call. Requests arrive, leave early, have deadlines and
may crash their engine.

A run is correct if every reader got the beginning of the reference tokens, without gap or
duplicate, and one finish reason, and if no block is in use once no request is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bloomery.engine.client import EngineChild, EngineClient, EngineTimeouts
from bloomery.engine.engine_process import HEARTBEAT_SECONDS, EngineProcess
from bloomery.errors import RequestFailed
from bloomery.ipc import ChildHandle, EngineHello, EngineMessage, ProtocolError
from bloomery.messages import (
    EngineCapacity,
    EngineRequest,
    EngineStatus,
    ResolvedSampling,
    ScheduledStep,
)
from tests.chaos.fake_engine import fake_plan
from tests.engine.fake_executor import VOCAB, FakeExecutor, reference_tokens
from tests.engine.random_engine import check_block_pool

POISON = (6, 6, 6, 6, 6)
MAX_SECONDS = 50 * 3600.0  # of virtual time; a longer run is stuck
GIVEN_UP = "given up: the engine stopped 3 times while it ran this request"


class VirtualTimeSelector(selectors.SelectSelector):
    """Never waits: a timeout moves the virtual clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulation is stuck: no event is scheduled")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual."""

    def __init__(self) -> None:
        self.virtual_selector = VirtualTimeSelector()
        super().__init__(self.virtual_selector)

    def time(self) -> float:
        return self.virtual_selector.now


@dataclass(frozen=True)
class FaultRates:
    """How often each fault happens, per thousand, and the number of one call that must fail."""

    kill: float = 0.0  # before a step
    hang: float = 0.0  # before a step
    drop: float = 0.0  # of messages, like the next two
    duplicate: float = 0.0
    delay: float = 0.0
    failed_start: float = 0.0  # of engine starts
    poison: float = 0.0  # of requests
    failing_call: int | None = None  # counted over calls of all kinds


@dataclass
class SimulationReport:
    """What happened in a simulation."""

    steps: int = 0
    engines: int = 0  # engine starts
    calls: int = 0  # calls that may fail: engine starts, messages, steps
    # How requests ended.
    finished: int = 0
    given_up: int = 0  # after three crashes
    left: int = 0  # the reader closed the stream
    late: int = 0  # the deadline passed
    preemptions: int = 0
    leaks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EngineSize:
    """The capacity of a simulated engine."""

    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class FaultInjector:
    """Decides which faults happen when. It is the only source of randomness."""

    def __init__(self, random: Random, rates: FaultRates, report: SimulationReport):
        self.random = random
        self.rates = rates
        self.report = report

    def happens(self, rate: float) -> bool:
        """Return True with a probability of `rate` per thousand."""
        return rate > 0 and self.random.random() * 1000 < rate

    def call_fails(self) -> bool:
        """Count a call and return whether it is the one that must fail."""
        self.report.calls += 1
        return self.report.calls == self.rates.failing_call


class FailingExecutor(FakeExecutor):
    """A fake executor whose steps fail if the fault injector or a poison prompt says so."""

    def __init__(self, block_size: int, faults: FaultInjector):
        super().__init__(block_size)
        self.faults = faults

    def begin(self, step: ScheduledStep) -> None:
        if self.faults.call_fails():
            raise RuntimeError("the device is gone")
        for scheduled in step.requests:
            new_request = scheduled.new_request
            if new_request is not None and new_request.tokens[:5] == POISON:
                raise RuntimeError("a step that cannot be computed")
        super().begin(step)


@dataclass(frozen=True)
class SimulatedChannel:
    """The engine's side of the simulated connection."""

    send: Callable[[EngineMessage], None]
    receive: Callable[[float | None], list[EngineMessage]]


class SimulatedChild(EngineChild):
    """An engine process, simulated by a task in the client's event loop."""

    def __init__(
        self,
        on_message: Callable[[EngineChild, EngineMessage], None],
        faults: FaultInjector,
        size: EngineSize,
    ):
        super().__init__(on_message)
        self.faults = faults
        self.size = size
        self.inbox: list[EngineMessage] = []
        self.message_arrived = asyncio.Event()
        self.last_arrival = 0.0  # of messages in transit, which must arrive in order
        self.task: asyncio.Task[None] | None = None
        self.engine: EngineProcess | None = None

    # ---- as an EngineChild ----

    async def start(self, command: Sequence[str], prestarted: ChildHandle | None) -> None:
        self.faults.report.engines += 1
        if self.faults.call_fails() or self.faults.happens(self.faults.rates.failed_start):
            raise OSError("no more processes")
        self.task = asyncio.create_task(self._run())

    def send(self, message: EngineMessage) -> None:
        self._transmit(message, self._deliver_to_engine)

    async def terminate(self, grace_seconds: float = 0.0) -> None:
        self.die()
        self.exit_reason = self.exit_reason or "was killed by signal 9"

    # ---- the connection ----

    def _transmit(self, message: EngineMessage, deliver: Callable[[EngineMessage], None]) -> None:
        faults = self.faults
        loop = asyncio.get_running_loop()
        if faults.call_fails() or faults.happens(faults.rates.drop):
            return
        max_delay = 5.0 if faults.happens(faults.rates.delay) else 0.002
        arrival = loop.time() + faults.random.random() * max_delay
        # Strictly increasing: the event loop does not keep the order of equal times.
        self.last_arrival = max(self.last_arrival + 1e-9, arrival)
        for _ in range(1 + faults.happens(faults.rates.duplicate)):
            loop.call_at(self.last_arrival, deliver, message)

    def _deliver_to_engine(self, message: EngineMessage) -> None:
        self.inbox.append(message)
        self.message_arrived.set()

    def _deliver_to_client(self, message: EngineMessage) -> None:
        """Deliver a message, even if the engine has died since it was sent."""
        try:
            self.on_message(message)
        except ProtocolError as error:
            self.exit_reason = f"broke the protocol: {error}"
            self.die()

    def _take_inbox(self, timeout_seconds: float | None) -> list[EngineMessage]:
        messages = self.inbox
        self.inbox = []
        self.message_arrived.clear()
        return messages

    # ---- the engine ----

    async def _run(self) -> None:
        random = self.faults.random
        channel = SimulatedChannel(
            lambda message: self._transmit(message, self._deliver_to_client), self._take_inbox
        )
        try:
            await self.message_arrived.wait()
            hello, *early_messages = self._take_inbox(None)
            if not isinstance(hello, EngineHello):
                raise ProtocolError("no EngineHello")
            for part in range(random.randrange(4)):
                await asyncio.sleep(random.random())
                channel.send(EngineStatus("loading", part / 4, "weights"))
            size = self.size
            capacity = EngineCapacity(
                size.blocks,
                size.block_size,
                size.max_num_seqs,
                size.max_num_batched_tokens,
                256,
                VOCAB,
            )
            executor = FailingExecutor(size.block_size, self.faults)
            clock = asyncio.get_running_loop().time
            self.engine = EngineProcess(channel, hello, executor, capacity, clock)
            channel.send(capacity)
            self.engine.handle_messages(early_messages)
            while True:
                await self._run_step(self.engine)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # ends the engine, as it would end a process
            self.exit_reason = f"ended on {error}"
            self.die()

    async def _run_step(self, engine: EngineProcess) -> None:
        faults = self.faults
        if not engine.loop.busy and not self.inbox:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.message_arrived.wait(), HEARTBEAT_SECONDS)
        if faults.happens(faults.rates.kill):
            raise RuntimeError("killed")
        if faults.happens(faults.rates.hang):
            await asyncio.Event().wait()
        steps_before = engine.stats.steps
        engine.run_once()
        check_block_pool(engine.block_pool)
        faults.report.steps += engine.stats.steps - steps_before
        await asyncio.sleep(faults.random.random() * 0.02)

    def die(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.engine is not None:
            self.faults.report.preemptions += self.engine.scheduler.num_preemptions
            self._check_leaks(self.engine)
            self.engine = None
        if not self.lost.done():
            self.lost.set_result(None)

    def _check_leaks(self, engine: EngineProcess) -> None:
        num_used_blocks = engine.block_pool.num_blocks - engine.block_pool.num_free_blocks
        if not engine.loop.busy and num_used_blocks:
            leak = f"{num_used_blocks} blocks are in use without a request"
            self.faults.report.leaks.append(leak)


def run_simulation(seed: int, rates: FaultRates, num_requests: int = 40) -> SimulationReport:
    """Run one simulation to its end. Raises if the run is not correct."""
    random = Random(seed)
    report = SimulationReport()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        simulation = _simulate(random, rates, report, num_requests)
        runner.run(asyncio.wait_for(simulation, MAX_SECONDS))
    return report


async def _simulate(
    random: Random, rates: FaultRates, report: SimulationReport, num_requests: int
) -> None:
    faults = FaultInjector(random, rates, report)
    size = EngineSize(
        blocks=random.choice([32, 48, 200]),
        block_size=random.choice([2, 4]),
        max_num_seqs=random.choice([2, 5, 16]),
        max_num_batched_tokens=random.choice([3, 16, 64]),
    )
    timeouts = EngineTimeouts(
        max_restarts=10**9, restart_delay_seconds=0.1, queue_seconds=MAX_SECONDS
    )
    steps_in_flight = random.choice([1, 2, 3])
    plan = fake_plan(steps_in_flight=steps_in_flight, prefix_cache=random.random() < 0.8)
    client = EngineClient(
        plan, (), timeouts, lambda on_message: SimulatedChild(on_message, faults, size)
    )
    await client.start()
    prefix = [random.randrange(5) for _ in range(12)]
    readers = []
    for number in range(num_requests):
        await asyncio.sleep(random.expovariate(2.0))
        request = _create_request(random, number, prefix, faults)
        readers.append(asyncio.create_task(_read_stream(client, request, random, report)))
    await asyncio.gather(*readers)
    if not is_journal_empty(client):
        raise AssertionError("the journal holds requests that have ended")
    await wait_idle(client)
    await client.close()
    if report.leaks:
        raise AssertionError(report.leaks[0])


def is_journal_empty(client: EngineClient) -> bool:
    journal = client.journal
    open_entries = (journal.entries, journal.by_request, journal.unsent, journal.quarantine)
    return not any(open_entries) and journal.running_alone is None


async def wait_idle(client: EngineClient) -> None:
    """Wait until the engine has nothing to do. Its blocks are checked when it ends."""
    while True:
        child = client.child
        engine = child.engine if isinstance(child, SimulatedChild) else None
        if engine is not None and not engine.loop.busy and not child.inbox:
            return
        await asyncio.sleep(1.0)


def _create_request(
    random: Random, number: int, prefix: list[int], faults: FaultInjector
) -> EngineRequest:
    prompt = prefix[: random.choice([0, 12])]
    prompt = prompt + [random.randrange(5) for _ in range(random.randrange(1, 12))]
    if faults.happens(faults.rates.poison):
        prompt = [*POISON, *prompt]
    max_tokens = random.randrange(1, 30)
    deadline = random.uniform(0.01, 5.0) if random.random() < 0.1 else None
    stop_ids = random.choice([(), (3,)])
    return EngineRequest(
        str(number),
        tuple(prompt),
        ResolvedSampling(min_tokens=max_tokens // 2),
        max_tokens,
        stop_ids,
        cache_salt=random.choice(["", "other"]),
        deadline=deadline,
        tenant=random.choice(["", "other"]),
    )


async def _read_stream(
    client: EngineClient, request: EngineRequest, random: Random, report: SimulationReport
) -> None:
    """Read a stream, perhaps slowly or not to its end, and check what arrived."""
    expected = reference_tokens(request)[len(request.prompt) :]
    tokens = list[int]()
    leave_after = random.randrange(len(expected) + 1) if random.random() < 0.1 else None
    finishes = []
    async with aclosing(client.stream([request])) as stream:
        async for output in stream:
            if output.position != len(tokens):
                raise AssertionError(f"position {output.position} after {len(tokens)} tokens")
            tokens += output.ids
            if output.finish is not None:
                finishes.append(output.finish)
            if leave_after is not None and len(tokens) >= leave_after and not finishes:
                report.left += 1
                return
            if random.random() < 0.1:
                await asyncio.sleep(random.random())
    if tokens != expected[: len(tokens)] or len(finishes) != 1:
        raise AssertionError(
            f"request {request.id}: {tokens} is not the beginning of {expected}, "
            f"or it finished {finishes}"
        )
    is_poison = request.prompt[:5] == POISON
    if finishes == ["deadline"] and request.deadline is not None:
        report.late += 1
    elif finishes == ["error"] and output.error == GIVEN_UP and report.engines > 2:
        report.given_up += 1
    elif is_poison or finishes[0] not in ("stop", "length") or tokens != expected:
        raise AssertionError(
            f"request {request.id} finished with {finishes} {output.error} "
            f"after {len(tokens)} of {len(expected)} tokens"
        )
    else:
        report.finished += 1


def find_failure(seed: int, rates: FaultRates, num_requests: int = 40) -> str | None:
    """Run one simulation and return its failure, or None if the run is correct."""
    try:
        run_simulation(seed, rates, num_requests)
    except (AssertionError, RuntimeError, TimeoutError, ProtocolError, RequestFailed) as error:
        return f"{type(error).__name__}: {error}"
    return None

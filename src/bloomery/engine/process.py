"""The engine as a process: messages in, steps, messages out, in one thread.

It holds nothing that a client would miss and mends nothing: whatever goes wrong beyond a single request ends it, and
whoever started it starts another. It knows neither which executor it drives nor who listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from bloomery.config import Plan
from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Announced, Executor, Report
from bloomery.engine.gauge import Gauge
from bloomery.engine.loop import Loop
from bloomery.engine.policy import policy_for
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.wire import Channel, Hello, Message, WireError
from bloomery.errors import BloomeryError
from bloomery.messages import (
    AbortRequest,
    AdmittedRequests,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineStatus,
    ScheduledStep,
    TokenOutput,
)

log = logging.getLogger("bloomery.engine")

HEARTBEAT = 0.5  # seconds between two signs of life of an idle engine
REPORTS = 0.1  # seconds between two reports while loading
PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket, make_executor: Callable[[Plan, Report], Executor]) -> int:
    """Greet, load, and step until the other end is gone; the process's exit status."""
    die_with_parent()
    connection.set_inheritable(False)
    channel = Channel(connection)
    with contextlib.ExitStack() as ends:
        try:
            while not (arrived := channel.receive(None)):
                pass  # half a frame
            hello, *early = arrived
            if not isinstance(hello, Hello):
                raise WireError(f"a {type(hello).__name__} where a Hello was due")
            try:
                executor = make_executor(hello.plan, reporter(channel.send))
                ends.callback(executor.close)
                ends.callback(
                    connection.close
                )  # before the executor: the client need not wait for that
                capacity = executor.start(hello.plan)
            except BloomeryError as error:  # what a person must mend: another try would not help
                channel.send(EngineStatus("failed", detail=str(error)))
                return 1
            Engine(channel, hello, executor, capacity).run(early)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except WireError as error:
            log.error("the engine ends on a malformed frame: %s", error)
        except Exception:
            log.exception("the engine ends on an error")
        return 1


def die_with_parent() -> None:
    """SIGTERM unwinds; the parent's death kills, even in the middle of a step; Ctrl-C is the parent's business."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reporter(send: Callable[[Message], None]) -> Report:
    told = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= REPORTS:
            told = now
            send(EngineStatus("loading", min(done / max(total, 1), 1.0), what))

    return report


class Line(Protocol):
    """An engine's way to its client, as far as stepping needs it."""

    def send(self, message: Message) -> None: ...
    def receive(self, seconds: float | None) -> list[Message]: ...


class Engine:
    """The loop, and what is told of it."""

    def __init__(
        self,
        channel: Line,
        hello: Hello,
        executor: Executor,
        capacity: EngineCapacity,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.channel = channel
        self.epoch = hello.epoch
        self.capacity = capacity
        self.clock = clock
        self.blocks = Blocks(capacity.blocks, capacity.block_size, hello.plan.prefix_cache)
        policy = policy_for(hello.plan, capacity)
        self.scheduler = Scheduler(
            self.blocks,
            capacity.max_num_batched_tokens,
            capacity.max_num_seqs,
            policy,
            capacity.stages,
        )
        self.loop = Loop(
            self.scheduler, Announced(executor, self.announce), hello.plan.depth, clock
        )
        self.stats = EngineStats(kv_blocks=capacity.blocks)
        self.gauge = Gauge()
        self.submitted = 0
        self.shapes: deque[tuple[int, int, bool]] = (
            deque()
        )  # of steps in flight: sequences, positions, any of a prompt
        # pieces of spare work
        self.told = 0.0
        self.begun = clock()
        self.several = False

    def run(self, early: list[Message]) -> None:
        self.channel.send(self.capacity)
        self.take(early)
        while True:
            self.turn()

    def turn(self) -> None:
        """What has arrived, one step, and what there is to tell."""
        busy = self.loop.busy
        begun = self.clock()
        patience = self.loop.patience() if busy or self.loop.left else HEARTBEAT
        while arrived := self.channel.receive(
            patience
        ):  # who comes early does not make the next step come early
            self.take(arrived)
            if not (patience := self.loop.patience()):
                break
        self.prepare()
        begun = begun if busy else self.clock()
        news = self.loop.step()
        now = self.clock()
        steps = self.submitted - len(self.loop.flight)
        moved = steps > self.stats.steps
        if moved:
            self.count(steps, now - begun)
        if moved or news or now - self.told >= HEARTBEAT:
            self.told = now
            self.tell(tuple(news))

    def prepare(self) -> None:
        """What the executor left for later, piece by piece."""
        if not self.loop.left:
            return
        self.several = self.several or self.loop.left > 1
        self.loop.spare()
        if not self.loop.left and self.several:
            log.info(
                "all steps are captured, %.1f s after the engine was ready",
                self.clock() - self.begun,
            )

    def count(self, steps: int, seconds: float) -> None:
        ended = [self.shapes.popleft() for _ in range(steps - self.stats.steps)]
        self.stats = replace(
            self.stats,
            steps=steps,
            step_seconds=self.stats.step_seconds + seconds,
            sequences=self.stats.sequences + sum(sequences for sequences, _, _ in ended),
            positions=self.stats.positions + sum(positions for _, positions, _ in ended),
            prompt_steps=self.stats.prompt_steps + sum(prompts for _, _, prompts in ended),
        )

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, EngineRequest):
                self.add(message)
            elif isinstance(message, AbortRequest):
                self.loop.abort(message.id)
            else:
                raise WireError(f"a {type(message).__name__} is not for an engine")

    def add(self, request: EngineRequest) -> None:
        """A request that is refused, for whatever reason, harms nobody else; one that is known was said twice."""
        if request.id in self.scheduler.by_request:
            return
        try:
            self.loop.add(request)
        except Exception as error:
            known = isinstance(error, BloomeryError)
            if not known:
                log.exception("a request could not be added")
            why = str(error) if known else "the engine could not take this request"
            self.tell((TokenOutput(request.id, len(request.emitted), finish="error", error=why),))
        else:
            if not request.emitted:
                self.stats = replace(
                    self.stats, tokens_in=self.stats.tokens_in + len(request.prompt)
                )

    def announce(self, step: ScheduledStep) -> None:
        self.submitted += 1
        counts = [item.count for item in step.chunks]
        going = len(step.decodes)
        prompts = any(item.new_request is not None or item.count > 1 for item in step.chunks)
        self.shapes.append((going + len(counts), going + sum(counts), prompts))
        begun = [(item, item.new_request) for item in step.chunks if item.new_request is not None]
        if not begun:
            return
        names = tuple(self.scheduler.running[item.sequence].request.id for item, _ in begun)
        self.channel.send(AdmittedRequests(self.epoch, names))
        self.stats = replace(
            self.stats,
            prefix_queried=self.stats.prefix_queried + sum(len(first.tokens) for _, first in begun),
            prefix_hit=self.stats.prefix_hit + sum(item.start for item, _ in begun),
        )

    def tell(self, tokens: tuple[TokenOutput, ...]) -> None:
        self.stats = replace(
            self.stats,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=self.blocks.count - self.blocks.available,
            tokens_out=self.stats.tokens_out + sum(len(entry.ids) for entry in tokens),
            preemptions=self.scheduler.preemptions,
            tax_seconds=self.scheduler.policy.tax,
            timing=self.loop.timing,
            unprepared=self.loop.left,
            share=self.gauge.look(self.loop.timing, self.clock()),
        )
        self.channel.send(EngineOutput(self.epoch, self.stats, tokens))

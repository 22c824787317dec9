"""Ranks as processes of this machine: every step is told to all of them, one of them answers.

A rank that is gone, or says that it failed, ends all: whoever owns this executor starts another. Ranks live no longer
than their owner, for they end with the sockets he holds.
"""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.config import Plan, child_environment
from bloomery.engine.executor import Report
from bloomery.engine.wire import Channel, Join, Message, Order, encode
from bloomery.errors import ConfigError
from bloomery.executors.ranks import Awaited, Drawn, RankLost, total
from bloomery.messages import EngineCapacity, EngineStatus, ScheduledStep, StepOutput

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GRACE = 5.0  # seconds a rank has to end


class Member:
    """One rank as its owner sees it."""

    def __init__(self, number: int):
        ours, theirs = socket.socketpair()
        # A tie to its parent ends even a rank that hangs. To Linux a parent is a thread; only the main one will stay.
        tied = ["tied"] if threading.current_thread() is threading.main_thread() else []
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bloomery.executors.rank", str(theirs.fileno()), *tied],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=child_environment(),
            )
        self.number = number
        self.channel = Channel(ours)

    def send(self, frame: bytes) -> None:
        try:
            self.channel.connection.sendall(frame)
        except ConnectionError:
            raise self._lost() from None

    def hear(self) -> list[Message]:
        try:
            return self.channel.receive(0)
        except (EOFError, ConnectionError):
            raise self._lost() from None

    def _lost(self) -> RankLost:
        code = self.process.wait()
        return RankLost(
            f"rank {self.number} "
            + (f"died of signal {-code}" if code < 0 else f"ended, status {code}")
        )

    def end(self) -> None:
        """Have it gone: its line is closed."""
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Processes:
    def __init__(self, report: Report | None = None):
        self.report = report
        self.members: list[Member] = []
        self.outputs: deque[StepOutput] = deque()
        self.folder: Path | None = None
        self.drawn = Drawn()
        self.poll = select.poll()

    def start(self, plan: Plan) -> EngineCapacity:
        """Load; ranks that are there already, and as many as the plan wants, leave what they had."""
        self.drawn = Drawn(plan.pp > 1)
        with self._ending():
            if len(self.members) != plan.tp * plan.pp:
                self._spawn(plan.tp * plan.pp)
            self.folder = Path(tempfile.mkdtemp(prefix="bloomery-"))  # nobody else may look into it
            for member in self.members:
                member.send(encode(Join(plan, member.number, f"{self.folder}/meeting", LOOPBACK)))
            capacity = self._loaded(plan)
        if (
            plan.device != "cuda"
        ):  # NCCL comes back to the meeting when two ranks speak for the first time
            self._sweep()
        return capacity

    def _spawn(self, count: int) -> None:
        self.close()
        for number in range(count):
            self.members.append(Member(number))
            self.poll.register(self.members[-1].channel.connection, select.POLLIN)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever goes wrong with one rank ends all of them."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _loaded(self, plan: Plan) -> EngineCapacity:
        """Once every rank has loaded; until then, how far they are."""
        done = [0.0] * len(self.members)
        found: dict[int, EngineCapacity] = {}
        while len(found) < len(self.members):
            for number, message in self._hear():
                if isinstance(message, EngineCapacity):
                    found[number] = message
                elif isinstance(message, EngineStatus):
                    done[number] = message.progress
                    if self.report is not None:  # of the whole each rank reads its part
                        self.report(message.detail, int(sum(done) * 1000), 1000)
        return total([found[number] for number in sorted(found)], found[plan.tp * (plan.pp - 1)])

    def spare(self) -> int:
        """Ranks have nothing that may wait."""
        return 0

    def submit(self, step: ScheduledStep) -> Awaited:
        frame = encode(Order(step, self.drawn.of(step)))
        with self._ending():
            for member in self.members:
                member.send(frame)
        return Awaited(self.next)

    def next(self) -> StepOutput:
        with self._ending():
            while not self.outputs:
                for _, message in self._hear():
                    if isinstance(message, StepOutput):
                        self.drawn.note(message)
                        self.outputs.append(message)
        return self.outputs.popleft()

    def _hear(self) -> list[tuple[int, Message]]:
        """Wait for somebody to say something; a rank that failed or is gone is an error."""
        ready = {descriptor for descriptor, _ in self.poll.poll()}
        found = []
        for member in self.members:
            if member.channel.connection.fileno() in ready:
                for message in member.hear():
                    if isinstance(message, EngineStatus) and message.state == "failed":
                        raise ConfigError(message.detail)
                    found.append((member.number, message))
        return found

    def close(self) -> None:
        for member in self.members:
            self.poll.unregister(member.channel.connection)
            member.channel.connection.close()
        for member in self.members:
            member.end()
        self.members = []
        self.outputs.clear()
        self._sweep()

    def _sweep(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

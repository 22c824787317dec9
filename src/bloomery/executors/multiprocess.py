"""The executor for tensor parallel ranks and pipeline stages as processes of this machine.

Every step is sent to all ranks, and the driver rank returns its output. If a rank disappears or
reports a failure, the executor ends all ranks, and its owner creates a new executor. Ranks exit
when their sockets close, so they live no longer than their owner. This module imports no torch.
"""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bloomery.config import EnginePlan
from bloomery.engine.executor import LoadProgress
from bloomery.errors import ConfigError
from bloomery.executors.rank_group import (
    AdapterLoadFuture,
    DeferredResult,
    PipelineTokens,
    RankLostError,
    combine_capacities,
    find_driver_rank,
)
from bloomery.ipc import (
    ENGINE_CODEC,
    BlockingChannel,
    EngineMessage,
    RankJoin,
    RankMasks,
    RankStep,
    describe_exit,
    spawn_child,
)
from bloomery.messages import (
    AdapterInfo,
    AdapterRefusal,
    EngineCapacity,
    EngineStatus,
    LoadAdapter,
    ScheduledStep,
    StepOutput,
    UnloadAdapter,
)

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
EXIT_SECONDS = 5.0  # that a rank may take to exit after its connection is closed


class RankProcess:
    """The process of one rank and the connection to it."""

    def __init__(self, rank: int):
        command = [sys.executable, "-m", "bloomery.executors.rank_worker"]
        # The kernel then kills the rank with its parent, even if the rank hangs. Linux takes the
        # spawning thread for the parent, and only the main thread lives as long as the process.
        if threading.current_thread() is threading.main_thread():
            command.append("die-with-parent")
        self.rank = rank
        self.process, connection = spawn_child(command)
        self.channel = BlockingChannel(connection, ENGINE_CODEC)

    def send(self, frame: bytes) -> None:
        try:
            self.channel.connection.sendall(frame)
        except ConnectionError:
            raise self._create_lost_error() from None

    def receive(self) -> list[EngineMessage]:
        """Return the messages that have arrived, without waiting."""
        try:
            return self.channel.receive(0)
        except (EOFError, ConnectionError):
            raise self._create_lost_error() from None

    def _create_lost_error(self) -> RankLostError:
        return RankLostError(f"rank {self.rank} {describe_exit(self.process.wait())}")

    def wait_or_kill(self) -> None:
        """Reap the process, whose connection is closed."""
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class MultiprocessExecutor:
    """Runs one process per rank. `report` receives the load progress."""

    def __init__(self, report: LoadProgress | None = None):
        self.report = report
        self.ranks: list[RankProcess] = []
        self.outputs: deque[StepOutput] = deque()
        self.rendezvous_folder: Path | None = None
        self.pipeline_tokens = PipelineTokens()
        self.adapter_loads: dict[str, AdapterLoadFuture] = {}  # under way, by name
        self.poll = select.poll()

    def start(self, plan: EnginePlan) -> EngineCapacity:
        """Load the model on all ranks. Running ranks are reused if their number is right."""
        self.pipeline_tokens = PipelineTokens(plan.pipeline_parallel_size)
        num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
        with self._close_on_error():
            if len(self.ranks) != num_ranks:
                self._spawn_ranks(num_ranks)
            # mkdtemp creates a folder that no other user can read.
            self.rendezvous_folder = Path(tempfile.mkdtemp(prefix="bloomery-"))
            rendezvous = f"{self.rendezvous_folder}/rendezvous"
            for rank in self.ranks:
                join = RankJoin(plan, rank.rank, rendezvous, LOOPBACK)
                rank.send(ENGINE_CODEC.encode(join))
            capacities = self._wait_loaded()
        if plan.device != "cuda":
            # NCCL reads the rendezvous file again when two ranks first communicate.
            self._remove_rendezvous()
        driver = find_driver_rank(plan.tensor_parallel_size, plan.pipeline_parallel_size)
        return combine_capacities(capacities, driver)

    def _spawn_ranks(self, num_ranks: int) -> None:
        self.close()
        for number in range(num_ranks):
            rank = RankProcess(number)
            self.ranks.append(rank)
            self.poll.register(rank.channel.connection, select.POLLIN)

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """End all ranks if any of them fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _wait_loaded(self) -> list[EngineCapacity]:
        """Wait until every rank has loaded and report progress. Returns capacities by rank."""
        fractions = [0.0] * len(self.ranks)
        capacities: dict[int, EngineCapacity] = {}
        while len(capacities) < len(self.ranks):
            for rank, message in self._receive():
                if isinstance(message, EngineCapacity):
                    capacities[rank] = message
                elif isinstance(message, EngineStatus):
                    fractions[rank] = message.progress
                    if self.report is not None:
                        # The fraction of a rank is relative to all weights, not to its own part.
                        self.report(message.detail, int(sum(fractions) * 1000), 1000)
        return [capacities[rank] for rank in sorted(capacities)]

    def submit(self, step: ScheduledStep) -> DeferredResult:
        rank_step = RankStep(step, self.pipeline_tokens.select_last_tokens(step))
        self._send_to_ranks(rank_step)
        return DeferredResult(self._next_output, self._send_masks)

    def _send_masks(self, masks: np.ndarray) -> None:
        self._send_to_ranks(RankMasks(masks.tobytes()))

    def _next_output(self) -> StepOutput:
        with self._close_on_error():
            while not self.outputs:
                self._handle_messages(None)
        return self.outputs.popleft()

    def _handle_messages(self, timeout_ms: int | None) -> None:
        """Wait for messages of running ranks and keep what they say."""
        for _, message in self._receive(timeout_ms):
            if isinstance(message, StepOutput):
                self.pipeline_tokens.record(message)
                self.outputs.append(message)
            elif isinstance(message, AdapterInfo | AdapterRefusal):
                load = self.adapter_loads[message.name]
                if load.add_answer(message):
                    del self.adapter_loads[message.name]
                    if load.is_refused:  # other ranks may have loaded it
                        self.unload_adapter(message.name)

    def _receive(self, timeout_ms: int | None = None) -> list[tuple[int, EngineMessage]]:
        """Wait for messages and return them with their ranks. Raises if a rank fails or is lost."""
        readable = {descriptor for descriptor, _ in self.poll.poll(timeout_ms)}
        messages = []
        for rank in self.ranks:
            if rank.channel.connection.fileno() in readable:
                for message in rank.receive():
                    if isinstance(message, EngineStatus) and message.state == "failed":
                        raise ConfigError(message.detail)
                    messages.append((rank.rank, message))
        return messages

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        load = AdapterLoadFuture(len(self.ranks), self._poll_adapter_loads)
        self.adapter_loads[name] = load
        self._send_to_ranks(LoadAdapter(name, path))
        return load

    def unload_adapter(self, name: str) -> None:
        self._send_to_ranks(UnloadAdapter(name))

    def _poll_adapter_loads(self) -> None:
        with self._close_on_error():
            self._handle_messages(0)

    def _send_to_ranks(self, message: EngineMessage) -> None:
        frame = ENGINE_CODEC.encode(message)
        with self._close_on_error():
            for rank in self.ranks:
                rank.send(frame)

    def close(self) -> None:
        for rank in self.ranks:
            self.poll.unregister(rank.channel.connection)
            rank.channel.connection.close()
        for rank in self.ranks:
            rank.wait_or_kill()
        self.ranks = []
        self.outputs.clear()
        for load in self.adapter_loads.values():
            load.set_exception(RankLostError("the ranks have ended"))
        self.adapter_loads.clear()
        self._remove_rendezvous()

    def _remove_rendezvous(self) -> None:
        if self.rendezvous_folder is not None:
            shutil.rmtree(self.rendezvous_folder, ignore_errors=True)
            self.rendezvous_folder = None

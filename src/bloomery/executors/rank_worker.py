"""One tensor parallel rank of one pipeline stage, in a process of its own.

    python -m bloomery.executors.rank_worker [die-with-parent] DESCRIPTOR

Steps arrive over an inherited socket and run in order. The driver rank sends the outputs back. When
the other end of the socket closes, the process exits at once, even within a step: the step may wait
for a message of another rank that never comes.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from bloomery.config import EnginePlan, bind_network_interface
from bloomery.engine.executor import LoadProgress, PendingStep
from bloomery.errors import BloomeryError, ConfigError
from bloomery.executors.rank_group import AdapterAnswer
from bloomery.ipc import (
    ENGINE_CODEC,
    BlockingChannel,
    EngineMessage,
    ProtocolError,
    RankJoin,
    RankMasks,
    RankStep,
    create_progress_reporter,
    die_with_parent,
    open_inherited_channel,
)
from bloomery.messages import (
    AdapterInfo,
    AdapterRefusal,
    EngineStatus,
    LoadAdapter,
    UnloadAdapter,
)
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.distributed import leave_process_group, rendezvous
from bloomery.runtime.worker import Worker

log = logging.getLogger("bloomery.rank")

EngineChannel = BlockingChannel[EngineMessage]


class RankWorker:
    """A worker that has joined the other ranks and loaded its part of the model."""

    def __init__(self, join: RankJoin, report: LoadProgress | None = None):
        bind_network_interface(join.interface)
        device, is_shared = select_rank_device(join.plan, join.rank)
        plan = replace(join.plan, device=device)
        pool = None  # the worker computes with it, and ranks communicate through it
        if plan.cpu_kernels:
            with suppress(NativeBuildError):
                pool = ThreadPool(plan.threads)
        mesh = rendezvous(
            join.rendezvous,
            join.rank,
            plan.tensor_parallel_size,
            plan.pipeline_parallel_size,
            getattr(torch, plan.dtype),
            torch.device(device),
            is_shared,
            pool,
        )
        self.is_driver = mesh.is_driver
        self.worker = Worker(plan, report=report, mesh=mesh, pool=pool)
        # All ranks capture at the same time: collectives inside a graph must not be matched with
        # those of a step on another rank.
        self.worker.capture_graphs(report=report)
        self.capacity = replace(self.worker.capacity, stages=plan.pipeline_parallel_size)

    def run(self, rank_step: RankStep) -> PendingStep:
        """Start a step. A step with masked sequences samples in `provide_masks`."""
        self.last_step = self.worker.run(rank_step.step, rank_step.last_tokens)
        return self.last_step

    def provide_masks(self, rank_masks: RankMasks) -> PendingStep:
        """Let the last step sample with its masks."""
        num_words = -(-self.worker.capacity.vocab // 32)
        masks = np.frombuffer(rank_masks.masks, np.int32).reshape(-1, num_words)
        self.last_step.provide_masks(masks)
        return self.last_step

    def load_adapter(self, name: str, path: str, answer: Callable[[AdapterAnswer], None]) -> None:
        """Read an adapter while steps go on; `answer` is called from another thread."""

        def on_done(load: Future[AdapterInfo]) -> None:
            error = load.exception()
            answer(load.result() if error is None else AdapterRefusal(name, str(error)))

        self.worker.load_adapter(name, path).add_done_callback(on_done)

    def leave(self) -> None:
        """Unload the model and leave the other ranks. The process may join again."""
        del self.worker
        leave_process_group()


def select_rank_device(plan: EnginePlan, rank: int) -> tuple[str, bool]:
    """Return the device of a rank, and whether all ranks share one GPU.

    Each rank gets a GPU of its own, unless the plan names a single one.
    """
    if plan.device == "cpu":
        return "cpu", False
    if plan.executor == "ray":  # Ray shows each actor only its own GPU
        return "cuda:0", False
    if plan.device != "cuda":
        return plan.device, True
    num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
    num_gpus = torch.cuda.device_count()
    first_gpu = plan.first_device
    if first_gpu + num_ranks > num_gpus:
        raise ConfigError(
            f"tp {plan.tensor_parallel_size} and pp {plan.pipeline_parallel_size} need "
            f"{num_ranks} GPUs, cuda:{first_gpu} to cuda:{first_gpu + num_ranks - 1}, "
            f"and torch sees {num_gpus}; with --device cuda:0 all ranks share that one card, "
            "which is slow"
        )
    return f"cuda:{first_gpu + rank}", False


def main() -> int:
    *options, descriptor = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="rank: %(message)s", stream=sys.stderr)
    if "die-with-parent" in options:
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    channel = open_inherited_channel(int(descriptor), ENGINE_CODEC)
    inbox: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()
    threading.Thread(target=receive_messages, args=(channel, inbox), daemon=True).start()
    message = inbox.get()
    while isinstance(message, RankJoin):
        try:
            rank = RankWorker(message, create_progress_reporter(channel.send))
        except BloomeryError as error:
            channel.send(EngineStatus("failed", detail=str(error)))
            return 1
        channel.send(rank.capacity)
        message = run_steps(rank, inbox, channel)
        rank.leave()
    raise ProtocolError(f"a rank takes no {type(message).__name__}")


def receive_messages(channel: EngineChannel, inbox: queue.SimpleQueue[EngineMessage]) -> None:
    """Put messages into `inbox`; exit the process when the connection ends."""
    try:
        while True:
            for message in channel.receive(None):
                inbox.put(message)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        log.exception("the rank ends on a malformed message")
        os._exit(1)


def run_steps(
    rank: RankWorker, inbox: queue.SimpleQueue[EngineMessage], channel: EngineChannel
) -> EngineMessage:
    """Run steps until a message of another type arrives, and return that message.

    A second thread sends the outputs, so that waiting for the device does not delay the next step.
    """
    pending_steps: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
    sender = threading.Thread(target=send_outputs, args=(pending_steps, channel), daemon=True)
    if rank.is_driver:
        sender.start()
    while isinstance(message := inbox.get(), RankStep | RankMasks | LoadAdapter | UnloadAdapter):
        if isinstance(message, LoadAdapter):
            rank.load_adapter(message.name, message.path, channel.send)
            continue
        if isinstance(message, UnloadAdapter):
            rank.worker.unload_adapter(message.name)
            continue
        if isinstance(message, RankMasks):
            pending = rank.provide_masks(message)
            is_complete = True
        else:
            pending = rank.run(message)
            is_complete = not message.step.masked
        if rank.is_driver and is_complete:
            pending_steps.put(pending)
    if rank.is_driver:
        pending_steps.put(None)
        sender.join()
    return message


def send_outputs(
    pending_steps: queue.SimpleQueue[PendingStep | None], channel: EngineChannel
) -> None:
    try:
        while (pending := pending_steps.get()) is not None:
            channel.send(pending.result())
    except BaseException:
        log.exception("the rank ends on a failed step")
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

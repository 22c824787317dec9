"""One tensor parallel rank of one pipeline stage, in a process of its own.

    python -m bloomery.executors.rank_worker [die-with-parent] DESCRIPTOR

Steps arrive over an inherited socket and run in order; the driver rank sends the outputs back. When
the other end of the socket closes, the process exits at once, wherever it is: its peers may never
send the message it waits for.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import torch

from bloomery.config import EnginePlan, bind_network_interface
from bloomery.engine.executor import LoadProgress, PendingStep
from bloomery.errors import BloomeryError, ConfigError
from bloomery.ipc import (
    ENGINE_CODEC,
    BlockingChannel,
    EngineMessage,
    ProtocolError,
    RankJoin,
    RankStep,
    die_with_parent,
    open_inherited_channel,
    create_progress_reporter,
)
from bloomery.messages import EngineStatus
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.distributed import leave_ranks, rendezvous
from bloomery.runtime.worker import Worker

log = logging.getLogger("bloomery.rank")

EngineChannel = BlockingChannel[EngineMessage]


class RankWorker:
    """A worker that has joined the other ranks and loaded its part of the model."""

    def __init__(self, join: RankJoin, report: LoadProgress | None = None):
        bind_network_interface(join.interface)
        device, is_shared = select_rank_device(join.plan, join.rank)
        plan = replace(join.plan, device=device)
        pool = None  # the ranks communicate through it, and the worker computes with it
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
        # All ranks capture their CUDA graphs now: messages inside a graph must not meet those of a
        # step on another rank.
        while self.worker.capture_next_graph():
            pass
        self.capacity = replace(self.worker.capacity, stages=plan.pipeline_parallel_size)

    def run(self, rank_step: RankStep) -> PendingStep:
        return self.worker.run(rank_step.step, rank_step.last_tokens)

    def leave(self) -> None:
        """Unload the model and leave the other ranks; a process may join again."""
        del self.worker
        leave_ranks()


def select_rank_device(plan: EnginePlan, rank: int) -> tuple[str, bool]:
    """Return the device of a rank, and whether all ranks share one GPU.

    Each rank gets a GPU of its own, unless the plan names a single one.
    """
    if plan.executor == "ray":  # Ray shows each actor only its own GPU
        return ("cpu" if plan.device == "cpu" else "cuda:0"), False
    if plan.device != "cuda":
        return plan.device, plan.device != "cpu"
    num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
    num_gpus = torch.cuda.device_count()
    first = plan.first_device
    if first + num_ranks > num_gpus:
        raise ConfigError(
            f"tp {plan.tensor_parallel_size} and pp {plan.pipeline_parallel_size} need "
            f"{num_ranks} GPUs, cuda:{first} to cuda:{first + num_ranks - 1}, and torch sees "
            f"{num_gpus}; with --device cuda:0 all ranks share that one card, which is slow"
        )
    return f"cuda:{first + rank}", False


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
    """Run steps until another message arrives; return that message.

    A second thread sends the outputs: waiting for the device must not delay the next step.
    """
    pending_steps: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
    sender = threading.Thread(target=send_outputs, args=(pending_steps, channel), daemon=True)
    if rank.is_driver:
        sender.start()
    while isinstance(message := inbox.get(), RankStep):
        pending = rank.run(message)
        if rank.is_driver:
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

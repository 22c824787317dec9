"""One rank: a worker among others, in a process of its own. `python -m bloomery.executors.rank DESCRIPTOR`.

Orders come over an inherited socket and are run in their order; the rank that has the tokens sends them back. When the
other end is gone the process ends at once, wherever it is: peers may never come to the message it waits for.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from dataclasses import replace

import torch

from bloomery.config import Plan, use_interface
from bloomery.engine.executor import Report
from bloomery.engine.process import die_with_parent, reporter
from bloomery.engine.wire import Channel, Join, Message, Order, WireError
from bloomery.errors import BloomeryError, ConfigError
from bloomery.messages import EngineStatus
from bloomery.parallel.mesh import meet, part
from bloomery.runtime.worker import Pending, Worker

log = logging.getLogger("bloomery.rank")


class Rank:
    def __init__(self, join: Join, report: Report | None = None):
        use_interface(join.interface)
        device, shared = device_of(join.plan, join.rank)
        plan = replace(join.plan, device=device)
        mesh = meet(
            join.meeting,
            join.rank,
            plan.tp,
            plan.pp,
            getattr(torch, plan.dtype),
            torch.device(device),
            shared,
            plan.native,
        )
        self.speaks = mesh.speaks
        self.worker = Worker(plan, report=report, mesh=mesh)
        while (
            self.worker.spare()
        ):  # all ranks at the same time, or messages inside of graphs would cross steps
            pass
        self.capacity = replace(self.worker.capacity, stages=plan.pp)

    def run(self, order: Order) -> Pending:
        return self.worker.run(order.step, order.drawn)

    def leave(self) -> None:
        """Forget the others, and what was loaded: a rank may be told to join anew."""
        del self.worker
        part()


def device_of(plan: Plan, rank: int) -> tuple[str, bool]:
    """A GPU for each rank; if one is named, that one for all of them."""
    if plan.executor == "ray":  # which shows an actor its own GPU and no other
        return ("cpu" if plan.device == "cpu" else "cuda:0"), False
    if plan.device != "cuda":
        return plan.device, plan.device != "cpu"
    ranks = plan.tp * plan.pp
    found = torch.cuda.device_count()
    if plan.first_device + ranks > found:
        last = plan.first_device + ranks - 1
        raise ConfigError(
            f"tp {plan.tp} and pp {plan.pp} need {ranks} GPUs, cuda:{plan.first_device} to cuda:{last}, and torch sees "
            f"{found}; with --device cuda:0 all ranks share that one card, which is slow"
        )
    return f"cuda:{plan.first_device + rank}", False


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="rank: %(message)s", stream=sys.stderr)
    if "tied" in sys.argv:
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's business
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    channel = Channel(connection)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=read, args=(channel, inbox), daemon=True).start()
    told = inbox.get()
    while isinstance(told, Join):
        try:
            rank = Rank(told, reporter(channel.send))
        except BloomeryError as error:
            channel.send(EngineStatus("failed", detail=str(error)))
            return 1
        channel.send(rank.capacity)
        told = work(rank, inbox, channel)
        rank.leave()
    raise WireError(f"a {type(told).__name__} is not for a rank")


def read(channel: Channel, inbox: queue.SimpleQueue[Message]) -> None:
    try:
        while True:
            for message in channel.receive(None):
                inbox.put(message)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        log.exception("a rank ends on what it was told")
        os._exit(1)


def work(rank: Rank, inbox: queue.SimpleQueue[Message], channel: Channel) -> Message:
    """Orders until something else comes, which is given back.

    Results are told by a thread of their own: waiting for a device must not keep the next step from it.
    """
    results: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
    teller = threading.Thread(target=tell, args=(results, channel), daemon=True)
    if rank.speaks:
        teller.start()
    while isinstance(order := inbox.get(), Order):
        pending = rank.run(order)
        if rank.speaks:
            results.put(pending)
    if rank.speaks:
        results.put(None)
        teller.join()
    return order


def tell(results: queue.SimpleQueue[Pending | None], channel: Channel) -> None:
    try:
        while (pending := results.get()) is not None:
            channel.send(pending.result())
    except BaseException:
        log.exception("a rank ends on a result")
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

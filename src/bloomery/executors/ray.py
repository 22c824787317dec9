"""Ranks as actors of a Ray cluster: one that is running (`ray start`), or one of this machine alone.

A stage of the pipeline is a bundle of a placement group, so ranks that share layers are on one node and stages may be
on several. Orders and results are the messages that processes of one machine get. Nodes need the same Python, with
Bloomery in it, and the model under the same path.
"""

from __future__ import annotations

import fcntl
import queue
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import ray
import torch.distributed as dist
from ray._private.services import get_ray_address_from_environment
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bloomery.config import Plan
from bloomery.engine.executor import Report
from bloomery.engine.wire import Frames, Join, Order, WireError, encode
from bloomery.errors import BloomeryError, ConfigError
from bloomery.executors.rank import Rank
from bloomery.executors.ranks import Awaited, Drawn, RankLost, total
from bloomery.messages import EngineCapacity, ScheduledStep, StepOutput
from bloomery.runtime.worker import Pending

PATIENCE = 120.0  # seconds until others have given back what the placement group needs
ANSWER = 10.0  # seconds a cluster has to take a connection; Ray itself would try for a quarter of an hour
SIOCGIFADDR = 0x8915
M = TypeVar("M", Join, Order, EngineCapacity, StepOutput)


def decoded(frame: bytes, kind: type[M]) -> M:
    message = next(Frames().feed(frame))
    if not isinstance(message, kind):
        raise WireError(f"a {type(message).__name__} where a {kind.__name__} was due")
    return message


class Actor:
    """One rank. Steps and results have a thread each: waiting for a device must not keep the next step from it."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        self.rank: Rank | None = None
        self.store: dist.Store | None = None

    def meeting(self, size: int) -> str:
        """Where ranks meet: on this node's own address and no other."""
        address = get_node_ip_address()
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            address,
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return f"{address}:{port}"

    def join(self, frame: bytes) -> bytes:
        told = decoded(frame, Join)
        try:
            self.rank = Rank(
                replace(told, interface=told.interface or interface_of(get_node_ip_address()))
            )
        except BloomeryError as error:
            raise ConfigError(str(error)) from None
        return encode(self.rank.capacity)

    def run(self, frame: bytes) -> None:
        if self.rank is None:
            raise RuntimeError("run before join")
        pending = self.rank.run(decoded(frame, Order))
        if self.rank.speaks:
            self.results.put(pending)

    @ray.method(concurrency_group="tell")
    def tell(self) -> bytes:
        return encode(self.results.get().result())


def interface_of(address: str) -> str:
    """The network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    raise ConfigError(
        f"no network interface here has Ray's address {address}; name one with --interface"
    )


class Actors:
    def __init__(self, report: Report | None = None):
        self.report = report
        self.actors: list[Any] = []
        self.group: Any = None
        self.speaker = 0
        self.drawn = Drawn()
        self.flight: deque[tuple[Any, list[Any]]] = (
            deque()
        )  # of each step what the speaker will say, and all ranks

    def start(self, plan: Plan) -> EngineCapacity:
        connect(plan.shared)
        with self._ending():
            self.group = self._place(plan)
            self.actors = [self._actor(plan, rank) for rank in range(plan.tp * plan.pp)]
            meeting = ray.get(self.actors[0].meeting.remote(len(self.actors)))
            joins = [
                actor.join.remote(encode(Join(plan, rank, meeting, plan.interface or "")))
                for rank, actor in enumerate(self.actors)
            ]
            found = self._loaded(joins)
        self.speaker = plan.tp * (plan.pp - 1)
        self.drawn = Drawn(plan.pp > 1)
        return total(found, found[self.speaker])

    def _place(self, plan: Plan) -> Any:
        bundle = wanted(plan)
        stages = {name: count * plan.tp for name, count in bundle.items()}
        if not fits(stages, plan.pp):
            raise ConfigError(
                f"the Ray cluster cannot hold tp {plan.tp} x pp {plan.pp}: each of {plan.pp} stages needs "
                f"{amounts(stages)} on one node. It has {listing()}"
            )
        group = placement_group([stages] * plan.pp, strategy="PACK")
        if not group.wait(PATIENCE):
            remove_placement_group(group)
            raise ConfigError(
                f"the Ray cluster is busy: no room for {plan.pp} times {amounts(stages)} within {PATIENCE:.0f} s. "
                f"It has {listing()}; free of all that: {amounts(ray.available_resources())}"
            )
        return group

    def _actor(self, plan: Plan, rank: int) -> Any:
        bundle = wanted(plan)
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=rank // plan.tp
        )
        kind = ray.remote(concurrency_groups={"tell": 1})(Actor)
        return kind.options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy
        ).remote()

    def _loaded(self, joins: list[Any]) -> list[EngineCapacity]:
        waiting = joins
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            ray.get(done)  # what went wrong with one is told at once
            if self.report is not None:
                self.report("ranks", len(joins) - len(waiting), len(joins))
        return [decoded(frame, EngineCapacity) for frame in ray.get(joins)]

    def spare(self) -> int:
        """Ranks have nothing that may wait."""
        return 0

    def submit(self, step: ScheduledStep) -> Awaited:
        frame = encode(Order(step, self.drawn.of(step)))
        with self._ending():
            ran = [actor.run.remote(frame) for actor in self.actors]
            self.flight.append((self.actors[self.speaker].tell.remote(), ran))
        return Awaited(self.next)

    def next(self) -> StepOutput:
        answer, waiting = self.flight.popleft()
        with self._ending():
            while True:  # a rank that fails elsewhere is heard of first, for the speaker may wait for it for ever
                done, waiting = ray.wait([answer, *waiting], num_returns=1)
                said = ray.get(done)
                if answer in done:
                    break
                waiting = [one for one in waiting if one != answer]
        output = decoded(said[0], StepOutput)
        self.drawn.note(output)
        return output

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever goes wrong with one rank ends all of them."""
        try:
            yield
        except RayError as error:
            self.close()
            cause = getattr(error, "cause", None)
            raise (
                cause
                if isinstance(cause, ConfigError)
                else RankLost(f"a rank on Ray is lost: {error}")
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)
        self.actors = []
        self.group = None
        self.flight.clear()
        ray.shutdown()


# ---- the cluster ---------------------------------------------------------------------------------


def connect(shared: bool) -> None:
    """Ray's own way with SIGTERM is not kept: it writes a stack trace, and leaves no time to clear up."""
    former = signal.getsignal(signal.SIGTERM)
    address = find(shared)
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "://" not in host:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
        ray.init(
            address=address,
            logging_level="ERROR",
            **({"include_dashboard": False} if address == "local" else {}),
        )
    except OSError as error:
        raise ConfigError(
            f"the Ray cluster at {address} cannot be reached: {error}; RAY_ADDRESS names another, RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN open one that asks for a token, and `ray stop` has this machine forget one that is gone"
        ) from None
    if former is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, former)


def find(shared: bool) -> str:
    """The cluster that runs, or else "local", one of this machine alone, for which Ray asks a token of this user's.

    The latter ends with the engine that started it, so several engines cannot share it.
    """
    try:
        address: str = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        if shared:
            raise ConfigError(
                "replicas on Ray share a cluster, and none is running: `ray start --head` starts one; on one machine "
                "replicas need no --executor ray"
            ) from None
        return "local"
    return address


def wanted(plan: Plan) -> dict[str, float]:
    """What one rank takes."""
    return {"CPU": plan.threads} if plan.device == "cpu" else {"CPU": 1, "GPU": 1}


def fits(stage: dict[str, float], count: int) -> bool:
    """Whether `count` such stages find room, each on one node."""

    def room(node: dict[str, Any]) -> int:
        return min(int(node["Resources"].get(name, 0) // amount) for name, amount in stage.items())

    return sum(room(node) for node in ray.nodes() if node["Alive"]) >= count


def listing() -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = (f"{node['NodeManagerAddress']}: {amounts(node['Resources'])}" for node in nodes)
    return f"{len(nodes)} node(s): {'; '.join(each)}"


def amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("GPU", "CPU"))

"""The executor for ranks as actors of a Ray cluster.

The cluster is a running one (`ray start`), or Ray starts one on this machine alone. A pipeline
stage is one bundle of a placement group, so the tensor parallel ranks of a stage are on
one node, and stages may be on several. Steps and outputs are the same messages that rank processes
of one machine exchange. All nodes need the same Python with Bloomery installed, and the model under
the same path.
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
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
import torch.distributed as dist
from ray._private.services import get_ray_address_from_environment
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bloomery.config import EnginePlan
from bloomery.engine.executor import LoadProgress, PendingStep
from bloomery.errors import BloomeryError, ConfigError
from bloomery.executors.rank_group import (
    AdapterAnswer,
    AdapterLoadFuture,
    DeferredResult,
    PipelineTokens,
    RankLostError,
    combine_capacities,
    find_driver_rank,
)
from bloomery.executors.rank_worker import RankWorker
from bloomery.ipc import ENGINE_CODEC, FrameDecoder, ProtocolError, RankJoin, RankMasks, RankStep
from bloomery.messages import (
    AdapterInfo,
    AdapterRefusal,
    EngineCapacity,
    ScheduledStep,
    StepOutput,
)

# Seconds until other jobs must have released the resources of the placement group.
PLACEMENT_SECONDS = 120.0
# Seconds a cluster may take to accept a connection; Ray itself tries for a quarter of an hour.
CONNECT_SECONDS = 10.0
SIOCGIFADDR = 0x8915  # ioctl of Linux: the address of a network interface

MessageT = TypeVar("MessageT", RankJoin, RankStep, RankMasks, EngineCapacity, StepOutput)


def decode_frame(frame: bytes, message_type: type[MessageT]) -> MessageT:
    """Decode a complete frame that must hold a message of the given type."""
    message = next(FrameDecoder(ENGINE_CODEC).feed(frame))
    if not isinstance(message, message_type):
        raise ProtocolError(f"expected {message_type.__name__}, got {type(message).__name__}")
    return message


class RayRankActor:
    """One rank as a Ray actor.

    Steps and results have a thread each, so that waiting for the device does not delay the next
    step.
    """

    def __init__(self) -> None:
        self.pending_steps: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()
        self.rank: RankWorker | None = None
        self.store: dist.Store | None = None

    def create_rendezvous(self, num_ranks: int) -> str:
        """Open the store where ranks meet, on this node's address only. Returns host:port."""
        address = get_node_ip_address()
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            address,
            port,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return f"{address}:{port}"

    def join(self, frame: bytes) -> bytes:
        """Load the model with the other ranks. Takes a RankJoin, returns an EngineCapacity."""
        join = decode_frame(frame, RankJoin)
        interface = join.interface or find_network_interface(get_node_ip_address())
        try:
            self.rank = RankWorker(replace(join, interface=interface))
        except BloomeryError as error:
            raise ConfigError(str(error)) from None
        return ENGINE_CODEC.encode(self.rank.capacity)

    def run(self, frame: bytes) -> None:
        """Start a step. Takes a RankStep."""
        if self.rank is None:
            raise RuntimeError("run before join")
        rank_step = decode_frame(frame, RankStep)
        pending = self.rank.run(rank_step)
        if self.rank.is_driver and not rank_step.step.masked:
            self.pending_steps.put(pending)

    def provide_masks(self, frame: bytes) -> None:
        """Let the last step sample. Takes a RankMasks."""
        if self.rank is None:
            raise RuntimeError("masks before join")
        pending = self.rank.provide_masks(decode_frame(frame, RankMasks))
        if self.rank.is_driver:
            self.pending_steps.put(pending)

    @ray.method(concurrency_group="adapters")
    def load_adapter(self, name: str, path: str) -> bytes:
        """Read an adapter while steps go on. Returns an AdapterInfo or an AdapterRefusal."""
        answers: queue.SimpleQueue[AdapterAnswer] = queue.SimpleQueue()
        if self.rank is None:
            raise RuntimeError("load_adapter before join")
        self.rank.load_adapter(name, path, answers.put)
        return ENGINE_CODEC.encode(answers.get())

    def unload_adapter(self, name: str) -> None:
        """Drop the host copy of an adapter."""
        if self.rank is not None:
            self.rank.worker.unload_adapter(name)

    @ray.method(concurrency_group="outputs")
    def next_output(self) -> bytes:
        """Wait for the oldest step. Returns a StepOutput."""
        return ENGINE_CODEC.encode(self.pending_steps.get().result())


def find_network_interface(address: str) -> str:
    """Return the network interface of this node that has the IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # this interface has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise ConfigError(
        f"no network interface here has Ray's address {address}; name one with --interface"
    )


class RayStep(NamedTuple):
    """References to the results of a submitted step: the driver's output, and every rank's run."""

    output: Any
    runs: list[Any]


class RayExecutor:
    """Runs one Ray actor per rank. `report` receives the load progress."""

    def __init__(self, report: LoadProgress | None = None):
        self.report = report
        self.actors: list[Any] = []
        self.placement: Any = None
        self.driver = 0  # rank
        self.pipeline_tokens = PipelineTokens()
        self.in_flight: deque[RayStep] = deque()

    def start(self, plan: EnginePlan) -> EngineCapacity:
        connect(plan.shares_ray_cluster)
        num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
        with self._close_on_error():
            self.placement = self._create_placement(plan)
            self.actors = [self._create_actor(plan, rank) for rank in range(num_ranks)]
            rendezvous = ray.get(self.actors[0].create_rendezvous.remote(num_ranks))
            joins = []
            for rank, actor in enumerate(self.actors):
                join = RankJoin(plan, rank, rendezvous, plan.interface or "")
                joins.append(actor.join.remote(ENGINE_CODEC.encode(join)))
            capacities = self._wait_loaded(joins)
        self.driver = find_driver_rank(plan.tensor_parallel_size, plan.pipeline_parallel_size)
        self.pipeline_tokens = PipelineTokens(plan.pipeline_parallel_size)
        return combine_capacities(capacities, self.driver)

    def _create_placement(self, plan: EnginePlan) -> Any:
        num_stages = plan.pipeline_parallel_size
        stage = {
            name: count * plan.tensor_parallel_size
            for name, count in compute_rank_resources(plan).items()
        }
        if not fits_cluster(stage, num_stages):
            raise ConfigError(
                f"the Ray cluster cannot hold tp {plan.tensor_parallel_size} x pp {num_stages}: "
                f"each of {num_stages} stages needs {describe_resources(stage)} on one node. "
                f"It has {describe_cluster()}"
            )
        placement = placement_group([stage] * num_stages, strategy="PACK")
        if not placement.wait(PLACEMENT_SECONDS):
            remove_placement_group(placement)
            free = describe_resources(ray.available_resources())
            raise ConfigError(
                f"the Ray cluster is busy: no room for {num_stages} times "
                f"{describe_resources(stage)} within {PLACEMENT_SECONDS:.0f} s. "
                f"It has {describe_cluster()}; free of all that: {free}"
            )
        return placement

    def _create_actor(self, plan: EnginePlan, rank: int) -> Any:
        resources = compute_rank_resources(plan)
        strategy = PlacementGroupSchedulingStrategy(
            self.placement, placement_group_bundle_index=rank // plan.tensor_parallel_size
        )
        actor_class = ray.remote(concurrency_groups={"outputs": 1, "adapters": 1})(RayRankActor)
        return actor_class.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=strategy,
        ).remote()

    def _wait_loaded(self, joins: list[Any]) -> list[EngineCapacity]:
        waiting = joins
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            ray.get(done)  # raises the failure of a rank at once
            if self.report is not None:
                self.report("ranks", len(joins) - len(waiting), len(joins))
        return [decode_frame(frame, EngineCapacity) for frame in ray.get(joins)]

    def submit(self, step: ScheduledStep) -> DeferredResult:
        rank_step = RankStep(step, self.pipeline_tokens.select_last_tokens(step))
        frame = ENGINE_CODEC.encode(rank_step)
        with self._close_on_error():
            runs = [actor.run.remote(frame) for actor in self.actors]
            output = self.actors[self.driver].next_output.remote()
            self.in_flight.append(RayStep(output, runs))
        return DeferredResult(self._next_output, self._send_masks)

    def _send_masks(self, masks: np.ndarray) -> None:
        frame = ENGINE_CODEC.encode(RankMasks(masks.tobytes()))
        with self._close_on_error():
            runs = [actor.provide_masks.remote(frame) for actor in self.actors]
            self.in_flight[-1].runs.extend(runs)

    def _next_output(self) -> StepOutput:
        output_ref, waiting = self.in_flight.popleft()
        with self._close_on_error():
            # Wait for the runs, too: if a rank has failed, the output never comes.
            while True:
                done, waiting = ray.wait([output_ref, *waiting], num_returns=1)
                results = ray.get(done)
                if output_ref in done:
                    break
                waiting = [ref for ref in waiting if ref != output_ref]
        output = decode_frame(results[0], StepOutput)
        self.pipeline_tokens.record(output)
        return output

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """End all ranks if any of them fails."""
        try:
            yield
        except RayError as error:
            self.close()
            cause = getattr(error, "cause", None)
            if isinstance(cause, ConfigError):
                raise cause from None
            raise RankLostError(f"a rank on Ray is lost: {error}") from None
        except BaseException:
            self.close()
            raise

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        waiting = [actor.load_adapter.remote(name, path) for actor in self.actors]

        def poll() -> None:
            nonlocal waiting
            with self._close_on_error():
                done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                for frame in ray.get(done):
                    message = next(FrameDecoder(ENGINE_CODEC).feed(frame))
                    assert isinstance(message, AdapterInfo | AdapterRefusal)
                    if load.add_answer(message) and load.is_refused:
                        self.unload_adapter(name)  # other ranks may have loaded it

        load = AdapterLoadFuture(len(waiting), poll)
        return load

    def unload_adapter(self, name: str) -> None:
        with self._close_on_error():
            for actor in self.actors:
                actor.unload_adapter.remote(name)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self.placement is not None:
            remove_placement_group(self.placement)
        self.actors = []
        self.placement = None
        self.in_flight.clear()
        ray.shutdown()


# ---- the cluster ---------------------------------------------------------------------------------


def connect(is_shared: bool) -> None:
    """Connect to the Ray cluster and keep this process's SIGTERM handler.

    Ray would install a handler that writes a stack trace and leaves no time to clean up.
    """
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    address = find_cluster(is_shared)
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "://" not in host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, logging_level="ERROR", **options)
    except OSError as error:
        raise ConfigError(
            f"the Ray cluster at {address} cannot be reached: {error}; RAY_ADDRESS names another, "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN open one that asks for a token, and `ray stop` "
            "makes this machine forget one that is gone"
        ) from None
    if sigterm_handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm_handler)


def find_cluster(is_shared: bool) -> str:
    """Return the address of the running cluster, or "local" to start one on this machine.

    A local cluster ends with the engine that started it, so several engines cannot share it. Ray
    protects it with a token of this user.
    """
    try:
        address: str = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        if is_shared:
            raise ConfigError(
                "replicas on Ray share a cluster, and none is running: `ray start --head` starts "
                "one; on one machine replicas need no --executor ray"
            ) from None
        return "local"
    return address


def compute_rank_resources(plan: EnginePlan) -> dict[str, float]:
    """Return the resources of one rank, by Ray's names."""
    if plan.device == "cpu":
        return {"CPU": plan.threads}
    return {"CPU": 1, "GPU": 1}


def fits_cluster(stage: dict[str, float], num_stages: int) -> bool:
    """Whether the nodes have room for `num_stages` stages, if each stage must fit on one node."""

    def count_stages(node: dict[str, Any]) -> int:
        resources = node["Resources"]
        return min(int(resources.get(name, 0) // amount) for name, amount in stage.items())

    return sum(count_stages(node) for node in ray.nodes() if node["Alive"]) >= num_stages


def describe_cluster() -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    descriptions = (
        f"{node['NodeManagerAddress']}: {describe_resources(node['Resources'])}" for node in nodes
    )
    return f"{len(nodes)} node(s): {'; '.join(descriptions)}"


def describe_resources(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("GPU", "CPU"))

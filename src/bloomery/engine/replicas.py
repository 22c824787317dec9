"""Several engines behind the interface of one EngineClient.

Each request goes to the engine that the router chooses. When an engine crashes, its requests move
to other engines. A request moves only once: after a second crash it waits for the restart of its
engine, and the journal of that engine then identifies the request that kills engines.
This module knows no HTTP, no text and no devices.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from bloomery.config import EnginePlan, count_physical_cores
from bloomery.engine.client import EngineChild, EngineClient, add_stats
from bloomery.engine.routing import PrefixAffinityRouter, RequestRouter
from bloomery.errors import BloomeryError
from bloomery.messages import (
    AdapterInfo,
    EngineCapacity,
    EngineRequest,
    EngineStats,
    EngineStatus,
    TokenOutput,
)

# Best state first.
STATE_ORDER = ("ready", "stalled", "restarting", "loading", "draining", "failed", "closed")


def plan_for_replica(plan: EnginePlan, replica: int, num_replicas: int) -> EnginePlan:
    """Return the plan of one replica.

    The replica gets its own GPUs, its share of the one GPU that the plan names, or its share of the
    CPU cores.
    """
    num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
    plan = replace(plan, shares_ray_cluster=plan.executor == "ray")
    if plan.device == "cpu":
        core_share = max(count_physical_cores() // (num_ranks * num_replicas), 1)
        return replace(plan, threads=min(plan.threads, core_share))
    if plan.executor == "ray":
        return plan  # Ray assigns the GPUs
    if plan.device != "cuda":
        memory_share = plan.gpu_memory_utilization / num_replicas
        return replace(plan, gpu_memory_utilization=memory_share)
    if num_ranks > 1:
        return replace(plan, first_device=replica * num_ranks)
    return replace(plan, device=f"cuda:{replica}")


@dataclass
class RoutedRequest:
    """An open request, the output tokens its reader has, and how often it has moved."""

    request: EngineRequest
    arrived: float  # seconds on the clock of the event loop
    emitted: list[int]
    num_moves: int = 0
    moving: bool = False  # its engine has crashed, and it will continue at another one

    def remaining_request(self, now: float) -> EngineRequest:
        """Return the request in the form that resumes it at another engine."""
        request = self.request
        deadline = request.deadline
        if deadline is not None:
            deadline = max(deadline - (now - self.arrived), 0.0)
        sampling = request.sampling
        if self.emitted:
            sampling = replace(sampling, prompt_logprobs=None)
        emitted = (*request.emitted, *self.emitted)
        return replace(request, emitted=emitted, deadline=deadline, sampling=sampling)


class ReplicaSet:
    """Engines of the same plan that serve requests together."""

    def __init__(self, clients: Sequence[EngineClient], router: RequestRouter | None = None):
        self.clients = clients
        self.router = router or PrefixAffinityRouter(len(clients))
        self.open_requests: list[dict[str, RoutedRequest]] = [{} for _ in clients]
        self.watchers: list[asyncio.Task[None]] = []

    # ---- for the server ----

    async def start(self) -> None:
        for engine, client in enumerate(self.clients):
            await client.start()
            watcher = asyncio.create_task(self._watch(engine), name=f"watcher of engine {engine}")
            self.watchers.append(watcher)

    async def ready(self) -> EngineCapacity:
        """Wait until one engine is loaded and return its capacity."""
        waiting = {asyncio.ensure_future(client.ready()) for client in self.clients}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            for task in waiting:
                task.cancel()
        raise BloomeryError(f"no engine is available: {self.status.detail or self.status.state}")

    def add_step_observer(self, observer: Callable[[EngineStats, EngineStats], None]) -> None:
        for client in self.clients:
            client.add_step_observer(observer)

    async def wait_failed(self) -> str:
        """Wait until every engine has failed; return a reason."""
        reasons = await asyncio.gather(*(client.wait_failed() for client in self.clients))
        return reasons[0]

    @property
    def status(self) -> EngineStatus:
        """The status of the engine in the best state."""
        statuses = [client.status for client in self.clients]
        return min(statuses, key=lambda status: STATE_ORDER.index(status.state))

    @property
    def capacity(self) -> EngineCapacity | None:
        """The capacity of the engine with the shortest context, None while none is known."""
        known = [client.capacity for client in self.clients if client.capacity is not None]
        return min(known, key=lambda capacity: capacity.max_model_len, default=None)

    @property
    def stats(self) -> EngineStats:
        """Statistics summed over all engines; the utilization is the mean."""
        all_stats = [client.stats for client in self.clients]
        shares = [stats.roofline_share for stats in all_stats if stats.roofline_share is not None]
        return replace(
            reduce(add_stats, all_stats),
            running=sum(stats.running for stats in all_stats),
            waiting=sum(stats.waiting for stats in all_stats),
            kv_used=sum(stats.kv_used for stats in all_stats),
            kv_blocks=sum(stats.kv_blocks for stats in all_stats),
            checkpoints=sum(stats.checkpoints for stats in all_stats),
            checkpoint_blocks=sum(stats.checkpoint_blocks for stats in all_stats),
            kv_used_by_group=tuple(
                map(sum, zip(*(stats.kv_used_by_group for stats in all_stats), strict=False))
            ),
            roofline_share=sum(shares) / len(shares) if shares else None,
            adapter_slots=tuple(slot for stats in all_stats for slot in stats.adapter_slots),
            adapters_in_memory=sum(stats.adapters_in_memory for stats in all_stats),
            waiting_for_adapters=sum(stats.waiting_for_adapters for stats in all_stats),
        )

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self.clients)

    @property
    def num_open_requests(self) -> int:
        return sum(client.num_open_requests for client in self.clients)

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        """Like EngineClient.stream. Requests of one call share a prompt and stay together."""
        now = asyncio.get_running_loop().time()
        routed_by_id = {request.id: RoutedRequest(request, now, []) for request in requests}
        while routed_by_id:
            first = next(iter(routed_by_id.values()))
            engine = self._choose_engine(first.request)
            self.open_requests[engine] |= routed_by_id
            now = asyncio.get_running_loop().time()
            remaining = [routed.remaining_request(now) for routed in routed_by_id.values()]
            outputs = self.clients[engine].stream(remaining)
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        visible = self._process_output(engine, routed_by_id, output)
                        if visible is not None:
                            yield visible
            finally:
                for request_id in routed_by_id:
                    self.open_requests[engine].pop(request_id, None)
            for routed in routed_by_id.values():
                routed.moving = False

    def abort(self, id: str) -> bool:
        return any(client.abort(id) for client in self.clients)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Have every engine that runs read an adapter; the others do when a request needs it."""
        running = [client for client in self.clients if client.status.state == "ready"]
        loads = [client.load_adapter(name, path) for client in running or self.clients]
        infos = await asyncio.gather(*loads)
        return infos[0]

    def unload_adapter(self, name: str) -> None:
        for client in self.clients:
            client.unload_adapter(name)

    async def close(self, drain_seconds: float = 0.0) -> None:
        for watcher in self.watchers:
            watcher.cancel()
        await asyncio.gather(*self.watchers, return_exceptions=True)
        await asyncio.gather(*(client.close(drain_seconds) for client in self.clients))

    # ---- routing ----

    def _choose_engine(self, request: EngineRequest) -> int:
        """Choose a ready engine, else one that will be ready, else any engine."""
        states = {engine: client.status.state for engine, client in enumerate(self.clients)}
        available: list[int] = []
        for choices in (("ready",), ("stalled", "restarting", "loading"), STATE_ORDER):
            available = [engine for engine, state in states.items() if state in choices]
            if available:
                break
        loads = {engine: len(self.open_requests[engine]) for engine in available}
        return self.router.choose(request, loads)

    def _process_output(
        self, engine: int, routed_by_id: dict[str, RoutedRequest], output: TokenOutput
    ) -> TokenOutput | None:
        """Record an output and return what the reader gets of it.

        The abort of a request that moves to another engine is hidden from the reader.
        """
        routed = routed_by_id[output.request]
        routed.emitted += output.ids
        if routed.moving and output.finish == "abort":
            return replace(output, finish=None) if output.ids else None
        if output.finish is not None:
            del routed_by_id[output.request]
            self.open_requests[engine].pop(output.request, None)
        return output

    async def _watch(self, engine: int) -> None:
        """When the engine crashes, move its requests to the others."""
        client = self.clients[engine]
        watched: EngineChild | None = None
        while not client.failed.is_set():
            if client.child is None or client.child is watched:
                await asyncio.sleep(0.02)  # until the next engine process is started
                continue
            watched = client.child
            await asyncio.wait([watched.lost])
            self.router.forget(engine)  # the restarted engine has an empty prefix cache
            while watched.process is not None and watched.process.returncode is None:
                # The client may write to the process until the process is reaped.
                await asyncio.sleep(0.01)
            if any(other.status.state == "ready" for other in self.clients):
                self._move_requests(engine)

    def _move_requests(self, engine: int) -> None:
        """Abort the requests of an engine, each at most once. `stream` sends them to another."""
        for request_id, routed in list(self.open_requests[engine].items()):
            if routed.num_moves == 0:
                routed.num_moves = 1
                routed.moving = True
                self.clients[engine].abort(request_id)

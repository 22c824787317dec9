"""Several engines behind one door: the same interface as one EngineClient, each request at the engine that suits it.

An engine that has seen a prompt's beginning has its keys and values still at hand, so a request goes where most of its
prompt is known, unless others have much less to do. When an engine dies its requests go on at the others, each once: a
request that then meets another death waits for that engine's successor, whose journal knows how to find a culprit.
This file must not know HTTP, text or devices.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

from bloomery.config import Plan, cores
from bloomery.engine.client import EngineClient, summed
from bloomery.errors import BloomeryError
from bloomery.messages import EngineCapacity, EngineRequest, EngineStats, EngineStatus, TokenOutput

GRAIN = 32  # tokens of a prompt that are remembered as one
REMEMBERED = 1 << 16  # grains an engine is believed to have at hand
SLACK = 4  # open requests by which an engine that knows a prompt may be ahead of twice the idlest


def share(plan: Plan, number: int, count: int) -> Plan:
    """The plan of one replica of so many: GPUs of its own, or its share of the one that was named and of the cores."""
    ranks = plan.tp * plan.pp
    plan = replace(plan, shared=plan.executor == "ray")
    if plan.device == "cpu":
        return replace(plan, threads=min(plan.threads, max(cores() // (ranks * count), 1)))
    if plan.executor == "ray":
        return plan  # which GPU is whose is Ray's affair
    if plan.device == "cuda":
        return (
            replace(plan, first_device=number * ranks)
            if ranks > 1
            else replace(plan, device=f"cuda:{number}")
        )
    return replace(plan, memory=plan.memory / count)


class Routing(Protocol):
    def pick(self, request: EngineRequest, loads: Mapping[int, int]) -> int:
        """One of the engines that can be had; `loads` are their open requests."""
        ...


class Affinity:
    """Where the longest beginning of the prompt has been before, then where there is least to do."""

    def __init__(self, engines: int):
        self.seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]

    def pick(self, request: EngineRequest, loads: Mapping[int, int]) -> int:
        chain = list(grains(request))
        known = {engine: self._known(engine, chain) for engine in loads}
        idlest = min(loads, key=lambda engine: (loads[engine], -known[engine]))
        best = max(loads, key=lambda engine: (known[engine], -loads[engine]))
        chosen = best if known[best] and loads[best] <= 2 * loads[idlest] + SLACK else idlest
        self._remember(chosen, chain)
        return chosen

    def _known(self, engine: int, chain: list[int]) -> int:
        seen = self.seen[engine]
        return next((count for count, grain in enumerate(chain) if grain not in seen), len(chain))

    def _remember(self, engine: int, chain: list[int]) -> None:
        seen = self.seen[engine]
        for grain in reversed(chain):  # the beginning is forgotten last
            seen[grain] = None
            seen.move_to_end(grain)
        while len(seen) > REMEMBERED:
            seen.popitem(last=False)

    def forget(self, engine: int) -> None:
        self.seen[engine].clear()


def grains(request: EngineRequest) -> Iterator[int]:
    """One number for every whole grain of the prompt, each standing for all that comes before it too."""
    chain = hash(request.salt)
    for start in range(0, len(request.prompt) - GRAIN + 1, GRAIN):
        chain = hash((chain, request.prompt[start : start + GRAIN]))
        yield chain


@dataclass
class Open:
    """A request on its way: as it was given, what its reader has, and where it is."""

    request: EngineRequest
    begun: float
    ids: list[int]
    moves: int = 0
    leaving: bool = False  # taken back from an engine that died, to go on at another

    def rest(self, now: float) -> EngineRequest:
        """As another engine must get it."""
        request = self.request
        left = None if request.deadline is None else max(request.deadline - (now - self.begun), 0.0)
        sampling = replace(request.sampling, prompt_logprobs=None) if self.ids else request.sampling
        return replace(
            request, emitted=(*request.emitted, *self.ids), deadline=left, sampling=sampling
        )


class Replicas:
    def __init__(self, clients: Sequence[EngineClient], routing: Routing | None = None):
        self.clients = clients
        self.routing = routing or Affinity(len(clients))
        self.open: list[dict[str, Open]] = [{} for _ in clients]
        self.watchers: list[asyncio.Task[None]] = []

    # ---- for the server ----

    async def start(self) -> None:
        for engine, client in enumerate(self.clients):
            await client.start()
            self.watchers.append(
                asyncio.create_task(self._watch(engine), name=f"watch over engine {engine}")
            )

    async def ready(self) -> EngineCapacity:
        """What an engine can hold, once the first of them is there."""
        waiting = {asyncio.ensure_future(client.ready()) for client in self.clients}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if one.exception() is None:
                        return one.result()
        finally:
            for one in waiting:
                one.cancel()
        raise BloomeryError(f"no engine is available: {self.status.detail or self.status.state}")

    def observe(self, watcher: Callable[[EngineStats, EngineStats], None]) -> None:
        for client in self.clients:
            client.observe(watcher)

    async def wait_failed(self) -> str:
        """When none is left; as long as one works there is something to serve."""
        return (await asyncio.gather(*(client.wait_failed() for client in self.clients)))[0]

    @property
    def status(self) -> EngineStatus:
        """That of the engine which is best off."""
        order = ("ready", "stalled", "restarting", "loading", "draining", "failed", "closed")
        return min(
            (client.status for client in self.clients), key=lambda status: order.index(status.state)
        )

    @property
    def capacity(self) -> EngineCapacity | None:
        known = [client.capacity for client in self.clients if client.capacity is not None]
        return min(known, key=lambda capacity: capacity.max_length, default=None)

    @property
    def stats(self) -> EngineStats:
        every = [client.stats for client in self.clients]
        moment = ("running", "waiting", "kv_used", "kv_blocks", "unprepared")
        now = {name: sum(getattr(one, name) for one in every) for name in moment}
        shares = [one.share for one in every if one.share is not None]
        return replace(
            reduce(summed, every), share=sum(shares) / len(shares) if shares else None, **now
        )

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[TokenOutput, None]:
        """As EngineClient.stream. Requests that come together stay together: they share a prompt."""
        now = asyncio.get_running_loop().time()
        open = {request.id: Open(request, now, []) for request in requests}
        while open:
            engine = self._pick(next(iter(open.values())).request)
            here = self.open[engine]
            now = asyncio.get_running_loop().time()
            here |= open
            news = self.clients[engine].stream([one.rest(now) for one in open.values()])
            try:
                async with contextlib.aclosing(news):
                    async for entry in news:
                        told = self._told(engine, open, entry)
                        if told is not None:
                            yield told
            finally:
                for name in open:
                    here.pop(name, None)
            for one in open.values():
                one.leaving = False

    def abort(self, id: str) -> bool:
        return any(client.abort(id) for client in self.clients)

    async def close(self, drain_seconds: float = 0.0) -> None:
        for watcher in self.watchers:
            watcher.cancel()
        await asyncio.gather(*self.watchers, return_exceptions=True)
        await asyncio.gather(*(client.close(drain_seconds) for client in self.clients))

    # ---- who goes where ----

    def _pick(self, request: EngineRequest) -> int:
        """Of those that are ready; if none is, of those that will be."""
        states = {engine: client.status.state for engine, client in enumerate(self.clients)}
        for wanted in (("ready",), ("stalled", "restarting", "loading"), tuple(states.values())):
            able = [engine for engine, state in states.items() if state in wanted]
            if able:
                break
        return self.routing.pick(request, {engine: len(self.open[engine]) for engine in able})

    def _told(self, engine: int, open: dict[str, Open], entry: TokenOutput) -> TokenOutput | None:
        """What a reader is told of it: not that the request is moving."""
        one = open[entry.request]
        one.ids += entry.ids
        if one.leaving and entry.finish == "abort":
            return replace(entry, finish=None) if entry.ids else None
        if entry.finish is not None:
            del open[entry.request]
            self.open[engine].pop(entry.request, None)
        return entry

    async def _watch(self, engine: int) -> None:
        """When the engine dies, take back what can go on elsewhere."""
        client = self.clients[engine]
        watched = None
        while not client.failed.is_set():
            if client.child is None or client.child is watched:
                await asyncio.sleep(0.02)  # between two engines
                continue
            watched = client.child
            await asyncio.wait([watched.lost])
            if isinstance(self.routing, Affinity):
                self.routing.forget(engine)  # its successor's cache is empty
            while watched.process is not None and watched.process.returncode is None:
                await asyncio.sleep(0.01)  # until it is buried, and nobody writes to it
            if any(other.status.state == "ready" for other in self.clients):
                self._take_back(engine)

    def _take_back(self, engine: int) -> None:
        for name, one in list(self.open[engine].items()):
            if one.moves == 0:
                one.moves = 1
                one.leaving = True
                self.clients[engine].abort(name)

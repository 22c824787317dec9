"""Work over static buffers, done again and again: as it is, or recorded once a size and replayed.

On a GPU a recording is a CUDA graph: the host starts one thing instead of hundreds of kernels. What was not captured
beforehand is captured behind its second run, while the device is busy with it; what came twice will come again. All
graphs share one pool of memory, for no two run at once and what they leave is in buffers outside of it. Nothing here
knows what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from bloomery.native.arena import Arena
from bloomery.native.record import record
from bloomery.native.team import Program

Work = Callable[[], None]
Key = tuple[int, ...]  # what tells one size from another


class Runs(Protocol):
    def run(self, key: Key, work: Work) -> None: ...


class Plainly:
    """One operation after another."""

    def run(self, key: Key, work: Work) -> None:
        work()


class Recorded:
    """The CPU's own kernels, recorded when a size first comes."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.found = dict[Key, Program]()

    def add(self, key: Key, work: Work) -> None:
        self.found[key] = record(work, self.arena)

    def run(self, key: Key, work: Work) -> None:
        if key not in self.found:
            self.add(key, work)
        self.found[key].replay()


class Pool:
    """Memory for graphs. The largest should come first: the others fit into the room it leaves."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.due: list[tuple[Captured, Key, Work]] = []

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Nothing of it is run, and nothing waits for the device. It must have run before: whatever it compiles, or
        allocates for longer than itself, may not be of the capture."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def catch_up(self) -> None:
        """Capture what has come twice; to be called when the second is on its way."""
        while self.due:
            runs, key, work = self.due.pop()
            runs.found[key] = self.capture(work)


class Captured:
    def __init__(self, pool: Pool):
        self.pool = pool
        self.met = set[Key]()
        self.found: dict[Key, torch.cuda.CUDAGraph] = {}

    def run(self, key: Key, work: Work) -> None:
        graph = self.found.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        if key in self.met:
            self.pool.due.append((self, key, work))
        self.met.add(key)

    def prepare(self, key: Key, work: Work) -> None:
        """Run it, for nobody, and capture it."""
        if key not in self.found:
            work()
            self.found[key] = self.pool.capture(work)

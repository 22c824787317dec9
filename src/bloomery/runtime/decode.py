"""A decode step that feeds itself: every row's next position from what the device already holds.

The host says which rows take part and which blocks they gained, and only when that changed; token, position and slot
come from the rows' own state on the device, and go back to it. The step runs over static buffers, so that it can be
captured once a batch size and replayed; without a graph it is the same call. Lines beyond the batch point at nobody's
row, whose table is the reserved block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bloomery.attention.base import Ragged
from bloomery.kernels.rows import advance, fetch
from bloomery.native.arena import Arena
from bloomery.native.record import Unrecordable, record
from bloomery.runtime.device import upload
from bloomery.runtime.forward import Forward
from bloomery.runtime.rows import Row, Rows

ROOM = 256 << 20  # bytes of an arena beside logits; only what is touched is taken
Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # logits, rows, positions -> tokens


def buckets(most: int, grain: int = 1) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then steps of 8, and of 16 from 128 on; or multiples of the grain."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, most + 16, 16)] if grain == 1 else range(grain, most, grain)
    return [size for size in sizes if size < most] + [most]


class Replayable(Protocol):
    """A CUDA graph, or the CPU's counterpart."""

    def replay(self) -> None: ...


class DecodeStep:
    def __init__(
        self,
        model: Forward,
        vocab: int,
        rows: Rows,
        block_size: int,
        pick: Pick,
    ):
        self.model, self.rows, self.block_size, self.pick = model, rows, block_size, pick
        most, device = rows.count, rows.last.device
        self.lines = torch.full((most,), most, dtype=torch.int32, device=device)  # nobody
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(most, vocab, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.members: list[int] = []
        self.graphs: dict[tuple[int, bool], Replayable] = {}
        self.sizes: list[int] = []
        self.arena: Arena | None = None  # results of recorded steps

    def capture(self, done: Callable[[], None] = lambda: None) -> None:
        """One graph a batch size, largest first, all in one pool of memory."""
        pool = torch.cuda.graph_pool_handle()
        self.sizes = buckets(self.rows.count, self.model.grain)
        for size in reversed(self.sizes):
            for sampled in (True, False):
                self.forward(size, sampled)  # compiles what is missing, outside of the capture
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.forward(size, sampled)
                self.graphs[size, sampled] = graph
            done()

    def record(self) -> str | None:
        """On a CPU: from now on steps are recorded, each size when it first comes. Why not, where one cannot be."""
        most, vocab = self.logits.shape
        self.arena = Arena(ROOM + 12 * most * vocab)
        try:
            self._recorded(1, True), self._recorded(1, False)
        except Unrecordable as reason:
            self.arena = None
            return str(reason)
        return None

    def _recorded(self, size: int, sampled: bool) -> Replayable | None:
        if self.arena is not None:
            self.graphs[size, sampled] = record(lambda: self.forward(size, sampled), self.arena)
        return self.graphs.get((size, sampled))

    def forward(self, size: int, sampled: bool) -> None:
        """The work of one step over the first `size` lines; with `sampled` up to the tokens, else up to the logits."""
        lines = self.lines[:size]
        inputs = fetch(lines, self.rows.last, self.rows.positions, self.rows.tables, self.block_size)
        ragged = Ragged(
            (), (), size, self.starts[: size + 1], inputs.ends, inputs.positions, inputs.slots, inputs.tables,
            self.block_size,
        )  # fmt: skip
        hidden = self.model.hidden(inputs.ids, ragged)
        if not sampled:
            self.logits[:size] = self.model.logits(hidden)
            return
        tokens = self.pick(self.model.logits(hidden, wide=False), lines, inputs.ends)
        self.tokens[:size] = tokens
        advance(lines, tokens, self.rows.last, self.rows.positions)

    def run(self, members: Sequence[Row], sampled: bool) -> int:
        """Queue a step for these rows; how many lines it has."""
        self.rows.send(members)
        count = len(members)
        size = next((size for size in self.sizes if size >= count), count)
        wanted = [row.index for row in members]
        if wanted != self.members or size != count:
            padded = wanted + [self.rows.count] * (size - count)
            if padded != self.members:
                self.lines[:size] = upload(padded, self.lines.device, torch.int32)
                self.members = padded
        graph = self.graphs.get((size, sampled)) or self._recorded(size, sampled)
        if graph is not None:
            graph.replay()
        else:
            self.forward(size, sampled)
        return count

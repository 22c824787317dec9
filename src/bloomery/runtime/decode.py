"""A decode step that feeds itself: every row's next position from what the device already holds.

The host says which rows take part and which blocks they gained, and only when that changed; token, position and slot
come from the rows' own state on the device, and go back to it. The step runs over static buffers, so that it can be
captured once a batch size and replayed; without a graph it is the same call. Lines beyond the batch point at nobody's
row, whose table is the reserved block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from bloomery.attention.base import Backend, Ragged
from bloomery.kernels.rows import advance, fetch
from bloomery.models.decoder import Decoder
from bloomery.runtime.rows import Row, Rows

Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # logits, rows, positions -> tokens


def buckets(most: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then steps of 8, and of 16 from 128 on."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, most + 16, 16)]
    return [size for size in sizes if size < most] + [most]


class DecodeStep:
    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        caches: Sequence[torch.Tensor],
        rows: Rows,
        block_size: int,
        pick: Pick,
    ):
        self.decoder, self.backend, self.caches, self.rows = decoder, backend, caches, rows
        self.block_size, self.pick = block_size, pick
        most, device = rows.count, rows.last.device
        self.lines = torch.full((most,), most, dtype=torch.int32, device=device)  # nobody
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(most, decoder.spec.vocab, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.members: list[int] = []
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.sizes: list[int] = []

    def capture(self, done: Callable[[], None] = lambda: None) -> None:
        """One graph a batch size, largest first, all in one pool of memory."""
        pool = torch.cuda.graph_pool_handle()
        self.sizes = buckets(self.rows.count)
        for size in reversed(self.sizes):
            for sampled in (True, False):
                self.forward(size, sampled)  # compiles what is missing, outside of the capture
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.forward(size, sampled)
                self.graphs[size, sampled] = graph
            done()

    def forward(self, size: int, sampled: bool) -> None:
        """The work of one step over the first `size` lines; with `sampled` up to the tokens, else up to the logits."""
        lines = self.lines[:size]
        inputs = fetch(lines, self.rows.last, self.rows.positions, self.rows.tables, self.block_size)
        ragged = Ragged(
            (), (), size, self.starts[: size + 1], inputs.ends, inputs.positions, inputs.slots, inputs.tables,
            self.block_size,
        )  # fmt: skip
        plan = self.backend.plan(ragged)
        hidden = self.decoder(inputs.ids, inputs.positions, inputs.slots, self.caches, self.backend, plan)
        if not sampled:
            self.logits[:size] = self.decoder.logits(hidden)
            return
        tokens = self.pick(self.decoder.logits(hidden, wide=False), lines, inputs.ends)
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
                self.lines[:size] = upload(padded, self.lines.device)
                self.members = padded
        graph = self.graphs.get((size, sampled))
        if graph is not None:
            graph.replay()
        else:
            self.forward(size, sampled)
        return count


def upload(values: Iterable, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Host numbers to the device without waiting for it."""
    found = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return found.to(device, non_blocking=True)

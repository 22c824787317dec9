"""A decode step that feeds itself: every row's next position from what the device already holds.

The host says which rows take part and which blocks they gained, and only when that changed; token, position and slot
come from the rows' own state on the device, and go back to it. The step runs over static buffers, so that it can be
captured once a batch size and replayed; without a graph it is the same call. Lines beyond the batch point at nobody's
row, whose table is the reserved block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bloomery.attention.base import AttentionMetadata
from bloomery.kernels.rows import advance, fetch
from bloomery.native.arena import Arena
from bloomery.native.record import Unrecordable
from bloomery.runtime.device import upload
from bloomery.runtime.forward import Forward
from bloomery.runtime.replay import Captured, Plainly, Recorded, Runs
from bloomery.runtime.rows import Rows

ROOM = 256 << 20  # bytes of an arena beside logits; only what is touched is taken
Pick = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # logits, rows, positions -> tokens


def buckets(most: int, grain: int = 1) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then steps of 8, and of 16 from 128 on; or multiples of the grain."""
    sizes = (
        [1, 2, 4, *range(8, 128, 8), *range(128, most + 16, 16)]
        if grain == 1
        else range(grain, most, grain)
    )
    return [size for size in sizes if size < most] + [most]


class DecodeStep:
    def __init__(
        self,
        model: Forward,
        vocab: int,
        rows: Rows,
        block_size: int,
        pick: Pick,
        draws: bool = True,
        runs: Runs | None = None,
    ):
        """`draws`: tokens are drawn here; where another stage does, they come before the step that needs them."""
        self.model = model
        self.rows = rows
        self.block_size = block_size
        self.pick = pick
        self.draws = draws
        self.runs = runs or Plainly()
        most = rows.count
        device = rows.last.device
        self.lines = torch.full((most,), most, dtype=torch.int32, device=device)  # nobody
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(most, vocab, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.going: Sequence[int] | None = None  # whom the last step was for
        self.members: list[int] = []  # and all its lines
        self.sizes = buckets(most, model.grain) if isinstance(runs, Captured) else []

    def prepare(self, size: int) -> None:
        """Capture the step of so many lines that draws its tokens; others are, once they have come twice."""
        if isinstance(self.runs, Captured):
            self.lines.fill_(self.rows.count)  # what runs here must be nobody's step
            self.going = None
            self.members = []
            self.runs.prepare((size, True), partial(self.forward, size, True))

    def record(self) -> str | None:
        """On a CPU: from now on steps are recorded, each size when it first comes. Why not, where one cannot be."""
        most, vocab = self.logits.shape
        self.runs = recorded = Recorded(Arena(ROOM + 12 * most * vocab))
        try:
            for sampled in (True, False):
                recorded.add((1, sampled), partial(self.forward, 1, sampled))
        except Unrecordable as reason:
            self.runs = Plainly()
            return str(reason)
        return None

    def forward(self, size: int, sampled: bool) -> None:
        """The work of one step over the first `size` lines; with `sampled` up to the tokens, else up to the logits."""
        lines = self.lines[:size]
        inputs = fetch(
            lines, self.rows.last, self.rows.positions, self.rows.tables, self.block_size
        )
        ragged = AttentionMetadata(
            (),
            (),
            size,
            self.starts[: size + 1],
            inputs.ends,
            inputs.positions,
            inputs.slots,
            inputs.tables,
            self.block_size,
        )
        hidden = self.model.hidden(inputs.ids, ragged)
        if not self.draws:
            return
        if not sampled:
            self.logits[:size] = self.model.logits(hidden)
            return
        tokens = self.pick(self.model.logits(hidden, wide=False), lines, inputs.ends)
        self.tokens[:size] = tokens
        advance(lines, tokens, inputs.ends, self.rows.last, self.rows.positions)

    def run(self, going: Sequence[int], sampled: bool) -> None:
        """Queue a step for the rows of these numbers."""
        self.rows.send()
        if going is not self.going:
            count = len(going)
            size = next((size for size in self.sizes if size >= count), count)
            padded = [*going, *[self.rows.count] * (size - count)]
            if padded != self.members:
                self.lines[:size] = upload(padded, self.lines.device, torch.int32)
            self.going = going
            self.members = padded
        size = len(self.members)
        self.runs.run((size, sampled), partial(self.forward, size, sampled))

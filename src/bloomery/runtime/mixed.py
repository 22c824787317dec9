"""A step of rows that go on by one and of a few chunks of prompts, over static buffers: a DecodeStep with more behind.

Captured, it is one graph, where the host would otherwise take longer to start its kernels one by one than the device to
run them. Rows that go on feed themselves; of the chunks the host sends ids and where they begin and end. A size is how
many lines there may be and how many positions there are: lines in use, chunks, and at the end positions that are
nobody's and go to the reserved block. A prompt that ends here draws its first token here. Where lines are few and have
little behind them, attention takes them for prompts of one position: a kernel for them alone would cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from bloomery.attention.base import AttentionMetadata
from bloomery.kernels.rows import advance, gather
from bloomery.messages import ScheduledRequest
from bloomery.runtime.decode import Pick
from bloomery.runtime.device import upload
from bloomery.runtime.forward import Forward
from bloomery.runtime.replay import Captured, Plainly, Runs
from bloomery.runtime.rows import Row, Rows

LINES = (8, 32, 64, 128, 192)  # that may be captured; and as many as there are rows
NEAR = 1024  # positions that few lines may attend to and be prompts; prompts themselves seldom see fewer
# Few, so that soon all are captured, whoever comes: the first two who needed another would wait for it. Larger steps
# keep the device longer than the host.
TOKENS = (32, 64, 128, 192, 256, *range(384, 1025, 128), *range(1280, 2049, 256))
PROMPTS = 8  # the last of them is what fills the step up

Placed = Sequence[tuple[ScheduledRequest, Row]]


class MixedStep:
    def __init__(
        self,
        model: Forward,
        rows: Rows,
        block_size: int,
        pick: Pick,
        most: int = TOKENS[-1],
        runs: Runs | None = None,
    ):
        """`most`: positions of any step."""
        self.model = model
        self.rows = rows
        self.block_size = block_size
        self.pick = pick
        self.runs = runs or Plainly()
        captured = isinstance(runs, Captured)  # otherwise a step is as large as what it holds
        self.lines = (
            [*(size for size in LINES if size < rows.count), rows.count] if captured else []
        )
        self.most = min(most, TOKENS[-1])
        self.sizes = [*(size for size in TOKENS if size < self.most), self.most] if captured else []
        device = rows.last.device
        kind = rows.last.dtype
        self.sent = torch.full(
            (numbers(rows.count, self.most),), rows.count, dtype=kind, device=device
        )
        self.tokens = torch.zeros(rows.count + PROMPTS, dtype=torch.int64, device=device)
        self.padded = 0  # positions of the last step that were nobody's

    def takes(self, lines: int, chunks: Placed) -> bool:
        """Whether such a step is small enough, and its chunks are of prompts and ask for no more than a kernel can
        pick."""
        count = lines + sum(item.count for item, _ in chunks)
        return (
            len(chunks) < PROMPTS
            and count <= self.most
            and all(
                row.plain and row.draws_only and not item.drafts and row.knows(item.start)
                for item, row in chunks
            )
        )

    def usual(self) -> list[tuple[int, int, bool]]:
        """Lines, positions and whether lines are near, of the steps to be captured beforehand: the largest, which
        decides how much memory graphs take, then all others in which there is room for a prompt."""
        found = [(self.rows.count, self.most, False)] if self.sizes else []
        for before, lines in zip([0, *self.lines], self.lines):
            for near in (True, False) if lines <= LINES[0] else (False,):
                found += [(lines, tokens, near) for tokens in self.sizes if before < tokens]
        return list(dict.fromkeys(found))

    def prepare(self, lines: int, tokens: int, near: bool) -> None:
        if isinstance(self.runs, Captured):
            self._send(layout((), (), lines, tokens, self.rows.count))
            self.runs.prepare((lines, tokens, near), partial(self.forward, lines, tokens, near))

    def _send(self, sent: np.ndarray) -> None:
        self.sent[: len(sent)] = upload(torch.from_numpy(sent), self.sent.device, self.sent.dtype)

    def forward(self, lines: int, tokens: int, near: bool) -> None:
        """The work of a step of that size; what it holds is in `sent`."""
        rows = self.rows
        size = self.block_size
        sequences = lines + PROMPTS
        sent = self.sent[: numbers(lines, tokens)]
        found = gather(sent, rows.last, rows.positions, rows.tables, size, lines, PROMPTS, tokens)
        alone = 0 if near else lines
        ragged = AttentionMetadata(
            (),
            (),
            alone,
            found.starts,
            found.ends,
            found.positions,
            found.slots,
            found.tables,
            size,
            sequences - alone,
        )
        hidden = self.model.hidden(found.ids, ragged, found.wanted)
        drawing = sent[:sequences]
        drawn = self.pick(self.model.logits(hidden, wide=False), drawing, found.ends)
        self.tokens[:sequences] = drawn
        advance(drawing, drawn, found.ends, rows.last, rows.positions)

    def run(
        self, going: Sequence[int], chunks: Placed, furthest: int
    ) -> tuple[list[int], torch.Tensor]:
        """Queue the step of these rows, each at a position no further than that, and chunks; the chunks' sequences that
        draw, and all tokens, those of rows first."""
        chunks = sorted(chunks, key=lambda pair: not pair[0].samples)
        self.rows.send()
        used = len(going) + sum(item.count for item, _ in chunks)
        lines = next((size for size in self.lines if size >= len(going)), len(going))
        tokens = next((size for size in self.sizes if size >= used), used)
        self.padded = tokens - used
        self._send(layout(going, chunks, lines, tokens, self.rows.count))
        near = lines <= LINES[0] and furthest < NEAR
        self.runs.run((lines, tokens, near), partial(self.forward, lines, tokens, near))
        drawing = [item.sequence for item, _ in chunks if item.samples]
        return drawing, torch.cat(
            (self.tokens[: len(going)], self.tokens[lines : lines + len(drawing)])
        )


def numbers(lines: int, tokens: int) -> int:
    """What `layout` gives, in length."""
    return lines + 4 * PROMPTS + 1 + tokens


def layout(
    going: Sequence[int], chunks: Placed, lines: int, tokens: int, nobody: int
) -> np.ndarray:
    """The host's part of a step, as kernels/rows.gather reads it."""
    spare = PROMPTS - len(chunks)
    starts = list(accumulate((item.count for item, _ in chunks), initial=len(going)))
    at = lines + 4 * PROMPTS + 1 + len(going)
    sent = np.zeros(numbers(lines, tokens), np.int32)
    sent[: at - len(going)] = (
        *going,
        *[nobody] * (lines - len(going)),
        *(row.index if item.samples else nobody for item, row in chunks),
        *[nobody] * spare,
        *(row.index for _, row in chunks),
        *[nobody] * spare,
        *starts,
        *[starts[-1]] * (spare - 1),
        tokens,
        *(item.start + item.count for item, _ in chunks),
        *[0] * spare,
    )
    for item, row in chunks:
        sent[at : at + item.count] = row.start.tokens[item.start : item.start + item.count]
        at += item.count
    return sent

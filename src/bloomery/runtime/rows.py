"""A worker's memory of the sequences it serves: one permanent row each, until the engine says it has finished.

What steps in flight need of each other stays on the device: the token a step draws is `last` of its row, standing at
`positions`, and the next step reads it from there. The host knows only the tokens a row was started with. One row more
than there are sequences is nobody's: its table is the reserved block, and lines that pad a batch point at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bloomery.messages import ScheduledRequest, NewRequestData
from bloomery.runtime.picker import plain


@dataclass(slots=True)
class Row:
    index: int  # its place in every per-row tensor
    start: NewRequestData
    table: list[int] = field(default_factory=list)
    sent: int = 0  # blocks of the table the device knows
    plain: bool = True  # its tokens can be picked on the device alone
    pooled: torch.Tensor | None = (
        None  # [width], of its hidden states so far where their mean is wanted: see pooling
    )

    @property
    def draws_only(self) -> bool:
        """Whether nothing but tokens is wanted of it: no prompt's log-probabilities, no embedding."""
        return self.start.pooling is None and self.start.sampling.prompt_logprobs is None

    def knows(self, position: int) -> bool:
        """Whether the host knows the token at that position; if not, it is the row's last, on the device."""
        return position < len(self.start.tokens)


@dataclass(frozen=True, slots=True)
class Lineup:
    """Rows that go on by one position, in the order of a step's lines: the longest first, for attention ends when the
    last of them has. From step to step they grow alike, so it holds until somebody joins or leaves."""

    going: tuple[int, ...] = ()  # sequences as steps name them
    places: tuple[int, ...] = ()  # of each line among `going`
    rows: tuple[Row, ...] = ()
    indices: tuple[int, ...] = ()  # of the rows
    plain: bool = True  # all of them


class Rows:
    def __init__(self, count: int, width: int, reserved: int, device: torch.device):
        self.count = count
        self.free = list(reversed(range(count)))
        self.by_sequence: dict[int, Row] = {}
        self.lineup = Lineup()  # of the last step
        self.grown: dict[
            int, Row
        ] = {}  # by index: their tables have blocks the device does not know
        kind = torch.int64 if device.type == "cpu" else torch.int32
        self.last = torch.zeros(count + 1, dtype=kind, device=device)
        self.positions = torch.zeros(count + 1, dtype=kind, device=device)
        self.tables = torch.full((count + 1, width), reserved, dtype=kind, device=device)

    def place(self, item: ScheduledRequest) -> Row:
        """The item's row, made on its first step, its table grown by the item's blocks."""
        if item.new_request is not None:
            self.by_sequence[item.sequence] = Row(
                self.free.pop(), item.new_request, plain=plain(item.new_request)
            )
        return self.grow(item.sequence, item.blocks)

    def grow(self, sequence: int, blocks: Sequence[int]) -> Row:
        row = self.by_sequence[sequence]
        if blocks:
            row.table += blocks
            self.grown[row.index] = row
        return row

    def line_up(self, going: tuple[int, ...], starts: Sequence[int]) -> Lineup:
        """The very same object as for the last step, if these are the same rows."""
        if going != self.lineup.going:
            places = sorted(range(len(going)), key=starts.__getitem__, reverse=True)
            rows = tuple([self.by_sequence[going[place]] for place in places])
            indices = tuple([row.index for row in rows])
            self.lineup = Lineup(
                going, tuple(places), rows, indices, all(row.plain for row in rows)
            )
        return self.lineup

    def release(self, sequence: int) -> Row:
        self.lineup = Lineup()  # it may come again, to another row
        row = self.by_sequence.pop(sequence)
        self.grown.pop(row.index, None)
        self.free.append(row.index)
        return row

    def send(self) -> None:
        """Tell the device which blocks rows have gained."""
        if not self.grown:
            return
        rows = self.grown.values()
        news = [
            (row.index, place, row.table[place])
            for row in rows
            for place in range(row.sent, len(row.table))
        ]
        for row in rows:
            row.sent = len(row.table)
        self.grown.clear()
        kind = self.tables.dtype
        device = self.tables.device
        found = torch.tensor(news, dtype=torch.int64, pin_memory=device.type == "cuda").to(
            device, non_blocking=True
        )
        indices, places, blocks = found.unbind(1)
        self.tables[indices, places] = blocks.to(kind)

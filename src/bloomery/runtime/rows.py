"""A worker's memory of the sequences it serves: one permanent row each, until the engine says it has finished.

What steps in flight need of each other stays on the device: the token a step draws is `last` of its row, and the next
step reads it from there. The host knows only the tokens a row was started with, and how long it is by now.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bloomery.messages import Item, Start


@dataclass(slots=True)
class Row:
    index: int  # its place in every per-row tensor
    start: Start
    table: list[int] = field(default_factory=list)

    def knows(self, position: int) -> bool:
        """Whether the host knows the token at that position; if not, it is the row's last, on the device."""
        return position < len(self.start.tokens)


class Rows:
    def __init__(self, count: int, device: torch.device):
        self.free = list(reversed(range(count)))
        self.by_sequence: dict[int, Row] = {}
        self.last = torch.zeros(count + 1, dtype=torch.int64, device=device)  # one more, for padding

    def place(self, item: Item) -> Row:
        """The item's row, made on its first step, its table grown by the item's blocks."""
        if item.first is not None:
            self.by_sequence[item.sequence] = Row(self.free.pop(), item.first)
        row = self.by_sequence[item.sequence]
        row.table += item.blocks
        return row

    def release(self, sequence: int) -> Row:
        row = self.by_sequence.pop(sequence)
        self.free.append(row.index)
        return row

"""A worker's memory of the sequences it serves: one permanent row each, until the engine says it has finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from bloomery.messages import Item, Start


@dataclass(slots=True)
class Row:
    index: int  # its place in every per-row tensor
    start: Start
    tokens: list[int]  # all that is known, prompt first
    table: list[int] = field(default_factory=list)


class Rows:
    def __init__(self, count: int):
        self.free = list(reversed(range(count)))
        self.by_sequence: dict[int, Row] = {}

    def place(self, item: Item) -> Row:
        """The item's row, made on its first step, its table grown by the item's blocks."""
        if item.first is not None:
            self.by_sequence[item.sequence] = Row(self.free.pop(), item.first, list(item.first.tokens))
        row = self.by_sequence[item.sequence]
        row.table += item.blocks
        return row

    def release(self, sequence: int) -> Row:
        row = self.by_sequence.pop(sequence)
        self.free.append(row.index)
        return row

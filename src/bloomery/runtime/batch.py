"""A step as tensors: token ids and positions one after another, and where each sequence's share begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from bloomery.attention.base import Ragged
from bloomery.messages import Item
from bloomery.runtime.rows import Row


@dataclass(frozen=True)
class Share:
    """One item's part of the batch."""

    item: Item
    row: Row
    first: int  # index of its first position in the batch

    @property
    def lines(self) -> range:
        """Positions of the batch whose logits are sampled: the item's last and each draft."""
        last = self.first + self.item.count - 1
        return range(last, last + 1 + len(self.item.drafts)) if self.item.samples else range(0)


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor  # [tokens]
    ragged: Ragged
    shares: tuple[Share, ...]

    @classmethod
    def of(cls, placed: list[tuple[Item, Row]], last: torch.Tensor, block_size: int) -> Batch:
        """`last` [rows] has the tokens that only the device knows."""
        placed = sorted(placed, key=lambda pair: pair[0].count + len(pair[0].drafts) > 1)  # single positions first
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        unknown: list[tuple[int, int]] = []  # (place in the batch, row)
        shares = []
        for item, row in placed:
            shares.append(Share(item, row, len(ids)))
            end = item.start + item.count
            if row.knows(end - 1):
                ids += row.start.tokens[item.start : end]
            else:
                unknown.append((len(ids), row.index))
                ids.append(0)
            ids += item.drafts
            for position in range(item.start, end + len(item.drafts)):
                positions.append(position)
                slots.append(row.table[position // block_size] * block_size + position % block_size)
        counts = [item.count + len(item.drafts) for item, _ in placed]
        lengths = [item.start + count for (item, _), count in zip(placed, counts, strict=True)]
        widest = max(len(row.table) for _, row in placed)
        kind = torch.int64 if last.device.type == "cpu" else torch.int32

        def tensor(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=kind, device=last.device)

        ragged = Ragged(
            counts=tuple(counts),
            lengths=tuple(lengths),
            singles=counts.count(1),
            starts=tensor([0, *accumulate(counts)]),
            ends=tensor(lengths),
            positions=tensor(positions),
            slots=tensor(slots),
            tables=tensor([row.table + [0] * (widest - len(row.table)) for _, row in placed]),
            block_size=block_size,
        )
        fed = tensor(ids)
        if unknown:
            places, rows = tensor(unknown).unbind(1)
            fed[places] = last[rows].to(kind)
        return cls(fed, ragged, tuple(shares))

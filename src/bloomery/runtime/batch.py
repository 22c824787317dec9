"""A step as tensors: token ids and positions one after another, and where each sequence's share begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from bloomery.attention.base import AttentionMetadata
from bloomery.messages import ScheduledRequest
from bloomery.runtime.device import upload
from bloomery.runtime.rows import Row


@dataclass(frozen=True)
class Share:
    """One item's part of the batch."""

    item: ScheduledRequest
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
    ragged: AttentionMetadata
    shares: tuple[Share, ...]

    @classmethod
    def of(
        cls, placed: list[tuple[ScheduledRequest, Row]], last: torch.Tensor, block_size: int
    ) -> Batch:
        """`last` [rows] has the tokens that only the device knows."""
        placed = sorted(
            placed, key=lambda pair: pair[0].count + len(pair[0].drafts) > 1
        )  # single positions first
        ids: list[int] = []
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
        counts = [item.count + len(item.drafts) for item, _ in placed]
        begins = [item.start for item, _ in placed]
        places = layout(counts, begins, placed, block_size)
        starts = [0, *accumulate(counts)]
        lengths = [begin + count for begin, count in zip(begins, counts, strict=True)]
        kind = torch.int64 if last.device.type == "cpu" else torch.int32
        device = last.device
        parts = (ids, places.positions, places.slots, starts, lengths, places.tables.ravel())
        sent = upload(torch.from_numpy(np.concatenate(parts)), device, kind)  # one copy for all
        fed, positions, slots, firsts, ends, flat = sent.split([len(part) for part in parts])
        ragged = AttentionMetadata(
            tuple(counts),
            tuple(lengths),
            counts.count(1),
            firsts,
            ends,
            positions,
            slots,
            flat.view(places.tables.shape),
            block_size,
        )
        if unknown:
            lines, rows = upload(unknown, device).unbind(1)
            fed[lines] = last[rows].to(kind)
        return cls(fed, ragged, tuple(shares))


class Places(NamedTuple):
    """Of every new position its place in its sequence and in the cache; and the sequences' tables, padded."""

    positions: np.ndarray  # [tokens]
    slots: np.ndarray  # [tokens]
    tables: np.ndarray  # [sequences, blocks]


def layout(
    counts: list[int],
    begins: list[int],
    placed: list[tuple[ScheduledRequest, Row]],
    block_size: int,
) -> Places:
    """In numpy: torch would wake its threads for these few numbers."""
    owner = np.repeat(np.arange(len(counts)), counts)
    shift = np.array(begins) - np.cumsum([0, *counts[:-1]])
    positions = np.arange(len(owner)) + shift[owner]
    widest = max(len(row.table) for _, row in placed)
    tables = np.array([row.table + [0] * (widest - len(row.table)) for _, row in placed])
    return Places(
        positions,
        tables[owner, positions // block_size] * block_size + positions % block_size,
        tables,
    )

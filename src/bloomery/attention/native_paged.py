"""Paged attention by native kernels: the fast path on a CPU, in float32 over whatever keys and values are kept in.

Sequences with one new position attend one by one, a thread for each few heads; the others in tiles of queries. No two
sequences ever share a computation, so a result does not depend on the others in its step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bloomery.attention.base import AttentionMetadata, slopes
from bloomery.native import ops
from bloomery.native.team import team
from bloomery.spec import Alibi, Attention

TILE = 32  # queries that go through the keys together


@dataclass(frozen=True)
class Items:
    rows: torch.Tensor  # [items, 4]: sequence, first token, first position, count
    singles: int
    largest: int
    tables: torch.Tensor
    ends: torch.Tensor | None  # where the host does not know positions
    block_size: int


class NativePaged:
    def refuses(self, spec: Attention, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cpu" or not team().active:
            return "native kernels are not running"
        if dtype != torch.float32:
            return f"native kernels compute in float32, not {dtype}"
        return "a head has no multiple of 8 dimensions" if spec.head_dim % 8 else None

    def plan(self, ragged: AttentionMetadata) -> Items:
        items = []
        first = 0
        for i, (count, length) in enumerate(zip(ragged.counts, ragged.lengths, strict=True)):
            start = length - count
            items += [
                (i, first + a, start + a, min(TILE, count - a)) for a in range(0, count, TILE)
            ]
            first += count
        if not ragged.counts:  # a recorded step: one position each, and only the device knows where
            items = [(i, i, 0, 1) for i in range(ragged.singles)]
        # Every sequence of one comes first, and longer ones may end in an item of one: those count as tiles.
        rows = team().keep(torch.from_numpy(np.array(items, np.int64).reshape(-1, 4)))
        largest = max((count for *_, count in items), default=1)
        tables = ragged.tables if ragged.tables.is_contiguous() else ragged.tables.contiguous()
        ends = None if ragged.counts else ragged.ends
        return Items(rows, ragged.singles, largest, tables, ends, ragged.block_size)

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, spec: Attention, plan: Items
    ) -> torch.Tensor:
        alibi = spec.position if isinstance(spec.position, Alibi) else None
        falling = None if alibi is None else team().keep(slopes(spec, alibi).contiguous())
        q = q if q.is_contiguous() else q.contiguous()
        return ops.attend(
            q,
            cache,
            plan.rows,
            plan.singles,
            plan.largest,
            plan.tables,
            plan.block_size,
            plan.ends,
            spec.softmax_scale,
            spec.softcap,
            falling,
            spec.window,
        )

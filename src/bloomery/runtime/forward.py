"""A pass of the model over the positions of a step; in deterministic mode, over the same number of them every time.

Libraries and kernels choose their ways by shape, so a token's last bits depend on how many others are in its step.
Steady gives them one shape only: positions go through the model in tiles of a fixed size, each position a sequence of
its own that attends over its own length, padded with lines that are nobody's. What is left is that a line's result may
not depend on its place in a tile; that is tried out before the first step. So a token is the same alone and in any
batch, in chunks of any size, behind a cached prefix, after preemption and after replay, whatever the weights' format.

Nothing here knows requests, rows or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from bloomery.attention.base import Backend, AttentionMetadata
from bloomery.models.decoder import Decoder
from bloomery.parallel.mesh import Mesh, Pipe

# positions; larger ones waste arithmetic on few streams, smaller ones re-read the weights
CPU_TILE = 16
GPU_TILE = 128


class Forward(Protocol):
    @property
    def grain(self) -> int:
        """Sizes of a captured step go by this many lines."""
        ...

    def hidden(
        self, ids: torch.Tensor, ragged: AttentionMetadata, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """ids [tokens] -> hidden states [tokens, hidden], or only those of the lines `wanted`."""
        ...

    def logits(self, hidden: torch.Tensor, wide: bool = True) -> torch.Tensor: ...


@dataclass(frozen=True)
class Whole:
    """All positions of a step at once."""

    decoder: Decoder
    backend: Backend
    caches: Sequence[torch.Tensor]
    grain: int = 1
    pipe: Pipe | None = (
        None  # where this is a stage: states come from the one before and go to the one behind
    )

    def hidden(
        self, ids: torch.Tensor, ragged: AttentionMetadata, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        plan = self.backend.plan(ragged)
        arrived = None if self.pipe is None else self.pipe.receive(len(ids))
        hidden = self.decoder(
            ids, ragged.positions, ragged.slots, self.caches, self.backend, plan, wanted, arrived
        )
        if self.pipe is not None:
            self.pipe.send(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, wide: bool = True) -> torch.Tensor:
        return self.decoder.logits(hidden, wide)


@dataclass(frozen=True)
class Steady:
    """`grain` positions at a time, no more and no fewer."""

    whole: Whole
    width: int  # blocks of the longest table
    nobody: int  # the reserved block
    grain: int

    def hidden(
        self, ids: torch.Tensor, ragged: AttentionMetadata, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if len(ids) <= self.grain:
            order = torch.arange(len(ids), device=ids.device)
        else:  # by position: what one looks at, be it another's in a shared block, is never in a later tile
            order = ragged.positions.argsort(stable=True)
        line = torch.arange(len(ids), dtype=ragged.starts.dtype, device=ids.device)
        owner = torch.searchsorted(ragged.starts[1:], line, right=True)
        tables = F.pad(ragged.tables, (0, self.width - ragged.tables.shape[1]), value=self.nobody)
        found = []
        for part in order.split(self.grain):
            tile = self._tile(
                ragged.positions[part], ragged.slots[part], tables[owner[part]], ragged.block_size
            )
            found.append(self.whole.hidden(self._filled(ids[part], 0), tile)[: len(part)])
        hidden = found[0]
        if len(found) > 1:
            hidden = torch.empty(
                len(ids), hidden.shape[1], dtype=hidden.dtype, device=hidden.device
            )
            hidden.index_copy_(0, order, torch.cat(found))
        return hidden if wanted is None else hidden[wanted]

    def logits(self, hidden: torch.Tensor, wide: bool = True) -> torch.Tensor:
        parts = [
            self.whole.logits(self._filled(part, 0), wide)[: len(part)]
            for part in hidden.split(self.grain)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def even(self, vocab: int, block_size: int) -> bool:
        """Whether lines that are alike come out alike, wherever in a tile they stand."""
        kind = self.whole.caches[0].device.type == "cpu"
        device = self.whole.caches[0].device
        numbers = torch.zeros(self.grain, dtype=torch.int64 if kind else torch.int32, device=device)
        tables = torch.full(
            (self.grain, self.width), self.nobody, dtype=numbers.dtype, device=device
        )
        tile = self._tile(numbers, numbers + self.nobody * block_size, tables, block_size)
        hidden = self.whole.hidden(numbers + vocab // 2, tile)
        logits = self.whole.logits(hidden) if self.whole.decoder.last else hidden
        return bool((hidden == hidden[:1]).all()) and bool((logits == logits[:1]).all())

    def _tile(
        self, positions: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, block_size: int
    ) -> AttentionMetadata:
        positions = self._filled(positions, 0)
        slots = self._filled(slots, self.nobody * block_size)
        ends = positions + 1
        starts = torch.arange(self.grain + 1, dtype=positions.dtype, device=positions.device)
        known = positions.device.type == "cpu"  # elsewhere the host would have to wait
        counts, lengths = ((1,) * self.grain, tuple(ends.tolist())) if known else ((), ())
        tables = self._filled(tables, self.nobody)
        return AttentionMetadata(
            counts, lengths, self.grain, starts, ends, positions, slots, tables, block_size
        )

    def _filled(self, lines: torch.Tensor, value: int) -> torch.Tensor:
        """Lines [n, ...] and as many of `value` as make a tile."""
        return F.pad(lines, (0, 0) * (lines.dim() - 1) + (0, self.grain - len(lines)), value=value)


def steady(whole: Whole, width: int, nobody: int, block_size: int, mesh: Mesh) -> Steady:
    """The largest tile whose lines come out alike, on every rank; position by position if need be."""
    cpu = whole.caches[0].device.type == "cpu"
    found = Steady(whole, width, nobody, CPU_TILE if cpu else GPU_TILE)
    if not mesh.least(found.even(whole.decoder.spec.vocab, block_size)):
        found = Steady(whole, width, nobody, 1)
    return found

"""The products of LoRA adapters: shrink, expand, and tables that replace an embedding.

    lora_shrink   x [rows, in] -> [rows, parts * rank], with the A of each row's device slot
    lora_expand   y += B times the part of the shrunk row that an output reads
    lora_lookup   token ids -> rows of the table of each row's slot
    lora_project  x -> logits, with the table of each row's slot

Each row has the number of its adapter's device slot, or -1 if it has no adapter. So one launch
serves any mix of adapters, and a captured step holds whatever the rows need. The matrices of all
slots lie in one block of memory, slot after slot. With experts, a row is a (token, choice) pair,
and each slot has the matrices of all experts.

A linear layer may be several layers of the adapter: q, k and v, or gate and up. Each of them is a
part with an A of its own, and its outputs read the rank columns of that part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool


class AdapterBatch:
    """The adapter slot of each row of the current forward pass."""

    def __init__(self) -> None:
        self.slots: torch.Tensor | None = None  # [rows] int32, -1: none; None: no row has one
        self.all_slots: torch.Tensor | None = None  # of all rows of the forward pass

    def begin(self, slots: torch.Tensor | None) -> None:
        """Set the slots of a forward pass."""
        self.slots = slots
        self.all_slots = slots

    def select(self, rows: torch.Tensor | slice | None) -> None:
        """From here on layers see only these rows; None: all of them again."""
        self.slots = self.all_slots
        if self.slots is not None and rows is not None:
            self.slots = self.slots[rows]


class LoraMatrices(NamedTuple):
    """The matrices of one linear layer, of all slots. B has the adapter's scale in it."""

    a: torch.Tensor  # [slots, experts, parts * rank, in]; without experts there is one
    b: torch.Tensor  # [slots, experts, out, rank]
    parts: torch.Tensor  # [out] int32: the part that each output reads
    bias: torch.Tensor | None = None  # [slots, out]: added to the bias of the base model


class LoraRows(NamedTuple):
    """Which matrices the rows of a product use."""

    slots: torch.Tensor  # [tokens] int32, -1: none
    # [tokens, choices] int32: each token has a row for each of its experts; ids outside of the
    # range have none.
    experts: torch.Tensor | None = None

    def matrix_rows(self, num_experts: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each slot and expert in use and its rows; waits for the device."""
        slots = self.slots.long()
        experts = torch.zeros_like(slots)
        if self.experts is not None:
            slots = slots.repeat_interleave(self.experts.shape[1])
            experts = self.experts.flatten().long()
        is_used = (slots >= 0) & (experts >= 0) & (experts < num_experts)
        matrix = torch.where(is_used, slots * num_experts + experts, -1)
        for index in matrix.unique().tolist():
            if index >= 0:
                yield index // num_experts, index % num_experts, (matrix == index).nonzero()[:, 0]


def lora_shrink(
    x: torch.Tensor, matrices: LoraMatrices, rows: LoraRows, pool: ThreadPool | None = None
) -> torch.Tensor:
    """x [rows, in] -> [rows, parts * rank] in float32; rows without an adapter are not defined."""
    if pool is not None and pool.accepts(x):
        return ops.lora_shrink(pool, x, matrices.a, rows.slots, rows.experts)
    return lora_shrink_reference(x, matrices, rows)


def lora_shrink_reference(x: torch.Tensor, matrices: LoraMatrices, rows: LoraRows) -> torch.Tensor:
    """The same as `lora_shrink`, in torch."""
    _, num_experts, width, _ = matrices.a.shape
    shrunk = torch.zeros(len(x), width, dtype=torch.float32, device=x.device)
    for slot, expert, index in rows.matrix_rows(num_experts):
        shrunk[index] = x[index].float() @ matrices.a[slot, expert].float().t()
    return shrunk


def lora_expand(
    shrunk: torch.Tensor,
    matrices: LoraMatrices,
    rows: LoraRows,
    y: torch.Tensor,
    pool: ThreadPool | None = None,
) -> None:
    """Add B times the shrunk rows, and the bias of the adapter, to y [rows, out], in place."""
    if pool is not None and pool.accepts(shrunk, y):
        _, b, parts, bias = matrices
        ops.lora_expand(pool, shrunk, b, parts, rows.slots, y, rows.experts, bias)
        return
    lora_expand_reference(shrunk, matrices, rows, y)


def lora_expand_reference(
    shrunk: torch.Tensor, matrices: LoraMatrices, rows: LoraRows, y: torch.Tensor
) -> None:
    """The same as `lora_expand`, in torch."""
    _, num_experts, _, rank = matrices.b.shape
    columns = matrices.parts.long()[:, None] * rank + torch.arange(rank, device=y.device)
    for slot, expert, index in rows.matrix_rows(num_experts):
        read = shrunk[index][:, columns]  # [rows, out, rank]
        delta = (read * matrices.b[slot, expert].float()).sum(-1)
        if matrices.bias is not None:
            delta = delta + matrices.bias[slot].float()
        y[index] = (y[index].float() + delta).to(y.dtype)


def lora_lookup(
    token_ids: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    first_id: int,
    out: torch.Tensor,
    active: torch.Tensor | None = None,
    pool: ThreadPool | None = None,
) -> None:
    """Write the rows of token ids [n] in the table of each row's slot into `out` [n, width].

    tables [slots, ids, width] hold the ids from `first_id` on. Other ids, and rows without an
    adapter, become 0. With `active` [slots], only rows of active slots are written.
    """
    if pool is not None and pool.accepts(tables[:0], out):
        ops.lora_lookup(pool, token_ids, tables, slots, first_id, out, active)
        return
    index = token_ids.long() - first_id
    is_inside = (index >= 0) & (index < tables.shape[1])
    slot = slots.long()
    values = tables[slot.clamp(min=0), index.clamp(0, tables.shape[1] - 1)]
    values = torch.where((is_inside & (slot >= 0))[:, None], values, 0).to(out.dtype)
    out.copy_(values if active is None else torch.where(uses(active, slots), values, out))


def lora_project(
    x: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    active: torch.Tensor,
    pool: ThreadPool | None = None,
) -> None:
    """Write x [n, in] times the table of each row's slot into `out` [n, outputs], in place.

    tables [slots, outputs, in]. Only rows of active slots are written; active [slots] int32.
    """
    if pool is not None and pool.accepts(tables[:0], x, out):
        ops.lora_shrink(pool, x, tables[:, None], slots, None, out, active)
        return
    for slot in range(len(tables)):
        chosen = uses(active, slots) & (slots == slot)[:, None]
        out.copy_(torch.where(chosen, (x @ tables[slot].t()).to(out.dtype), out))


def uses(active: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Whether each row has an active slot: [n, 1]."""
    return ((slots >= 0) & (active[slots.long().clamp(min=0)] != 0))[:, None]

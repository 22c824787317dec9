"""The LoRA adapters of a linear layer or an embedding, in all device slots.

A layer adds its adapters' part to the product of the base weights, whatever their format. Which
slot a row of the step uses is known to the AdapterBatch (kernels/lora.py), which all layers of a
model share. While it has no slots, no row of the step has an adapter, and every layer runs as if
there were none.

This file does not know how adapters are stored in files (models/adapter_files.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bloomery.kernels.lora import (
    AdapterBatch,
    FusedLora,
    LoraMatrices,
    LoraRows,
    lora_bias,
    lora_expand,
    lora_expand_triton,
    lora_lookup,
    lora_project,
    lora_shrink,
    lora_shrink_triton,
)
from bloomery.native.thread_pool import ThreadPool


class LinearAdapters:
    """The adapters of one linear layer, or of all experts of a block.

    row_parts: for each output of this rank, the layer of the adapter it belongs to. q | k | v are
        the outputs of three such layers.
    """

    def __init__(
        self,
        batch: AdapterBatch,
        inputs: int,
        row_parts: Sequence[int],
        num_experts: int = 1,
        is_outer: bool = False,
    ):
        self.batch = batch
        self.is_outer = is_outer
        self.inputs = inputs
        self.row_parts = tuple(row_parts)
        self.num_experts = num_experts
        self.num_parts = max(row_parts) + 1
        self.matrices: LoraMatrices | None = None
        # On a GPU, for layers that run once in a forward pass: see FusedLora.
        self.shrunk: torch.Tensor | None = None

    @property
    def is_active(self) -> bool:
        """Whether a row of this step may have an adapter that changes this layer."""
        slots = self.batch.outer_slots if self.is_outer else self.batch.slots
        return slots is not None and self.matrices is not None

    def shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of A, B and bias in one slot."""
        num_outputs = len(self.row_parts)
        return (
            (self.num_experts, self.num_parts * rank, self.inputs),
            (self.num_experts, num_outputs, rank),
            (num_outputs,),
        )

    def bind(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
        """Take the memory of all slots: `shapes` with the slots as their first dimension."""
        parts = torch.tensor(self.row_parts, dtype=torch.int32, device=a.device)
        # Adapters of experts have no biases.
        self.matrices = LoraMatrices(a, b, parts, bias if self.num_experts == 1 else None)

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        pool: ThreadPool | None = None,
        experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the adapters' part of the product of x [rows, in] to y [rows, out], in place.

        experts [tokens, choices]: the expert of each row, for adapters of experts.
        """
        slots = self.batch.slots
        if slots is None or self.matrices is None:
            return y
        rows = LoraRows(slots, experts, self.batch.groups)
        shrunk = lora_shrink(x, self.matrices, rows, pool)
        lora_expand(shrunk, self.matrices, rows, y, pool)
        return y

    def multiply_beside(
        self,
        x: torch.Tensor,
        multiply: Callable[[torch.Tensor], torch.Tensor],
        side: torch.cuda.Stream,
        shrinks_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return multiply(x) and the adapters' part, which stream `side` computes meanwhile.

        The base product is queued first, so the adapters use the processors that it leaves idle.
        If it leaves none, with `shrinks_first` only the expand has to wait for them.

        Memory that one stream has allocated is used again only on that stream, and each of them
        waits for the other before the next product. So nothing is overwritten too early.
        """
        slots = self.batch.slots
        assert slots is not None and self.matrices is not None
        rows = LoraRows(slots, None, self.batch.groups)
        main = torch.cuda.current_stream()
        shrunk = lora_shrink_triton(x, self.matrices, rows) if shrinks_first else None
        fork = main.record_event()
        y = multiply(x)
        side.wait_event(fork)
        with torch.cuda.stream(side):
            added = x.new_empty(len(x), len(self.row_parts))
            joins = shrunk is not None
            if shrunk is None:
                shrunk = lora_shrink_triton(x, self.matrices, rows, joins=True)
            lora_expand_triton(shrunk, self.matrices, rows, added, accumulates=False, joins=joins)
        main.wait_stream(side)
        return y, added

    def fused(self) -> FusedLora | None:
        """Return the adapter of a step of one row for a fused kernel, if one may take it.

        If the last layer keeps one row of a larger step, none may: `shrunk` has old values then.
        """
        slots = self.batch.slots
        if slots is None or not self.batch.has_one_row or self.matrices is None:
            return None
        if self.shrunk is None or self.num_experts > 1:
            return None
        return FusedLora(self.matrices, slots, self.shrunk)

    def as_bias(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the bias [out] of a step of one row: that of the layer, and the adapter's part.

        x [1, in] on a GPU.
        """
        slots = self.batch.slots
        assert slots is not None and self.matrices is not None
        rows = LoraRows(slots)
        shrunk = lora_shrink(x, self.matrices, rows)
        return lora_bias(shrunk, self.matrices, rows, bias, x.dtype)


class TableAdapters:
    """Whole tables [ids, width] that adapters have instead of the embedding or of the head.

    They take as much memory as the base model's, so there is none before the first of them.
    """

    def __init__(self, batch: AdapterBatch, first_id: int, num_ids: int, width: int):
        self.batch = batch
        self.first_id = first_id  # of this rank's part of the vocabulary
        self.num_ids = num_ids
        self.width = width
        self.tables: torch.Tensor | None = None  # [slots, ids, width]
        self.active: torch.Tensor | None = None  # [slots] int32: whether the slot has a table

    @property
    def is_allocated(self) -> bool:
        return self.tables is not None

    def slot_size(self) -> int:
        """The number of values in one slot."""
        return self.num_ids * self.width

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate a table for every slot."""
        shape = (num_slots, self.num_ids, self.width)
        self.tables = torch.zeros(shape, dtype=dtype, device=device)
        self.active = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def release(self) -> None:
        """Free the tables."""
        self.tables = None
        self.active = None

    def replace_embeddings(
        self, token_ids: torch.Tensor, x: torch.Tensor, pool: ThreadPool | None
    ) -> None:
        """Replace the embeddings x [rows, width] of rows whose adapter has its own, in place."""
        slots = self.batch.outer_slots
        if slots is not None and self.tables is not None:
            lora_lookup(token_ids, self.tables, slots, self.first_id, x, self.active, pool)

    def replace_logits(
        self, x: torch.Tensor, logits: torch.Tensor, pool: ThreadPool | None
    ) -> None:
        """Replace the logits [rows, ids] of rows whose adapter has its own head, in place."""
        slots = self.batch.outer_slots
        if slots is not None and self.tables is not None and self.active is not None:
            lora_project(x, self.tables, slots, logits, self.active, pool)


class EmbeddingAdapters:
    """The adapters of the token embedding: low-rank ones, and whole tables."""

    def __init__(self, batch: AdapterBatch, first_id: int, num_ids: int, width: int):
        self.batch = batch
        # The A of an embedding is looked up by token instead of multiplied.
        self.linear = LinearAdapters(batch, num_ids, [0] * width, is_outer=True)
        self.tables = TableAdapters(batch, first_id, num_ids, width)
        self.lookup: torch.Tensor | None = None  # [slots, ids, rank]

    def add(
        self, token_ids: torch.Tensor, x: torch.Tensor, pool: ThreadPool | None = None
    ) -> torch.Tensor:
        """Change the embeddings x [rows, width] of these tokens, in place."""
        slots = self.batch.outer_slots
        matrices = self.linear.matrices
        self.tables.replace_embeddings(token_ids, x, pool)
        if slots is None or matrices is None or self.lookup is None:
            return x
        rank = self.lookup.shape[2]
        shape = (len(x), rank)
        dtype = torch.float32
        shrunk = x.new_empty(shape, dtype=dtype) if pool is None else pool.empty(shape, dtype)
        lora_lookup(token_ids, self.lookup, slots, self.tables.first_id, shrunk, None, pool)
        lora_expand(shrunk, matrices, LoraRows(slots, None, self.batch.groups), x, pool)
        return x

"""The request rows of a worker: one permanent row per running request, until it finishes.

State that one step hands to the next stays on the device. The token that a step samples becomes the
`last_tokens` entry of its row, at the position in `positions`, and the next step reads it from
there. The host knows only the tokens that a request was admitted with. One extra row is the padding
row: its block tables hold the null block, and batch slots that pad a step point at it.

A row has a block table for each part of the model's cache groups (cache_groups.py). On the device
all tables have blocks of the same number of positions. Blocks that have left a window stay in the
tables: attention does not depend on what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bloomery.attention.base import index_dtype, upload
from bloomery.cache_groups import BlockTableSpec, StateLayout
from bloomery.messages import NULL_BLOCK, NewRequestData, ScheduledRequest
from bloomery.native.thread_pool import ThreadPool


@dataclass(slots=True)
class RequestRow:
    """The host's state of one running request."""

    index: int  # into every per-row tensor
    request: NewRequestData
    block_tables: list[list[int]] = field(default_factory=list)  # as the kernels count blocks
    # Pieces of its recurrent states, for each table of them (cache_groups.StateLayout).
    state_pieces: list[list[int]] = field(default_factory=list)
    num_uploaded_blocks: int = 0  # blocks of each table that the device knows
    pooled_sum: torch.Tensor | None = None  # [hidden] for mean pooling, see pooling.py

    @property
    def adapter_slot(self) -> int:
        """The device slot of its LoRA adapter, counted from 0 as the kernels do; -1: none."""
        return self.request.lora_slot - 1

    @property
    def wants_only_tokens(self) -> bool:
        """Whether the request wants neither prompt log-probabilities nor an embedding."""
        return self.request.pooling is None and self.request.sampling.prompt_logprobs is None

    def host_knows_token(self, position: int) -> bool:
        """Whether the host knows the token at that position; else it is the row's last token."""
        return position < len(self.request.tokens)


# The block table of a model with one cache group.
SINGLE_TABLE = BlockTableSpec(group=0, window=None, blocks_per_page=1, kernel_blocks=1)

# A scheduled request and its row.
PlacedRequest = tuple[ScheduledRequest, RequestRow]


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """The decodes of a step in the order of their batch slots.

    The longest sequence comes first, because attention ends when its slowest sequence does. All
    sequences grow by one token a step, so the order holds until a request joins or leaves.
    """

    sequences: tuple[int, ...] = ()  # as the scheduled step lists them
    step_indices: tuple[int, ...] = ()  # index of each batch slot's sequence in that list
    rows: tuple[RequestRow, ...] = ()
    row_indices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # of `rows`
    # Likeliest tokens to report for each row; empty if no row wants log-probabilities.
    num_logprobs: tuple[int | None, ...] = ()
    # The device slot of each row's LoRA adapter, -1: none; None if no row has one.
    adapter_slots: np.ndarray | None = None


EMPTY_ORDER = BatchOrder()


class RequestRows:
    """The rows of all running requests, and their tensors on the device."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        null_block: int,
        device: torch.device,
        pool: ThreadPool | None = None,
        tables: Sequence[BlockTableSpec] = (SINGLE_TABLE,),
        states: StateLayout | None = None,
    ):
        """`max_blocks_per_seq` counts blocks as the kernels do, `null_block` as the scheduler.

        The null block is the last one.
        """
        self.pool = pool  # of the native CPU kernels that read and write the rows
        dtype = index_dtype(device)
        self.max_num_seqs = max_num_seqs
        self.padding_row = max_num_seqs
        self.free_rows = list(reversed(range(max_num_seqs)))
        self.by_sequence: dict[int, RequestRow] = {}
        self.decode_order = EMPTY_ORDER  # of the last step
        # Rows whose block tables have grown since the last upload, by index.
        self.grown_rows: dict[int, RequestRow] = {}
        self.null_block = null_block
        self.tables = tuple(tables)
        # Scheduler and kernels count the blocks of the only table alike.
        self.has_single_table = len(tables) == 1 and tables[0].kernel_blocks == 1
        self.null_blocks = [null_block * table.kernel_blocks for table in tables]  # of each table
        num_rows = max_num_seqs + 1
        self.last_tokens = torch.zeros(num_rows, dtype=dtype, device=device)
        self.positions = torch.zeros(num_rows, dtype=dtype, device=device)
        null_entries = torch.tensor(self.null_blocks, dtype=dtype).view(-1, 1, 1)
        # [tables, rows, blocks]
        self.block_tables = null_entries.repeat(1, num_rows, max_blocks_per_seq).to(device)
        self.states = states
        if states is not None:
            null_state = states.divide_blocks([null_block] * states.num_blocks, null_block + 1)
            null_pieces = torch.tensor(null_state, dtype=dtype)[:, None]
            # [tables, rows, pieces]
            self.state_pieces = null_pieces.repeat(1, num_rows, 1).to(device)
        self.new_states: dict[int, RequestRow] = {}  # rows whose states are not uploaded, by index

    def add(self, sequence: int, request: NewRequestData) -> RequestRow:
        """Assign a free row to a new request."""
        row = RequestRow(self.free_rows.pop(), request)
        row.block_tables = [[] for _ in self.tables]
        if self.states is not None:
            num_blocks = self.null_block + 1
            row.state_pieces = self.states.divide_blocks(request.state_blocks, num_blocks)
            self.new_states[row.index] = row
        self.by_sequence[sequence] = row
        return row

    def null_states(self) -> list[torch.Tensor]:
        """The pieces [pieces] of the padding row's state, for each table of states."""
        return [] if self.states is None else list(self.state_pieces[:, self.padding_row])

    def append_blocks(self, sequence: int, blocks: Sequence[int]) -> RequestRow:
        """Extend the block tables of a request; `upload_new_blocks` sends them to the device.

        blocks: those of new pages, as in ScheduledRequest.
        """
        row = self.by_sequence[sequence]
        if blocks:
            if self.has_single_table and NULL_BLOCK not in blocks:
                row.block_tables[0] += blocks
            else:
                self._append_pages(row, blocks)
            self.grown_rows[row.index] = row
        return row

    def _append_pages(self, row: RequestRow, blocks: Sequence[int]) -> None:
        """Distribute the blocks of pages over the tables, in the way the kernels count blocks."""
        first = 0
        while first < len(blocks):
            for block_table, table in zip(row.block_tables, self.tables, strict=True):
                for block in blocks[first : first + table.blocks_per_page]:
                    block = self.null_block if block == NULL_BLOCK else block
                    start = block * table.kernel_blocks
                    block_table += range(start, start + table.kernel_blocks)
                first += table.blocks_per_page

    def order_decodes(self, sequences: tuple[int, ...], positions: Sequence[int]) -> BatchOrder:
        """Order the decodes of a step; returns the previous order if the sequences are the same."""
        if sequences != self.decode_order.sequences:
            indices = sorted(range(len(sequences)), key=positions.__getitem__, reverse=True)
            rows = tuple([self.by_sequence[sequences[index]] for index in indices])
            samplings = [row.request.sampling for row in rows]
            num_logprobs = tuple([sampling.logprobs for sampling in samplings])
            wants_logprobs = any(count is not None for count in num_logprobs)
            adapter_slots = np.array([row.adapter_slot for row in rows], np.int32)
            self.decode_order = BatchOrder(
                sequences=sequences,
                step_indices=tuple(indices),
                rows=rows,
                row_indices=np.array([row.index for row in rows], np.int32),
                num_logprobs=num_logprobs if wants_logprobs else (),
                adapter_slots=adapter_slots if (adapter_slots >= 0).any() else None,
            )
        return self.decode_order

    def place_decodes(
        self, sequences: Sequence[int], positions: Sequence[int]
    ) -> list[PlacedRequest]:
        """Expand the decodes of a step to scheduled requests, for steps that the host lays out."""
        return [
            (
                ScheduledRequest(sequence, position, 1, (), None, (), True),
                self.by_sequence[sequence],
            )
            for sequence, position in zip(sequences, positions, strict=True)
        ]

    def release(self, sequence: int) -> RequestRow:
        """Free the row of a finished or preempted request."""
        self.decode_order = EMPTY_ORDER  # the sequence may come again, in another row
        row = self.by_sequence.pop(sequence)
        self.grown_rows.pop(row.index, None)
        self.new_states.pop(row.index, None)
        self.free_rows.append(row.index)
        return row

    def upload_new_blocks(self) -> None:
        """Write the blocks that rows have gained into the block tables on the device."""
        if self.new_states:
            self._upload_new_states()
        if not self.grown_rows:
            return
        _, num_rows, width = self.block_tables.shape
        new_entries: list[tuple[int, int]] = []  # (index into all tables, block)
        for row in self.grown_rows.values():
            start = row.num_uploaded_blocks
            for table, block_table in enumerate(row.block_tables):
                first = (table * num_rows + row.index) * width + start
                new_entries += enumerate(block_table[start:], first)
            row.num_uploaded_blocks = len(row.block_tables[0])
        self.grown_rows.clear()
        places, blocks = upload(new_entries, self.block_tables.device).unbind(1)
        self.block_tables.view(-1)[places] = blocks.to(self.block_tables.dtype)

    def _upload_new_states(self) -> None:
        """Write the pieces of the states of new requests."""
        indices = list(self.new_states)
        entries = [row.state_pieces for row in self.new_states.values()]
        self.new_states.clear()
        device = self.state_pieces.device
        pieces = upload(entries, device, self.state_pieces.dtype)  # [rows, tables, pieces]
        self.state_pieces[:, upload(indices, device).long()] = pieces.transpose(0, 1)

    def set_last_tokens(
        self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write the last token of these rows [n], and its position."""
        self.last_tokens[rows] = tokens.to(self.last_tokens.dtype)
        self.positions[rows] = positions.to(self.positions.dtype)

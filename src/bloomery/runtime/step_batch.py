"""Builds the batch of one step: the model inputs of decode, mixed and prefill steps.

A `StepBatch` holds the model inputs of a step. There are two ways to build one. `build_host_batch`
lays out any step on the host. `StepBuffers` lays out steps that feed themselves: their tokens and
positions come from the request rows on the device, and all that the host sends lies in static
buffers. Such a step can be captured in a CUDA graph or a CPU trace, once per `StepShape`.

This file must not run the model or sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from bloomery.attention.base import AttentionMetadata, build_step_tensors, upload
from bloomery.kernels.rows import gather_decode_inputs, gather_mixed_inputs, gather_state_pieces
from bloomery.kernels.state_cache import RecurrentMetadata
from bloomery.messages import ScheduledRequest
from bloomery.runtime.rows import PlacedRequest, RequestRow, RequestRows

# Prefill slots of a mixed step. The last one is the padding that fills the step up.
NUM_PREFILL_SLOTS = 8
# Decode slots of captured mixed steps; the number of rows is added to them.
MIXED_DECODE_SLOTS = (8, 32, 64, 128, 192)
# Tokens of captured mixed steps. The list is short, because all of them are captured before the
# engine is ready. Steps beyond the last size need no graph: they keep the device busy for longer
# than the host needs to launch their kernels.
MIXED_TOKENS = (32, 64, 128, 192, 256, *range(384, 1025, 128), *range(1280, 2049, 256))
MAX_MIXED_TOKENS = MIXED_TOKENS[-1]
# Decodes with at most this many positions may go through the prefill kernel, if they are few
# (MIXED_DECODE_SLOTS[0]): a launch of the decode kernel for them alone would cost more.
SHORT_DECODE_POSITIONS = 1024


@dataclass(frozen=True)
class BatchedRequest:
    """One request's part of a batch that the host laid out."""

    scheduled: ScheduledRequest
    row: RequestRow
    first_token: int  # index of its first position in the batch

    @property
    def sample_range(self) -> range:
        """Indices in the batch whose logits are sampled: its last position and each draft."""
        if not self.scheduled.samples:
            return range(0)
        last = self.first_token + self.scheduled.count - 1
        return range(last, last + 1 + len(self.scheduled.drafts))


class StepBatch(NamedTuple):
    """The model inputs of one step: decodes first, then prefill chunks."""

    token_ids: torch.Tensor  # [tokens]
    layouts: tuple[AttentionMetadata, ...]  # one per block table of the model
    # Positions whose hidden states the model returns [n]; None: all of them.
    output_indices: torch.Tensor | None = None
    # Self-feeding steps: the row that each sequence samples for [sequences], perhaps padding.
    sampling_rows: torch.Tensor | None = None
    # The device slot of each token's LoRA adapter [tokens], -1: none; None: no token has one.
    adapter_slots: torch.Tensor | None = None
    # Host-built steps: all requests, those that sample, and the positions they sample at [n].
    requests: tuple[BatchedRequest, ...] = ()
    sampled_requests: tuple[BatchedRequest, ...] = ()
    sample_indices: torch.Tensor | None = None
    states: tuple[RecurrentMetadata, ...] = ()  # one per table of recurrent states


def build_host_batch(
    placed: Sequence[PlacedRequest], rows: RequestRows, block_size: int
) -> StepBatch:
    """Lay out a step on the host; `rows` have tokens that only the device knows."""
    # Sequences with a single position come first.
    placed = sorted(placed, key=lambda pair: pair[0].count + len(pair[0].drafts) > 1)
    device = rows.last_tokens.device
    token_ids: list[int] = []
    device_tokens: list[tuple[int, int]] = []  # (index in the batch, row)
    requests = []
    query_lens = []
    seq_lens = []
    for scheduled, row in placed:
        requests.append(BatchedRequest(scheduled, row, len(token_ids)))
        end = scheduled.start + scheduled.count
        if row.host_knows_token(end - 1):
            token_ids += row.request.tokens[scheduled.start : end]
        else:
            device_tokens.append((len(token_ids), row.index))
            token_ids.append(0)
        token_ids += scheduled.drafts
        query_lens.append(scheduled.count + len(scheduled.drafts))
        seq_lens.append(end + len(scheduled.drafts))
    block_tables = [
        [row.block_tables[table] for _, row in placed] for table in range(len(rows.tables))
    ]
    windows = [table.window for table in rows.tables]
    ids, layouts = build_step_tensors(
        token_ids, query_lens, seq_lens, block_tables, block_size, device, windows
    )
    if device_tokens:
        indices, token_rows = upload(device_tokens, device).unbind(1)
        ids[indices] = rows.last_tokens[token_rows].to(ids.dtype)
    sampled = [
        request
        for request in requests
        if request.scheduled.samples and request.row.request.pooling is None
    ]
    sampled_positions = [index for request in sampled for index in request.sample_range]
    sample_indices = upload(sampled_positions or [0], device)
    adapter_slots = None
    if any(row.adapter_slot >= 0 for _, row in placed):
        slots = np.array([row.adapter_slot for _, row in placed], np.int32).repeat(query_lens)
        adapter_slots = upload(torch.from_numpy(slots), device, torch.int32)
    all_outputs = len(sample_indices) == len(ids) or not all(
        request.row.wants_only_tokens for request in requests
    )
    return StepBatch(
        token_ids=ids,
        layouts=layouts,
        output_indices=None if all_outputs else sample_indices,
        adapter_slots=adapter_slots,
        requests=tuple(requests),
        sampled_requests=tuple(sampled),
        sample_indices=sample_indices,
        states=build_host_states(placed, rows, layouts[0]),
    )


def build_host_states(
    placed: Sequence[PlacedRequest], rows: RequestRows, layout: AttentionMetadata
) -> tuple[RecurrentMetadata, ...]:
    """Describe a host-built step to the recurrent layers of each table of states."""
    if rows.states is None:
        return ()
    entries = [row.state_pieces for _, row in placed]  # [sequences, tables, pieces]
    pieces = upload(entries, layout.seq_lens.device, layout.seq_lens.dtype)
    return tuple(
        RecurrentMetadata(
            num_decodes=layout.num_decodes,
            query_start_loc=layout.query_start_loc,
            seq_lens=layout.seq_lens,
            state_pieces=table_pieces.contiguous(),
            host_query_lens=layout.host_query_lens,
            host_seq_lens=layout.host_seq_lens,
        )
        for table_pieces in pieces.unbind(1)
    )


class StepShape(NamedTuple):
    """The sizes of a self-feeding step: a CUDA graph or CPU trace serves all steps of one shape."""

    num_decodes: int  # decode slots, padding included
    num_tokens: int  # padding included
    num_prefills: int = 0  # prefill slots: 0 or NUM_PREFILL_SLOTS
    decodes_as_prefills: bool = False  # attention treats decodes as prefills of one position
    # The step ends with logits and samples in a part of its own, perhaps when it has its masks.
    # Mixed steps always do, so that one graph serves requests with and without grammars.
    samples_apart: bool = False
    has_adapters: bool = False  # some tokens have a LoRA adapter; other steps do not pay for them
    changes_outer: bool = False  # one of these changes layers outside of the decoder layers

    @property
    def num_sequences(self) -> int:
        """Decode and prefill slots together."""
        return self.num_decodes + self.num_prefills


def decode_shape(
    num_decodes: int, is_masked: bool = False, has_adapters: bool = False
) -> StepShape:
    """The shape of a step without prefill chunks."""
    return StepShape(num_decodes, num_decodes, samples_apart=is_masked, has_adapters=has_adapters)


def mixed_shape(
    num_decodes: int,
    num_tokens: int,
    decodes_as_prefills: bool,
    has_adapters: bool = False,
) -> StepShape:
    """The shape of a step with prefill chunks."""
    return StepShape(
        num_decodes, num_tokens, NUM_PREFILL_SLOTS, decodes_as_prefills, True, has_adapters
    )


def sampling_shape(num_slots: int) -> StepShape:
    """The shape of the second part of a step that samples apart."""
    return StepShape(num_slots, 0)


def decode_batch_sizes(max_num_seqs: int, tile_size: int = 1) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then every 8, and every 16 from 128 on.

    With larger tiles: multiples of the tile size.
    """
    sizes: Sequence[int] = range(tile_size, max_num_seqs, tile_size)
    if tile_size == 1:
        sizes = [1, 2, 4, *range(8, 128, 8), *range(128, max_num_seqs + 16, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class CaptureSizes:
    """The sizes that steps are padded to; with empty lists steps are not padded."""

    decodes: Sequence[int] = ()  # of decode steps
    mixed_decodes: Sequence[int] = ()  # decode slots of mixed steps
    mixed_tokens: Sequence[int] = ()  # tokens of mixed steps

    @classmethod
    def for_graphs(
        cls, max_num_seqs: int, max_mixed_tokens: int, tile_size: int = 1
    ) -> CaptureSizes:
        """The sizes for which CUDA graphs are captured."""
        slots = [size for size in MIXED_DECODE_SLOTS if size < max_num_seqs]
        tokens = [size for size in MIXED_TOKENS if size < max_mixed_tokens]
        return cls(
            decodes=decode_batch_sizes(max_num_seqs, tile_size),
            mixed_decodes=[*slots, max_num_seqs],
            mixed_tokens=[*tokens, max_mixed_tokens],
        )

    def decode_shapes(self, is_masked: bool = False, has_adapters: bool = False) -> list[StepShape]:
        """Decode steps to capture at the start: the largest first, then the others ascending."""
        sizes = [*self.decodes[-1:], *self.decodes[:-1]]
        return [decode_shape(size, is_masked, has_adapters) for size in sizes]

    def mixed_shapes(self) -> list[StepShape]:
        """Mixed steps to capture at the start: all that leave room for a prefill token.

        The largest comes first, because it decides how much memory the graphs take.
        """
        if not self.mixed_tokens:
            return []
        shapes = [mixed_shape(self.mixed_decodes[-1], self.mixed_tokens[-1], False)]
        for smaller, slots in zip([0, *self.mixed_decodes], self.mixed_decodes):
            options = [False]
            if slots <= MIXED_DECODE_SLOTS[0]:
                options = [True, False]
            for as_prefills in options:
                shapes += [
                    mixed_shape(slots, tokens, as_prefills)
                    for tokens in self.mixed_tokens
                    if smaller < tokens
                ]
        return list(dict.fromkeys(shapes))

    def sampling_shapes(self, with_masked: bool, with_mixed: bool) -> list[StepShape]:
        """The second parts of masked decode steps and of mixed steps to capture at the start."""
        sizes = set(self.decodes if with_masked else ())
        if with_mixed:
            sizes |= {slots + NUM_PREFILL_SLOTS for slots in self.mixed_decodes}
        return [sampling_shape(size) for size in sorted(sizes)]

    def pad_decode(
        self, num_decodes: int, is_masked: bool = False, has_adapters: bool = False
    ) -> StepShape:
        """The shape of a decode step of that many rows."""
        return decode_shape(round_up(num_decodes, self.decodes), is_masked, has_adapters)

    def pad_mixed(
        self,
        num_decodes: int,
        num_tokens: int,
        max_position: int,
        has_adapters: bool = False,
    ) -> StepShape:
        """The shape of a mixed step whose decodes are at positions up to `max_position`."""
        slots = round_up(num_decodes, self.mixed_decodes)
        few_decodes = slots <= MIXED_DECODE_SLOTS[0]
        as_prefills = few_decodes and max_position < SHORT_DECODE_POSITIONS
        tokens = round_up(num_tokens, self.mixed_tokens)
        return mixed_shape(slots, tokens, as_prefills, has_adapters)


def round_up(count: int, sizes: Sequence[int]) -> int:
    """The smallest of these ascending sizes that holds `count`; `count` itself if none does."""
    return next((size for size in sizes if size >= count), count)


class StepBuffers:
    """Static device buffers for the data that the host sends for a self-feeding step.

    Decodes read their inputs from the request rows. For them the host sends only which row is in
    which batch slot, and only when that changed. For prefill chunks it sends the token ids and
    where each chunk begins and ends.
    """

    def __init__(self, rows: RequestRows, block_size: int, max_mixed_tokens: int):
        self.rows = rows
        self.block_size = block_size
        device = rows.last_tokens.device
        max_slots = rows.max_num_seqs
        self.decode_rows = torch.full(
            (max_slots,), rows.padding_row, dtype=torch.int32, device=device
        )
        self.decode_start_loc = torch.arange(max_slots + 1, dtype=torch.int32, device=device)
        packed_len = packed_length(max_slots, max_mixed_tokens)
        self.packed = torch.full(
            (packed_len,), rows.padding_row, dtype=rows.last_tokens.dtype, device=device
        )
        self.resident_slots = b""  # what `decode_rows` holds, as bytes
        # The adapter slot of each token, in decode steps and in mixed steps.
        self.decode_adapters = torch.full((max_slots,), -1, dtype=torch.int32, device=device)
        num_tokens = max_slots + max_mixed_tokens
        self.mixed_adapters = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)

    def write_decodes(self, row_indices: np.ndarray, shape: StepShape) -> None:
        """Fill the batch slots of a decode step."""
        slots = np.full(shape.num_decodes, self.rows.padding_row, np.int32)
        slots[: len(row_indices)] = row_indices
        slot_bytes = slots.tobytes()
        if slot_bytes != self.resident_slots:
            uploaded = upload(torch.from_numpy(slots), self.decode_rows.device, torch.int32)
            self.decode_rows[: shape.num_decodes] = uploaded
            self.resident_slots = slot_bytes

    def write_mixed(
        self, row_indices: np.ndarray, chunks: Sequence[PlacedRequest], shape: StepShape
    ) -> None:
        """Fill the batch slots of a mixed step."""
        packed = pack_mixed_step(row_indices, chunks, shape, self.rows.padding_row)
        uploaded = upload(torch.from_numpy(packed), self.packed.device, self.packed.dtype)
        self.packed[: len(packed)] = uploaded

    def write_adapters(self, slots: np.ndarray, shape: StepShape) -> None:
        """Fill in the adapter slot of each token; the tokens that pad the step have none."""
        target = self.mixed_adapters if shape.num_prefills else self.decode_adapters
        padded = np.full(shape.num_tokens, -1, np.int32)
        padded[: len(slots)] = slots
        uploaded = upload(torch.from_numpy(padded), target.device, torch.int32)
        target[: shape.num_tokens] = uploaded

    def adapter_slots(self, shape: StepShape) -> torch.Tensor | None:
        """The adapter slot of each token of a step; None if no token has one."""
        if not shape.has_adapters:
            return None
        slots = self.mixed_adapters if shape.num_prefills else self.decode_adapters
        return slots[: shape.num_tokens]

    def write_padding(self, shape: StepShape) -> None:
        """Fill every batch slot with padding, so that running the step changes no request."""
        if shape.has_adapters:
            self.write_adapters(np.zeros(0, np.int32), shape)
        if shape.num_prefills:
            self.write_mixed(np.zeros(0, np.int32), (), shape)
            return
        self.decode_rows.fill_(self.rows.padding_row)
        self.resident_slots = b""

    def gather(self, shape: StepShape) -> StepBatch:
        """Lay out the step on the device; part of the captured work."""
        rows = self.rows
        state = (rows.last_tokens, rows.positions, rows.block_tables, self.block_size)
        num_decodes = shape.num_decodes
        if not shape.num_prefills:
            sampling_rows = self.decode_rows[:num_decodes]
            decodes = gather_decode_inputs(sampling_rows, *state, rows.pool)
            layout = AttentionMetadata(
                num_decodes=num_decodes,
                num_prefills=0,
                query_start_loc=self.decode_start_loc[: num_decodes + 1],
                seq_lens=decodes.seq_lens,
                positions=decodes.positions,
                slot_mapping=decodes.slot_mapping[0],
                block_tables=decodes.block_tables[0],
                block_size=self.block_size,
                window=rows.tables[0].window,
            )
            layouts = self._layout_tables(layout, decodes.slot_mapping, decodes.block_tables)
            states = self._gather_states((sampling_rows,), layout)
            return StepBatch(
                decodes.token_ids,
                layouts,
                None,
                sampling_rows,
                self.adapter_slots(shape),
                states=states,
            )
        packed = self.packed[: packed_length(num_decodes, shape.num_tokens)]
        mixed = gather_mixed_inputs(
            packed, *state, num_decodes, shape.num_prefills, shape.num_tokens
        )
        attended_decodes = 0 if shape.decodes_as_prefills else num_decodes
        layout = AttentionMetadata(
            num_decodes=attended_decodes,
            num_prefills=shape.num_sequences - attended_decodes,
            query_start_loc=mixed.query_start_loc,
            seq_lens=mixed.seq_lens,
            positions=mixed.positions,
            slot_mapping=mixed.slot_mapping[0],
            block_tables=mixed.block_tables[0],
            block_size=self.block_size,
            window=rows.tables[0].window,
        )
        layouts = self._layout_tables(layout, mixed.slot_mapping, mixed.block_tables)
        sampling_rows = packed[: shape.num_sequences]
        chunk_rows = packed[num_decodes + shape.num_prefills :][: shape.num_prefills]
        states = self._gather_states((packed[:num_decodes], chunk_rows), layout)
        return StepBatch(
            mixed.token_ids,
            layouts,
            mixed.sample_indices,
            sampling_rows,
            self.adapter_slots(shape),
            states=states,
        )

    def _gather_states(
        self, sequence_rows: tuple[torch.Tensor, ...], layout: AttentionMetadata
    ) -> tuple[RecurrentMetadata, ...]:
        """Describe the step to the recurrent layers of each table of states.

        sequence_rows: the rows of the sequences, in parts.
        """
        rows = self.rows
        if rows.states is None:
            return ()
        batch_rows = sequence_rows[0] if len(sequence_rows) == 1 else torch.cat(sequence_rows)
        pieces = gather_state_pieces(batch_rows, rows.state_pieces, rows.pool)
        return tuple(
            RecurrentMetadata(
                num_decodes=layout.num_decodes,
                query_start_loc=layout.query_start_loc,
                seq_lens=layout.seq_lens,
                state_pieces=table_pieces,
            )
            for table_pieces in pieces.unbind(0)
        )

    def _layout_tables(
        self, first: AttentionMetadata, slot_mapping: torch.Tensor, block_tables: torch.Tensor
    ) -> tuple[AttentionMetadata, ...]:
        """Return one layout per block table, given that of the first.

        slot_mapping [tables, tokens], block_tables [tables, sequences, blocks].
        """
        others = [
            replace(
                first,
                slot_mapping=slot_mapping[index],
                block_tables=block_tables[index],
                window=self.rows.tables[index].window,
            )
            for index in range(1, len(self.rows.tables))
        ]
        return (first, *others)


def packed_length(num_decodes: int, num_tokens: int) -> int:
    """The length of what `pack_mixed_step` returns."""
    return num_decodes + 4 * NUM_PREFILL_SLOTS + 1 + num_tokens


def pack_mixed_step(
    row_indices: np.ndarray,
    chunks: Sequence[PlacedRequest],
    shape: StepShape,
    padding_row: int,
) -> np.ndarray:
    """Pack the data of a mixed step into the layout that `gather_mixed_inputs` reads."""
    unused_slots = NUM_PREFILL_SLOTS - len(chunks)
    padding = [padding_row] * unused_slots
    num_used = len(row_indices)
    query_lens = [scheduled.count for scheduled, _ in chunks]
    starts = list(accumulate(query_lens, initial=num_used))
    header_len = shape.num_decodes + 4 * NUM_PREFILL_SLOTS + 1
    packed = np.zeros(header_len + shape.num_tokens, np.int32)
    # rows of the decode slots
    packed[:num_used] = row_indices
    packed[num_used : shape.num_decodes] = padding_row
    packed[shape.num_decodes : header_len] = (
        # rows that sample at the end of a chunk
        *(row.index if scheduled.samples else padding_row for scheduled, row in chunks),
        *padding,
        # rows of the chunks
        *(row.index for _, row in chunks),
        *padding,
        # first token of each chunk, and the end of the step
        *starts,
        *[starts[-1]] * (unused_slots - 1),
        shape.num_tokens,
        # sequence lengths after the step
        *(scheduled.start + scheduled.count for scheduled, _ in chunks),
        *[0] * unused_slots,
    )
    first = header_len + num_used
    for scheduled, row in chunks:
        end = scheduled.start + scheduled.count
        packed[first : first + scheduled.count] = row.request.tokens[scheduled.start : end]
        first += scheduled.count
    return packed

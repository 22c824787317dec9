"""Request rows on the device: the kernels that begin and end a step.

Each running request has a row: its last token, that token's position, and its block tables. The
last row is the padding row. Batch slots that only pad a captured step point at it, and it never
advances. Models with one cache group have one block table; see cache_groups.py.

A step that feeds itself needs no tensors from the host. `gather_decode_inputs` begins a step of
decodes only, `gather_mixed_inputs` begins a step that also has prefill chunks, and `advance_rows`
ends both. `runtime/step_batch.py` calls all three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.native import ops, recurrent_ops
from bloomery.native.thread_pool import ThreadPool

ROWS_PER_PROGRAM = 256  # batch slots of one program of advance_kernel


class DecodeInputs(NamedTuple):
    """Model inputs of a step in which each batch slot computes one position."""

    token_ids: torch.Tensor  # [slots]
    positions: torch.Tensor  # [slots]
    seq_lens: torch.Tensor  # [slots] length of each sequence, the new position included
    slot_mapping: torch.Tensor  # [tables, slots] KV cache slot of the new key and value
    block_tables: torch.Tensor  # [tables, slots, blocks]


def gather_decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    pool: ThreadPool | None = None,
) -> DecodeInputs:
    """rows [slots], the row of each batch slot -> the inputs of each row's next position.

    last_tokens and positions are [all rows], block_tables is [tables, all rows, blocks].
    """
    if pool is not None:
        state = (last_tokens, positions, block_tables, block_size)
        return DecodeInputs(*ops.gather_decode_inputs(pool, rows, *state))
    if not use_triton(rows):
        return gather_decode_reference(rows, last_tokens, positions, block_tables, block_size)
    num_slots = len(rows)
    num_tables, num_rows, table_width = block_tables.shape
    outputs = rows.new_empty(3 + num_tables, num_slots)
    batch_tables = rows.new_empty(num_tables, num_slots, table_width)
    gather_decode_kernel[(num_slots, num_tables)](
        rows,
        last_tokens,
        positions,
        block_tables,
        outputs,
        batch_tables,
        num_slots,
        num_rows,
        table_width,
        BLOCK_SIZE=block_size,
        CHUNK=1024,
        num_warps=4,
        **pdl_options(rows.device),
    )
    return DecodeInputs(outputs[0], outputs[1], outputs[2], outputs[3:], batch_tables)


def gather_decode_reference(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """The same as `gather_decode_inputs`, in torch."""
    index = rows.long()
    position = positions[index]
    batch_tables = block_tables[:, index]
    block = block_tables[:, index, (position // block_size).long()]
    slot_mapping = block * block_size + position % block_size
    return DecodeInputs(last_tokens[index], position, position + 1, slot_mapping, batch_tables)


@jit
def gather_decode_kernel(
    rows,  # [num_slots]
    last_tokens,  # [num_rows]
    positions,  # [num_rows]
    block_tables,  # [tables, num_rows, table_width]
    outputs,  # [3 + tables, num_slots]: token ids, positions, sequence lengths, slot mappings
    batch_tables,  # [tables, num_slots, table_width]
    num_slots,
    num_rows,
    table_width,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program gathers the inputs of one batch slot and copies the used part of one table."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    batch_slot = tl.program_id(0)
    table = tl.program_id(1)
    row = tl.load(rows + batch_slot).to(tl.int64)
    position = tl.load(positions + row)
    row_table = block_tables + (table * num_rows + row) * table_width
    block = tl.load(row_table + position // BLOCK_SIZE)
    if table == 0:
        tl.store(outputs + batch_slot, tl.load(last_tokens + row))
        tl.store(outputs + num_slots + batch_slot, position)
        tl.store(outputs + 2 * num_slots + batch_slot, position + 1)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(outputs + (3 + table) * num_slots + batch_slot, slot)
    batch_table = batch_tables + (table * num_slots + batch_slot).to(tl.int64) * table_width
    num_blocks = position // BLOCK_SIZE + 1
    for first in range(0, num_blocks, CHUNK):
        index = first + tl.arange(0, CHUNK)
        used = index < num_blocks
        tl.store(batch_table + index, tl.load(row_table + index, mask=used, other=0), mask=used)


def gather_state_pieces(
    rows: torch.Tensor, state_pieces: torch.Tensor, pool: ThreadPool | None = None
) -> torch.Tensor:
    """rows [slots], state_pieces [tables, all rows, pieces] -> [tables, slots, pieces]."""
    if pool is not None:
        return recurrent_ops.gather_state_pieces(pool, rows, state_pieces)
    return state_pieces.index_select(1, rows)


class MixedInputs(NamedTuple):
    """Model inputs of a step with decodes and prefill chunks.

    Sequences are the decode slots, followed by the prefill slots. A padding sequence has length 0.
    """

    seq_lens: torch.Tensor  # [sequences]
    sample_indices: torch.Tensor  # [sequences] index of the sequence's last token in the step
    query_start_loc: torch.Tensor  # [sequences + 1] index of the sequence's first token
    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slot_mapping: torch.Tensor  # [tables, tokens]
    block_tables: torch.Tensor  # [tables, sequences, blocks]


def gather_mixed_inputs(
    packed: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_decodes: int,
    num_prefills: int,
    num_tokens: int,
) -> MixedInputs:
    """Gather the inputs of a step of `num_decodes` decode slots, then `num_prefills` prefill slots.

    packed: the host's data of the step, one part after another:
      [num_decodes]      row of each decode slot, the padding row where the slot is unused
      [num_prefills]     row that samples a token at the end of each chunk, or the padding row
      [num_prefills]     row of each chunk
      [num_prefills + 1] index of each chunk's first token in the step, and the end of the last one
      [num_prefills]     length of each chunk's sequence after the step; 0 for chunks that only pad
      [num_tokens]       token ids; those of decode slots are not read
    As many decode slots are in use as there are tokens before the first chunk.
    """
    num_sequences = num_decodes + num_prefills
    num_tables, num_rows, table_width = block_tables.shape
    if not use_triton(packed):
        return gather_mixed_reference(
            packed,
            last_tokens,
            positions,
            block_tables,
            block_size,
            num_decodes,
            num_prefills,
            num_tokens,
        )
    outputs = packed.new_empty((2 + num_tables) * num_tokens + 3 * num_sequences + 1)
    batch_tables = packed.new_empty(num_tables, num_sequences, table_width)
    gather_mixed_kernel[(num_sequences, num_tables)](
        packed,
        last_tokens,
        positions,
        block_tables,
        outputs,
        batch_tables,
        num_decodes,
        num_prefills,
        num_tokens,
        num_rows,
        table_width,
        BLOCK_SIZE=block_size,
        CHUNK=1024,
        num_warps=4,
        **pdl_options(packed.device),
    )
    sizes = (
        num_sequences,
        num_sequences,
        num_sequences + 1,
        num_tokens,
        num_tokens,
        num_tables * num_tokens,
    )
    *shared, slot_mapping = outputs.split(sizes)
    return MixedInputs._make((*shared, slot_mapping.view(num_tables, num_tokens), batch_tables))


def gather_mixed_reference(
    packed: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_decodes: int,
    num_prefills: int,
    num_tokens: int,
) -> MixedInputs:
    """The same as `gather_mixed_inputs`, in torch."""
    sizes = (num_decodes, num_prefills, num_prefills, num_prefills + 1, num_prefills, num_tokens)
    decode_rows, _, prefill_rows, starts, seq_lens, token_ids = packed.long().split(sizes)
    used = int(starts[0])
    decodes = gather_decode_reference(
        decode_rows[:used], last_tokens, positions, block_tables, block_size
    )
    query_start_loc = torch.cat((torch.arange(num_decodes).clamp(max=used), starts))
    query_lens = starts.diff()
    chunk = torch.repeat_interleave(torch.arange(num_prefills), query_lens)  # of each token
    real = seq_lens[chunk] > 0
    position = seq_lens[chunk] - starts[1:][chunk] + torch.arange(used, num_tokens)
    position = torch.where(real, position, 0)
    row = torch.where(real, prefill_rows[chunk], len(last_tokens) - 1)
    block = block_tables[:, row, position // block_size]
    slot_mapping = block * block_size + position % block_size
    last_of_chunk = torch.where((seq_lens > 0) & (query_lens > 0), starts[1:] - 1, 0)
    unused = torch.zeros(num_decodes - used, dtype=torch.int64)
    outputs = (
        torch.cat((decodes.seq_lens, unused, seq_lens)),
        torch.cat((torch.arange(used), unused, last_of_chunk)),
        query_start_loc,
        torch.cat((decodes.token_ids, token_ids[used:])),
        torch.cat((decodes.positions, position)),
        torch.cat((decodes.slot_mapping, slot_mapping), 1),
    )
    batch_tables = block_tables[:, torch.cat((decode_rows, prefill_rows))]
    converted = [output.to(last_tokens.dtype) for output in outputs]
    return MixedInputs._make((*converted, batch_tables))


@jit(do_not_specialize=["num_decodes", "num_prefills", "num_tokens", "num_rows"])
def gather_mixed_kernel(
    packed,
    last_tokens,  # [num_rows]
    positions,  # [num_rows]
    block_tables,  # [tables, num_rows, table_width]
    outputs,  # the parts of MixedInputs up to slot_mapping, one after another
    batch_tables,  # [tables, num_decodes + num_prefills, table_width]
    num_decodes,
    num_prefills,
    num_tokens,
    num_rows,
    table_width,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program gathers the inputs of one sequence, all tokens of its chunk included.

    Programs of the first table write what all tables share.
    """
    # Without `launch_dependents`: attention reads the layout before its own wait.
    wait_for_previous(PDL)
    sequence = tl.program_id(0)
    table = tl.program_id(1)
    num_sequences = num_decodes + num_prefills
    table_rows = block_tables + (table * num_rows).to(tl.int64) * table_width
    chunk_starts = packed + num_decodes + 2 * num_prefills
    sample_indices = outputs + num_sequences
    query_start_loc = outputs + 2 * num_sequences
    token_ids = query_start_loc + num_sequences + 1
    token_positions = token_ids + num_tokens
    slot_mapping = token_ids + (2 + table) * num_tokens
    used_decodes = tl.load(chunk_starts)
    seq_len = 0
    if sequence < num_decodes:
        row = tl.load(packed + sequence).to(tl.int64)
        if sequence < used_decodes:
            position = tl.load(positions + row)
            block = tl.load(table_rows + row * table_width + position // BLOCK_SIZE)
            if table == 0:
                tl.store(token_ids + sequence, tl.load(last_tokens + row))
                tl.store(token_positions + sequence, position)
            tl.store(slot_mapping + sequence, block * BLOCK_SIZE + position % BLOCK_SIZE)
            seq_len = position + 1
        if table == 0:
            tl.store(sample_indices + sequence, tl.where(sequence < used_decodes, sequence, 0))
            tl.store(query_start_loc + sequence, tl.minimum(sequence, used_decodes))
    else:
        chunk = sequence - num_decodes
        row = tl.load(packed + num_decodes + num_prefills + chunk).to(tl.int64)
        start = tl.load(chunk_starts + chunk)
        stop = tl.load(chunk_starts + chunk + 1)
        seq_len = tl.load(chunk_starts + num_prefills + 1 + chunk)
        row = tl.where(seq_len > 0, row, num_rows - 1)
        for first in range(start, stop, CHUNK):
            token = first + tl.arange(0, CHUNK)
            inside = token < stop
            position = tl.where(seq_len > 0, seq_len - stop + token, 0)
            block = tl.load(
                table_rows + row * table_width + position // BLOCK_SIZE, mask=inside, other=0
            )
            if table == 0:
                token_id = tl.load(
                    chunk_starts + 2 * num_prefills + 1 + token, mask=inside, other=0
                )
                tl.store(token_ids + token, token_id, mask=inside)
                tl.store(token_positions + token, position, mask=inside)
            tl.store(slot_mapping + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        if table == 0:
            has_tokens = (seq_len > 0) & (stop > start)
            tl.store(sample_indices + sequence, tl.where(has_tokens, stop - 1, 0))
            tl.store(query_start_loc + sequence, start)
            if chunk == num_prefills - 1:
                tl.store(query_start_loc + sequence + 1, stop)
    if table == 0:
        tl.store(outputs + sequence, seq_len)
    batch_table = batch_tables + (table * num_sequences + sequence).to(tl.int64) * table_width
    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    for first in range(0, num_blocks, CHUNK):
        index = first + tl.arange(0, CHUNK)
        used = index < num_blocks
        entries = tl.load(table_rows + row * table_width + index, mask=used, other=0)
        tl.store(batch_table + index, entries, mask=used)


def advance_rows(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    pool: ThreadPool | None = None,
) -> None:
    """Write each row's sampled token and its position, which is the sequence's length, in place.

    rows, tokens, seq_lens [slots]. Slots of the padding row write nothing.
    """
    if pool is not None:
        ops.advance_rows(pool, rows, tokens, last_tokens, positions)
        return
    if not use_triton(rows):
        advance_reference(rows, tokens, seq_lens, last_tokens, positions)
        return
    num_slots = len(rows)
    num_programs = -(-num_slots // ROWS_PER_PROGRAM)
    advance_kernel[(num_programs,)](
        rows,
        tokens,
        seq_lens,
        last_tokens,
        positions,
        num_slots,
        len(last_tokens) - 1,
        WIDTH=ROWS_PER_PROGRAM,
        num_warps=4,
        **pdl_options(rows.device),
    )


def advance_reference(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """The same as `advance_rows`, in torch."""
    real = rows != len(last_tokens) - 1
    index = rows[real].long()
    last_tokens[index] = tokens[real].to(last_tokens.dtype)
    positions[index] = seq_lens[real].to(positions.dtype)


@jit(do_not_specialize=["rows", "tokens", "seq_lens", "num_slots", "padding_row"])
def advance_kernel(
    rows,  # [num_slots]
    tokens,  # [num_slots]
    seq_lens,  # [num_slots]
    last_tokens,  # [all rows]
    positions,  # [all rows]
    num_slots,
    padding_row,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program advances WIDTH batch slots."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    batch_slot = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(rows + batch_slot, mask=batch_slot < num_slots, other=padding_row).to(tl.int64)
    real = row != padding_row
    token = tl.load(tokens + batch_slot, mask=real, other=0).to(last_tokens.dtype.element_ty)
    tl.store(last_tokens + row, token, mask=real)
    tl.store(positions + row, tl.load(seq_lens + batch_slot, mask=real, other=0), mask=real)

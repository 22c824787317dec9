"""Prefill attention over the paged KV cache: many new positions for each sequence.

The KV cache already holds the new positions and all before them. One program takes a tile of rows:
the queries of one KV head, position by position and, within a position, head by head, so that heads
with the same keys read them together. It loops over tiles of keys, from the start of the window or
of the sequence to the diagonal. Only tiles that some row does not see completely are masked.

In a captured step the host does not know the lengths of the sequences. The launch then has as many
programs as there can be tiles, and each program finds its own tile. If there are too few programs
for the GPU, as for a short chunk after a long context, several programs share a tile of rows. Each
takes a range of its keys, and the last to finish combines their results.

attention/triton_paged launches this kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.output_gate import OutputGate, gate_factors
from bloomery.kernels.paged_decode import (
    LOG2E,
    WIDE_HEAD_DIM,
    AttentionScoring,
    attend_tile,
    first_visible,
    load_block_ids,
    load_kv_tile,
    start_with_sinks,
)
from bloomery.kernels.quantized_kv_cache import as_kernel_input, kv_cache_scales

MAX_SPLITS = 8
MAX_SCRATCH_BYTES = 48 << 20  # for partial results of programs that share tiles


@dataclass(frozen=True)
class PagedPrefillTiling:
    """How the work is divided among programs and how a program runs."""

    rows: int  # queries of one program
    tile: int  # positions that a program reads per iteration
    warps: int
    stages: int  # tiles in flight
    splits: int = 1  # programs that share a tile of rows, at most
    min_tiles: int = 4  # tiles of keys that each of those programs has at least


@lru_cache(maxsize=1024)
def select_prefill_tiling(
    max_rows: int,
    total_rows: int,
    dim: int,
    element_size: int,
    kv_heads: int,
    num_multiprocessors: int,
) -> PagedPrefillTiling:
    """Choose a tiling for sequences of at most `max_rows` rows each and `total_rows` together.

    The choices were measured on an H200 (benchmarks/LOG.md). A multiprocessor runs two programs at
    a time; splitting beyond that costs more than it gains.
    """
    if dim > WIDE_HEAD_DIM:
        # With more rows the sums of a wide head do not fit into the registers.
        tiling = PagedPrefillTiling(32, 32, 8, 2)
        if element_size == 4:
            tiling = PagedPrefillTiling(16, 16, 8, 1)
    elif element_size == 4:
        if dim > 128:
            tiling = PagedPrefillTiling(16, 16, 8, 2)
        else:
            tiling = PagedPrefillTiling(16 if max_rows <= 16 else 32, 32, 8, 2)
    elif dim > 128:
        if max_rows <= 64:
            tiling = PagedPrefillTiling(64, 32, 4, 2)
        else:
            tiling = PagedPrefillTiling(128, 64, 8, 2)
    elif dim <= 64 and max_rows <= 2048:
        tiling = PagedPrefillTiling(64, 128, 4, 2)
    else:
        tiling = PagedPrefillTiling(64, 64, 4, 3)
    programs = kv_heads * -(-total_rows // tiling.rows)
    splits = max(min(2 * num_multiprocessors // programs, MAX_SPLITS), 1)
    return replace(tiling, splits=splits)


def paged_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_seq: int,
    num_seqs: int,
    max_query_len: int,
    num_tokens: int,
    block_size: int,
    scoring: AttentionScoring,
    tiling: PagedPrefillTiling,
    split_counters: torch.Tensor,
    gate: OutputGate | None = None,
) -> None:
    """Attend for sequences first_seq to first_seq + num_seqs - 1 of the step.

    Each has at most `max_query_len` new positions, all together have `num_tokens`. q and out are
    [tokens, heads, dim]: the tokens from query_start_loc[i] to query_start_loc[i + 1] are the last
    positions of sequence i, which has seq_lens[i]. A padding sequence has length 0; its tokens get
    zeros. `gate` multiplies the result.

    split_counters: zeros, and zeros again afterwards. No kernel that runs at the same time may use
    them. block_tables, query_start_loc and seq_lens are read before earlier kernels have ended, so
    the kernel that wrote them must be one that is never overtaken.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    heads_per_kv_head = heads // kv_heads
    tiles_per_seq = -(-max_query_len * heads_per_kv_head // tiling.rows)
    tiles_by_tokens = num_tokens * heads_per_kv_head // tiling.rows + num_seqs
    tiles = min(tiles_per_seq * num_seqs, tiles_by_tokens)
    split_bytes = kv_heads * tiles * tiling.rows * (dim + 1) * 4  # of one split of every tile
    splits = 1
    if kv_heads * tiles <= split_counters.numel():
        splits = min(tiling.splits, max(MAX_SCRATCH_BYTES // split_bytes, 1))
    scratch = q
    if splits > 1:
        scratch_size = splits * split_bytes // 4
        scratch = torch.empty(scratch_size, dtype=torch.float32, device=q.device)
    cache_scales = kv_cache_scales(cache)
    paged_prefill_kernel[(kv_heads, tiles, splits)](
        q,
        as_kernel_input(cache),
        q if cache_scales is None else cache_scales,
        out,
        block_tables,
        query_start_loc,
        seq_lens,
        q if scoring.slopes is None else scoring.slopes,
        q if scoring.sinks is None else scoring.sinks,
        q if gate is None else gate.values,
        scratch,
        split_counters,
        cache.stride(0),
        cache.shape[1],
        block_tables.stride(0),
        0 if gate is None else gate.values.stride(0),
        first_seq,
        num_seqs,
        scoring.scale * LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_POW2=max(16, next_power_of_2(dim)),
        BLOCK=block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        WINDOW=scoring.window or 0,
        CHUNK=scoring.chunk or 0,
        SOFTCAP=scoring.softcap or 0.0,
        ALIBI=scoring.slopes is not None,
        SINKS=scoring.sinks is not None,
        GATE="" if gate is None else gate.activation,
        GATE_DIM=1 if gate is None else gate.values.shape[1] // heads,
        QUANTIZED=cache_scales is not None,
        SEQS_POW2=round_up_num_seqs(num_seqs),
        STAGES=tiling.stages,
        SPLIT=splits > 1,
        MIN_TILES=tiling.min_tiles,
        num_warps=tiling.warps,
        **pdl_options(q.device),
    )


def round_up_num_seqs(num_seqs: int) -> int:
    """Round up to one of a few sizes, because the kernel is compiled for each of them."""
    return 16 if num_seqs <= 16 else max(64, next_power_of_2(num_seqs))


@jit(
    do_not_specialize=[
        "block_tables",
        "query_start_loc",
        "seq_lens",
        "table_width",
        "first_seq",
        "num_seqs",
    ]
)
def paged_prefill_kernel(
    q,  # [tokens, HEADS, DIM]
    cache,  # [2, num_slots, KV_HEADS, DIM]
    cache_scales,  # [2, num_slots, KV_HEADS] if QUANTIZED
    out,  # [tokens, HEADS, DIM]
    block_tables,  # [sequences, table_width]
    query_start_loc,  # [sequences + 1]
    seq_lens,  # [sequences]
    slopes,  # [HEADS] if ALIBI
    sinks,  # [HEADS] if SINKS
    gate,  # [tokens, HEADS * GATE_DIM] if GATE, rows `gate_stride` apart
    scratch,  # for each tile of rows: results [splits, ROWS, DIM], then log-sums [splits, ROWS]
    split_counters,  # [tiles, KV_HEADS]
    value_offset,  # elements from a key to its value in the cache
    num_slots,
    table_width,
    gate_stride,
    first_seq,
    num_seqs,
    scale,  # of q . k, times log2(e)
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    GATE: tl.constexpr,
    GATE_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SEQS_POW2: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program attends for ROWS queries of one KV head over one split of their keys.

    Tiles of keys fall into three ranges: [first, first_full) where window or chunk mask some keys,
    [first_full, first_causal) that every row sees completely, and [first_causal, last) on the
    diagonal.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    HEADS_PER_KV_HEAD: tl.constexpr = HEADS // KV_HEADS
    LIMITED: tl.constexpr = WINDOW > 0 or CHUNK > 0
    index, first_row = find_sequence(
        query_start_loc + first_seq,
        tl.program_id(1),
        num_seqs,
        HEADS_PER_KV_HEAD,
        ROWS,
        SEQS_POW2,
    )
    is_unused = index >= num_seqs
    sequence = first_seq + tl.minimum(index, num_seqs - 1)
    query_start = tl.load(query_start_loc + sequence, cache_modifier=".cg").to(tl.int32)
    query_end = tl.load(query_start_loc + sequence + 1, cache_modifier=".cg").to(tl.int32)
    query_len = query_end - query_start
    end = tl.load(seq_lens + sequence, cache_modifier=".cg").to(tl.int32)
    # Positions of the first and the last row. A padding sequence would have negative ones.
    context_len = end - query_len
    low = tl.maximum(context_len + first_row // HEADS_PER_KV_HEAD, 0)
    last_row_position = context_len + (first_row + ROWS - 1) // HEADS_PER_KV_HEAD
    high = tl.maximum(tl.minimum(last_row_position, end - 1), 0)
    first = 0
    first_causal = (low + 1) // TILE
    last = high // TILE + 1
    first_full = first
    lowest = first_visible(low, WINDOW, CHUNK)
    if LIMITED:
        first = lowest // TILE
        full_start = tl.cdiv(first_visible(high, WINDOW, CHUNK), TILE)
        first_full = tl.minimum(full_start, first_causal)
    used_splits = 1
    if SPLIT:
        tiles_per_split = tl.maximum(tl.cdiv(last - first, tl.num_programs(2)), MIN_TILES)
        used_splits = tl.maximum(tl.cdiv(last - first, tiles_per_split), 1)
        is_unused = is_unused | (split >= used_splits)
        first = first + split * tiles_per_split
        last = tl.minimum(first + tiles_per_split, last)
        first_full = tl.minimum(tl.maximum(first_full, first), last)
        first_causal = tl.minimum(tl.maximum(first_causal, first), last)
    r = first_row + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_POW2)
    q_position = end - query_len + r // HEADS_PER_KV_HEAD
    head = kv_head * HEADS_PER_KV_HEAD + r % HEADS_PER_KV_HEAD
    valid = (r < query_len * HEADS_PER_KV_HEAD)[:, None] & (d < DIM)[None, :]
    token = (query_start + r // HEADS_PER_KV_HEAD).to(tl.int64)
    offset = (token * HEADS + head)[:, None] * DIM + d[None, :]
    block_table = block_tables + sequence.to(tl.int64) * table_width
    nonzero_end = tl.maximum(end, 1)
    full_block_ids = load_block_ids(block_table, first_full * TILE, nonzero_end, BLOCK, TILE, True)
    causal_block_ids = load_block_ids(
        block_table, first_causal * TILE, nonzero_end, BLOCK, TILE, True
    )
    wait_for_previous(PDL)
    if is_unused:
        return
    if end == 0:
        tl.store(out + offset, tl.zeros([ROWS, DIM_POW2], out.dtype.element_ty), mask=valid)
        return
    queries = tl.load(q + offset, mask=valid, other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head) * 1.4426950408889634
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_POW2], tl.float32)
    if SINKS:
        row_max, row_sum = start_with_sinks(row_max, row_sum, sinks + head, r >= 0, split == 0)
    if LIMITED:
        window_block_ids = load_block_ids(block_table, first * TILE, end, BLOCK, TILE, False)
        row_max, row_sum, acc = attend_tiles(
            queries,
            row_max,
            row_sum,
            acc,
            first,
            first_full,
            window_block_ids,
            q_position,
            lowest,
            end,
            cache,
            cache_scales,
            value_offset,
            num_slots,
            block_table,
            kv_head,
            slope,
            scale,
            KV_HEADS,
            DIM,
            DIM_POW2,
            BLOCK,
            TILE,
            WINDOW,
            CHUNK,
            SOFTCAP,
            ALIBI,
            True,
            QUANTIZED,
            STAGES,
        )
    row_max, row_sum, acc = attend_tiles(
        queries,
        row_max,
        row_sum,
        acc,
        first_full,
        first_causal,
        full_block_ids,
        q_position,
        lowest,
        end,
        cache,
        cache_scales,
        value_offset,
        num_slots,
        block_table,
        kv_head,
        slope,
        scale,
        KV_HEADS,
        DIM,
        DIM_POW2,
        BLOCK,
        TILE,
        WINDOW,
        CHUNK,
        SOFTCAP,
        ALIBI,
        False,
        QUANTIZED,
        STAGES,
    )
    row_max, row_sum, acc = attend_tiles(
        queries,
        row_max,
        row_sum,
        acc,
        first_causal,
        last,
        causal_block_ids,
        q_position,
        lowest,
        end,
        cache,
        cache_scales,
        value_offset,
        num_slots,
        block_table,
        kv_head,
        slope,
        scale,
        KV_HEADS,
        DIM,
        DIM_POW2,
        BLOCK,
        TILE,
        WINDOW,
        CHUNK,
        SOFTCAP,
        ALIBI,
        True,
        QUANTIZED,
        STAGES,
    )
    y = acc / tl.maximum(row_sum, 1e-30)[:, None]  # in one split, a row may see no key at all
    if SPLIT:
        group = tl.program_id(1) * KV_HEADS + kv_head
        group_scratch = scratch + group.to(tl.int64) * (tl.num_programs(2) * ROWS * (DIM + 1))
        log_sum = tl.where(row_sum > 0, row_max + tl.log2(row_sum), -1e30)
        y, is_last = combine_prefill_splits(
            y,
            log_sum,
            group_scratch,
            split_counters + group,
            split,
            used_splits,
            ROWS,
            DIM,
            DIM_POW2,
        )
        if not is_last:
            return
    if GATE != "":
        gate_column = head[:, None] * GATE_DIM + tl.minimum(d, GATE_DIM - 1)[None, :]
        y = y * gate_factors(gate + token[:, None] * gate_stride + gate_column, valid, GATE)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=valid)


@jit
def combine_prefill_splits(
    y,
    log_sum,
    scratch,
    counter,
    split,
    used_splits,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
):
    """Store the result of this split; the last of `used_splits` programs combines all of them.

    Returns the combined result and whether this program is the last one. For other programs the
    result has no meaning. scratch: results [splits, ROWS, DIM], then log-sums [splits, ROWS].
    """
    is_last = used_splits == 1
    if used_splits > 1:
        i = tl.arange(0, ROWS)
        d = tl.arange(0, DIM_POW2)
        offset = i[:, None] * DIM + d[None, :]
        in_head = (d < DIM)[None, :]
        log_sums = scratch + tl.num_programs(2) * ROWS * DIM
        tl.store(scratch + split * (ROWS * DIM) + offset, y, mask=in_head)
        tl.store(log_sums + split * ROWS + i, log_sum)
        tl.debug_barrier()  # all threads have stored before one of them counts
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == used_splits - 1
        if is_last:
            tl.store(counter, 0)
            row_max = tl.full([ROWS], -1e30, tl.float32)
            row_sum = tl.zeros([ROWS], tl.float32)
            y = tl.zeros([ROWS, DIM_POW2], tl.float32)
            for part in range(used_splits):
                part_log_sum = tl.load(log_sums + part * ROWS + i, cache_modifier=".cg")
                part_y = tl.load(
                    scratch + part * (ROWS * DIM) + offset,
                    mask=in_head,
                    other=0.0,
                    cache_modifier=".cg",
                )
                new_max = tl.maximum(row_max, part_log_sum)
                decay = tl.exp2(row_max - new_max)
                weight = tl.where(part_log_sum > -1e30, tl.exp2(part_log_sum - new_max), 0.0)
                y = y * decay[:, None] + part_y * weight[:, None]
                row_max = new_max
                row_sum = row_sum * decay + weight
            y = y / row_sum[:, None]
    return y, is_last


@jit
def find_sequence(
    query_start_loc,
    tile,
    num_seqs,
    HEADS_PER_KV_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    SEQS_POW2: tl.constexpr,
):
    """Return the sequence of a tile and the tile's first row; `num_seqs` if there is no such tile.

    The tiles of a sequence are taken from the end: rows that see most keys come first.
    """
    i = tl.arange(0, SEQS_POW2)
    query_end = tl.load(query_start_loc + 1 + i, mask=i < num_seqs, other=0, cache_modifier=".cg")
    query_start = tl.load(query_start_loc + i, mask=i < num_seqs, other=0, cache_modifier=".cg")
    query_len = (query_end - query_start).to(tl.int32)
    tiles = (query_len * HEADS_PER_KV_HEAD + ROWS - 1) // ROWS
    last_tiles = tl.cumsum(tiles, 0)
    index = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    end_tile = tl.sum(tl.where(i <= index, tiles, 0), 0)
    return tl.minimum(index, num_seqs), (end_tile - 1 - tile) * ROWS


@jit
def attend_tiles(
    q,
    row_max,
    row_sum,
    acc,
    first,
    last,
    next_block_ids,
    q_position,
    lowest,
    end,
    cache,
    cache_scales,
    value_offset,
    num_slots,
    block_table,
    kv_head,
    slope,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the tiles of keys from `first` to `last` - 1 to the running softmax of q."""
    n = tl.arange(0, TILE)
    LIMITED: tl.constexpr = WINDOW > 0 or CHUNK > 0
    for t in tl.range(first, last, num_stages=STAGES):
        block_ids = next_block_ids
        next_block_ids = load_block_ids(block_table, (t + 1) * TILE, end, BLOCK, TILE, False)
        k, v = load_kv_tile(
            cache,
            cache_scales,
            value_offset,
            num_slots,
            block_ids,
            t * TILE,
            lowest,
            end,
            kv_head,
            MASK,
            LIMITED,
            QUANTIZED,
            KV_HEADS,
            DIM,
            DIM_POW2,
            BLOCK,
            TILE,
        )
        row_max, row_sum, acc = attend_tile(
            q,
            k,
            v,
            row_max,
            row_sum,
            acc,
            t * TILE + n,
            q_position,
            slope,
            scale,
            WINDOW,
            CHUNK,
            SOFTCAP,
            ALIBI,
            MASK,
        )
    return row_max, row_sum, acc

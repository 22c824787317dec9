"""Decode attention over the paged KV cache: one new position for each sequence.

This kernel is bound by the memory bandwidth of keys and values. One program reads one split of one
sequence's keys and values of one KV head, and serves the query heads that share it. If there are
few sequences, several splits keep the GPU busy; the last program to finish combines their results
in the same launch. The number of programs depends only on the batch size. Each program computes its
range from the sequence length, which only the device needs to know, so the launch can be captured
in a CUDA graph.

attention/triton_paged launches it; kernels/paged_prefill shares its helpers.
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
from bloomery.kernels.output_gate import OutputGate, apply_output_gate_reference, gate_factors
from bloomery.kernels.quantized_kv_cache import (
    as_kernel_input,
    kv_cache_scales,
    read_kv_cache,
    stored_to_float32,
)

LOG2E = 1.4426950408889634
PROGRAMS_PER_MULTIPROCESSOR = 4  # enough to hide the latency of memory
MAX_CHOSEN_SPLITS = 32  # combining more costs more than they gain
MAX_SPLITS = 64  # that the kernel can combine
MAX_EARLY_SEQS = 32  # sequences up to which reading before the wait is faster
# Sequences up to which small kernels overlap (PDL). There, few registers per program help more than
# many tiles in flight.
FEW_SEQS = 4
WIDE_HEAD_DIM = 256  # dimensions of a head above which a program takes fewer rows and tiles


@dataclass(frozen=True)
class AttentionScoring:
    """How q . k becomes a score, before the softmax."""

    scale: float
    window: int | None = None  # a query sees the last `window` positions, itself included
    softcap: float | None = None
    slopes: torch.Tensor | None = None  # [heads] float32: ALiBi's score change per position
    chunk: int | None = None  # a query sees the positions from position // chunk * chunk on
    sinks: torch.Tensor | None = None  # [heads] float32: a score per head that has no value


@dataclass(frozen=True)
class PagedDecodeTiling:
    """How the work is divided among programs and how a program runs."""

    tile: int  # positions that a program reads per iteration
    warps: int
    stages: int  # tiles in flight
    splits: int = 1  # programs that share a sequence's positions, at most
    head_groups: int = 1  # programs that share the query heads of a KV head
    max_unsplit_tiles: int = 2  # a sequence of so few tiles is not split: combining has a cost


def paged_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    block_tables: torch.Tensor,
    block_size: int,
    scoring: AttentionScoring,
    gate: OutputGate | None = None,
) -> torch.Tensor:
    """Compute attention of q [tokens, heads, dim] sequence by sequence.

    Tokens query_start_loc[i] to query_start_loc[i + 1] are the last of the seq_lens[i] positions of
    sequence i.
    """
    out = torch.empty_like(q)
    heads_per_kv_head = q.shape[1] // cache.shape[2]
    for i, seq_len in enumerate(seq_lens):
        tokens = slice(query_start_loc[i], query_start_loc[i + 1])
        query_len = tokens.stop - tokens.start
        position = torch.arange(seq_len, device=q.device)
        block = block_tables[i].long()[position // block_size]
        slots = block * block_size + position % block_size
        k, v = read_kv_cache(cache, slots, torch.float32)
        k = k.repeat_interleave(heads_per_kv_head, 1)
        v = v.repeat_interleave(heads_per_kv_head, 1)
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        distance = position - position[seq_len - query_len :, None]
        if scoring.slopes is not None:
            scores = scores + scoring.slopes[:, None, None] * distance
        visible = distance <= 0
        if scoring.window is not None:
            visible &= distance > -scoring.window
        if scoring.chunk is not None:
            chunk_start = position[seq_len - query_len :, None] // scoring.chunk * scoring.chunk
            visible &= position >= chunk_start
        scores = scores.masked_fill(~visible, -torch.inf)
        if scoring.sinks is not None:
            sink_scores = scoring.sinks[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat((scores, sink_scores), -1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out if gate is None else apply_output_gate_reference(out, *gate)


@lru_cache(maxsize=4096)
def select_decode_tiling(
    batch_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    element_size: int,
    max_seq_len: int,
    num_multiprocessors: int,
) -> PagedDecodeTiling:
    """Choose a tiling for sequences of at most `max_seq_len` positions.

    If programs are few, query heads are spread over head groups, and positions over splits. The
    choices were measured on an H200 (benchmarks/kernels.py tune). No tiling needs more than 80 KiB
    of shared memory, which every supported GPU has.
    """
    tiling = select_narrow_tiling(
        batch_size, heads, kv_heads, dim, element_size, max_seq_len, num_multiprocessors
    )
    if dim <= WIDE_HEAD_DIM:
        return tiling
    # The sums of a wide head take most registers, and its tiles most of the shared memory.
    return replace(tiling, warps=4, stages=min(tiling.stages, 2))


def select_narrow_tiling(
    batch_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    element_size: int,
    max_seq_len: int,
    num_multiprocessors: int,
) -> PagedDecodeTiling:
    """Choose a tiling as if heads had no more than WIDE_HEAD_DIM dimensions."""
    heads_per_kv_head = heads // kv_heads
    few_programs = batch_size * kv_heads < num_multiprocessors
    small_groups = few_programs or element_size == 4 or dim > WIDE_HEAD_DIM
    max_group = 16 if small_groups else 64
    head_groups = -(-heads_per_kv_head // max_group)
    row_bytes = next_power_of_2(dim) * element_size  # of one position
    tile = max(16, min(64, 16384 // row_bytes))
    programs = batch_size * kv_heads * head_groups
    max_tiles = next_power_of_2(-(-max_seq_len // tile))
    fill = max(1, num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // programs)
    splits = min(1 << (fill.bit_length() - 1), max_tiles, MAX_CHOSEN_SPLITS)
    if batch_size <= FEW_SEQS:
        return PagedDecodeTiling(tile, 4, 2, splits, head_groups)
    if heads_per_kv_head > 16:  # bound by arithmetic
        splits = splits if head_groups > 1 else 1
        max_unsplit_tiles = 8 if splits == 2 else 2
        return PagedDecodeTiling(tile, 4, 3, splits, head_groups, max_unsplit_tiles)
    small_tile = max(16, min(tile, 8192 // row_bytes))
    if splits > 1:
        return PagedDecodeTiling(small_tile, 2, 3, splits // 2, head_groups)
    if programs <= 6 * num_multiprocessors:
        # A multiprocessor runs two programs. Halves of long sequences balance better.
        return PagedDecodeTiling(small_tile, 2, 4, min(2, max_tiles), head_groups, 8)
    stages = 3 if tile * row_bytes == 16384 else 4
    return PagedDecodeTiling(tile, 2, stages, 1, head_groups)


def paged_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_decodes: int,
    block_size: int,
    scoring: AttentionScoring,
    tiling: PagedDecodeTiling,
    split_counters: torch.Tensor,
    early: bool = False,
    gate: OutputGate | None = None,
) -> None:
    """Attend for the first `num_decodes` tokens of q and out [tokens, heads, dim].

    A padding row has sequence length 0; its token is not written.

    split_counters: zeros, and zeros again afterwards; one for each sequence and head group if there
    are splits.
    early: read keys and values before earlier kernels have ended. The layout (block tables,
    sequence lengths, slots) must then be older than the chain of overlapping kernels that contains
    this one, and slot_mapping must name every slot that the chain writes.
    gate: multiplies the result.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    group_size = -(-heads // kv_heads // tiling.head_groups)
    dim_pow2 = max(16, next_power_of_2(dim))
    group_pow2 = next_power_of_2(group_size)
    splits = tiling.splits
    scratch = out
    if splits > 1:
        num_groups = num_decodes * kv_heads * tiling.head_groups
        if splits > MAX_SPLITS or num_groups > split_counters.numel():
            raise ValueError(
                f"{num_decodes} sequences with {kv_heads} KV heads are too many for {splits} splits"
            )
        scratch_size = num_decodes * heads * splits * (dim + 1)
        scratch = torch.empty(scratch_size, dtype=torch.float32, device=q.device)
    reads_early = (
        early and num_decodes <= MAX_EARLY_SEQS and splits > 1 and tiling.tile <= block_size
    )
    cache_scales = kv_cache_scales(cache)
    paged_decode_kernel[(kv_heads * tiling.head_groups, num_decodes, splits)](
        q,
        as_kernel_input(cache),
        q if cache_scales is None else cache_scales,
        out,
        block_tables,
        seq_lens,
        slot_mapping,
        q if scoring.slopes is None else scoring.slopes,
        q if scoring.sinks is None else scoring.sinks,
        q if gate is None else gate.values,
        scratch,
        split_counters,
        cache.stride(0),
        cache.shape[1],
        block_tables.stride(0),
        0 if gate is None else gate.values.stride(0),
        scoring.scale * LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_POW2=dim_pow2,
        HEAD_GROUPS=tiling.head_groups,
        GROUP_SIZE=group_size,
        GROUP_POW2=group_pow2,
        BLOCK=block_size,
        TILE=tiling.tile,
        WINDOW=scoring.window or 0,
        CHUNK=scoring.chunk or 0,
        SOFTCAP=scoring.softcap or 0.0,
        ALIBI=scoring.slopes is not None,
        SINKS=scoring.sinks is not None,
        GATE="" if gate is None else gate.activation,
        GATE_DIM=1 if gate is None else gate.values.shape[1] // heads,
        SPLIT=splits > 1,
        MAX_UNSPLIT_TILES=tiling.max_unsplit_tiles,
        MAX_SPLITS=MAX_SPLITS,
        SPLITS_AT_ONCE=min(MAX_SPLITS, max(1, 2048 * tiling.warps // (group_pow2 * dim_pow2))),
        EARLY_SEQS=MAX_EARLY_SEQS if reads_early else 0,
        QUANTIZED=cache_scales is not None,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **pdl_options(q.device),
    )


@jit(do_not_specialize=["block_tables", "seq_lens", "slot_mapping", "table_width"])
def paged_decode_kernel(
    q,  # [tokens, HEADS, DIM]
    cache,  # [2, num_slots, KV_HEADS, DIM]
    cache_scales,  # [2, num_slots, KV_HEADS] if QUANTIZED
    out,  # [tokens, HEADS, DIM]
    block_tables,  # [sequences, table_width]
    seq_lens,  # [sequences]
    slot_mapping,  # [sequences]
    slopes,  # [HEADS] if ALIBI
    sinks,  # [HEADS] if SINKS
    gate,  # [tokens, HEADS * GATE_DIM] if GATE, rows `gate_stride` apart
    scratch,  # results [sequences, HEADS, splits, DIM], then log-sums [sequences, HEADS, splits]
    split_counters,  # [sequences, KV_HEADS * HEAD_GROUPS]
    value_offset,  # elements from a key to its value in the cache
    num_slots,
    table_width,
    gate_stride,
    scale,  # of q . k, times log2(e)
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    HEAD_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    GATE: tl.constexpr,
    GATE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_UNSPLIT_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    EARLY_SEQS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program attends for one head group of one sequence over one split of its positions."""
    launch_dependents(PDL)
    if EARLY_SEQS == 0:
        wait_for_previous(PDL)
    group = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = group // HEAD_GROUPS
    head_group = group % HEAD_GROUPS
    ROWS: tl.constexpr = GROUP_POW2 if GROUP_POW2 > 16 else 16  # tl.dot needs 16 at least
    LIMITED: tl.constexpr = WINDOW > 0 or CHUNK > 0
    g = tl.arange(0, ROWS)
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_POW2)
    head = kv_head * (HEADS // KV_HEADS) + head_group * GROUP_SIZE + g
    is_head = (g < GROUP_SIZE) & (head_group * GROUP_SIZE + g < HEADS // KV_HEADS)
    block_table = block_tables + sequence.to(tl.int64) * table_width
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    end = tl.maximum(seq_len, 1)
    first = 0
    last = tl.cdiv(end, TILE)
    used_splits = 1
    lowest = first_visible(end - 1, WINDOW, CHUNK)
    if LIMITED:
        first = lowest // TILE
    if SPLIT:
        count = last - first
        tiles_per_split = tl.where(
            count <= MAX_UNSPLIT_TILES, count, tl.cdiv(count, tl.num_programs(2))
        )
        used_splits = tl.cdiv(count, tiles_per_split)
        first = first + split * tiles_per_split
        last = tl.minimum(first + tiles_per_split, last)
    if EARLY_SEQS > 0:
        # The first tile is read while earlier kernels still compute the query. If its block holds a
        # slot that this step writes, it is read again below.
        early_start = tl.minimum(first, last - 1) * TILE
        block_ids = load_block_ids(block_table, early_start, end, BLOCK, TILE, False)
        k, v = load_kv_tile(
            cache,
            cache_scales,
            value_offset,
            num_slots,
            block_ids,
            early_start,
            lowest,
            end,
            kv_head,
            True,
            LIMITED,
            QUANTIZED,
            KV_HEADS,
            DIM,
            DIM_POW2,
            BLOCK,
            TILE,
        )
        i = tl.arange(0, EARLY_SEQS)
        written = tl.load(slot_mapping + i, mask=i < tl.num_programs(1), other=-BLOCK) // BLOCK
        early_block = tl.load(block_table + early_start // BLOCK)
        is_stale = tl.max((written == early_block).to(tl.int32), 0) > 0
        wait_for_previous(PDL)
    if (split >= used_splits) | (seq_len == 0):
        return
    valid = is_head[:, None] & (d < DIM)[None, :]
    offset = (sequence * HEADS + head)[:, None] * DIM + d[None, :]
    queries = tl.load(q + offset, mask=valid, other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=is_head, other=0.0) * 1.4426950408889634
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_POW2], tl.float32)
    if SINKS:
        row_max, row_sum = start_with_sinks(row_max, row_sum, sinks + head, is_head, split == 0)
    q_position = g * 0 + (end - 1)
    if EARLY_SEQS > 0:
        if is_stale:
            k, v = load_kv_tile(
                cache,
                cache_scales,
                value_offset,
                num_slots,
                block_ids,
                early_start,
                lowest,
                end,
                kv_head,
                True,
                LIMITED,
                QUANTIZED,
                KV_HEADS,
                DIM,
                DIM_POW2,
                BLOCK,
                TILE,
            )
        row_max, row_sum, acc = attend_tile(
            queries,
            k,
            v,
            row_max,
            row_sum,
            acc,
            early_start + n,
            q_position,
            slope,
            scale,
            WINDOW,
            CHUNK,
            SOFTCAP,
            ALIBI,
            True,
        )
        first += 1
    next_block_ids = load_block_ids(block_table, first * TILE, end, BLOCK, TILE, False)
    for t in tl.range(first, last, num_stages=STAGES):
        if STAGES > 2:
            block_ids = next_block_ids
            next_block_ids = load_block_ids(block_table, (t + 1) * TILE, end, BLOCK, TILE, False)
        else:
            block_ids = load_block_ids(block_table, t * TILE, end, BLOCK, TILE, False)
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
            True,
            LIMITED,
            QUANTIZED,
            KV_HEADS,
            DIM,
            DIM_POW2,
            BLOCK,
            TILE,
        )
        row_max, row_sum, acc = attend_tile(
            queries,
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
            True,
        )
    acc = acc / row_sum[:, None]
    if used_splits == 1:
        if GATE != "":
            gate_column = head[:, None] * GATE_DIM + tl.minimum(d, GATE_DIM - 1)[None, :]
            acc = acc * gate_factors(gate + sequence * gate_stride + gate_column, valid, GATE)
        tl.store(out + offset, acc.to(out.dtype.element_ty), mask=valid)
    elif SPLIT:
        splits = tl.num_programs(2)
        row = sequence * HEADS + head
        log_sums = scratch + tl.num_programs(1) * HEADS * splits * DIM
        result_rows = scratch + (row * splits + split)[:, None] * DIM
        tl.store(result_rows + d[None, :], acc, mask=valid)
        tl.store(log_sums + row * splits + split, row_max + tl.log2(row_sum), mask=is_head)
        tl.debug_barrier()  # all threads have stored before one of them counts
        counter = split_counters + sequence * (KV_HEADS * HEAD_GROUPS) + group
        if tl.atomic_add(counter, 1, sem="acq_rel") == used_splits - 1:
            tl.store(counter, 0)
            combine_splits(
                scratch,
                log_sums,
                out,
                gate + sequence * gate_stride + kv_head * (HEADS // KV_HEADS) * GATE_DIM,
                sequence * HEADS + kv_head * (HEADS // KV_HEADS),
                head_group * GROUP_SIZE,
                splits,
                used_splits,
                HEADS // KV_HEADS,
                DIM,
                DIM_POW2,
                GROUP_SIZE,
                GROUP_POW2,
                MAX_SPLITS,
                SPLITS_AT_ONCE,
                GATE,
                GATE_DIM,
            )


@jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@jit
def start_with_sinks(row_max, row_sum, sinks, mask, is_first_split):
    """Return the state of a softmax that has seen the sinks of its rows, in one of the splits."""
    # Finite, because a maximum of -inf would make NaN of a tile without visible keys.
    sink = tl.maximum(tl.load(sinks, mask=mask, other=0.0) * 1.4426950408889634, -1e30)
    row_max = tl.where(is_first_split, sink, row_max)
    row_sum = tl.where(is_first_split, 1.0, row_sum)
    return row_max, row_sum


@jit
def load_block_ids(
    block_table,
    start,
    end,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BEFORE_WAIT: tl.constexpr,
):
    """Load the block ids of a tile of positions from `start` on, a multiple of TILE.

    Positions past `end` get the block of the last one. Callers load block ids one iteration ahead:
    if an address waited for its block id in the same iteration, the compiler would divide the tiles
    in flight between the two loads, and would start to copy a tile only after the one before it.
    """
    position = start
    if TILE > BLOCK:
        position = start + tl.arange(0, TILE)
    entry = block_table + tl.minimum(position, end - 1) // BLOCK
    if BEFORE_WAIT:  # bypass the L1 cache
        return tl.load(entry, cache_modifier=".cg")
    return tl.load(entry)


@jit
def load_kv_tile(
    cache,
    cache_scales,
    value_offset,
    num_slots,
    block_ids,
    start,
    lowest,
    end,
    kv_head,
    MASK: tl.constexpr,
    LIMITED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load keys and values [TILE, dim] of positions from `start` on, in blocks `block_ids`.

    Past `end`, and with LIMITED below `lowest`, keys are arbitrary: the blocks may belong to other
    sequences. With MASK, values there are zero, because a weight of zero would not hide a NaN.
    Loads bypass the L1 cache (.cg), which may hold what was there before the wait.
    """
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_POW2)
    if TILE <= BLOCK:
        slot = block_ids.to(tl.int64) * BLOCK + start % BLOCK + n
    else:
        slot = block_ids.to(tl.int64) * BLOCK + tl.minimum(start + n, end - 1) % BLOCK
    keys = cache + (slot * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
    in_range = start + n < end
    if LIMITED:
        in_range = in_range & (start + n >= lowest)
    is_position = in_range[:, None]
    in_head = (d < DIM)[None, :]
    if DIM < DIM_POW2:
        k = tl.load(keys, mask=in_head, other=0.0, cache_modifier=".cg")
        v = tl.load(
            keys + value_offset, mask=is_position & in_head, other=0.0, cache_modifier=".cg"
        )
    elif MASK:
        k = tl.load(keys, cache_modifier=".cg")
        v = tl.load(keys + value_offset, mask=is_position, other=0.0, cache_modifier=".cg")
    else:
        k = tl.load(keys, cache_modifier=".cg")
        v = tl.load(keys + value_offset, cache_modifier=".cg")
    if QUANTIZED:
        scale = cache_scales + slot * KV_HEADS + kv_head
        k_scale = tl.load(scale, cache_modifier=".cg")
        k = stored_to_float32(k) * k_scale[:, None]
        if MASK:
            v_scale = tl.load(
                scale + num_slots * KV_HEADS, mask=in_range, other=0.0, cache_modifier=".cg"
            )
        else:
            v_scale = tl.load(scale + num_slots * KV_HEADS, cache_modifier=".cg")
        v = stored_to_float32(v) * v_scale[:, None]
    return k, v


@jit
def attend_tile(
    q,
    k,
    v,
    row_max,
    row_sum,
    acc,
    k_position,
    q_position,
    slope,
    scale,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """Add one tile of keys and values to the running softmax of q [rows, dim].

    The state is each row's maximum score, its sum of weights, and acc, the weighted sum of values.
    Exponentials are powers of two: scale and slope include log2(e).
    """
    z = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    factor = scale
    if SOFTCAP > 0:
        # softcap * tanh(y) is 2 * softcap * sigmoid(2 y) - softcap
        TWO_OVER_CAP: tl.constexpr = 2.0 / (SOFTCAP * 1.4426950408889634)
        z = tl.sigmoid(z * (scale * TWO_OVER_CAP)) * (2 * SOFTCAP) - SOFTCAP
        factor = 1.4426950408889634
    if ALIBI:
        distance = (k_position[None, :] - q_position[:, None]).to(tl.float32)
        z = z * factor + slope[:, None] * distance
        factor = 1.0
    if MASK:
        visible = k_position[None, :] <= q_position[:, None]
        if WINDOW > 0:
            visible = visible & (k_position[None, :] > q_position[:, None] - WINDOW)
        if CHUNK > 0:
            visible = visible & (k_position[None, :] >= (q_position // CHUNK * CHUNK)[:, None])
        z = tl.where(visible, z, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(z, 1) * factor)
    weights = tl.exp2(z * factor - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum * decay + tl.sum(weights, 1), acc


@jit
def combine_splits(
    scratch,
    log_sums,
    out,
    gate,
    first_row,
    first_head,
    splits,
    used_splits,
    HEADS_PER_KV_HEAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    GATE: tl.constexpr,
    GATE_DIM: tl.constexpr,
):
    """Combine the results of all splits for GROUP_SIZE heads, SPLITS_AT_ONCE splits at a time.

    first_row: the row of the KV head's first query head; first_head: the group's first among them.
    gate: of the KV head's first query head.
    """
    g = tl.arange(0, GROUP_POW2)
    d = tl.arange(0, DIM_POW2)
    all_splits = tl.arange(0, MAX_SPLITS)[None, :]
    is_head = (g < GROUP_SIZE) & (first_head + g < HEADS_PER_KV_HEAD)
    row = first_row + first_head + g
    split_log_sums = tl.load(
        log_sums + row[:, None] * splits + all_splits,
        mask=(all_splits < used_splits) & is_head[:, None],
        other=-float("inf"),
        cache_modifier=".cg",
    )
    row_max = tl.max(split_log_sums, 1)
    total_log_sum = row_max + tl.log2(tl.sum(tl.exp2(split_log_sums - row_max[:, None]), 1))
    acc = tl.zeros([GROUP_POW2, DIM_POW2], tl.float32)
    for start in range(0, used_splits, SPLITS_AT_ONCE):
        split = start + tl.arange(0, SPLITS_AT_ONCE)[None, :]
        place = row[:, None] * splits + split
        is_used = (split < used_splits) & is_head[:, None]
        result = tl.load(
            scratch + place[:, :, None] * DIM + d[None, None, :],
            mask=is_used[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        log_sum = tl.load(log_sums + place, mask=is_used, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(log_sum - total_log_sum[:, None])
        acc += tl.sum(result * weight[:, :, None], 1)
    valid = is_head[:, None] & (d < DIM)[None, :]
    if GATE != "":
        gate_column = (first_head + g)[:, None] * GATE_DIM + tl.minimum(d, GATE_DIM - 1)[None, :]
        acc = acc * gate_factors(gate + gate_column, valid, GATE)
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=valid)

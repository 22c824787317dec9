"""Attention of one new position a sequence over the paged cache: bound by how fast keys and values can be read.

One program reads one split of one sequence's keys and values for one key head, and serves the query heads that share
it. Where sequences are few, several splits keep the device busy; the last to finish puts the results together in the
same launch. How many programs there are is known from the batch alone; each finds its range from the sequence's length,
which only the device needs to know: so the launch can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from bloomery.kernels.launch import begin, jit, overlap, power_of_two, tl, wait
from bloomery.kernels.rounded_cache import bits, plain, read, scales

LOG2E = 1.4426950408889634
PROGRAMS = 4  # a processor should have so many to hide latency
# putting more together costs more than they gain; what the kernel can take
USUAL_SPLITS = 32
MOST_SPLITS = 64
EARLY = 32  # sequences up to which reading early pays
FEW = 4  # sequences up to which small kernels overtake one another: there a lean program is worth more than tiles ahead


@dataclass(frozen=True)
class Scoring:
    """What becomes of q . k before the softmax."""

    scale: float
    window: int | None = None  # a query sees the last `window` positions, itself included
    softcap: float | None = None
    slopes: torch.Tensor | None = None  # [heads] float32, what a position of distance costs: ALiBi


@dataclass(frozen=True)
class Tiling:
    """How the work is cut and how a program runs."""

    tile: int  # positions read at once
    warps: int
    stages: int  # tiles in flight
    splits: int = 1  # programs that share a sequence's positions, at most
    parts: int = 1  # programs that share a key head's queries
    direct: int = (
        2  # tiles up to which one program takes them all: putting splits together has its price
    )


def attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    starts: list[int],
    ends: list[int],
    tables: torch.Tensor,
    block_size: int,
    scoring: Scoring,
) -> torch.Tensor:
    """q [tokens, heads, dim]: sequence i has tokens starts[i] to starts[i + 1], the last of its ends[i] positions."""
    out = torch.empty_like(q)
    for i, end in enumerate(ends):
        new = slice(starts[i], starts[i + 1])
        place = torch.arange(end, device=q.device)
        slots = tables[i].long()[place // block_size] * block_size + place % block_size
        share = q.shape[1] // cache.shape[2]
        k, v = (half.repeat_interleave(share, 1) for half in read(cache, slots, torch.float32))
        scores = torch.einsum("qhd,khd->hqk", q[new].float(), k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        distance = place - place[end - (new.stop - new.start) :, None]
        if scoring.slopes is not None:
            scores = scores + scoring.slopes[:, None, None] * distance
        seen = (
            distance <= 0
            if scoring.window is None
            else (distance <= 0) & (distance > -scoring.window)
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[new] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


@lru_cache(maxsize=4096)
def tiling(
    batch: int, heads: int, kv_heads: int, dim: int, item: int, positions: int, processors: int
) -> Tiling:
    """For sequences of at most `positions`, of numbers of `item` bytes. Few programs: queries apart, and splits.
    Measured (benchmarks/kernels.py tune); no cut needs more than 80 KiB to share, which every processor has."""
    share = heads // kv_heads
    few = batch * kv_heads < processors
    parts = -(-share // (16 if few or item == 4 else 64))
    row = power_of_two(dim) * item  # bytes of a position
    tile = max(16, min(64, 16384 // row))
    programs = batch * kv_heads * parts
    tiles = power_of_two(-(-positions // tile))
    fill = max(1, processors * PROGRAMS // programs)
    splits = min(1 << (fill.bit_length() - 1), tiles, USUAL_SPLITS)
    if batch <= FEW:
        return Tiling(tile, 4, 2, splits, parts)
    if share > 16:  # much arithmetic for what is read
        splits = splits if parts > 1 else 1
        return Tiling(tile, 4, 3, splits, parts, direct=8 if splits == 2 else 2)
    half = max(16, min(tile, 8192 // row))
    if splits > 1:
        return Tiling(half, 2, 3, splits // 2, parts)
    if (
        programs <= 6 * processors
    ):  # two run side by side, and halves of long sequences are dealt out more evenly
        return Tiling(half, 2, 4, min(2, tiles), parts, direct=8)
    return Tiling(tile, 2, 3 if tile * row == 16384 else 4, 1, parts)


def paged_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    tables: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    batch: int,
    block_size: int,
    scoring: Scoring,
    cut: Tiling,
    arrived: torch.Tensor,
    early: bool = False,
) -> None:
    """The first `batch` tokens of q and out [tokens, heads, dim], one a sequence, over tables, ends and slots.

    A sequence that ends at 0 is nobody's: its token, if there is one, is left alone.

    arrived: zeros, and zeros again afterwards, one for each sequence and group of heads wherever there are splits.
    early: read before earlier kernels have ended. The layout (tables, ends, slots) must then be older than the chain
    of overlapping kernels this one stands in, and slots must name every place of the cache that the chain writes.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    share = -(-heads // kv_heads // cut.parts)
    dim_up = max(16, power_of_two(dim))
    share_two = power_of_two(share)
    scratch = out
    if cut.splits > 1:
        if cut.splits > MOST_SPLITS or batch * kv_heads * cut.parts > arrived.numel():
            raise ValueError(
                f"{batch} sequences with {kv_heads} key heads are too many for {cut.splits} splits"
            )
        scratch = torch.empty(
            batch * heads * cut.splits * (dim + 1), dtype=torch.float32, device=q.device
        )
    by = scales(cache)
    decode_kernel[(kv_heads * cut.parts, batch, cut.splits)](
        q,
        bits(cache),
        q if by is None else by,
        out,
        tables,
        ends,
        slots,
        q if scoring.slopes is None else scoring.slopes,
        scratch,
        arrived,
        cache.stride(0),
        cache.shape[1],
        tables.stride(0),
        scoring.scale * LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_UP=dim_up,
        PARTS=cut.parts,
        SHARE=share,
        SHARE_TWO=share_two,
        BLOCK=block_size,
        TILE=cut.tile,
        WINDOW=scoring.window or 0,
        CAP=scoring.softcap or 0.0,
        ALIBI=scoring.slopes is not None,
        SPLIT=cut.splits > 1,
        DIRECT=cut.direct,
        MOST=MOST_SPLITS,
        CHUNK=min(MOST_SPLITS, max(1, 2048 * cut.warps // (share_two * dim_up))),
        EARLY=EARLY
        if early and batch <= EARLY and cut.splits > 1 and cut.tile <= block_size
        else 0,
        SCALED=by is not None,
        STAGES=cut.stages,
        num_warps=cut.warps,
        **overlap(q.device),
    )


@jit(do_not_specialize=["tables", "ends", "slots", "width"])
def decode_kernel(
    q,
    cache,
    scales,
    out,
    tables,
    ends,
    slots,
    slopes,
    scratch,
    arrived,
    half,
    places,
    width,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    PARTS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SPLIT: tl.constexpr,
    DIRECT: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    if EARLY == 0:
        wait(PDL)
    group = tl.program_id(0)
    b = tl.program_id(1)
    s = tl.program_id(2)
    kv_head = group // PARTS
    part = group % PARTS
    SHARE_UP: tl.constexpr = SHARE_TWO if SHARE_TWO > 16 else 16
    g = tl.arange(0, SHARE_UP)
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_UP)
    head = kv_head * (HEADS // KV_HEADS) + part * SHARE + g
    member = (g < SHARE) & (part * SHARE + g < HEADS // KV_HEADS)
    row = tables + b.to(tl.int64) * width
    length = tl.load(ends + b).to(tl.int32)
    end = tl.maximum(length, 1)
    first = 0
    last = tl.cdiv(end, TILE)
    used = 1
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0) // TILE
    if SPLIT:
        count = last - first
        per = tl.where(count <= DIRECT, count, tl.cdiv(count, tl.num_programs(2)))
        used = tl.cdiv(count, per)
        first = first + s * per
        last = tl.minimum(first + per, last)
    if EARLY > 0:
        # What earlier steps stored is read while the query is still being computed; what this step stores, again below.
        near = tl.minimum(first, last - 1) * TILE
        here = blocks_of(row, near, end, BLOCK, TILE, False)
        k, v = load_tile(
            cache,
            scales,
            half,
            places,
            here,
            near,
            end,
            kv_head,
            True,
            SCALED,
            KV_HEADS,
            DIM,
            DIM_UP,
            BLOCK,
            TILE,
        )
        i = tl.arange(0, EARLY)
        new = tl.load(slots + i, mask=i < tl.num_programs(1), other=-BLOCK) // BLOCK
        stale = tl.max((new == tl.load(row + near // BLOCK)).to(tl.int32), 0) > 0
        wait(PDL)
    if (s >= used) | (length == 0):
        return
    real = member[:, None] & (d < DIM)[None, :]
    place = (b * HEADS + head)[:, None] * DIM + d[None, :]
    queries = tl.load(q + place, mask=real, other=0.0)
    slope = tl.zeros([SHARE_UP], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=member, other=0.0) * 1.4426950408889634
    top = tl.full([SHARE_UP], -1e30, tl.float32)
    total = tl.zeros([SHARE_UP], tl.float32)
    acc = tl.zeros([SHARE_UP, DIM_UP], tl.float32)
    at = g * 0 + (end - 1)
    if EARLY > 0:
        if stale:
            k, v = load_tile(
                cache,
                scales,
                half,
                places,
                here,
                near,
                end,
                kv_head,
                True,
                SCALED,
                KV_HEADS,
                DIM,
                DIM_UP,
                BLOCK,
                TILE,
            )
        top, total, acc = attend(
            queries, k, v, top, total, acc, near + n, at, slope, scale, WINDOW, CAP, ALIBI, True
        )
        first += 1
    ahead = blocks_of(row, first * TILE, end, BLOCK, TILE, False)
    for t in tl.range(first, last, num_stages=STAGES):
        if STAGES > 2:
            here = ahead
            ahead = blocks_of(row, (t + 1) * TILE, end, BLOCK, TILE, False)
        else:
            here = blocks_of(row, t * TILE, end, BLOCK, TILE, False)
        k, v = load_tile(
            cache,
            scales,
            half,
            places,
            here,
            t * TILE,
            end,
            kv_head,
            True,
            SCALED,
            KV_HEADS,
            DIM,
            DIM_UP,
            BLOCK,
            TILE,
        )
        top, total, acc = attend(
            queries, k, v, top, total, acc, t * TILE + n, at, slope, scale, WINDOW, CAP, ALIBI, True
        )
    acc = acc / total[:, None]
    if used == 1:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)
    elif SPLIT:
        splits = tl.num_programs(2)
        line = b * HEADS + head
        sums = scratch + tl.num_programs(1) * HEADS * splits * DIM
        tl.store(scratch + (line * splits + s)[:, None] * DIM + d[None, :], acc, mask=real)
        tl.store(sums + line * splits + s, top + tl.log2(total), mask=member)
        tl.debug_barrier()  # all threads have stored before one of them says so
        counter = arrived + b * (KV_HEADS * PARTS) + group
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)
            combine(
                scratch,
                sums,
                out,
                b * HEADS + kv_head * (HEADS // KV_HEADS),
                part * SHARE,
                splits,
                used,
                HEADS // KV_HEADS,
                DIM,
                DIM_UP,
                SHARE,
                SHARE_TWO,
                MOST,
                CHUNK,
            )


@jit
def blocks_of(row, at, end, BLOCK: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    """The blocks of a tile of positions from `at` on, a multiple of TILE; past `end`, the last one's.

    To be asked a turn ahead: were an address to wait for its block in the same turn, the compiler would share the tiles
    in flight between the two, and start to copy a tile only when the one before it is done with.
    """
    place = at
    if TILE > BLOCK:
        place = at + tl.arange(0, TILE)
    entry = row + tl.minimum(place, end - 1) // BLOCK
    if EARLY:  # before the wait: past the first cache
        return tl.load(entry, cache_modifier=".cg")
    return tl.load(entry)


@jit
def load_tile(
    cache,
    scales,
    half,
    places,
    blocks,
    at,
    end,
    head,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys and values [TILE, dim] of positions from `at` on, in the blocks that blocks_of gave.

    Past `end` keys are anything and, with MASK, values zero: a weight of zero would not hide a NaN. Past the first
    cache (.cg), which may hold what stood here before the wait.
    """
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_UP)
    if TILE <= BLOCK:
        slot = blocks.to(tl.int64) * BLOCK + at % BLOCK + n
    else:
        slot = blocks.to(tl.int64) * BLOCK + tl.minimum(at + n, end - 1) % BLOCK
    keys = cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :]
    live = (at + n < end)[:, None]
    real = (d < DIM)[None, :]
    if DIM < DIM_UP:
        k = tl.load(keys, mask=real, other=0.0, cache_modifier=".cg")
        v = tl.load(keys + half, mask=live & real, other=0.0, cache_modifier=".cg")
    elif MASK:
        k = tl.load(keys, cache_modifier=".cg")
        v = tl.load(keys + half, mask=live, other=0.0, cache_modifier=".cg")
    else:
        k = tl.load(keys, cache_modifier=".cg")
        v = tl.load(keys + half, cache_modifier=".cg")
    if SCALED:
        by = scales + slot * KV_HEADS + head
        k = plain(k) * tl.load(by, cache_modifier=".cg")[:, None]
        v = plain(v) * tl.load(by + places * KV_HEADS, cache_modifier=".cg")[:, None]
    return k, v


@jit
def attend(
    q,
    k,
    v,
    top,
    total,
    acc,
    k_at,
    q_at,
    slope,
    scale,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """One tile into the running softmax of q [rows, dim] at positions q_at: its maximum, its sum, and acc over values.

    In powers of two: scale and slope carry log2(e).
    """
    z = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    factor = scale
    if CAP > 0:
        z = tl.sigmoid(z * (scale * (2.0 / (CAP * 1.4426950408889634)))) * (2 * CAP) - CAP
        factor = 1.4426950408889634
    if ALIBI:
        z = z * factor + slope[:, None] * (k_at[None, :] - q_at[:, None]).to(tl.float32)
        factor = 1.0
    if MASK:
        seen = k_at[None, :] <= q_at[:, None]
        if WINDOW > 0:
            seen = seen & (k_at[None, :] > q_at[:, None] - WINDOW)
        z = tl.where(seen, z, -float("inf"))
    new = tl.maximum(top, tl.max(z, 1) * factor)
    e = tl.exp2(z * factor - new[:, None])
    fade = tl.exp2(top - new)
    acc = tl.dot(e.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new, total * fade + tl.sum(e, 1), acc


@jit
def combine(
    scratch,
    sums,
    out,
    line,
    first,
    splits,
    used,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_TWO: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The results of at most MOST splits for SHARE of the GROUP heads of a key head, CHUNK splits at a time."""
    g = tl.arange(0, SHARE_TWO)
    d = tl.arange(0, DIM_UP)
    every = tl.arange(0, MOST)[None, :]
    member = (g < SHARE) & (first + g < GROUP)
    head = line + first + g
    known = (every < used) & member[:, None]
    each = tl.load(
        sums + head[:, None] * splits + every, mask=known, other=-float("inf"), cache_modifier=".cg"
    )
    top = tl.max(each, 1)
    whole = top + tl.log2(tl.sum(tl.exp2(each - top[:, None]), 1))
    acc = tl.zeros([SHARE_TWO, DIM_UP], tl.float32)
    real = member[:, None] & (d < DIM)[None, :]
    for start in range(0, used, CHUNK):
        i = start + tl.arange(0, CHUNK)[None, :]
        at = head[:, None] * splits + i
        here = (i < used) & member[:, None]
        there = here[:, :, None] & (d < DIM)[None, None, :]
        x = tl.load(
            scratch + at[:, :, None] * DIM + d[None, None, :],
            mask=there,
            other=0.0,
            cache_modifier=".cg",
        )
        z = tl.load(sums + at, mask=here, other=-float("inf"), cache_modifier=".cg")
        acc += tl.sum(x * tl.exp2(z - whole[:, None])[:, :, None], 1)
    tl.store(out + head[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=real)

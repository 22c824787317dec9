"""Attention of many new positions a sequence over the paged cache, which holds them and all before them already.

One program takes a tile of rows: the queries of one key head, position by position and, within a position, head by
head, so that heads that share keys share their reading. It runs over tiles of keys, from the window's edge or the
beginning to the diagonal; only tiles that some row does not see whole are masked. Where the host does not know how long
the sequences are, there are as many programs as their tiles can be at most, and each finds its own. Where those are too
few for the device, as with a question behind a long conversation, several share a tile of rows, each a stretch of its
keys, and the last to finish adds up what they found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from bloomery.kernels.launch import begin, jit, overlap, power_of_two, tl, wait
from bloomery.kernels.paged_decode import LOG2E, Scoring, attend, blocks_of, load_tile
from bloomery.kernels.rounded_cache import bits, scales

MOST_SPLITS = 8
SCRATCH = 48 << 20  # bytes that programs who share tiles may leave for each other


@dataclass(frozen=True)
class Tiling:
    rows: int  # of queries held
    tile: int  # of positions read at once
    warps: int
    stages: int  # tiles in flight
    splits: int = 1  # programs that share a tile of rows, at most
    least: int = 4  # tiles of keys for each of them, or fewer share


@lru_cache(maxsize=1024)
def tiling(rows: int, every: int, dim: int, item: int, kv_heads: int, processors: int) -> Tiling:
    """For sequences of at most `rows` rows and `every` row of all, of numbers of `item` bytes; measured
    (benchmarks/LOG.md). A processor runs two programs: beyond them sharing costs more than it gives."""
    if item == 4:
        cut = Tiling(16, 16, 8, 2) if dim > 128 else Tiling(16 if rows <= 16 else 32, 32, 8, 2)
    elif dim > 128:
        cut = Tiling(64, 32, 4, 2) if rows <= 64 else Tiling(128, 64, 8, 2)
    else:
        cut = Tiling(64, 128, 4, 2) if dim <= 64 and rows <= 2048 else Tiling(64, 64, 4, 3)
    programs = kv_heads * -(-every // cut.rows)
    return replace(cut, splits=max(min(2 * processors // programs, MOST_SPLITS), 1))


def paged_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    first: int,
    count: int,
    longest: int,
    tokens: int,
    block_size: int,
    scoring: Scoring,
    cut: Tiling,
    arrived: torch.Tensor,
) -> None:
    """Sequences `first` to `first + count` of the step, of at most `longest` new positions each and `tokens` in all.

    q and out [tokens, heads, dim]: sequence i has tokens starts[i] to starts[i + 1], the last ones of its ends[i].
    Tokens of a sequence that ends at 0 are nobody's, and get zeros.

    arrived: zeros, and zeros again afterwards, which no kernel that runs at the same time counts in.
    tables, starts and ends are read before earlier kernels have ended: whoever wrote them must not be overtaken.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    share = heads // kv_heads
    by = scales(cache)
    tiles = min(-(-longest * share // cut.rows) * count, tokens * share // cut.rows + count)
    part = kv_heads * tiles * cut.rows * (dim + 1) * 4  # bytes, of one program a tile
    splits = min(cut.splits, max(SCRATCH // part, 1)) if kv_heads * tiles <= arrived.numel() else 1
    scratch = q
    if splits > 1:
        scratch = torch.empty(splits * part // 4, dtype=torch.float32, device=q.device)
    prefill_kernel[(kv_heads, tiles, splits)](
        q,
        bits(cache),
        q if by is None else by,
        out,
        tables,
        starts,
        ends,
        q if scoring.slopes is None else scoring.slopes,
        scratch,
        arrived,
        cache.stride(0),
        cache.shape[1],
        tables.stride(0),
        first,
        count,
        scoring.scale * LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_UP=max(16, power_of_two(dim)),
        BLOCK=block_size,
        ROWS=cut.rows,
        TILE=cut.tile,
        WINDOW=scoring.window or 0,
        CAP=scoring.softcap or 0.0,
        ALIBI=scoring.slopes is not None,
        SCALED=by is not None,
        COUNT_UP=counted(count),
        STAGES=cut.stages,
        SPLIT=splits > 1,
        LEAST=cut.least,
        num_warps=cut.warps,
        **overlap(q.device),
    )


def counted(sequences: int) -> int:
    """How many a program looks through for its own: few sizes, for each is a kernel."""
    return 16 if sequences <= 16 else max(64, power_of_two(sequences))


@jit(do_not_specialize=["tables", "starts", "ends", "width", "first", "count"])
def prefill_kernel(
    q,
    cache,
    scales,
    out,
    tables,
    starts,
    ends,
    slopes,
    scratch,
    arrived,
    half,
    places,
    width,
    first,
    count,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT_UP: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    kv_head = tl.program_id(0)
    s = tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    which, begins = found(starts + first, tl.program_id(1), count, SHARE, ROWS, COUNT_UP)
    nobody = which >= count
    sequence = first + tl.minimum(which, count - 1)
    start = tl.load(starts + sequence, cache_modifier=".cg").to(tl.int32)
    count = tl.load(starts + sequence + 1, cache_modifier=".cg").to(tl.int32) - start
    end = tl.load(ends + sequence, cache_modifier=".cg").to(tl.int32)
    low = tl.maximum(end - count + begins // SHARE, 0)  # below it, nobody's
    high = tl.maximum(tl.minimum(end - count + (begins + ROWS - 1) // SHARE, end - 1), 0)
    tile = 0
    whole = (low + 1) // TILE
    last = high // TILE + 1
    seen = tile
    if WINDOW > 0:
        tile = tl.maximum(low - WINDOW + 1, 0) // TILE
        seen = tl.minimum(tl.cdiv(tl.maximum(high - WINDOW + 1, 0), TILE), whole)
    used = 1
    if SPLIT:
        per = tl.maximum(tl.cdiv(last - tile, tl.num_programs(2)), LEAST)
        used = tl.maximum(tl.cdiv(last - tile, per), 1)
        nobody = nobody | (s >= used)
        tile = tile + s * per
        last = tl.minimum(tile + per, last)
        seen = tl.minimum(tl.maximum(seen, tile), last)
        whole = tl.minimum(tl.maximum(whole, tile), last)
    r = begins + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_UP)
    at = end - count + r // SHARE  # positions of the rows
    head = kv_head * SHARE + r % SHARE
    real = (r < count * SHARE)[:, None] & (d < DIM)[None, :]
    place = ((start + r // SHARE).to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    row = tables + sequence.to(tl.int64) * width
    past = tl.maximum(end, 1)
    at_seen = blocks_of(row, seen * TILE, past, BLOCK, TILE, True)
    at_whole = blocks_of(row, whole * TILE, past, BLOCK, TILE, True)
    wait(PDL)
    if nobody:
        return
    if end == 0:
        tl.store(out + place, tl.zeros([ROWS, DIM_UP], out.dtype.element_ty), mask=real)
        return
    queries = tl.load(q + place, mask=real, other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head) * 1.4426950408889634
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_UP], tl.float32)
    if WINDOW > 0:
        at_first = blocks_of(row, tile * TILE, end, BLOCK, TILE, False)
        top, total, acc = over_tiles(
            queries,
            top,
            total,
            acc,
            tile,
            seen,
            at_first,
            at,
            end,
            cache,
            scales,
            half,
            places,
            row,
            kv_head,
            slope,
            scale,
            KV_HEADS,
            DIM,
            DIM_UP,
            BLOCK,
            TILE,
            WINDOW,
            CAP,
            ALIBI,
            True,
            SCALED,
            STAGES,
        )
    top, total, acc = over_tiles(
        queries,
        top,
        total,
        acc,
        seen,
        whole,
        at_seen,
        at,
        end,
        cache,
        scales,
        half,
        places,
        row,
        kv_head,
        slope,
        scale,
        KV_HEADS,
        DIM,
        DIM_UP,
        BLOCK,
        TILE,
        WINDOW,
        CAP,
        ALIBI,
        False,
        SCALED,
        STAGES,
    )
    top, total, acc = over_tiles(
        queries,
        top,
        total,
        acc,
        whole,
        last,
        at_whole,
        at,
        end,
        cache,
        scales,
        half,
        places,
        row,
        kv_head,
        slope,
        scale,
        KV_HEADS,
        DIM,
        DIM_UP,
        BLOCK,
        TILE,
        WINDOW,
        CAP,
        ALIBI,
        True,
        SCALED,
        STAGES,
    )
    y = acc / tl.maximum(total, 1e-30)[:, None]  # of a stretch, rows may see nothing
    if SPLIT:
        group = tl.program_id(1) * KV_HEADS + kv_head
        parts = scratch + group.to(tl.int64) * (tl.num_programs(2) * ROWS * (DIM + 1))
        log = tl.where(total > 0, top + tl.log2(total), -1e30)
        y, last_one = together(y, log, parts, arrived + group, s, used, ROWS, DIM, DIM_UP)
        if not last_one:
            return
    tl.store(out + place, y.to(out.dtype.element_ty), mask=real)


@jit
def together(
    y, log, parts, counter, s, used, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr
):
    """What `used` programs have found, in their order, and whether this is the last of them: for others it is nothing.

    parts: [programs, ROWS, dim], then the logarithms of their sums [programs, ROWS].
    """
    last_one = used == 1
    if used > 1:
        i = tl.arange(0, ROWS)
        d = tl.arange(0, DIM_UP)
        there = i[:, None] * DIM + d[None, :]
        inside = (d < DIM)[None, :]
        logs = parts + tl.num_programs(2) * ROWS * DIM
        tl.store(parts + s * (ROWS * DIM) + there, y, mask=inside)
        tl.store(logs + s * ROWS + i, log)
        tl.debug_barrier()  # all threads have stored before one of them says so
        last_one = tl.atomic_add(counter, 1, sem="acq_rel") == used - 1
        if last_one:
            tl.store(counter, 0)
            top = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            y = tl.zeros([ROWS, DIM_UP], tl.float32)
            for p in range(used):
                each = tl.load(logs + p * ROWS + i, cache_modifier=".cg")
                x = tl.load(
                    parts + p * (ROWS * DIM) + there, mask=inside, other=0.0, cache_modifier=".cg"
                )
                new = tl.maximum(top, each)
                fade = tl.exp2(top - new)
                share = tl.where(each > -1e30, tl.exp2(each - new), 0.0)
                y = y * fade[:, None] + x * share[:, None]
                top = new
                total = total * fade + share
            y = y / total[:, None]
    return y, last_one


@jit
def found(starts, tile, count, SHARE: tl.constexpr, ROWS: tl.constexpr, COUNT_UP: tl.constexpr):
    """The sequence of a tile and its first row there; `count` where there are not so many tiles. A sequence's are taken
    from behind: the rows that see most come first."""
    i = tl.arange(0, COUNT_UP)
    ends = tl.load(starts + 1 + i, mask=i < count, other=0, cache_modifier=".cg")
    new = ends - tl.load(starts + i, mask=i < count, other=0, cache_modifier=".cg")
    tiles = (new.to(tl.int32) * SHARE + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    which = tl.sum((upto <= tile).to(tl.int32), 0)
    return tl.minimum(which, count), (tl.sum(tl.where(i <= which, tiles, 0), 0) - 1 - tile) * ROWS


@jit
def over_tiles(
    q,
    top,
    total,
    acc,
    first,
    last,
    ahead,
    at,
    end,
    cache,
    scales,
    half,
    places,
    row,
    kv_head,
    slope,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.arange(0, TILE)
    for t in tl.range(first, last, num_stages=STAGES):
        here = ahead
        ahead = blocks_of(row, (t + 1) * TILE, end, BLOCK, TILE, False)
        k, v = load_tile(
            cache,
            scales,
            half,
            places,
            here,
            t * TILE,
            end,
            kv_head,
            MASK,
            SCALED,
            KV_HEADS,
            DIM,
            DIM_UP,
            BLOCK,
            TILE,
        )
        top, total, acc = attend(
            q, k, v, top, total, acc, t * TILE + n, at, slope, scale, WINDOW, CAP, ALIBI, MASK
        )
    return top, total, acc

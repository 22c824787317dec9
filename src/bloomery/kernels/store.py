"""New keys and values into their places in the paged cache; on a GPU in one pass with what comes before.

`turn_and_store` is that pass: a packed projection is clamped, its queries and keys normed and turned, the keys and
values stored, the queries handed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait
from bloomery.kernels.norm import layer_norm_reference, rms_norm_reference
from bloomery.kernels.rotate import rotate
from bloomery.kernels.rounded_cache import bits, narrowed, scales, write
from bloomery.native import ops
from bloomery.native.team import team

Pair = tuple[torch.Tensor, torch.Tensor]
LINES = 8  # heads a program takes


@dataclass(frozen=True)
class Turn:
    """What becomes of queries and keys on their way: clamped (values too), normed a head at a time, turned."""

    angles: Pair | None = (
        None  # cos, sin in float32 [tokens, turned / 2]; with `positions` tables [length, turned / 2]
    )
    positions: torch.Tensor | None = None  # [tokens]
    interleaved: bool = False
    norm: Literal["rms", "layer"] | None = None
    weights: Pair | None = (
        None  # of q and of k: [dim], or [heads, dim] where every head has its own
    )
    eps: float = 0.0
    clip: float | None = None


def store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """k, v [tokens, kv heads, dim] -> cache [2, slots, kv heads, dim] at `slots` [tokens]."""
    write(k, 0, cache, slots)
    write(v, 1, cache, slots)


def turn_and_store(
    qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, turn: Turn
) -> torch.Tensor:
    """qkv [tokens, (heads + 2 kv heads) * dim] -> q [tokens, heads, dim]; k and v go to `cache` at `slots`."""
    if (
        ops.keeps(cache)
        and team().takes(qkv, *(turn.weights or ()), *(turn.angles or ()))
        and slots.dtype == torch.int64
    ):
        return ops.turn_and_store(
            qkv,
            cache,
            slots,
            turn.angles,
            turn.positions,
            turn.interleaved,
            turn.norm,
            turn.weights,
            turn.eps,
            turn.clip,
        )
    return (turn_rows if fused(qkv) else turn_and_store_reference)(qkv, cache, slots, turn)


def turn_and_store_reference(
    qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, turn: Turn
) -> torch.Tensor:
    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if turn.norm == "layer":
            x = layer_norm_reference(x, weight, None, turn.eps)
        elif turn.norm == "rms":
            x = rms_norm_reference(x, weight, turn.eps)
        if turn.angles is None:
            return x
        cos, sin = (
            turn.angles
            if turn.positions is None
            else (table[turn.positions] for table in turn.angles)
        )
        return rotate(x, cos, sin, turn.interleaved)

    kv_heads, dim = cache.shape[2:]
    x = (qkv if turn.clip is None else qkv.clamp(-turn.clip, turn.clip)).unflatten(-1, (-1, dim))
    q, k, v = x.split((x.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if turn.norm is None:  # nothing tells queries and keys apart: turn them together
        both = turned(x[:, : x.shape[1] - kv_heads], None)
        q, k = both.split((both.shape[1] - kv_heads, kv_heads), 1)
        store(k, v, cache, slots)
        return q
    q_weight, k_weight = turn.weights or (None, None)
    store(turned(k, k_weight), v, cache, slots)
    return turned(q, q_weight)


def turn_rows(
    qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, turn: Turn
) -> torch.Tensor:
    """The kernel."""
    kv_heads, dim = cache.shape[2:]
    tokens = qkv.shape[0]
    lines = qkv.shape[1] // dim
    heads = lines - 2 * kv_heads
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = turn.angles or (q, q)
    q_weight, k_weight = turn.weights or (q, q)
    by = scales(cache)
    turn_kernel[(tokens, -(-lines // LINES))](
        qkv,
        q,
        bits(cache),
        q if by is None else by,
        slots,
        slots if turn.positions is None else turn.positions,
        cos,
        sin,
        q_weight,
        k_weight,
        qkv.stride(0),
        cache.stride(0),
        cache.shape[1],
        turn.eps,
        turn.clip or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_UP=power_of_two(dim),
        TURNED=2 * cos.shape[-1] if turn.angles else 0,
        INTERLEAVED=turn.interleaved,
        TABLES=turn.positions is not None,
        NORM=turn.norm,
        WEIGHT=turn.weights is not None,
        EACH=turn.weights is not None and q_weight.dim() > 1,
        CLIP=turn.clip is not None,
        SCALED=by is not None,
        LINES=LINES,
        num_warps=2,
        **overlap(qkv.device),
    )
    return q


@jit(do_not_specialize=["slots", "positions"])
def turn_kernel(
    qkv,
    q,
    cache,
    scales,
    slots,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    stride,
    half,
    places,
    eps,
    clip,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    EACH: tl.constexpr,
    CLIP: tl.constexpr,
    SCALED: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program takes LINES heads of one token, queries, keys and values alike.

    Dimension d of the result is x[d] cos + x[partner of d] sin, with the sign of its half; past TURNED it is x[d].
    """
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * LINES + tl.arange(0, LINES)
    d = tl.arange(0, DIM_UP)
    here = (h < HEADS + 2 * KV_HEADS)[:, None] & (d < DIM)[None, :]
    turns = (h < HEADS + KV_HEADS)[:, None]
    source = qkv + token * stride + h[:, None] * DIM
    x = tl.load(source + d[None, :], mask=here, other=0.0)
    if CLIP:
        x = clamped(x, clip)
    y = x.to(tl.float32)
    if NORM is not None:
        mean = tl.sum(y, 1)[:, None] / DIM if NORM == "layer" else 0.0
        off = tl.where(here, y - mean, 0.0)
        root = tl.rsqrt(tl.sum(off * off, 1)[:, None] / DIM + eps)
        y = tl.where(
            turns,
            normed(y, mean, root, h, d, q_weight, k_weight, HEADS, KV_HEADS, DIM, WEIGHT, EACH),
            y,
        )
        y = y.to(x.dtype).to(tl.float32)
    if TURNED > 0:
        low = d % 2 == 0 if INTERLEAVED else d < TURNED // 2
        step = 1 if INTERLEAVED else TURNED // 2
        partner = tl.where(d < TURNED, tl.where(low, d + step, d - step), d)
        angle = d // 2 if INTERLEAVED else tl.where(low, d, d - step)
        row = tl.load(positions + token).to(tl.int64) if TABLES else token
        c = tl.load(cos + row * (TURNED // 2) + angle, mask=d < TURNED, other=1.0)[None, :]
        s = tl.load(sin + row * (TURNED // 2) + angle, mask=d < TURNED, other=0.0)[None, :]
        z = tl.load(source + partner[None, :], mask=here, other=0.0)
        if CLIP:
            z = clamped(z, clip)
        z = z.to(tl.float32)
        if NORM is not None:
            z = normed(
                z, mean, root, h, partner, q_weight, k_weight, HEADS, KV_HEADS, DIM, WEIGHT, EACH
            )
            z = z.to(x.dtype).to(tl.float32)
        y = tl.where(turns, y * c + z * tl.where(low[None, :], -s, s), y)
    y = y.to(x.dtype)
    tl.store(
        q + (token * HEADS + h)[:, None] * DIM + d[None, :], y, mask=here & (h < HEADS)[:, None]
    )
    slot = tl.load(slots + token).to(tl.int64)
    k_head = h - HEADS
    v_head = h - HEADS - KV_HEADS
    place = cache + slot * (KV_HEADS * DIM) + d[None, :]
    if SCALED:
        wide = y.to(tl.float32)
        y, by = narrowed(wide, tl.max(tl.where(here, tl.abs(wide), 0.0), 1), cache.dtype.element_ty)
        own = scales + slot * KV_HEADS
        tl.store(own + k_head, by, mask=(k_head >= 0) & (k_head < KV_HEADS))
        tl.store(own + places * KV_HEADS + v_head, by, mask=(v_head >= 0) & (v_head < KV_HEADS))
    else:
        y = y.to(cache.dtype.element_ty)
    tl.store(place + k_head[:, None] * DIM, y, mask=here & turns & (k_head >= 0)[:, None])
    tl.store(place + half + v_head[:, None] * DIM, y, mask=here & (v_head >= 0)[:, None])


@jit
def clamped(x, clip):
    return tl.minimum(tl.maximum(x.to(tl.float32), -clip), clip).to(x.dtype)


@jit
def normed(
    x,
    mean,
    root,
    h,
    d,
    q_weight,
    k_weight,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WEIGHT: tl.constexpr,
    EACH: tl.constexpr,
):
    """x [lines, dimensions d] of heads h, by the statistics of its heads."""
    x = (x - mean) * root
    if WEIGHT:
        step: tl.constexpr = DIM if EACH else 0
        k_head = h - HEADS
        inside = (d < DIM)[None, :]
        w = tl.load(
            q_weight + h[:, None] * step + d[None, :], mask=inside & (h < HEADS)[:, None], other=0.0
        )
        is_key = (k_head >= 0) & (k_head < KV_HEADS)
        w += tl.load(
            k_weight + k_head[:, None] * step + d[None, :], mask=inside & is_key[:, None], other=0.0
        )
        x = x * w
    return x

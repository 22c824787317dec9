"""Gumbel noise as a function of (seed, position, token id) and of nothing else.

Because nothing is drawn from a stream, a result does not depend on batch neighbours, on how the vocabulary is cut
over ranks, on preemption or on a restart. This file must not know rows, requests or sampling parameters.

The recipe, in unsigned 32-bit arithmetic that wraps (`>>` logical), for any twin on another device to follow:

    mix(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    seed     lo, hi = the low and high 32 bits of the seed
             w0 = mix(mix(lo + 0x9E3779B9) ^ hi);   w1 = mix(mix(hi + 0x85EBCA6B) ^ lo)
    position k0 = mix(w0 ^ position);               k1 = mix(w1 ^ position)
    token    x = token * 0x9E3779B9 + k0
             x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x ^= k1;  x *= 0x846CA68B;  x ^= x >> 16
    uniform  v = (float32(x & 0x7FFFFFFF) + 0.5) * (1 - 2**-24) * 2**-31
    Gumbel   -log(-log1p(-v))

The winner of a draw is decided where the noise is large, that is where v is near 0. There float32 is fine, down to
2**-32, which is why the exponential is -log1p(-v) and not -log(u) with u near 1, whose steps are 2**-24. The factor
1 - 2**-24 keeps v below 1 after rounding, so that the noise is always finite: from -2.8 to 22.2.

torch has no unsigned 32-bit arithmetic, but int32 products wrap to the same bits; a logical shift is an arithmetic
one with the copies of the sign bit masked off.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import jit, tl

MASK = 0xFFFFFFFF
FIRST = 0x7FEB352D
SECOND = 0x846CA68B
GOLDEN = 0x9E3779B9
SILVER = 0x85EBCA6B
SCALE = (1 - 2.0**-24) * 2.0**-31


def words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as the two int32 words that `keys` takes; host arithmetic, once per request."""
    low = seed & MASK
    high = seed >> 32 & MASK
    return _signed(_mix_int(_mix_int(low + GOLDEN) ^ high)), _signed(
        _mix_int(_mix_int(high + SILVER) ^ low)
    )


def keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """seeds [lines, 2] int32 from `words`, positions [lines] -> [lines, 2] int32."""
    x = seeds ^ positions.to(torch.int32).unsqueeze(-1)
    _fold(x, 16)
    x *= FIRST
    _fold(x, 15)
    x *= _signed(SECOND)
    _fold(x, 16)
    return x


def gumbel(key: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """key [lines, 2] int32 from `keys`, tokens [count] or [lines, count] -> float32 [lines, count]."""
    x = tokens.to(torch.int32) * _signed(GOLDEN) + key[:, :1]
    _fold(x, 16)
    x *= FIRST
    _fold(x, 15)
    x ^= key[:, 1:]
    x *= _signed(SECOND)
    _fold(x, 16)
    x &= 0x7FFFFFFF
    return x.to(torch.float32).add_(0.5).mul_(-SCALE).log1p_().neg_().log_().neg_()


@jit
def key_at(word, position, FIRST: tl.constexpr = FIRST, SECOND: tl.constexpr = SECOND):
    """`keys` inside a kernel: one of a row's seed words, and a position -> uint32."""
    x = word.to(tl.uint32) ^ position.to(tl.uint32)
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@jit
def bits_at(
    k0,
    k1,
    tokens,
    FIRST: tl.constexpr = FIRST,
    SECOND: tl.constexpr = SECOND,
    GOLDEN: tl.constexpr = GOLDEN,
):
    x = tokens.to(tl.uint32) * GOLDEN + k0
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15) ^ k1) * SECOND
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@jit
def gumbel_at(k0, k1, tokens, SCALE: tl.constexpr = SCALE):
    """`gumbel` inside a kernel: the same integers, hence the same v; its logarithms within a few units in the last
    place. log1p(-v) is log(u) + e / u, where u is 1 - v rounded and e what the rounding lost."""
    v = (bits_at(k0, k1, tokens).to(tl.float32) + 0.5) * SCALE
    u = 1.0 - v
    return -tl.log(-tl.log(u) - ((1.0 - u) - v) / u)


def _fold(x: torch.Tensor, shift: int) -> None:
    """x ^= x >> shift, the shift being logical."""
    x ^= (x >> shift).bitwise_and_(MASK >> shift)


def _mix_int(x: int) -> int:
    x &= MASK
    x = ((x ^ x >> 16) * FIRST) & MASK
    x = ((x ^ x >> 15) * SECOND) & MASK
    return x ^ x >> 16


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x

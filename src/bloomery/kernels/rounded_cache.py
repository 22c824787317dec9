"""Keys and values in 8 bits: a cache that carries its scales behind itself.

A cache of int8 or 8-bit floats is [2, slots, kv heads, dim] like any other. Every head of every slot has a scale of its
own, its largest number over the largest there is: so what is stored does not depend on its neighbours, and writing one
position never touches another. The scales, float32 [2, slots, kv heads], lie in the same memory behind the numbers;
`scales` finds them. Whoever passes a cache on need not know.
"""

from __future__ import annotations

from math import prod

import torch

from bloomery.kernels.launch import jit, tl
from bloomery.kernels.quantize_rows import FP8, INT8, MOST

LEAST = 1e-12  # a scale, for heads of zeros
BYTES = 4  # of a scale


def is_rounded(dtype: torch.dtype) -> bool:
    return dtype in MOST


def cache_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize + (prod(shape[:-1]) * BYTES if is_rounded(dtype) else 0)


def of_memory(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache in `memory`, uint8 of cache_bytes; numbers start it, scales end it."""
    return memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def scales(cache: torch.Tensor) -> torch.Tensor | None:
    """Float32 [2, slots, kv heads], or nothing where numbers need none."""
    if not is_rounded(cache.dtype):
        return None
    start = cache.storage_offset() + cache.numel()
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return (
        memory[start : start + cache.numel() // cache.shape[-1] * BYTES]
        .view(torch.float32)
        .view(cache.shape[:-1])
    )


def bits(cache: torch.Tensor) -> torch.Tensor:
    """As kernels take it: the bytes of 8-bit floats."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] -> the same in `dtype`, and its scales [...]."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / MOST[dtype]).clamp(min=LEAST)
    wide = (wide / scale[..., None]).clamp(-MOST[dtype], MOST[dtype])
    return (wide.round() if dtype == INT8 else wide).to(dtype), scale


def write(part: torch.Tensor, half: int, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """part [tokens, kv heads, dim], keys (half 0) or values, to `slots` [tokens]."""
    by = scales(cache)
    if by is None:
        cache[half].index_copy_(0, slots.long(), part.to(cache.dtype))
        return
    numbers, scale = rounded(part, cache.dtype)
    cache[half].view(torch.uint8).index_copy_(0, slots.long(), numbers.view(torch.uint8))
    by[half].index_copy_(0, slots.long(), scale)


def read(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at `slots`, each [*slots, kv heads, dim]."""
    by = scales(cache)
    if by is None:
        return cache[0][slots].to(dtype), cache[1][slots].to(dtype)
    keys, values = (
        (half.view(torch.uint8)[slots].view(cache.dtype).float() * scale[slots][..., None]).to(
            dtype
        )
        for half, scale in zip(cache, by, strict=True)
    )
    return keys, values


@jit
def plain(x):
    """Stored numbers as float32, before their scale: bytes are 8-bit floats."""
    if x.dtype == tl.uint8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float32)


@jit
def narrowed(x, top, TYPE: tl.constexpr):
    """x [lines, dim] of the largest sizes `top` [lines]: to be stored, and its scales."""
    MOST: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
    scale = tl.maximum(top / MOST, 1e-12)
    x = tl.minimum(tl.maximum(x / scale[:, None], -MOST), MOST)
    if tl.int8 == TYPE:
        return (tl.floor(tl.abs(x) + 0.5) * tl.where(x < 0, -1.0, 1.0)).to(tl.int8), scale
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale

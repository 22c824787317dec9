"""A KV cache of 8-bit integers or floats, which carries its scales in the same memory.

Such a KV cache is a tensor [2, slots, kv heads, dim] like any other. Every head of every slot has
its own scale: its largest absolute value over the largest value of the type. So stored values do
not depend on other positions, and writing one position never touches another. The scales, float32
[2, slots, kv heads], follow the values in the same memory; `kv_cache_scales` returns them. Code
that only passes a KV cache on does not need to know.
"""

from __future__ import annotations

from math import prod

import torch

from bloomery.kernels.launch import jit, tl
from bloomery.kernels.quantize_rows import FP8, INT8, QUANT_MAX

MIN_SCALE = 1e-12  # the scale of a head of zeros
SCALE_NBYTES = 4


def is_quantized_dtype(dtype: torch.dtype) -> bool:
    """Whether a KV cache of this type has scales."""
    return dtype in QUANT_MAX


def kv_cache_nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a KV cache with its scales."""
    value_nbytes = prod(shape) * dtype.itemsize
    if not is_quantized_dtype(dtype):
        return value_nbytes
    return value_nbytes + prod(shape[:-1]) * SCALE_NBYTES


def view_kv_cache(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a KV cache that lies in `memory`, a uint8 tensor of `kv_cache_nbytes` bytes."""
    return memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def kv_cache_scales(cache: torch.Tensor) -> torch.Tensor | None:
    """Return the scales, float32 [2, slots, kv heads], or None if the type needs none."""
    if not is_quantized_dtype(cache.dtype):
        return None
    start = cache.storage_offset() + cache.numel()
    end = start + cache.numel() // cache.shape[-1] * SCALE_NBYTES
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return memory[start:end].view(torch.float32).view(cache.shape[:-1])


def as_kernel_input(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as kernels take it: 8-bit floats as bytes."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., dim] to `dtype`; also return its scales [...]."""
    values = x.float()
    scale = (values.abs().amax(-1) / QUANT_MAX[dtype]).clamp(min=MIN_SCALE)
    values = (values / scale[..., None]).clamp(-QUANT_MAX[dtype], QUANT_MAX[dtype])
    if dtype == INT8:
        values = values.round()
    return values.to(dtype), scale


def write_key_or_value(
    x: torch.Tensor, half: int, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write x [tokens, kv heads, dim], keys (half 0) or values (half 1), to slots [tokens]."""
    slots = slot_mapping.long()
    cache_scales = kv_cache_scales(cache)
    if cache_scales is None:
        cache[half].index_copy_(0, slots, x.to(cache.dtype))
        return
    quantized, scale = quantize_heads(x, cache.dtype)
    cache[half].view(torch.uint8).index_copy_(0, slots, quantized.view(torch.uint8))
    cache_scales[half].index_copy_(0, slots, scale)


def read_kv_cache(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values at `slots`, each [*slots, kv heads, dim]."""
    cache_scales = kv_cache_scales(cache)
    if cache_scales is None:
        return cache[0][slots].to(dtype), cache[1][slots].to(dtype)

    def dequantize(half: int) -> torch.Tensor:
        stored = cache[half].view(torch.uint8)[slots].view(cache.dtype)
        return (stored.float() * cache_scales[half][slots][..., None]).to(dtype)

    return dequantize(0), dequantize(1)


@jit
def stored_to_float32(x):
    """Convert stored values to float32, without their scale. Bytes are 8-bit floats."""
    if x.dtype == tl.uint8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float32)


@jit
def quantize_tile(x, max_abs, TYPE: tl.constexpr):
    """Quantize x [heads, dim] with largest absolute values [heads]; also return its scales."""
    MAX_VALUE: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
    scale = tl.maximum(max_abs / MAX_VALUE, 1e-12)
    x = tl.minimum(tl.maximum(x / scale[:, None], -MAX_VALUE), MAX_VALUE)
    if tl.int8 == TYPE:
        sign = tl.where(x < 0, -1.0, 1.0)
        return (tl.floor(tl.abs(x) + 0.5) * sign).to(tl.int8), scale
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale

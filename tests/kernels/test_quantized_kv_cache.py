"""The 8-bit KV cache: stored values, and how the rope and attention kernels use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.fusion import QkTransform
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.quantized_kv_cache import (
    kv_cache_nbytes,
    kv_cache_scales,
    read_kv_cache,
    view_kv_cache,
    write_key_or_value,
)
from bloomery.kernels.rope_cache import (
    apply_rope_and_cache_reference,
    apply_rope_and_cache_triton,
)
from bloomery.spec import AttentionSpec
from tests.kernels.oracles import check_attention, make_attention_case, relative_error

# The largest rounding error, as a share of the largest value of a head.
ROUNDING_ERROR = {torch.float8_e4m3fn: 1 / 16, torch.int8: 1 / 254}
needs_interpreter = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    memory = torch.zeros(kv_cache_nbytes(shape, dtype), dtype=torch.uint8)
    return view_kv_cache(memory, shape, dtype)


@pytest.mark.parametrize("dtype", ROUNDING_ERROR)
def test_stored_values_are_read_back_within_a_rounding_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = empty_cache((2, 9, 2, 16), dtype)
    slots = torch.tensor([7, 0, 3])
    magnitudes = torch.tensor([1e-3, 1.0, 50.0])[None, :, None, None]
    k, v = torch.randn(2, 3, 2, 16) * magnitudes
    k[0, 0] = 0
    write_key_or_value(k, 0, cache, slots)
    write_key_or_value(v, 1, cache, slots)
    for actual, expected in zip(read_kv_cache(cache, slots, torch.float32), (k, v), strict=True):
        limit = expected.abs().amax(-1, keepdim=True) * ROUNDING_ERROR[dtype] * 1.01
        assert bool(((actual - expected).abs() <= limit).all())
    cache_scales = kv_cache_scales(cache)
    assert cache_scales is not None
    assert cache_scales.shape == (2, 9, 2)
    assert cache_scales.count_nonzero() == 12, "a slot that was not written has a scale"
    assert kv_cache_scales(torch.zeros(2, 9, 2, 16)) is None
    assert kv_cache_nbytes((2, 9, 2, 16), dtype) == 2 * 9 * 2 * (16 + 4)


@needs_interpreter
@pytest.mark.parametrize("dtype", ROUNDING_ERROR)
def test_the_rope_kernel_stores_what_the_reference_stores(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    angles = torch.rand(5, 16) * 6
    qkv = torch.randn(5, 8 * 32)
    slots = torch.randperm(9)[:5]
    transform = QkTransform((angles.cos(), angles.sin()))
    cache = empty_cache((2, 9, 2, 32), dtype)
    expected_cache = empty_cache((2, 9, 2, 32), dtype)
    q = apply_rope_and_cache_triton(qkv, cache, slots, transform)
    expected_q = apply_rope_and_cache_reference(qkv, expected_cache, slots, transform)
    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(kv_cache_scales(cache), kv_cache_scales(expected_cache))
    # The interpreter rounds down where the reference rounds to nearest.
    limit = 0.1 if dtype == torch.float8_e4m3fn else 0.004
    stored = read_kv_cache(cache, slots, torch.float32)
    expected_stored = read_kv_cache(expected_cache, slots, torch.float32)
    for actual, expected in zip(stored, expected_stored, strict=True):
        assert relative_error(actual, expected) < limit


@needs_interpreter
@pytest.mark.parametrize("dtype", ROUNDING_ERROR)
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [40, 3]), ([1, 7, 20], [5, 7, 33])])
def test_the_attention_kernels_read_an_8_bit_kv_cache(
    dtype: torch.dtype, query_lens: list[int], seq_lens: list[int]
) -> None:
    torch.manual_seed(2)
    case = make_attention_case(
        AttentionSpec(4, 2, 32), query_lens, seq_lens, 16, torch.float16, "cpu"
    )
    cache = empty_cache(tuple(case.cache.shape), dtype)
    all_slots = torch.arange(cache.shape[1])
    for half in range(2):
        write_key_or_value(case.cache[half].nan_to_num(), half, cache, all_slots)
    assert check_attention(replace(case, cache=cache), TritonPagedAttention()) < 2e-3

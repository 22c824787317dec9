"""The kernel that applies rope and writes the KV cache, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.rope_cache import write_kv_cache
from tests.kernels.oracles import check_rope_and_cache

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rope_dim", "options"),
    [
        (4, 2, 64, 64, ""),
        (5, 1, 80, 32, "tables"),
        (3, 3, 96, 96, "interleaved rms"),
        (8, 4, 16, 8, "layer each clip"),
        (2, 2, 112, 112, "clip tables interleaved layer bare"),
        (6, 1, 128, 0, "rms each"),
        (4, 2, 64, 64, "rms after tables"),
        (4, 2, 48, 16, "rms bare after interleaved value"),
        (5, 1, 64, 32, "layer after each clip value"),
        (4, 2, 64, 64, "scaled tables"),
        (4, 2, 32, 0, "scaled rms"),
        (4, 2, 64, 64, "shared rms value tables"),
        (4, 2, 64, 32, "shared gate clip"),
        (6, 2, 80, 80, "gate rms scaled"),
        (5, 5, 16, 16, "narrow-gate shared"),
        (9, 1, 320, 64, "rms value"),
        (4, 2, 512, 512, "rms after shared value scaled tables gate"),
    ],
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_kernel_equals_reference(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rope_dim: int,
    options: str,
    dtype: torch.dtype,
    limit: float,
) -> None:
    error = check_rope_and_cache(heads, kv_heads, head_dim, rope_dim, options, dtype, "cpu")
    assert error < limit


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slots_may_be_32_or_64_bit_integers(index_dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 3, 1, 4)
    cache = torch.zeros(2, 9, 1, 4)
    write_kv_cache(k, v, cache, torch.tensor([7, 0, 3], dtype=index_dtype))
    assert torch.equal(cache[0, [7, 0, 3]], k)
    assert torch.equal(cache[1, [7, 0, 3]], v)
    assert cache.count_nonzero() == 24

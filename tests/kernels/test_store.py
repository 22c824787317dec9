"""Turning and storing in one kernel, under the interpreter, against the steps one by one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import check_turn
from bloomery.kernels.launch import interpreted
from bloomery.kernels.store import store

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned", "kind"),
    [
        (4, 2, 64, 64, ""),
        (5, 1, 80, 32, "tables"),
        (3, 3, 96, 96, "interleaved rms"),
        (8, 4, 16, 8, "layer each clip"),
        (2, 2, 112, 112, "clip tables interleaved layer bare"),
        (6, 1, 128, 0, "rms each"),
    ],
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_kernel_equals_reference(
    heads: int, kv_heads: int, dim: int, turned: int, kind: str, dtype: torch.dtype, limit: float
) -> None:
    assert check_turn(heads, kv_heads, dim, turned, kind, dtype, "cpu") < limit


def test_store_takes_slots_of_either_width() -> None:
    k, v = torch.randn(2, 3, 1, 4)
    for kind in (torch.int32, torch.int64):
        cache = torch.zeros(2, 9, 1, 4)
        store(k, v, cache, torch.tensor([7, 0, 3], dtype=kind))
        assert torch.equal(cache[0, [7, 0, 3]], k)
        assert torch.equal(cache[1, [7, 0, 3]], v)
        assert cache.count_nonzero() == 24

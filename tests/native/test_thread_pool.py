"""Memory of a trace arena is reused, and pools are independent of each other_pool."""

from __future__ import annotations

import gc

import pytest
import torch

from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool, TraceArena


def test_an_arena_reuses_memory_without_references() -> None:
    arena = TraceArena(4096)
    for _ in range(100):
        first = arena.allocate(256, torch.float32).view(16, 16)[3:]
        first.fill_(1.0)
    second = arena.allocate(512, torch.float32)
    with pytest.raises(MemoryError):
        arena.allocate(512, torch.float32)
    del first, second
    gc.collect()
    start, end = arena.free_ranges[0]
    assert end - start == 4096


def test_a_closed_pool_leaves_others_running(pool: ThreadPool) -> None:
    x = torch.randn(64, 4096)
    other_pool = ThreadPool(3, pool.library)
    assert other_pool.num_threads == 3
    expected = ops.elementwise(pool, ops.TANH, x)
    assert torch.equal(ops.elementwise(other_pool, ops.TANH, x), expected)
    other_pool.close()
    assert torch.equal(ops.elementwise(pool, ops.TANH, x), expected)

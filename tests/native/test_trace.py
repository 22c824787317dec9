"""Traces replay exactly the recorded operations, and no torch operation is missing unnoticed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from bloomery.fusion import ActivationEpilogue
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool, TraceArena
from bloomery.native.trace import UnsupportedOperation, record_trace


def test_a_trace_computes_from_the_current_values_of_its_buffers(pool: ThreadPool) -> None:
    x = torch.randn(3, 64)
    out = torch.zeros(3, 64)

    def work() -> None:
        activated = ops.activate(pool, x, ActivationEpilogue("silu", gated=False))
        out.copy_(torch.tanh(activated * 2.0 + x) / 4.0)

    trace = record_trace(pool, work, TraceArena(1 << 16))
    assert len(trace) == 6 and not out.any()  # recorded, not executed
    for _ in range(2):
        trace.replay()
        expected = torch.tanh(torch.nn.functional.silu(x) * 2 + x) / 4
        assert torch.allclose(out, expected, atol=1e-6)
        x.copy_(torch.randn(3, 64))


def test_an_operation_without_native_equivalent_is_named(pool: ThreadPool) -> None:
    x = torch.zeros(3)
    with pytest.raises(UnsupportedOperation, match="sigmoid"):
        record_trace(pool, lambda: x.sigmoid_() and None, TraceArena(1 << 16))
    with pytest.raises(UnsupportedOperation, match="zeros"):
        record_trace(pool, lambda: torch.zeros(3) and None, TraceArena(1 << 16))
    assert pool.arena is None


def test_threads_do_not_disturb_each_other(pool: ThreadPool) -> None:
    """Two threads compute eagerly, through the same shared memory, while a third records traces."""
    raw = torch.randint(0, 60, (48, 68), dtype=torch.uint8)
    segment = ops.pack_segment(pool, "Q8_0", raw, 64)
    matrix = ops.NativeMatrix(pool, 64, [segment])
    inputs = [torch.randn(rows, 64) for rows in (40, 41, 90)]
    expected = [ops.linear(pool, matrix, x) for x in inputs]

    def compute_eagerly(number: int) -> bool:
        return all(
            torch.equal(ops.linear(pool, matrix, inputs[number]), expected[number])
            for _ in range(200)
        )

    def record_and_replay() -> bool:
        out = torch.zeros(90, 48)

        def work() -> None:
            out.copy_(ops.linear(pool, matrix, inputs[2]))

        for _ in range(40):
            trace = record_trace(pool, work, TraceArena(1 << 17))
            assert len(trace) == 3
            out.zero_()
            trace.replay()
            assert torch.equal(out, expected[2])
        return True

    jobs = (partial(compute_eagerly, 0), partial(compute_eagerly, 1), record_and_replay)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(torch.inference_mode()(job)) for job in jobs]
        assert all(future.result() for future in futures)

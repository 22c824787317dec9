"""Selects rows of a matrix by index, on a CPU without torch.

Torch's indexing wakes torch's own threads. They then poll for milliseconds, on the cores of the
native thread pool.
"""

from __future__ import annotations

import torch

from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool


def select_rows(
    x: torch.Tensor, rows: torch.Tensor | slice, pool: ThreadPool | None
) -> torch.Tensor:
    """x [n, width], rows [m] -> x[rows]."""
    if pool is None or isinstance(rows, slice):
        return x[rows]
    selected = ops.select_rows(pool, x, rows)
    return x[rows] if selected is None else selected

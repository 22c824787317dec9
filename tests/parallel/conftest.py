"""Rank processes that load one test case after the other, since starting them takes most time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bloomery.executors.multiprocess import MultiprocessExecutor


@pytest.fixture(scope="package")
def rank_executors() -> Iterator[dict[int, MultiprocessExecutor]]:
    """Executors by their number of ranks; the first test that uses one starts its ranks."""
    executors = {num_ranks: MultiprocessExecutor() for num_ranks in (2, 4)}
    yield executors
    for executor in executors.values():
        executor.close()

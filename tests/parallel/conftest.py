"""Ranks that load one case after the other: starting them is what takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bloomery.executors.processes import Processes


@pytest.fixture(scope="package")
def crews() -> Iterator[dict[int, Processes]]:
    """By how many they are; started by whoever is the first to use them."""
    made = {count: Processes() for count in (2, 4)}
    yield made
    for crew in made.values():
        crew.close()

"""Random engines against the plain loop. `--engines N` runs more of them, in the same law."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.ghost.trial import Trial

CHUNK = 250


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    engines = metafunc.config.getoption("--engines")
    metafunc.parametrize(
        "first", range(0, engines, CHUNK), ids=lambda first: f"seeds {first}..{first + CHUNK - 1}"
    )


def test_engines_equal_the_plain_loop(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        try:
            seen += Trial(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # The trials must exercise what they claim to test.
    for what in ("hits", "preemptions", "chunks", "accepted", "aborts"):
        assert seen[what] > 0, f"no {what} in {CHUNK} engines"

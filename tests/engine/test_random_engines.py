"""Random engines must produce the reference tokens. `--engines N` tries N of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.random_engine import RandomEngine

ENGINES_PER_TEST = 250
EVENTS = ("prefix hits", "preemptions", "partial chunks", "accepted drafts", "aborts", "masks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    num_engines = metafunc.config.getoption("--engines")
    metafunc.parametrize(
        "first_seed",
        range(0, num_engines, ENGINES_PER_TEST),
        ids=lambda seed: f"seeds {seed}..{seed + ENGINES_PER_TEST - 1}",
    )


def test_engines_produce_the_reference_tokens(first_seed: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + ENGINES_PER_TEST):
        try:
            events += RandomEngine(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # Every event must have occurred, or the engines would not test it.
    for event in EVENTS:
        assert events[event] > 0, f"no {event} in {ENGINES_PER_TEST} engines"

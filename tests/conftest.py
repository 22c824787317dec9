"""Options and fixtures every test may use."""

from __future__ import annotations

import os
import random
import sys

# Before anything imports Triton: its kernels run on the CPU here. Tests share the cores, so each takes one.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time, at whatever speed: a run fails for what was changed and for nothing else. To look
# further, `pytest --hypothesis-profile=explore` draws new ones.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own is the same whoever ran before it, also for fixtures of a module."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server",
        type=int,
        help="the port of a ghost_server.py that tests/chaos/test_bad_ways.py shall use",
    )
    parser.addoption("--engines", type=int, default=2000, help="how many random engines to try")

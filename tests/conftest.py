"""Settings and options of all tests."""

from __future__ import annotations

import os
import random
import secrets
import sys

# Set before Triton is imported: its kernels are interpreted on the CPU. Each test uses one core,
# because tests run side by side.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

from tests.faster_libraries import speed_up_libraries

# Hypothesis uses the same examples in every run, so that only a change can make a test fail.
# `pytest --hypothesis-profile=explore` draws new examples.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed all random generators, so that a test does not depend on the tests before it.

    Requests without a seed draw one from `secrets`, so they get the same answers in every run, too.
    """
    random.seed(0)
    secrets.randbits = random.Random(0).getrandbits
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    speed_up_libraries()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server",
        type=int,
        help="the port of a fake_server.py that tests/chaos/test_bad_requests.py uses",
    )
    parser.addoption("--engines", type=int, default=2000, help="how many random engines to try")

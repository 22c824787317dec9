"""Options and fixtures every test may use."""

from __future__ import annotations

import os

# Before anything imports Triton: its kernels run on the CPU here. Tests share the cores, so each takes one.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server", type=int, help="the port of a ghost_server.py that tests/chaos/test_bad_ways.py shall use"
    )
    parser.addoption("--engines", type=int, default=2000, help="how many random engines to try")

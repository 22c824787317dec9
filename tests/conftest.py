"""Options and fixtures every test may use."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engines", type=int, default=2000, help="how many random engines to try")

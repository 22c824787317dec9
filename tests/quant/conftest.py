"""Formats are compared in exact arithmetic: without native kernels, unless a test starts them."""

from __future__ import annotations

import pytest

from bloomery.native.team import team


@pytest.fixture(autouse=True)
def without_native_kernels() -> None:
    team().stop()

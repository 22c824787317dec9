"""Let kernel tests ignore numpy's warnings about masked lanes.

Triton's interpreter computes with numpy, also in masked lanes, which hold arbitrary values.
"""

from __future__ import annotations

from pathlib import Path

import pytest

KERNEL_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
    for item in items:
        if KERNEL_TESTS in item.path.parents:
            item.add_marker(ignore)

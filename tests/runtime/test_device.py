"""Torch's threads: how many work on what is small, and that they are all back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bloomery.runtime.device import one_thread


@pytest.fixture(autouse=True)
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_and_then_all_again() -> None:
    with one_thread(True):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with one_thread(False):
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="within"), one_thread(True):
        raise ValueError("within")
    assert torch.get_num_threads() == 2

"""Adapters go through the staging ring whole, and a part is used again only after its copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bloomery.models import adapter_staging
from bloomery.models.adapter_staging import StagingRing

PART_BYTES = 64


class FakeEvent:
    """Counts how often the host has waited for a copy."""

    num_waits = 0

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded, "nothing to wait for"
        FakeEvent.num_waits += 1


@pytest.mark.parametrize("size", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_are_whole_and_wait_for_the_part_they_use(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEvent, "num_waits", 0)
    sources = [torch.randn(size).to(dtype) for _ in range(5)]
    ring = StagingRing(sources[0].nbytes, PART_BYTES, FakeEvent)
    slots = torch.zeros(len(sources), size, dtype=dtype)
    parts_per_adapter = -(-sources[0].nbytes // PART_BYTES)
    for number, source in enumerate(sources):
        ring.copy(source, slots[number])
        used = (number + 1) * parts_per_adapter
        assert FakeEvent.num_waits == max(used - len(ring.parts), 0)
    assert len(ring.parts) >= 2 * parts_per_adapter - 1
    assert torch.equal(slots, torch.stack(sources))


def test_tables_larger_than_the_ring_go_through_it_too() -> None:
    table = torch.randn(50, 8)
    ring = StagingRing(PART_BYTES, PART_BYTES, FakeEvent)
    target = torch.zeros_like(table)
    ring.copy(table, target)
    assert torch.equal(target, table)


def test_a_source_may_change_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reads the ring, never the adapter: a dropped adapter may be freed at once."""
    queued: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = torch.Tensor.copy_

    def copy_later(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if non_blocking:
            queued.append((self, other))
            return self
        return original(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    source = torch.randn(100)
    expected = source.clone()
    ring = StagingRing(source.nbytes, PART_BYTES, FakeEvent)
    target = torch.zeros(100)
    ring.copy(source, target)
    source.zero_()
    monkeypatch.undo()
    for to_part, from_part in queued:
        to_part.copy_(from_part)
    assert torch.equal(target, expected)
    assert adapter_staging.NUM_ADAPTERS >= 2

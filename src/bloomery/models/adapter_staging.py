"""The way of an adapter from host memory to a GPU: through buffers that are pinned at start.

A copy from ordinary memory would make the host wait for the steps in flight. Pinning the memory of
every adapter is no way out: it stops the launches of all threads until it is done, on an H200 for
67 ms per 84 MB (benchmarks/pinned_memory.py). So a ring of buffers is pinned once. The host copies
an adapter into it while the device computes the steps in flight, and queues the copies to the
device behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PART_BYTES = 16 << 20
# Adapters that fit the ring. A step that loads more of them waits for the steps before it.
NUM_ADAPTERS = 2


class StagingRing:
    """Pinned memory in parts, which are used in turn."""

    def __init__(
        self,
        adapter_bytes: int,
        part_bytes: int = PART_BYTES,
        create_event: Callable[[], Any] = torch.cuda.Event,
    ):
        num_parts = -(-NUM_ADAPTERS * adapter_bytes // part_bytes)
        is_pinned = torch.cuda.is_available()
        memory = torch.empty(num_parts * part_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.part_bytes = part_bytes
        self.parts = memory.split(part_bytes)
        self.create_event = create_event
        self.copied: list[Any] = [None] * num_parts  # events: the part may be used again
        self.next_part = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy to the device. The source may change as soon as this returns."""
        sources = source.view(-1).view(torch.uint8).split(self.part_bytes)
        targets = target.view(-1).view(torch.uint8).split(self.part_bytes)
        for source_part, target_part in zip(sources, targets, strict=True):
            index = self.next_part
            self.next_part = (index + 1) % len(self.parts)
            copied = self.copied[index]
            if copied is None:
                copied = self.create_event()
                self.copied[index] = copied
            else:
                copied.synchronize()
            staged = self.parts[index][: len(source_part)]
            staged.copy_(source_part)
            target_part.copy_(staged, non_blocking=True)
            copied.record()

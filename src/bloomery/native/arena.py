"""Memory for the results of recorded programs: one stretch, shared by all of them, for they never run at once.

While a program is recorded its tensors come and go as in any other run, and memory that nobody holds any more is given
out again; so a program of hundreds of operations needs as much as the few results that live at one time.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import insort

import torch

ALIGNED = 64


class Arena:
    def __init__(self, size: int):
        self.memory = torch.empty(size + ALIGNED, dtype=torch.uint8)  # untouched pages cost nothing
        first = -self.memory.data_ptr() % ALIGNED
        self.free = [(first, first + size)]  # stretches, in order

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = max(1, -(-count * dtype.itemsize // ALIGNED)) * ALIGNED
        place = next((i for i, (start, end) in enumerate(self.free) if end - start >= size), None)
        if place is None:
            raise MemoryError(
                f"a recorded step needs more than {len(self.memory)} bytes for its results"
            )
        start, end = self.free.pop(place)
        if end - start > size:
            self.free.insert(place, (start + size, end))
        # A tensor made of the piece holds it; when the last such tensor goes, so does the piece.
        piece = (ctypes.c_uint8 * size).from_address(self.memory.data_ptr() + start)
        weakref.finalize(piece, self._give_back, start, start + size).atexit = False
        return torch.frombuffer(piece, dtype=dtype, count=count)

    def _give_back(self, start: int, end: int) -> None:
        insort(self.free, (start, end))
        merged = [self.free[0]]
        for a, b in self.free[1:]:
            if a == merged[-1][1]:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self.free = merged

"""Bytes of files brought to a device as fast as the disk gives them.

A few threads read into a ring of buffers that the device can copy from by itself, and begin these copies on a stream of
their own; a buffer is read into again once its copy has ended. So disk and device are at work at the same time, and
over the borders of tensors too: whoever asks gets memory that is still being filled, and waits when he needs it.

On a CPU there is nothing to copy to and weights are mapped instead (models/checkpoint); there the same ring works with
ordinary memory, for tests. Nothing here knows tensors or formats.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch

from bloomery.errors import CheckpointError

READERS = 8
CHUNK = 8 << 20  # bytes of a buffer; each reader has two, one being read and one being copied

Wait = Callable[[], None]


class Buffer:
    """Memory that one thread at a time has. For a device, pinned, with the event behind its last copy."""

    def __init__(self, size: int, device: torch.device):
        cuda = device.type == "cuda"
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self.view = self.bytes.numpy().data
        self.copied = torch.cuda.Event() if cuda else None

    def read(self, file: int, name: Path, start: int, count: int) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        done = 0
        while done < count:
            got = os.preadv(file, [self.view[done:count]], start + done)
            if not got:
                raise CheckpointError(
                    f"{name}: became shorter while it was being read; download it again"
                )
            done += got

    def send(self, out: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        if copies is None or self.copied is None:
            out.copy_(self.bytes[: len(out)])
            return
        with torch.cuda.stream(copies):
            out.copy_(self.bytes[: len(out)], non_blocking=True)
            self.copied.record()


class Stream:
    """Use it in a `with`: at its end all that was asked for is there."""

    def __init__(self, device: torch.device, readers: int = READERS, chunk: int = CHUNK):
        self.device = device
        self.chunk = chunk
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()  # the longest unused first
        for _ in range(2 * readers):
            self.free.put(Buffer(chunk, device))
        self.readers = ThreadPoolExecutor(readers, "bloomery-reader")
        self.files: dict[Path, int] = {}
        self.begun: deque[Future[None]] = deque()
        self.most = (
            4 * readers
        )  # chunks asked for and not read: who asks for more waits, and reports what is true

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.wait(self.begun)
        finally:
            self.readers.shutdown(cancel_futures=True)
            for file in self.files.values():
                os.close(file)
            if self.copies is not None:
                self.copies.synchronize()  # buffers go back to the system with what uses them

    def read(self, file: Path, start: int, out: torch.Tensor) -> Wait:
        """Fill `out`, contiguous and of any type, with the file's bytes from `start` on; how to wait for it."""
        if file not in self.files:
            self.files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if self.copies is not None:  # the memory may have had another use that is still under way
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        every = []
        for first in range(0, out.nbytes, self.chunk):
            part = flat(out)[first : first + self.chunk]
            while len(self.begun) >= self.most:
                self.begun.popleft().result()
            every.append(self.readers.submit(self._bring, file, start + first, part))
            self.begun.append(every[-1])
        return lambda: self.wait(every)

    def wait(self, every: deque[Future[None]] | list[Future[None]]) -> None:
        """Until these are read and on their way: from here on the device's own work comes behind them."""
        for one in every:
            one.result()
        if self.copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.copies)

    def _bring(self, file: Path, start: int, out: torch.Tensor) -> None:
        buffer = self.free.get()
        try:
            buffer.read(self.files[file], file, start, len(out))
            buffer.send(out, self.copies)
        finally:
            self.free.put(buffer)


def flat(out: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return out.view(-1).view(torch.uint8)

"""The streaming weight loader: reads files to a GPU as fast as the disk delivers them.

A few threads read into a ring of pinned buffers and start copies to the device on a CUDA stream of
their own. A buffer is reused once its copy has ended. Disk and device thus work at the same time,
also across tensors: the caller gets memory that is still being filled, and waits when it needs it.

On a CPU, weights are mapped instead (models/checkpoint); tests run the same ring there with
ordinary memory. This module knows no tensor names and no formats.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch

from bloomery.errors import CheckpointError

NUM_READERS = 8
CHUNK_BYTES = 8 << 20  # of a buffer; each reader has two: one is being read, one copied

WaitForRead = Callable[[], None]


class StagingBuffer:
    """Host memory that one thread at a time uses. For a GPU it is pinned."""

    def __init__(self, size: int, device: torch.device):
        is_cuda = device.type == "cuda"
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        self.view = self.bytes.numpy().data
        self.copied = torch.cuda.Event() if is_cuda else None  # follows the last copy to the device

    def read(self, file: int, name: Path, start: int, count: int) -> None:
        """Fill the buffer with `count` bytes of a file; waits for the buffer's last copy first."""
        if self.copied is not None:
            self.copied.synchronize()
        num_read = 0
        while num_read < count:
            received = os.preadv(file, [self.view[num_read:count]], start + num_read)
            if not received:
                raise CheckpointError(
                    f"{name}: became shorter while it was being read; download it again"
                )
            num_read += received

    def send(self, out: torch.Tensor, copy_stream: torch.cuda.Stream | None) -> None:
        """Copy the buffer to `out`, without waiting if there is a CUDA stream."""
        if copy_stream is None or self.copied is None:
            out.copy_(self.bytes[: len(out)])
            return
        with torch.cuda.stream(copy_stream):
            out.copy_(self.bytes[: len(out)], non_blocking=True)
            self.copied.record()


class WeightStream:
    """Reads ranges of files into tensors.

    As a context manager: when it exits, all requested reads have ended.
    """

    def __init__(
        self, device: torch.device, num_readers: int = NUM_READERS, chunk_bytes: int = CHUNK_BYTES
    ):
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free_buffers: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for _ in range(2 * num_readers):
            self.free_buffers.put(StagingBuffer(chunk_bytes, device))
        self.readers = ThreadPoolExecutor(num_readers, "bloomery-reader")
        self.files: dict[Path, int] = {}
        self.pending: deque[Future[None]] = deque()
        # More requests wait for older ones, so that the reported progress is true.
        self.max_pending = 4 * num_readers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self.wait(self.pending)
        finally:
            self.readers.shutdown(cancel_futures=True)
            for file in self.files.values():
                os.close(file)
            if self.copy_stream is not None:
                self.copy_stream.synchronize()  # the copies must end before the buffers are freed

    def read(self, file: Path, start: int, out: torch.Tensor) -> WaitForRead:
        """Begin to fill `out`, contiguous and of any dtype, with bytes of the file.

        Returns a function that waits for it.
        """
        if file not in self.files:
            self.files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if self.copy_stream is not None:  # pending kernels may still use the memory
            self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        reads = []
        for offset in range(0, out.nbytes, self.chunk_bytes):
            chunk = as_bytes(out)[offset : offset + self.chunk_bytes]
            while len(self.pending) >= self.max_pending:
                self.pending.popleft().result()
            read = self.readers.submit(self._read_chunk, file, start + offset, chunk)
            reads.append(read)
            self.pending.append(read)
        return lambda: self.wait(reads)

    def wait(self, reads: Iterable[Future[None]]) -> None:
        """Wait until these reads have ended. Later kernels of the device wait for their copies."""
        for read in reads:
            read.result()
        if self.copy_stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.copy_stream)

    def _read_chunk(self, file: Path, start: int, out: torch.Tensor) -> None:
        buffer = self.free_buffers.get()
        try:
            buffer.read(self.files[file], file, start, len(out))
            buffer.send(out, self.copy_stream)
        finally:
            self.free_buffers.put(buffer)


def as_bytes(out: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8 [bytes]."""
    return out.view(-1).view(torch.uint8)

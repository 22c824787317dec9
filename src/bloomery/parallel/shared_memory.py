"""CPU ranks of one machine that communicate through shared memory, with native operations.

Every layer sends two messages. An all-reduce of 8 KiB takes 447 us through torch and its sockets,
and 123 us through shared memory (benchmarks/LOG.md). Such a message can also be part of a recorded
CPU trace. The memory is an anonymous file: other programs cannot open it by name, and it disappears
with the last process that holds it. If one rank cannot open the memory, all ranks communicate
through torch.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from bloomery.native.thread_pool import ThreadPool, data_pointer, raise_if_rank_lost
from bloomery.parallel.groups import CommunicationGroup

# Bytes of one slot. Longer messages are split; memory that is never touched costs nothing.
SLOT_BYTES = 4 << 20
SLOTS_PER_RANK = 4  # a pipeline stage may be this many messages ahead of the next one
# The dtypes that native_all_reduce can add, and their numbers in the C code.
REDUCE_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


# ---- segments ------------------------------------------------------------------------------------


class SharedMemorySegment:
    """Memory that some ranks share, as one of them sees it."""

    def __init__(self, pool: ThreadPool, handle: int):
        self.pool = pool
        self.handle = handle
        self.close = pool.library.shm_close_segment

    def __del__(self) -> None:
        self.close(self.handle)


class CreatedFile(NamedTuple):
    """The anonymous file of a segment in the rank that created it."""

    descriptor: int
    location: str  # tells the other ranks how to open it


def open_shared_segment(
    pool: ThreadPool, store: dist.Store, name: str, rank: int, size: int
) -> SharedMemorySegment | None:
    """Open a segment that all `size` ranks open under this name.

    Returns None on every rank if one of them could not open it.
    """
    created = create_file(name, size) if rank == 0 else None
    if rank == 0:
        store.set(name, "" if created is None else created.location)
    segment = open_segment(pool, store.get(name).decode(), rank, size)
    store.set(f"{name}: {rank}", str(segment is not None))
    successes = [store.get(f"{name}: {member}") == b"True" for member in range(size)]
    if created is not None:
        os.close(created.descriptor)
    return segment if all(successes) else None


def create_file(name: str, size: int) -> CreatedFile | None:
    """Create the anonymous file of a segment; None where the system has no such files.

    A secret behind the end of the segment proves to the other ranks that they opened this file.
    """
    if not hasattr(os, "memfd_create"):
        return None
    secret = secrets.token_hex(16)
    num_bytes = (size * SLOTS_PER_RANK + 1) * SLOT_BYTES
    descriptor = os.memfd_create(f"bloomery {name}")
    os.truncate(descriptor, num_bytes)
    os.pwrite(descriptor, secret.encode(), num_bytes)
    location = f"{machine_id()} {os.getpid()} {descriptor} {num_bytes} {secret}"
    return CreatedFile(descriptor, location)


def open_segment(
    pool: ThreadPool, location: str, rank: int, size: int
) -> SharedMemorySegment | None:
    """Open the segment at `location`; None if that is impossible.

    Every rank opens the file for itself, because a file lock belongs to an open file description.
    """
    if not location:
        return None
    try:
        descriptor = open_file(location)
    except OSError:
        return None
    handle = pool.library.shm_open_segment(descriptor, rank, size, SLOT_BYTES, SLOTS_PER_RANK)
    if handle:
        return SharedMemorySegment(pool, handle)
    os.close(descriptor)
    return None


def open_file(location: str) -> int:
    """Open the file of another process on this machine; raises OSError if it is another file."""
    machine, process, number, num_bytes, secret = location.split()
    if machine != machine_id():
        raise OSError("the file is on another machine")
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NOCTTY)
    if os.pread(descriptor, len(secret), int(num_bytes)) != secret.encode():
        os.close(descriptor)
        raise OSError("another file has taken its place")
    return descriptor


def machine_id() -> str:
    """Return a string that is equal for processes that see each other in /proc."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid_namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot_id}/{pid_namespace}"


# ---- messages ------------------------------------------------------------------------------------


class SharedMemoryGroup:
    """A group that communicates through a segment.

    Messages without a native operation go through `fallback`; all ranks make the same choice.
    """

    def __init__(self, segment: SharedMemorySegment, fallback: CommunicationGroup):
        self.segment = segment
        self.fallback = fallback
        self.rank = fallback.rank
        self.size = fallback.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in REDUCE_DTYPES:
            return self.fallback.all_reduce(x)
        x = x.contiguous()
        pool = self.segment.pool
        out = pool.empty(tuple(x.shape), x.dtype)
        segment = pool.keep_alive(self.segment)
        status = pool.library.native_all_reduce(
            pool.handle,
            segment.handle,
            data_pointer(x),
            x.numel(),
            REDUCE_DTYPES[x.dtype],
            data_pointer(out),
        )
        raise_if_rank_lost(status)
        return out

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        element_bytes = x.element_size()
        row_bytes = -(-total_width // self.size) * element_bytes
        if row_bytes > SLOT_BYTES:
            return self.fallback.all_gather(x, total_width)
        x = x.contiguous()
        num_rows = len(x)
        pool = self.segment.pool
        out = pool.empty((num_rows, total_width), x.dtype)
        segment = pool.keep_alive(self.segment)
        status = pool.library.native_all_gather(
            pool.handle,
            segment.handle,
            data_pointer(x),
            num_rows,
            row_bytes,
            total_width * element_bytes,
            data_pointer(out),
        )
        raise_if_rank_lost(status)
        return out


class SharedMemoryChannel:
    """Messages between two stages of one machine: rank 0 of the segment sends, rank 1 receives."""

    def __init__(self, segment: SharedMemorySegment):
        self.segment = segment

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        pool = self.segment.pool
        x = pool.empty((num_rows, width), dtype)
        segment = pool.keep_alive(self.segment)
        status = pool.library.native_receive(pool.handle, segment.handle, data_pointer(x), x.nbytes)
        raise_if_rank_lost(status)
        return x

    def send(self, x: torch.Tensor) -> None:
        x = x.contiguous()
        pool = self.segment.pool
        segment = pool.keep_alive(self.segment)
        status = pool.library.native_send(pool.handle, segment.handle, data_pointer(x), x.nbytes)
        raise_if_rank_lost(status)

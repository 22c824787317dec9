"""Ranks on the CPUs of one machine: messages through memory they share, by native operations.

What goes through torch and its sockets takes half a millisecond, twice a layer; a slot of memory takes microseconds,
and such a message can be part of a recorded step. The memory is an anonymous file: nobody opens it by a name, and it is
gone with the last who has it. Where ranks cannot share memory, all of them hear so and talk through torch.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from bloomery.native.team import address, heard, team
from bloomery.parallel.groups import Group

SLOT = 4 << 20  # bytes; longer messages go in parts, and what is never touched costs nothing
SLOTS = 4  # of each member: a stage may be so many messages ahead of the next
HALVES = {torch.float32: 0, torch.bfloat16: 1}  # what can be added up


class Region:
    """Memory of some ranks, as one of them sees it."""

    def __init__(self, handle: int):
        self.handle = handle
        self.free = team().call.region_free

    def __del__(self) -> None:
        self.free(self.handle)


def region(store: dist.Store, name: str, rank: int, size: int) -> Region | None:
    """One that all `size` ranks have opened under this name; None for all of them if one could not."""
    made = make(name, size) if rank == 0 else None
    if rank == 0:
        store.set(name, "" if made is None else made.told)
    found = opened(store.get(name).decode(), rank, size)
    store.set(f"{name}: {rank}", str(found is not None))
    everybody = [store.get(f"{name}: {member}") == b"True" for member in range(size)]
    if made is not None:
        os.close(made.file)
    return found if all(everybody) else None


class Made(NamedTuple):
    file: int
    told: str  # how others find it


def make(name: str, size: int) -> Made | None:
    if not hasattr(os, "memfd_create"):
        return None
    secret = secrets.token_hex(16)
    length = (size * SLOTS + 1) * SLOT
    file = os.memfd_create(f"bloomery {name}")
    os.truncate(file, length)
    os.pwrite(file, secret.encode(), length)
    return Made(file, f"{machine()} {os.getpid()} {file} {length} {secret}")


def opened(told: str, rank: int, size: int) -> Region | None:
    """Every rank opens the file for itself, for a lock belongs to an opening."""
    if not told or not team().active:
        return None
    try:
        file = find(told)
    except OSError:
        return None
    handle = team().call.region_make(file, rank, size, SLOT, SLOTS)
    if handle:
        return Region(handle)
    os.close(file)
    return None


def find(told: str) -> int:
    """Behind the file's end stands what proves that it is this one."""
    there, process, number, length, secret = told.split()
    if there != machine():
        raise OSError("another machine")
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NOCTTY)
    if os.pread(file, len(secret), int(length)) != secret.encode():
        os.close(file)
        raise OSError("another file")
    return file


def machine() -> str:
    """The same for processes that see each other."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


class Shared:
    """A group through a region; what has no native form goes the group's other way, on all ranks alike."""

    def __init__(self, memory: Region, other: Group):
        self.region = memory
        self.other = other
        self.rank = other.rank
        self.size = other.size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in HALVES:
            return self.other.sum(x)
        x = x.contiguous()
        out = team().empty(tuple(x.shape), x.dtype)
        call = team().call
        memory = team().keep(self.region)
        heard(call.native_sum(memory.handle, address(x), x.numel(), HALVES[x.dtype], address(out)))
        return out

    def join(self, x: torch.Tensor, total: int) -> torch.Tensor:
        width = -(-total // self.size)
        if width * x.element_size() > SLOT:
            return self.other.join(x, total)
        x = x.contiguous()
        out = team().empty((len(x), total), x.dtype)
        call = team().call
        memory = team().keep(self.region)
        size = x.element_size()
        heard(
            call.native_join(
                memory.handle, address(x), len(x), width * size, total * size, address(out)
            )
        )
        return out


class Near:
    """Between two stages of one machine: number 0 of the region sends, number 1 receives."""

    def __init__(self, memory: Region):
        self.region = memory

    def receive(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        x = team().empty((count, width), dtype)
        heard(team().call.native_receive(team().keep(self.region).handle, address(x), x.nbytes))
        return x

    def send(self, x: torch.Tensor) -> None:
        x = x.contiguous()
        heard(team().call.native_send(team().keep(self.region).handle, address(x), x.nbytes))

"""The one team of threads a process has for native kernels, and how tensors reach them.

A machine has its cores but once, so the team is a process's and not a model's, as torch's own threads are. A worker
starts it; until then, and where the library could not be built, kernels leave every tensor to torch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from math import prod
from typing import TypeVar

import torch

from bloomery.native.arena import ALIGNED, Arena
from bloomery.native.build import NoLibrary, build

T = TypeVar("T")
# bytes; what is never touched costs nothing
STRETCH = 64 << 20
HUGE = 2 << 20
KINDS = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_long,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}

# What each function takes, and what it gives where it gives anything.
FUNCTIONS: Mapping[str, tuple[str, str | None]] = {
    "team_start": ("i", "i"),
    "team_stop": ("", None),
    "large_pages": ("pl", None),
    "record_begin": ("", None),
    "record_end": ("", "p"),
    "program_run": ("p", "i"),
    "program_length": ("p", "l"),
    "program_free": ("p", None),
    "matrix_make": ("llippp", "p"),
    "matrix_free": ("p", None),
    "native_packed_bytes": ("ill", "l"),
    "native_pack": ("iplllp", None),
    "native_linear": ("pplpifppiipfp", None),
    "native_gather": ("pplfp", None),
    "native_norm": ("pllifpplp", None),
    "native_elements": ("ippllfip", None),
    "native_copy": ("ppl", None),
    "native_shift": ("pllp", None),
    "native_turn": ("pliiippipiippiffpppli", None),
    "native_attend": ("ppliiiiplllpllpffpldp", None),
    "native_fetch": ("plpppllppppp", None),
    "native_advance": ("plpppl", None),
    "native_pick": ("pllppplppp", None),
    "region_make": ("iiill", "p"),
    "region_free": ("p", None),
    "native_sum": ("pplip", "i"),
    "native_join": ("pplllp", "i"),
    "native_send": ("ppl", "i"),
    "native_receive": ("ppl", "i"),
    "native_own": ("plllp", None),
    "native_blank": ("pllllp", None),
}


class Recording(threading.local):
    """A thread's own: others go on computing meanwhile."""

    arena: Arena | None = None  # where results go while a program is recorded
    kept: tuple[object, ...] = ()  # what the program at hand must hold on to


class Team:
    def __init__(self) -> None:
        self.active = False
        self.threads = 0
        self.stretch = torch.empty(0, dtype=torch.uint8)  # what is left of the last one
        self.recording = Recording()

    def start(self, threads: int) -> str | None:
        """Build or load the library and wake the threads; why not, where that fails."""
        try:
            self.threads = self.call.team_start(threads)
        except NoLibrary as reason:
            return str(reason)
        self.active = True
        return None

    @property
    def arena(self) -> Arena | None:
        return self.recording.arena

    @cached_property
    def call(self) -> ctypes.CDLL:
        return bind(str(build()))

    def stop(self) -> None:
        """From now on torch computes; matrices that only the team can read are read by the caller's thread."""
        if self.active:
            self.call.team_stop()
            self.active = False

    def takes(self, *tensors: torch.Tensor | None) -> bool:
        """Whether native kernels may have these: float32 in this machine's memory, without gaps."""
        return self.active and all(
            x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous())
            for x in tensors
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory for a result."""
        arena = self.arena
        return (
            torch.empty(shape, dtype=dtype)
            if arena is None
            else arena.tensor(prod(shape), dtype).view(shape)
        )

    def lasting(self, size: int) -> torch.Tensor:
        """Bytes for weights, which every step reads from end to end: cut from stretches of large pages."""
        size = -(-size // ALIGNED) * ALIGNED
        if size > len(self.stretch):
            self.stretch = torch.empty(max(size, STRETCH) + HUGE, dtype=torch.uint8)
            self.stretch = self.stretch[-self.stretch.data_ptr() % HUGE :]
            self.call.large_pages(self.stretch.data_ptr(), len(self.stretch))
        found = self.stretch[:size]
        self.stretch = self.stretch[size:]
        return found

    def record(self, work: Callable[[], None], arena: Arena) -> Program:
        """What `work` asks of the team, written down instead of done. Results live in the arena."""
        self.recording.arena = arena
        self.recording.kept = (arena,)
        self.call.record_begin()
        try:
            work()
        except BaseException:
            self.call.program_free(self.call.record_end())
            raise
        finally:
            kept = self.recording.kept
            self.recording.arena = None
            self.recording.kept = ()
        return Program(self.call, self.call.record_end(), kept)

    def keep(self, thing: T) -> T:
        """Something whose memory an operation names, made for this call alone."""
        if self.arena is not None:
            self.recording.kept += (thing,)
        return thing


class Program:
    """Operations on fixed addresses; the tensors they name must outlive it."""

    def __init__(self, call: ctypes.CDLL, handle: int, kept: tuple[object, ...]):
        self.call = call
        self.handle = handle
        self.kept = kept

    def __len__(self) -> int:
        return self.call.program_length(self.handle)

    def replay(self) -> None:
        heard(self.call.program_run(self.handle))

    def __del__(self) -> None:
        self.call.program_free(self.handle)


@cache
def team() -> Team:
    return Team()


def bind(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name, (takes, gives) in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [KINDS[letter] for letter in takes]
        function.restype = None if gives is None else KINDS[gives]
    return library


def heard(lost: int) -> None:
    """What a function says that waits for other processes."""
    if lost:
        raise ConnectionError(f"rank {lost - 1} of those this one shares memory with is gone")


def address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()

"""The thread pool of the native CPU kernels: it owns the threads and the memory they work in.

A worker creates one pool and passes it to the model, the attention backend and the sampler. Where
the pool is None (on a GPU, or without compiled kernels) every operation runs in torch instead. The
operations themselves are in ops.py; this module knows no tensor shapes and no model.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Mapping
from math import prod
from typing import TypeVar

import torch

from bloomery.native.build import find_library

T = TypeVar("T")
ALIGNMENT = 64  # bytes
WEIGHT_CHUNK = 64 << 20  # bytes of one allocation for weights; untouched pages cost nothing
HUGE_PAGE = 2 << 20  # bytes

C_TYPES = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_long,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}

# The argument types of each C function, and the type of its result.
C_FUNCTIONS: Mapping[str, tuple[str, str | None]] = {
    "pool_create": ("i", "p"),
    "pool_destroy": ("p", None),
    "pool_num_threads": ("p", "i"),
    "advise_huge_pages": ("pl", None),
    "trace_begin": ("", None),
    "trace_end": ("", "p"),
    "trace_run": ("pp", "i"),
    "trace_length": ("p", "l"),
    "trace_free": ("p", None),
    "matrix_create": ("llippp", "p"),
    "matrix_free": ("p", None),
    "native_packed_bytes": ("ill", "l"),
    "native_pack": ("pipplllp", None),
    "native_pack_floats": ("pplllp", None),
    "native_linear": ("ppplpifppiifffpfp", None),
    "native_expert_linear": ("pppppppllliifffp", None),
    "native_route": ("ppllliipffllliffpfpp", None),
    "native_sort_pairs": ("ppllpp", None),
    "native_sum_experts": ("ppppllllppp", None),
    "native_lora_shrink": ("ppllpllpplllpp", None),
    "native_lora_expand": ("ppllpllppllllpplp", None),
    "native_lora_lookup": ("pplplpplllp", None),
    "native_pair_inputs": ("ppplllpp", None),
    "native_gather": ("ppplfp", None),
    "native_panel_rows": ("", "i"),
    "native_largest_activation": ("", "i"),
    "native_norm": ("ppllifpplp", None),
    "native_norm_columns": ("ppllllifpplllpl", None),
    "native_elementwise": ("pippllfifffp", None),
    "native_copy": ("pppl", None),
    "native_select_rows": ("ppllplp", None),
    "native_add_integer": ("ppllp", None),
    "native_rope_cache": ("pplliiippipiippifiipfipfppplpli", None),
    "native_attention": ("pppliiiiplllpllpffpllppiidp", None),
    "native_decode_inputs": ("pplpppllllppppp", None),
    "native_advance": ("pplpppl", None),
    "native_convolution": ("pppppppplllipplllppll", None),
    "native_delta_net": ("ppppppplllllliffpplllppll", None),
    "native_mamba2": ("pppppppllllllfffpplllppll", None),
    "native_selective_scan": ("ppppppppplllpplllppll", None),
    "native_gate_norm": ("pppppllllffii", None),
    "native_gather_states": ("pplplllp", None),
    "native_sample": ("ppllpppppppppppp", None),
    "native_score": ("ppllplp", None),
    "shm_open_segment": ("iiill", "p"),
    "shm_close_segment": ("p", None),
    "native_all_reduce": ("ppplip", "i"),
    "native_all_gather": ("ppplllp", "i"),
    "native_send": ("pppl", "i"),
    "native_receive": ("pppl", "i"),
    "native_local_vocab_rows": ("pplllp", None),
    "native_zero_foreign_rows": ("ppllllp", None),
}


class ThreadPool:
    """Threads for native kernels.

    Any Python thread may issue operations; they run one after another.
    """

    def __init__(self, num_threads: int, library: ctypes.CDLL | None = None):
        """Load the C library, after compiling it if need be, and start the threads.

        The pool may have fewer threads than asked for; the calling thread is one of them.
        Raises NativeBuildError where there is neither a fitting library nor a compiler.
        """
        self.library = load_library(str(find_library())) if library is None else library
        self.handle: int = self.library.pool_create(num_threads)
        self.num_threads: int = self.library.pool_num_threads(self.handle)
        # Of matrix products: the rows that weights interleave, and the integer to which the largest
        # activation of a block is rounded.
        self.panel_rows: int = self.library.native_panel_rows()
        self.largest_activation: int = self.library.native_largest_activation()
        self._destroy = weakref.finalize(self, self.library.pool_destroy, self.handle)
        self._destroy.atexit = False  # other threads may still compute while the process exits
        self._weight_memory = torch.empty(0, dtype=torch.uint8)  # the rest of the last chunk
        self._recording = TraceRecording()

    def close(self) -> None:
        """End the threads. No operation and no trace may run on the pool afterwards."""
        self._destroy()

    @property
    def arena(self) -> TraceArena | None:
        """The memory for results while the calling thread records a trace; else None."""
        return self._recording.arena

    def accepts(self, *tensors: torch.Tensor | None) -> bool:
        """Whether native kernels can read these tensors: float32, on the CPU, contiguous."""
        return all(
            x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous())
            for x in tensors
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate the result of an operation; in the arena while a trace is recorded."""
        arena = self.arena
        count = prod(shape)
        if arena is None or not count:
            return torch.empty(shape, dtype=dtype)
        return arena.allocate(count, dtype).view(shape)

    def allocate_weights(self, size: int) -> torch.Tensor:
        """Allocate bytes for weights, on huge pages, because every step reads all of them."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        if size > len(self._weight_memory):
            chunk = torch.empty(max(size, WEIGHT_CHUNK) + HUGE_PAGE, dtype=torch.uint8)
            self._weight_memory = chunk[-chunk.data_ptr() % HUGE_PAGE :]
            aligned = self._weight_memory
            self.library.advise_huge_pages(aligned.data_ptr(), len(aligned))
        allocated = self._weight_memory[:size]
        self._weight_memory = self._weight_memory[size:]
        return allocated

    def record(self, work: Callable[[], None], arena: TraceArena) -> OpTrace:
        """Run `work` with its native operations recorded instead of executed.

        Results are allocated in the arena. Torch operations still execute; record_trace prevents
        them.
        """
        recording = self._recording
        recording.arena = arena
        recording.references = [arena]
        self.library.trace_begin()
        try:
            work()
        except BaseException:
            self.library.trace_free(self.library.trace_end())
            raise
        finally:
            references = recording.references
            recording.arena = None
            recording.references = []
        return OpTrace(self, self.library.trace_end(), references)

    def keep_alive(self, owner: T) -> T:
        """Let the trace that is being recorded hold an object whose memory an operation uses."""
        if self.arena is not None:
            self._recording.references.append(owner)
        return owner


class TraceRecording(threading.local):
    """The trace that a thread is recording. Other threads run eagerly meanwhile."""

    arena: TraceArena | None = None

    def __init__(self) -> None:
        self.references: list[object] = []


class OpTrace:
    """A recorded sequence of native operations on fixed addresses.

    The tensors it reads and writes must outlive it, except those in `references`.
    """

    def __init__(self, pool: ThreadPool, handle: int, references: list[object]):
        self.pool = pool
        self.library = pool.library
        self.handle = handle
        self.references = references

    def __len__(self) -> int:
        return self.library.trace_length(self.handle)

    def replay(self) -> None:
        """Run all operations of the trace."""
        raise_if_rank_lost(self.library.trace_run(self.pool.handle, self.handle))

    def __del__(self) -> None:
        self.library.trace_free(self.handle)


class TraceArena:
    """Memory for the results of recorded traces. All traces share it: only one runs at a time.

    While a trace is recorded, its tensors are freed as in an eager run, and memory without a
    reference is allocated again. A trace of hundreds of operations thus needs no more memory than
    the few results that are alive at the same time.
    """

    def __init__(self, size: int):
        self.memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)  # untouched pages are free
        first = -self.memory.data_ptr() % ALIGNMENT
        self.free_ranges = [(first, first + size)]  # sorted byte ranges

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of `count` elements; its memory is freed with its last view."""
        size = max(1, -(-count * dtype.itemsize // ALIGNMENT)) * ALIGNMENT
        fitting = (i for i, (start, end) in enumerate(self.free_ranges) if end - start >= size)
        index = next(fitting, None)
        if index is None:
            raise MemoryError(
                f"a recorded step needs more than {len(self.memory)} bytes for its results"
            )
        start, end = self.free_ranges.pop(index)
        if end - start > size:
            self.free_ranges.insert(index, (start + size, end))
        # Tensors hold a reference to the buffer, so it is finalized with the last of them.
        buffer = (ctypes.c_uint8 * size).from_address(self.memory.data_ptr() + start)
        weakref.finalize(buffer, self._release, start, start + size).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count)

    def _release(self, start: int, end: int) -> None:
        insort(self.free_ranges, (start, end))
        merged = [self.free_ranges[0]]
        for next_start, next_end in self.free_ranges[1:]:
            last_start, last_end = merged[-1]
            if next_start == last_end:
                merged[-1] = (last_start, next_end)
            else:
                merged.append((next_start, next_end))
        self.free_ranges = merged


def load_library(path: str) -> ctypes.CDLL:
    """Load the compiled kernels and declare the types of their functions."""
    library = ctypes.CDLL(path)
    for name, (arguments, result) in C_FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [C_TYPES[letter] for letter in arguments]
        function.restype = None if result is None else C_TYPES[result]
    return library


def raise_if_rank_lost(lost_rank: int) -> None:
    """Check the result of a function that waits for other processes: 0, or a dead rank plus 1."""
    if lost_rank:
        raise ConnectionError(f"rank {lost_rank - 1}, which shares memory with this one, has died")


def data_pointer(x: torch.Tensor | None) -> int | None:
    """Return the address of the data of a tensor; None stands for NULL."""
    return None if x is None else x.data_ptr()

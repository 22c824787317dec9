"""How Triton kernels are compiled and launched: one import for every kernel file.

Without Triton (a CPU install) every kernel file can still be imported: `jit` returns functions
unchanged, and no caller launches them. With TRITON_INTERPRET=1 kernels run on CPU tensors, slowly;
the tests use that.

Programmatic dependent launch (PDL) lets a kernel start while the previous kernel of the stream is
still running. A kernel therefore calls `launch_dependents` first. In all of its programs it
calls `wait_for_previous` before it writes anything and before it reads what an earlier kernel
wrote. Above the wait, a kernel may read only three things: what no kernel of the step writes, what
was written by a kernel that does not call `launch_dependents` and so is never overtaken, and, if
its predecessor calls `launch_dependents` only after its own wait, what was written before that
predecessor.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = tl = None


log = logging.getLogger("bloomery.kernels")


def jit(function: Callable | None = None, **options: Any) -> Any:
    """Apply triton.jit if Triton is installed.

    The option `do_not_specialize` names integer arguments whose values must not cause a new
    compilation.
    """
    if triton is not None:
        return triton.jit(function, **options)
    if function is not None:
        return function
    return lambda function: function


def kernel_constant(value: Any) -> Any:
    """Wrap a value of a module so that kernels may read it."""
    return value if triton is None else tl.constexpr(value)


@jit
def launch_dependents(PDL: tl.constexpr):
    """From here on the next kernel may start."""
    if PDL:
        gdc_launch_dependents()


@jit
def wait_for_previous(PDL: tl.constexpr):
    """From here on everything that earlier kernels wrote is visible."""
    if PDL:
        gdc_wait()


MissingKernels = dict[str, Any]  # specialization -> kernel


@contextmanager
def defer_compilations(missing: MissingKernels) -> Iterator[None]:
    """Inside of the block, kernels that this process has not compiled are added to `missing`.

    They are neither compiled nor launched. What is computed is meaningless then, so the block must
    capture a CUDA graph, which runs nothing. Other threads compile as usual.
    """
    if triton is None:
        yield
        return

    thread = threading.get_ident()

    def defer(fn: Any, compile: Any, **details: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        missing[compile["specialization_data"]] = fn.jit_function
        return True

    runtime = triton.knobs.runtime
    previous = runtime.jit_cache_hook
    runtime.jit_cache_hook = defer
    try:
        yield
    finally:
        runtime.jit_cache_hook = previous


def compile_kernels(missing: MissingKernels) -> None:
    """Compile these kernels on all cores, or load them from the cache on the disk."""
    start_compiling(missing)()


def start_compiling(missing: MissingKernels) -> Callable[[], None]:
    """Start to compile these kernels on other threads; the returned function waits for them.

    The caller may compile, capture and launch other kernels meanwhile.
    """
    if not missing:
        return lambda: None
    kernels = dict(missing)
    device = torch.cuda.current_device()

    def compile_one(specialization: str) -> float:
        started = time.monotonic()
        torch.cuda.set_device(device)  # of this thread
        # The launcher is left to the first launch: Triton loads launchers as extension modules of
        # one name, and threads that do so at the same time get each other's.
        kernels[specialization].preload(specialization)
        return time.monotonic() - started

    start = time.monotonic()
    threads = ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1))
    jobs = [threads.submit(compile_one, specialization) for specialization in kernels]

    def wait() -> None:
        with threads:
            seconds = [job.result() for job in jobs]
        names = [kernel.__name__ for kernel in kernels.values()]
        slowest, name = max(zip(seconds, names, strict=True))
        log.info(
            "%d kernels compiled or loaded in %.1f s; %s took longest, %.1f s",
            len(kernels),
            time.monotonic() - start,
            name,
            slowest,
        )

    return wait


def triton_interpreted() -> bool:
    """Whether kernels run on CPU tensors in this process (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def use_triton(x: torch.Tensor) -> bool:
    """Whether a Triton kernel, rather than its torch reference, handles this tensor."""
    return x.is_cuda and triton is not None


@cache
def pdl_options(device: torch.device, joins: bool = False) -> dict[str, bool]:
    """Return launch arguments: whether a kernel may start before its predecessor has ended.

    joins: it follows work of another stream, too. Then it waits for both to end.
    """
    if is_hopper(device) and not joins:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is a Hopper or newer: it has PDL and packed arithmetic on 16-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 4 stands in for them on a CPU."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()

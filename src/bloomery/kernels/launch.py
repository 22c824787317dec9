"""How Triton kernels are written and launched here: one import for all of them, and when one may overtake another.

A machine without Triton (a CPU install) imports every kernel file all the same: there `jit` leaves functions as they
are, and nobody calls them. Under TRITON_INTERPRET=1 kernels run on CPU tensors, slowly: that is how they are tested.

Programmatic dependent launch lets a kernel start while its predecessor is still running. What keeps that right: kernels
call `begin` first, and `wait`, in all of their programs, before they read what an earlier kernel of the stream wrote
and before they write anything. Only what no kernel of the step writes may be read above the wait, or what one wrote
that nobody overtakes, for it does not call `begin`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = tl = None


def jit(function: Callable | None = None, **options: Any) -> Any:
    """triton.jit where there is Triton. `do_not_specialize` keeps a number that changes from compiling anew."""
    if triton is None:
        return function if function is not None else lambda function: function
    return triton.jit(function, **options)


@jit
def begin(PDL: tl.constexpr):
    """The next kernel may be set up from here on."""
    if PDL:
        gdc_launch_dependents()


@jit
def wait(PDL: tl.constexpr):
    """Everything earlier kernels wrote is there from here on."""
    if PDL:
        gdc_wait()


def interpreted() -> bool:
    """Whether kernels run on CPU tensors in this process."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def fused(x: torch.Tensor) -> bool:
    """Whether a kernel, rather than its reference, takes this tensor."""
    return x.is_cuda and triton is not None


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: whether it may start before its predecessor has ended."""
    return {"PDL": True, "launch_pdl": True} if hopper(device) else {"PDL": False}


@cache
def hopper(device: torch.device) -> bool:
    """Whether the device has what came with Hopper: overtaking, and arithmetic on two short floats at once."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def processors(device: torch.device) -> int:
    """How many programs run side by side, at the least."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


def power_of_two(n: int) -> int:
    """The smallest one that is no less."""
    return 1 << max(n - 1, 0).bit_length()

"""Activation functions of an MLP, plain or gated: activation(gate) * up in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
BLOCK = 1024  # outputs of one Triton program


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up for x [tokens, gate | up]."""
    if use_triton(x):
        return activation_triton(x, activation, gated=True)
    return gated_activation_reference(x, activation)


def apply_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(x), element by element."""
    if use_triton(x):
        return activation_triton(x, activation, gated=False)
    return ACTIVATIONS[activation](x)


def gated_activation_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The torch reference of `gated_activation`."""
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def activation_triton(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """Run the kernel."""
    x = x.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    grid = (out.numel() // width, -(-width // BLOCK))
    activation_kernel[grid](
        x,
        out,
        WIDTH=width,
        BLOCK=BLOCK,
        ACTIVATION=activation,
        GATED=gated,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


@jit
def activation_kernel(
    x,  # [rows, WIDTH], or [rows, 2 * WIDTH] with GATED
    out,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK outputs of one row."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    source = x + row * (2 * WIDTH if GATED else WIDTH) + column
    wait_for_previous(PDL)
    y = activation_tile(tl.load(source, mask=valid, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y = y * tl.load(source + WIDTH, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=valid)


@jit
def activation_tile(x, ACTIVATION: tl.constexpr):
    """Apply an activation to float32 values inside a kernel.

    gelu_tanh uses tanh(y) = 2 sigmoid(2 y) - 1.
    """
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.maximum(x, 0.0)

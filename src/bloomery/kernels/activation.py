"""Activation functions of an MLP, plain or gated: activation(gate) * up in one pass.

Two of them have parameters:

    clamped_swiglu   limit, alpha, offset: gate * sigmoid(alpha * gate) * (up + offset), where the
                     gate is at most limit, and up is in [-limit, limit]. Always gated.
    xielu            alpha_p, alpha_n, beta: alpha_p * x^2 + beta * x where x is positive, else
                     alpha_n * (exp(min(x, XIELU_EPS)) - 1 - x) + beta * x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from bloomery.fusion import ActivationEpilogue
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)

# Activations without parameters.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
CLAMPED_SWIGLU = "clamped_swiglu"
XIELU_BETA = 0.5
XIELU_EPS = -1e-6
BLOCK = 1024  # outputs of one Triton program


def apply_activation(
    x: torch.Tensor, activation: ActivationEpilogue, added: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activation(x), or activation(gate) * up for x [tokens, gate | up].

    `added` is a second part of x.
    """
    if use_triton(x):
        return activation_triton(x, activation, added)
    return activation_reference(x if added is None else x + added, activation)


def activation_reference(x: torch.Tensor, activation: ActivationEpilogue) -> torch.Tensor:
    """The torch reference of `apply_activation`."""
    name, gated, params = activation
    if not gated:
        return xielu(x, *params) if name == "xielu" else ACTIVATIONS[name](x)
    gate, up = x.chunk(2, -1)
    if name == CLAMPED_SWIGLU:
        limit, alpha, offset = params
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + offset)
    return activation_reference(gate, ActivationEpilogue(name, False, params)) * up


def xielu(x: torch.Tensor, alpha_p: float, alpha_n: float, beta: float) -> torch.Tensor:
    """xIELU: quadratic for positive x, exponential for negative x."""
    negative = torch.expm1(x.clamp(max=XIELU_EPS)) - x
    return torch.where(x > 0, alpha_p * x * x, alpha_n * negative) + beta * x


def xielu_params(alpha_p: float, alpha_n: float) -> tuple[float, float, float]:
    """Return the parameters of xielu for the numbers that a checkpoint stores.

    Stored numbers may be negative; their softplus is not.
    """
    positive = F.softplus(torch.tensor([alpha_p, alpha_n], dtype=torch.float64))
    return float(positive[0]), XIELU_BETA + float(positive[1]), XIELU_BETA


def activation_triton(
    x: torch.Tensor, activation: ActivationEpilogue, added: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the kernel."""
    x = x.contiguous()
    name, gated, params = activation
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    grid = (out.numel() // width, -(-width // BLOCK))
    activation_kernel[grid](
        x,
        x if added is None else added,
        out,
        *params,
        WIDTH=width,
        BLOCK=BLOCK,
        ACTIVATION=name,
        GATED=gated,
        HAS_ADDED=added is not None,
        num_warps=4,
        **pdl_options(x.device, joins=added is not None),
    )
    return out


@jit
def activation_kernel(
    x,  # [rows, WIDTH], or [rows, 2 * WIDTH] with GATED
    added,  # like x if HAS_ADDED: a second part of it
    out,  # [rows, WIDTH]
    param0,
    param1,
    param2,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK outputs of one row."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    first = row * (2 * WIDTH if GATED else WIDTH) + column
    wait_for_previous(PDL)
    y = tl.load(x + first, mask=valid, other=0.0).to(tl.float32)
    if HAS_ADDED:
        y += tl.load(added + first, mask=valid, other=0.0).to(tl.float32)
    up = y
    if GATED:
        up = tl.load(x + first + WIDTH, mask=valid, other=0.0).to(tl.float32)
        if HAS_ADDED:
            up += tl.load(added + first + WIDTH, mask=valid, other=0.0).to(tl.float32)
    y = activate_tile(y, up, ACTIVATION, GATED, param0, param1, param2)
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=valid)


@jit
def activate_tile(x, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr, param0, param1, param2):
    """Apply an activation to float32 values inside a kernel; with GATED multiply it by `up`.

    Comparisons rather than minima keep NaN where it is.
    """
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(x > param0, param0, x)
        up = tl.where(up > param0, param0, up)
        up = tl.where(up < -param0, -param0, up)
        return gate * tl.sigmoid(param1 * gate) * (up + param2)
    elif GATED:
        return activation_tile(x, ACTIVATION, param0, param1, param2) * up
    else:
        return activation_tile(x, ACTIVATION, param0, param1, param2)


@jit
def activation_tile(x, ACTIVATION: tl.constexpr, param0, param1, param2):
    """Apply an activation of one value.

    gelu_tanh uses tanh(y) = 2 sigmoid(2 y) - 1. xielu needs exp(y) - 1 - y for negative y: near
    zero the difference would cancel, so its series is used.
    """
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        return y * y
    elif ACTIVATION == "xielu":
        series = 1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0))
        series = x * x * (0.5 + x * (1.0 / 6.0 + x * series))
        negative = tl.where(x > -0.25, series, tl.exp(tl.minimum(x, 0.0)) - 1.0 - x)
        return tl.where(x > 0.0, param0 * x * x, param1 * negative) + param2 * x
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.maximum(x, 0.0)

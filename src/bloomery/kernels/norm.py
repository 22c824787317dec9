"""RMS norm and layer norm over the last axis, computed in float32 for inputs of any type.

The Triton kernel holds one row per program and optionally adds a residual first. What is added may
itself be normed, as in models with a norm after each block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)

MAX_WIDTH = 32768  # elements of a row; the kernel holds a whole row in registers


class RmsNorm(NamedTuple):
    """An RMS norm: its weight [width], and what is added to the mean square."""

    weight: torch.Tensor | None
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Norm the last axis without subtracting the mean."""
    if use_triton(x) and supports_norm_triton(x, weight, None):
        return norm_triton(x, weight, None, eps, centered=False)[1]
    return rms_norm_reference(x, weight, eps)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Norm the last axis. A weight [heads, dim] scales each head of x by its own row."""
    if use_triton(x) and supports_norm_triton(x, weight, bias):
        return norm_triton(x, weight, bias, eps, centered=True)[1]
    return layer_norm_reference(x, weight, bias, eps)


def add_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual + scale * y and its norm: a layer norm if `centered`, else an RMS norm.

    `added` is a second part of y.
    """
    contiguous = residual.is_contiguous() and y.is_contiguous()
    if use_triton(y) and supports_norm_triton(y, weight, bias) and contiguous:
        return norm_triton(y, weight, bias, eps, centered, residual, scale, added)
    if added is not None:
        y = y + added
    total = torch.add(residual, y, alpha=scale)
    if centered:
        return total, layer_norm_reference(total, weight, bias, eps)
    return total, rms_norm_reference(total, weight, eps)


def norm_add_norm(
    residual: torch.Tensor, y: torch.Tensor, scale: float, inner: RmsNorm, outer: RmsNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return total = residual + scale * inner(y), and outer(total), or total without an outer norm.

    All are [rows, width].
    """
    contiguous = residual.is_contiguous() and y.is_contiguous()
    outer_weight = None if outer is None else outer.weight
    supported = all(supports_norm_triton(y, part, None) for part in (inner.weight, outer_weight))
    if not (use_triton(y) and contiguous and supported):
        return norm_add_norm_reference(residual, y, scale, inner, outer)
    return norm_add_norm_triton(residual, y, scale, inner, outer)


def norm_add_norm_reference(
    residual: torch.Tensor, y: torch.Tensor, scale: float, inner: RmsNorm, outer: RmsNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch reference of `norm_add_norm`."""
    total = torch.add(residual, rms_norm_reference(y, *inner), alpha=scale)
    return total, total if outer is None else rms_norm_reference(total, *outer)


def norm_add_norm_triton(
    residual: torch.Tensor, y: torch.Tensor, scale: float, inner: RmsNorm, outer: RmsNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel."""
    width = y.shape[-1]
    block = next_power_of_2(width)
    total = torch.empty_like(y)
    out = total if outer is None else torch.empty_like(y)
    outer_weight, outer_eps = outer or (None, 0.0)
    norm_add_norm_kernel[(y.numel() // width,)](
        y,
        residual,
        y if inner.weight is None else inner.weight,
        y if outer_weight is None else outer_weight,
        total,
        out,
        inner.eps,
        outer_eps,
        scale,
        HAS_INNER_WEIGHT=inner.weight is not None,
        HAS_OUTER=outer is not None,
        HAS_OUTER_WEIGHT=outer_weight is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(y.device),
    )
    return total, out


@jit
def norm_add_norm_kernel(
    y,  # [rows, WIDTH]
    residual,  # [rows, WIDTH]
    inner_weight,  # [WIDTH]
    outer_weight,  # [WIDTH]
    total,  # [rows, WIDTH]
    out,  # [rows, WIDTH]
    inner_eps,
    outer_eps,
    scale,
    HAS_INNER_WEIGHT: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_OUTER_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program norms, adds and norms one row; results are rounded as by separate kernels."""
    launch_dependents(PDL)
    TYPE: tl.constexpr = total.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    if HAS_INNER_WEIGHT:
        inner_row = tl.load(inner_weight + column, mask=valid, other=0.0).to(tl.float32)
    if HAS_OUTER_WEIGHT:
        outer_row = tl.load(outer_weight + column, mask=valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    v = tl.load(y + place + column, mask=valid, other=0.0).to(tl.float32)
    r = tl.load(residual + place + column, mask=valid, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / WIDTH + inner_eps)
    if HAS_INNER_WEIGHT:
        v = v * inner_row
    v = (r + scale * v.to(TYPE).to(tl.float32)).to(TYPE)
    tl.store(total + place + column, v, mask=valid)
    if HAS_OUTER:
        v = v.to(tl.float32)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / WIDTH + outer_eps)
        if HAS_OUTER_WEIGHT:
            v = v * outer_row
        tl.store(out + place + column, v.to(TYPE), mask=valid)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The torch reference of `rms_norm`."""
    if weight is None or weight.dim() == 1:
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    x_float = x.float()
    inverse_rms = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (x_float * inverse_rms * weight).to(x.dtype)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The torch reference of `layer_norm`."""
    x_float = x.float()
    if weight is None or weight.dim() == 1:
        return F.layer_norm(x_float, x.shape[-1:], weight, bias, eps).to(x.dtype)
    out = F.layer_norm(x_float, x.shape[-1:], None, None, eps) * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def supports_norm_triton(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Whether the kernel can take this input.

    It needs one weight for all rows, and rows a fixed distance apart, as in a slice of a packed
    projection.
    """
    regular_rows = x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)
    shared_weights = all(part is None or part.dim() == 1 for part in (weight, bias))
    return regular_rows and x.shape[-1] <= MAX_WIDTH and shared_weights


def norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, or residual + scale * (x + added), and its norm. `centered` subtracts the mean."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    block = next_power_of_2(width)
    norm_kernel[(x.numel() // width,)](
        x,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        x if residual is None else residual,
        x if added is None else added,
        total,
        x.stride(0) if x.dim() == 2 else width,
        eps,
        scale,
        ADD_RESIDUAL=residual is not None,
        HAS_ADDED=added is not None,
        WIDTH=width,
        BLOCK=block,
        CENTERED=centered,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(x.device, joins=added is not None),
    )
    return total, out


@jit
def norm_kernel(
    x,  # [rows, WIDTH], rows `stride` apart
    weight,  # [WIDTH]
    bias,  # [WIDTH]
    out,  # [rows, WIDTH]
    residual,  # [rows, WIDTH]
    added,  # [rows, WIDTH] if HAS_ADDED: a second part of x
    total,  # [rows, WIDTH]: residual + scale * x
    stride,
    eps,
    scale,
    ADD_RESIDUAL: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program norms one row. Weights are loaded before the wait: no kernel writes them."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    y = tl.load(x + row * stride + column, mask=valid, other=0.0).to(tl.float32)
    if HAS_ADDED:
        y += tl.load(added + row * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        r = tl.load(residual + row * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
        y = r + scale * y
        # The norm is taken of the rounded sum, because later layers see the rounded sum.
        y = y.to(out.dtype.element_ty)
        tl.store(total + row * WIDTH + column, y, mask=valid)
        y = y.to(tl.float32)
    if CENTERED:
        y = tl.where(valid, y - tl.sum(y, 0) / WIDTH, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    if HAS_WEIGHT:
        y = y * w
    if HAS_BIAS:
        y = y + b
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=valid)

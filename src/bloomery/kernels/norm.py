"""RMS and layer norm over the last axis, in float32 whatever the input: one pass, one program a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait
from bloomery.native import ops
from bloomery.native.team import team

WIDEST = 32768  # a row is held in registers


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if fused(x) and fits(x, weight, None):
        return norm_rows(x, weight, None, eps, centered=False)[1]
    if team().takes(x, weight):
        return ops.norm(x, "rms", weight, None, eps)
    return rms_norm_reference(x, weight, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """A weight of more than one axis, as [heads, dim], norms the last axis and scales each head by its own row."""
    if fused(x) and fits(x, weight, bias):
        return norm_rows(x, weight, bias, eps, centered=True)[1]
    if team().takes(x, weight, bias):
        return ops.norm(x, "layer", weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)


def add_scaled(residual: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """residual + scale * y. Torch's threads would look for more work afterwards, on cores that the team wants."""
    if residual.shape == y.shape and team().takes(residual, y):
        return ops.elements(ops.ADD_SCALED, residual, y, scale)
    return torch.add(residual, y, alpha=scale)


def add_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + scale * y, and its norm: one pass over both."""
    if fused(y) and fits(y, weight, bias) and residual.is_contiguous() and y.is_contiguous():
        return norm_rows(y, weight, bias, eps, centered, residual, scale)
    total = add_scaled(residual, y, scale)
    if centered:
        return total, layer_norm_reference(total, weight, bias, eps)
    return total, rms_norm_reference(total, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None or weight.dim() == 1:
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    wide = x.float()
    if weight is not None and weight.dim() > 1:
        wide = F.layer_norm(wide, x.shape[-1:], None, None, eps) * weight
        return (wide if bias is None else wide + bias).to(x.dtype)
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def fits(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """One weight for all rows; rows a fixed distance apart, as in a slice of a packed projection."""
    rows = x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)
    return (
        rows
        and x.shape[-1] <= WIDEST
        and all(part is None or part.dim() == 1 for part in (weight, bias))
    )


def norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel; `centered` subtracts the mean. What was normed, x or its sum with a residual, and its norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    block = power_of_two(width)
    norm_kernel[(x.numel() // width,)](
        x,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        x if residual is None else residual,
        total,
        x.stride(0) if x.dim() == 2 else width,
        eps,
        scale,
        ADD=residual is not None,
        WIDTH=width,
        BLOCK=block,
        CENTERED=centered,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        num_warps=min(max(block // 512, 1), 16),
        **overlap(x.device),
    )
    return total, out


@jit
def norm_kernel(
    x,
    weight,
    bias,
    out,
    residual,
    total,
    stride,
    eps,
    factor,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    here = i < WIDTH
    if WEIGHT:
        scale = tl.load(weight + i, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + i, mask=here, other=0.0).to(tl.float32)
    wait(PDL)
    wide = tl.load(x + row * stride + i, mask=here, other=0.0).to(tl.float32)
    if ADD:
        wide = (
            tl.load(residual + row * WIDTH + i, mask=here, other=0.0).to(tl.float32) + factor * wide
        )
        wide = wide.to(out.dtype.element_ty)  # what is handed on is what is normed
        tl.store(total + row * WIDTH + i, wide, mask=here)
        wide = wide.to(tl.float32)
    if CENTERED:
        wide = tl.where(here, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if WEIGHT:
        wide = wide * scale
    if BIAS:
        wide = wide + shift
    tl.store(out + row * WIDTH + i, wide.to(out.dtype.element_ty), mask=here)

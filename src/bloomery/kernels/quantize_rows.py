"""Numbers rounded to 8 bits with a scale for every row, in one pass: what stands before a product of 8-bit factors."""

from __future__ import annotations

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
MOST = {FP8: 448.0, INT8: 127.0}  # what the largest number of a row becomes
LEAST = 1e-12  # a scale, for rows of zeros
WIDEST = 65536  # a row is held in registers


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, in] -> the same in `dtype`, and scales [tokens, 1] in float32: x is about one times the other."""
    call = quantize_kernel_rows if fused(x) and x.shape[1] <= WIDEST else quantize_rows_reference
    return call(x, dtype)


def quantize_rows_reference(
    x: torch.Tensor, dtype: torch.dtype = FP8
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / MOST[dtype]).clamp(min=LEAST)
    wide = (wide / scale).clamp(-MOST[dtype], MOST[dtype])
    return (wide.round() if dtype == INT8 else wide).to(dtype), scale


def quantize_kernel_rows(
    x: torch.Tensor, dtype: torch.dtype = FP8
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel."""
    x = x.contiguous()
    (tokens, columns) = x.shape
    width = power_of_two(x.shape[1])
    out = torch.empty(tokens, columns, dtype=dtype, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    quantize_kernel[(tokens,)](
        x,
        out.view(torch.int8) if dtype == INT8 else out,
        scale,
        MOST[dtype],
        LEAST,
        COLUMNS=columns,
        WIDTH=width,
        ROUND=dtype == INT8,
        num_warps=min(16, max(1, width // 1024)),
        **overlap(x.device),
    )
    return out, scale


@jit
def quantize_kernel(
    x,
    out,
    scale,
    most,
    least,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    v = tl.load(x + row * COLUMNS + i, mask=i < COLUMNS, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(v), 0) / most, least)
    v = tl.minimum(tl.maximum(v / s, -most), most)
    if ROUND:
        v = tl.floor(tl.abs(v) + 0.5) * tl.where(v < 0, -1.0, 1.0)
    tl.store(scale + row, s)
    tl.store(out + row * COLUMNS + i, v.to(out.dtype.element_ty), mask=i < COLUMNS)

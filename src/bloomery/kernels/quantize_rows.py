"""Quantization to 8 bits with one scale per row (token), in one pass over the data.

    scale [rows, 1] = max |x| / QUANT_MAX          codes [rows, columns] = round(x / scale)

One program quantizes one row, which it holds in registers. Codes are float8_e4m3fn or int8.
kernels/packed_linear.py uses it before W8A8 GEMMs, and quant/ for weights. This file must not know
layers or checkpoint formats.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
QUANT_MAX = {FP8: 448.0, INT8: 127.0}  # the code of the largest magnitude of a row
MIN_SCALE = 1e-12  # the scale of a row of zeros
MAX_COLUMNS = 65536  # a row must fit into the registers of a program


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [rows, columns]: codes of `dtype` and float32 scales [rows, 1]."""
    if use_triton(x) and x.shape[1] <= MAX_COLUMNS:
        return quantize_rows_triton(x, dtype)
    return quantize_rows_reference(x, dtype)


def quantize_rows_reference(
    x: torch.Tensor, dtype: torch.dtype = FP8
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch reference of `quantize_rows`."""
    values = x.float()
    quant_max = QUANT_MAX[dtype]
    scale = (values.abs().amax(1, keepdim=True) / quant_max).clamp(min=MIN_SCALE)
    values = (values / scale).clamp(-quant_max, quant_max)
    if dtype == INT8:
        values = values.round()
    return values.to(dtype), scale


def quantize_rows_triton(
    x: torch.Tensor, dtype: torch.dtype = FP8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel."""
    x = x.contiguous()
    rows, columns = x.shape
    width = next_power_of_2(columns)
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    quantize_rows_kernel[(rows,)](
        x,
        codes,
        scale,
        QUANT_MAX[dtype],
        MIN_SCALE,
        COLUMNS=columns,
        WIDTH=width,
        ROUND=dtype == INT8,
        num_warps=min(16, max(1, width // 1024)),
        **pdl_options(x.device),
    )
    return codes, scale


@jit
def quantize_rows_kernel(
    x,
    codes,
    scale,
    quant_max,
    min_scale,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one row. ROUND: to integers, half away from zero."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    v = tl.load(x + row * COLUMNS + i, mask=i < COLUMNS, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(v), 0) / quant_max, min_scale)
    v = tl.minimum(tl.maximum(v / s, -quant_max), quant_max)
    if ROUND:
        v = tl.floor(tl.abs(v) + 0.5) * tl.where(v < 0, -1.0, 1.0)
    tl.store(scale + row, s)
    tl.store(codes + row * COLUMNS + i, v.to(codes.dtype.element_ty), mask=i < COLUMNS)

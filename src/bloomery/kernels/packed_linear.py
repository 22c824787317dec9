"""Which way a product with a packed matrix goes, by its shape and the batch: what a matrix of fewer bits calls.

    rows      few tokens: kernels/packed_gemv, with what stands around the product
    product   dozens: kernels/packed_gemm
    woven     hundreds, on a Hopper: kernels/packed_woven
    rounded   8-bit weights that allow it: the input rounded too, and the library's product of 8-bit factors
    scratch   beyond, where arithmetic counts: unpacked into passing memory, and the library's product

The limits are measured (benchmarks/packed.py). This file must not know layers, formats or what a model is.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from bloomery.kernels import packed_gemm, packed_gemv, packed_woven
from bloomery.kernels.gemv import After, Norm
from bloomery.kernels.launch import begin, fused, jit, overlap, tl, wait
from bloomery.kernels.norm import layer_norm
from bloomery.kernels.packed import Codebook, Fp8, Grid, Packed
from bloomery.kernels.packed_gemv import largest, layout
from bloomery.kernels.quantize_rows import INT8, quantize_rows

LIBRARY = 32  # tokens from which the library multiplies int8
SCRATCH = 1 << 27  # bytes unpacked at once
SPAN = 2048  # bytes of codes that a program unpacks

Way = Literal["rows", "product", "woven", "rounded", "scratch"]


def few(packed: Packed) -> int:
    """Tokens up to which every one may have multiplications of its own."""
    return 4 if layout(packed).bits == 8 else 2


def many(packed: Packed) -> int:
    """Tokens from more of which on unpacking costs less than the slower product."""
    return 320 if isinstance(packed, Codebook) else 512


def way(tokens: int, packed: Packed, dtype: torch.dtype) -> Way:
    if tokens <= few(packed) and packed_gemv.possible(packed):
        return "rows"
    if rounds(packed) and tokens >= (LIBRARY if isinstance(packed, Grid) else 1):
        return "rounded"
    if packed_woven.plan(tokens, packed, dtype):
        return "woven"
    if tokens <= many(packed) and dtype.itemsize == 2 and packed_gemm.possible(packed):
        return "product"
    return "scratch"


def rounds(packed: Packed) -> bool:
    """Whether the library's product of 8-bit factors takes this matrix."""
    rows, columns = packed.shape
    if isinstance(packed, Codebook) or not packed.both or rows % 16 or columns % 16:
        return False
    if isinstance(packed, Fp8):
        return not packed.blocks and torch.cuda.get_device_capability(packed.codes.device) >= (8, 9)
    return (
        packed.codes.dtype == INT8
        and packed.group == columns
        and packed.zero is None
        and packed.order is None
    )


def packed_linear(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, in] -> [tokens, out]."""
    if not fused(x):
        return packed_linear_reference(x, packed, bias)
    match way(len(x), packed, x.dtype):
        case "rows":
            return packed_gemv.packed_rows(x, packed, bias)
        case "product":
            return packed_gemm.packed_product(x, packed, bias)
        case "woven":
            return packed_woven.woven_product(x, packed, bias)
        case "rounded":
            return rounded(x, packed, bias)
        case "scratch":
            return by_scratch(x, packed, bias)


def packed_linear_reference(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return F.linear(x, packed.dequantize(x.dtype), bias)


def packed_phrase(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, before: Norm | None, after: After
) -> torch.Tensor | None:
    """The product with all that surrounds it; None where there is no kernel, or it does not pay.

    A layer norm goes ahead on its own, which was measured to cost less than its sums inside of the product.
    """
    if not fused(x) or len(x) > few(packed) or not packed_gemv.possible(packed, after):
        return None
    if before is not None and before.kind == "layer":
        x = layer_norm(x, before.weight, before.bias, before.eps)
        before = None
    return packed_gemv.packed_rows(x, packed, bias, before, after)


def rounded(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Both factors in 8 bits."""
    if isinstance(packed, Fp8):
        codes, scale = quantize_rows(x)
        right = packed.scale.float().reshape(1, -1).expand(1, len(packed.codes)).contiguous()
        y = torch._scaled_mm(
            codes,
            packed.codes.t(),
            scale_a=scale,
            scale_b=right,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return y if bias is None else y + bias
    if isinstance(packed, Codebook):
        raise TypeError("a codebook has no product of 8-bit factors")
    codes, scale = quantize_rows(x, INT8)
    y = torch._int_mm(codes, packed.codes.t())
    out = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    rescale_kernel[(len(y), -(-y.shape[1] // 1024))](
        y,
        scale,
        packed.scale,
        out if bias is None else bias,
        out,
        ROWS=y.shape[1],
        BIAS=bias is not None,
        WIDTH=1024,
        num_warps=4,
        **overlap(x.device),
    )
    return out


@jit
def rescale_kernel(
    y,
    left,
    right,
    bias,
    out,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [tokens, out] in int32, times the scales of its token and its output."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = i < ROWS
    v = tl.load(y + token * ROWS + i, mask=here, other=0).to(tl.float32)
    v = v * tl.load(left + token) * tl.load(right + i, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + token * ROWS + i, v.to(out.dtype.element_ty), mask=here)


def by_scratch(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Unpacked some rows at a time, so that the memory stays small beside the matrix."""
    if isinstance(packed, Grid) and packed.order is not None:
        x = x.index_select(1, packed.order)
    rows, columns = packed.shape
    step = max(256, SCRATCH // (columns * x.element_size()) // 256 * 256)
    if step >= rows:
        return F.linear(x, unpacked(packed, range(rows), x.dtype), bias)
    y = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        weight = unpacked(packed, range(start, end), x.dtype)
        torch.mm(x, weight.t(), out=y[:, start:end])
    return y if bias is None else y + bias


def unpacked(packed: Packed, rows: range | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """These rows, [rows, in]; columns in the order of the codes."""
    how = layout(packed)
    columns = packed.shape[1]
    out = torch.empty(len(rows), columns, dtype=dtype, device=packed.codes.device)
    index, start = (out, rows.start) if isinstance(rows, range) else (rows, 0)
    codes = packed.codes.view(torch.int8 if how.signed else torch.uint8)
    group = min(how.group, columns)
    whole = group == columns
    octets = group * how.bits // 8
    span = (
        SPAN if whole else min(SPAN, octets & -octets)
    )  # bytes of one scale, a power of two of them
    unpack_kernel[(len(rows), -(-codes.shape[1] // SPAN))](
        codes,
        how.scale,
        out if how.zero is None else how.zero,
        out if how.table is None else how.table,
        out,
        index,
        start,
        columns,
        KIND=how.kind,
        BITS=how.bits,
        GROUP=0 if whole else group,
        TALL=how.tall,
        NEST=how.nest,
        ZERO=how.zero is not None,
        SIGNED=how.signed,
        PICKED=index is not out,
        SPANS=SPAN // span,
        SPAN=span,
        num_warps=4,
        **overlap(out.device),
    )
    return out


@jit(do_not_specialize=["start"])
def unpack_kernel(
    codes,
    scale,
    zero,
    table,
    out,
    index,
    start,
    columns,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    PICKED: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPANS times SPAN bytes of one row a program. GROUP 0: a row has one scale."""
    wait(PDL)
    begin(
        PDL
    )  # not before: who comes next may read, above its own wait, what was written before this kernel
    line = tl.program_id(0).to(tl.int64)
    row = start + line
    if PICKED:
        row = tl.load(index + line).to(tl.int64)
    EACH: tl.constexpr = 8 // BITS
    width = columns // EACH
    first = (tl.program_id(1) * SPANS + tl.arange(0, SPANS)) * SPAN
    k = first[:, None] + tl.arange(0, SPAN)[None, :]
    w = tl.load(codes + row * width + k, mask=k < width, other=0)
    at = row // TALL + first * 0
    if GROUP > 0:
        at = row // TALL * ((columns + GROUP - 1) // GROUP) + first * EACH // GROUP
    less = tl.full([SPANS, 1], 0 if SIGNED or KIND != "grid" else 1 << (BITS - 1), tl.float32)
    if KIND == "codebook" and ZERO:
        inside = tl.minimum(first, width - 1)
        s = largest(
            scale,
            zero,
            table,
            row * (columns // GROUP) + inside * EACH // GROUP,
            row,
            inside * EACH,
            columns,
            NEST,
        )
        s = s[:, None]
    else:
        s = tl.load(scale + at, mask=first < width, other=0.0).to(tl.float32)[:, None]
        if ZERO:
            less = tl.load(zero + at, mask=first < width, other=0.0).to(tl.float32)[:, None]
    if BITS == 4:
        v = tl.join(worth(w & 15, table, KIND, less) * s, worth(w >> 4, table, KIND, less) * s)
        v = tl.reshape(v, (SPANS, 2 * SPAN))
        k = first[:, None] * 2 + tl.arange(0, 2 * SPAN)[None, :]
    else:
        v = worth(w, table, KIND, less) * s
    tl.store(out + line * columns + k, v.to(out.dtype.element_ty), mask=k < columns)


@jit
def worth(code, table, KIND: tl.constexpr, less):
    if KIND == "codebook":
        return tl.load(table + code)
    elif KIND == "fp8":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # beside the exponent of 2 ** 23 a number of few bits needs no conversion, of which the card does few at once
        return (code.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0 - less

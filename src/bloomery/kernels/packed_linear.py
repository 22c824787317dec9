"""Linear layers with packed weights: chooses the kernel by format, number of tokens and GPU.

    y [tokens, out] = x @ packed.dequantize().T + bias                             x [tokens, in]

    gemv         few tokens: kernels/packed_gemv.py, fused with prologue and epilogue
    gemm         dozens of tokens: kernels/packed_gemm.py
    wgmma        hundreds of tokens on a Hopper GPU: kernels/packed_wgmma.py
    w8a8         8-bit weights that allow it: x is quantized too, then the library's 8-bit GEMM
    dequantize   more tokens: rows are dequantized into scratch memory for the library's GEMM

The limits between them were measured on an H200 (`benchmarks/packed.py bench`). This file is called
by quant/quantized_weight.py. It must not know layers, checkpoint formats or models.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from bloomery.fusion import Epilogue, NormPrologue
from bloomery.kernels import packed_gemm, packed_gemv, packed_wgmma
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.norm import layer_norm
from bloomery.kernels.packed import (
    CodebookWeight,
    Fp8Weight,
    GroupedScales,
    PackedWeight,
    describe_layout,
)
from bloomery.kernels.packed_gemv import load_nested_absmax, scale_to_float
from bloomery.kernels.quantize_rows import INT8, quantize_rows

MIN_INT8_GEMM_TOKENS = 32  # fewer are faster without the library's int8 GEMM
SCRATCH_BYTES = 1 << 27  # of dequantized weights at a time
PROGRAM_BYTES = 2048  # of codes that a program of dequantize_rows_kernel reads
RESCALE_WIDTH = 1024  # outputs per program of rescale_kernel

PackedKernel = Literal["gemv", "gemm", "wgmma", "w8a8", "dequantize"]


def max_gemv_tokens(packed: PackedWeight) -> int:
    """Return the number of tokens up to which the GEMV kernel is fastest."""
    return 4 if describe_layout(packed).bits == 8 else 2


def max_gemm_tokens(packed: PackedWeight) -> int:
    """Return the number of tokens up to which the packed GEMM is faster than dequantizing."""
    return 320 if isinstance(packed, CodebookWeight) else 512


def select_packed_kernel(tokens: int, packed: PackedWeight, dtype: torch.dtype) -> PackedKernel:
    """Choose the kernel for x of `tokens` rows and this dtype."""
    if tokens <= max_gemv_tokens(packed) and packed_gemv.supports_packed_gemv(packed):
        return "gemv"
    min_w8a8_tokens = MIN_INT8_GEMM_TOKENS if isinstance(packed, GroupedScales) else 1
    if supports_w8a8(packed) and tokens >= min_w8a8_tokens:
        return "w8a8"
    if packed_wgmma.select_wgmma_tiling(tokens, packed, dtype):
        return "wgmma"
    if (
        tokens <= max_gemm_tokens(packed)
        and dtype.itemsize == 2
        and packed_gemm.supports_packed_gemm(packed)
    ):
        return "gemm"
    return "dequantize"


def supports_w8a8(packed: PackedWeight) -> bool:
    """Whether the library's 8-bit GEMM takes this matrix and x may be quantized."""
    rows, columns = packed.shape
    if isinstance(packed, CodebookWeight) or not packed.quantize_input:
        return False
    if rows % 16 or columns % 16:
        return False
    if isinstance(packed, Fp8Weight):
        capability = torch.cuda.get_device_capability
        return not packed.is_blockwise and capability(packed.codes.device) >= (8, 9)
    return (
        packed.codes.dtype == INT8
        and packed.group_size == columns
        and packed.zero_point is None
        and packed.act_order is None
    )


def packed_linear(
    x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [tokens, in] by a packed matrix: [tokens, out]."""
    if not use_triton(x):
        return packed_linear_reference(x, packed, bias)
    match select_packed_kernel(len(x), packed, x.dtype):
        case "gemv":
            return packed_gemv.packed_gemv_triton(x, packed, bias)
        case "gemm":
            return packed_gemm.packed_gemm_triton(x, packed, bias)
        case "wgmma":
            return packed_wgmma.packed_wgmma_gluon(x, packed, bias)
        case "w8a8":
            return w8a8_linear(x, packed, bias)
        case "dequantize":
            return dequantized_linear(x, packed, bias)


def packed_linear_reference(
    x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The torch reference of `packed_linear`."""
    return F.linear(x, packed.dequantize(x.dtype), bias)


def packed_fused_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    prologue: NormPrologue | None,
    epilogue: Epilogue,
) -> torch.Tensor | None:
    """Run the linear fused with prologue and epilogue, or return None if that is not faster.

    A layer norm runs as a kernel of its own, which was measured to be faster than its sums inside
    the GEMV.
    """
    if not use_triton(x) or len(x) > max_gemv_tokens(packed):
        return None
    if not packed_gemv.supports_packed_gemv(packed, epilogue):
        return None
    if prologue is not None and prologue.kind == "layer":
        x = layer_norm(x, prologue.weight, prologue.bias, prologue.eps)
        prologue = None
    return packed_gemv.packed_gemv_triton(x, packed, bias, prologue, epilogue)


def w8a8_linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Quantize x [tokens, in] per token to 8 bits and use the library's 8-bit GEMM."""
    if isinstance(packed, Fp8Weight):
        codes, scale = quantize_rows(x)
        weight_scale = packed.scale.float().reshape(1, -1).expand(1, len(packed.codes))
        y = torch._scaled_mm(
            codes,
            packed.codes.t(),
            scale_a=scale,
            scale_b=weight_scale.contiguous(),
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return y if bias is None else y + bias
    if isinstance(packed, CodebookWeight):
        raise TypeError("a codebook weight has no W8A8 kernel")
    codes, scale = quantize_rows(x, INT8)
    y = torch._int_mm(codes, packed.codes.t())
    out = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    rescale_kernel[(len(y), -(-y.shape[1] // RESCALE_WIDTH))](
        y,
        scale,
        packed.scale,
        out if bias is None else bias,
        out,
        ROWS=y.shape[1],
        HAS_BIAS=bias is not None,
        WIDTH=RESCALE_WIDTH,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


@jit
def rescale_kernel(
    y,  # [tokens, ROWS] int32
    token_scale,  # [tokens]
    row_scale,  # [ROWS]
    bias,
    out,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply WIDTH integer outputs of a token by the scales of the token and of the rows."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = i < ROWS
    v = tl.load(y + token * ROWS + i, mask=mask, other=0).to(tl.float32)
    v = (
        v
        * tl.load(token_scale + token)
        * tl.load(row_scale + i, mask=mask, other=0.0).to(tl.float32)
    )
    if HAS_BIAS:
        v += tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * ROWS + i, v.to(out.dtype.element_ty), mask=mask)


def dequantized_linear(
    x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Dequantize SCRATCH_BYTES of rows at a time and use the library's GEMM."""
    if isinstance(packed, GroupedScales) and packed.act_order is not None:
        x = x.index_select(1, packed.act_order)
    rows, columns = packed.shape
    panel_rows = max(256, SCRATCH_BYTES // (columns * x.element_size()) // 256 * 256)
    if panel_rows >= rows:
        return F.linear(x, dequantize_rows(packed, range(rows), x.dtype), bias)
    y = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    for start in range(0, rows, panel_rows):
        end = min(start + panel_rows, rows)
        weight = dequantize_rows(packed, range(start, end), x.dtype)
        torch.mm(x, weight.t(), out=y[:, start:end])
    return y if bias is None else y + bias


def dequantize_rows(
    packed: PackedWeight, rows: range | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize some rows with a kernel: [rows, in], columns in the order of the codes.

    `rows` is a range, or a tensor of row numbers (an embedding look-up).
    """
    layout = describe_layout(packed)
    columns = packed.shape[1]
    out = torch.empty(len(rows), columns, dtype=dtype, device=packed.codes.device)
    row_index = out
    first_row = 0
    if isinstance(rows, range):
        first_row = rows.start
    else:
        row_index = rows
    codes = packed.codes.view(torch.int8 if layout.signed else torch.uint8)
    group_size = min(layout.group_size, columns)
    one_group = group_size == columns
    # A span is a power of two of bytes that share a scale.
    span_bytes = PROGRAM_BYTES
    if not one_group:
        group_bytes = group_size * layout.bits // 8
        span_bytes = min(PROGRAM_BYTES, group_bytes & -group_bytes)
    dequantize_rows_kernel[(len(rows), -(-codes.shape[1] // PROGRAM_BYTES))](
        codes,
        layout.scale,
        out if layout.zero_point is None else layout.zero_point,
        out if layout.table is None else layout.table,
        out,
        row_index,
        first_row,
        columns,
        KIND=layout.kind,
        BITS=layout.bits,
        GROUP_SIZE=0 if one_group else group_size,
        ROWS_PER_SCALE=layout.rows_per_scale,
        NESTED_COLUMNS=layout.columns_per_nested_scale,
        HAS_ZERO=layout.zero_point is not None,
        SIGNED=layout.signed,
        INDEXED=row_index is not out,
        SPANS=PROGRAM_BYTES // span_bytes,
        SPAN_BYTES=span_bytes,
        num_warps=4,
        **pdl_options(out.device),
    )
    return out


@jit(do_not_specialize=["first_row"])
def dequantize_rows_kernel(
    codes,  # [rows, row bytes]
    scale,
    zero,
    table,
    out,
    row_index,
    first_row,
    columns,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    INDEXED: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize SPANS spans of one row. GROUP_SIZE 0: the row has one scale."""
    wait_for_previous(PDL)
    # This comes after the wait, because the next kernel may read, before its own wait, what
    # kernels before this one wrote.
    launch_dependents(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    row = first_row + out_row
    if INDEXED:
        row = tl.load(row_index + out_row).to(tl.int64)
    CODES_PER_BYTE: tl.constexpr = 8 // BITS
    row_bytes = columns // CODES_PER_BYTE
    span_start = (tl.program_id(1) * SPANS + tl.arange(0, SPANS)) * SPAN_BYTES
    k = span_start[:, None] + tl.arange(0, SPAN_BYTES)[None, :]
    w = tl.load(codes + row * row_bytes + k, mask=k < row_bytes, other=0)
    scale_offset = row // ROWS_PER_SCALE + span_start * 0
    if GROUP_SIZE > 0:
        row_offset = row // ROWS_PER_SCALE * ((columns + GROUP_SIZE - 1) // GROUP_SIZE)
        scale_offset = row_offset + span_start * CODES_PER_BYTE // GROUP_SIZE
    DEFAULT_ZERO: tl.constexpr = 0 if SIGNED or KIND != "int" else 1 << (BITS - 1)
    z = tl.full([SPANS, 1], DEFAULT_ZERO, tl.float32)
    if KIND == "codebook" and HAS_ZERO:
        column = tl.minimum(span_start, row_bytes - 1) * CODES_PER_BYTE
        s = load_nested_absmax(
            scale,
            zero,
            table,
            row * (columns // GROUP_SIZE) + column // GROUP_SIZE,
            row,
            column,
            columns,
            NESTED_COLUMNS,
        )
        s = s[:, None]
    else:
        s = tl.load(scale + scale_offset, mask=span_start < row_bytes, other=0)
        s = scale_to_float(s, KIND)[:, None]
        if HAS_ZERO:
            z = tl.load(zero + scale_offset, mask=span_start < row_bytes, other=0.0)
            z = z.to(tl.float32)[:, None]
    if BITS == 4:
        low = code_value(w & 15, table, KIND, z) * s
        high = code_value(w >> 4, table, KIND, z) * s
        v = tl.reshape(tl.join(low, high), (SPANS, 2 * SPAN_BYTES))
        k = span_start[:, None] * 2 + tl.arange(0, 2 * SPAN_BYTES)[None, :]
    else:
        v = code_value(w, table, KIND, z) * s
    tl.store(out + out_row * columns + k, v.to(out.dtype.element_ty), mask=k < columns)


@jit
def code_value(code, table, KIND: tl.constexpr, zero):
    """Return the unscaled value of a code in float32."""
    if KIND == "codebook" or KIND == "mxfp4":
        return tl.load(table + code)
    elif KIND == "fp8":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # 0x4B400000 is 1.5 * 2 ** 23 as a float32: adding the code to its bits adds it to the
        # number. A conversion instruction would be slower.
        return (code.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0 - zero

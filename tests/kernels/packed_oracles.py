"""Comparisons of kernels for packed weights with their references, for tests and benchmarks.

Tests run the kernels under Triton's interpreter, benchmarks/packed.py runs them on a GPU. Text
describes a packed format:

    int4|int8 GROUP_SIZE|row [zero] [order] [signed] [w8a8]
        row: one scale per row; zero: zero points; order: act-order; w8a8: x may be quantized too
    nf4 BLOCK_SIZE [nested]
    mxfp4: E2M1 codes with a power of two for 32 columns
    fp8 one|row|block
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bloomery.kernels import (
    packed_gemm,
    packed_gemv,
    packed_linear,
    packed_wgmma,
    quantize_groups,
    quantize_rows,
)
from bloomery.kernels.moe import route_topk
from bloomery.kernels.packed import (
    E8M0_BIAS,
    FP8_BLOCK_SIZE,
    CodebookWeight,
    Fp8Weight,
    GroupedScales,
    PackedWeight,
    unpack_codes,
)
from bloomery.kernels.packed_moe import packed_fused_experts_reference
from bloomery.quant.mxfp4 import E2M1
from bloomery.quant.nf4 import quantize_absmax
from bloomery.spec import RouterSpec
from tests.kernels.linear_oracles import LinearCase, compare_with_reference
from tests.kernels.moe_oracles import make_expert_options
from tests.kernels.oracles import relative_error, run_in_poisoned_memory

# The format of each `--quantization` value.
MXFP4 = "mxfp4"
MAIN_FORMATS = {
    "int4": "int4 128 zero",
    "nf4": "nf4 64 nested",
    "int8": "int8 row signed",
    "fp8": "fp8 row",
}
OTHER_FORMATS = (
    "int4 128",
    "int4 64 zero",
    "int4 32 zero",
    "int4 row",
    "int4 row zero",
    "int4 128 zero order",
    "int8 128 zero",
    "int8 row",
    "int8 row zero",
    "fp8 one",
    "fp8 block",
    "nf4 64",
    "nf4 32",
    MXFP4,
    "int8 16 signed",
    "int8 16 zero",
)
ALL_FORMATS = (*MAIN_FORMATS.values(), *OTHER_FORMATS)


def make_packed_weight(packed_format: str, rows: int, columns: int, device: str) -> PackedWeight:
    """Make a random packed matrix whose values have about the size of real weights."""
    if packed_format == MXFP4:
        return make_mxfp4_weight(rows, columns, device)
    name, group, *options = packed_format.split()
    size = columns**-0.5
    if name == "fp8":
        scale = torch.rand(fp8_scale_shape(group, rows, columns), device=device) * size
        values = torch.empty(rows, columns, device=device).normal_()
        return Fp8Weight(values.to(torch.float8_e4m3fn), scale)
    bits = 8 if name == "int8" else 4
    codes = torch.randint(256, (rows, columns * bits // 8), dtype=torch.uint8, device=device)
    group_size = columns if group == "row" else int(group)
    scale = torch.rand(rows, columns // group_size, device=device) + 0.5
    if name == "nf4":
        absmax = (scale * size).half()
        table = torch.randn(16, device=device).sort().values
        if "nested" in options:
            return quantize_absmax(codes, table, absmax.float())
        return CodebookWeight(codes, table, absmax)
    scale = (scale * (size / 2**bits)).half()
    zero_point = None
    if "zero" in options:
        zero_point = (torch.rand(scale.shape, device=device) * ((1 << bits) - 1)).half()
    act_order = torch.randperm(columns, device=device).int() if "order" in options else None
    return GroupedScales(
        codes.view(torch.int8) if "signed" in options else codes,
        scale if bits == 4 else scale.float(),
        zero_point,
        bits,
        act_order,
        quantize_input="w8a8" in options,
    )


def make_mxfp4_weight(rows: int, columns: int, device: str) -> CodebookWeight:
    """Make a random MXFP4 matrix."""
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device=device)
    size = round(math.log2(0.3 * columns**-0.5))
    exponent = torch.randint(size - 3, size + 2, (rows, columns // 32), device=device)
    absmax = (exponent + E8M0_BIAS).to(torch.uint8)
    return CodebookWeight(codes, torch.tensor(E2M1, device=device), absmax)


def fp8_scale_shape(kind: str, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of the scales of an fp8 matrix: "one", "row" or "block"."""
    if kind == "one":
        return (1,)
    if kind == "row":
        return rows, 1
    return -(-rows // FP8_BLOCK_SIZE), -(-columns // FP8_BLOCK_SIZE)


def check_packed_gemv(
    packed_format: str,
    tokens: int,
    rows: int,
    columns: int,
    prologue: str,
    epilogue: str,
    dtype: torch.dtype,
    device: str,
    tiling: packed_gemv.PackedGemvTiling | None = None,
) -> float:
    """Relative error of the packed GEMV with prologue and epilogue (see linear_oracles)."""
    case = LinearCase.make(rows, columns, prologue, epilogue, True, dtype, device)
    packed = make_packed_weight(packed_format, rows, columns, device)
    x = (torch.randn(tokens, columns, device=device) + 0.3).to(dtype)
    call_epilogue = case.make_epilogue(tokens, dtype)
    actual = run_in_poisoned_memory(
        lambda: packed_gemv.packed_gemv_triton(
            x, packed, case.bias, case.prologue, call_epilogue, tiling
        )
    )
    weight = packed.dequantize(torch.float64)
    return compare_with_reference(actual, x, weight, case, call_epilogue)


def check_packed_linear(
    kernel: packed_linear.PackedKernel,
    packed_format: str,
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: str,
    tiling: packed_gemm.PackedGemmTiling | None = None,
    wgmma: tuple[packed_wgmma.WgmmaTiling, int] | None = None,
) -> float:
    """Relative error of one kernel. `wgmma` is the tiling and the number of programs of wgmma.

    For W8A8 the reference quantizes x too, so that only the products are compared.
    """
    packed = make_packed_weight(packed_format, rows, columns, device)
    bias = torch.randn(rows, device=device).to(dtype)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    wgmma_options = wgmma or ()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "gemm": lambda: packed_gemm.packed_gemm_triton(x, packed, bias, tiling),
        "wgmma": lambda: packed_wgmma.packed_wgmma_gluon(x, packed, bias, *wgmma_options),
        "w8a8": lambda: packed_linear.w8a8_linear(x, packed, bias),
        "dequantize": lambda: packed_linear.dequantized_linear(x, packed, bias),
    }
    actual = run_in_poisoned_memory(calls[kernel])
    x64 = x.double()
    if kernel == "w8a8":
        codes, scale = quantize_rows.quantize_rows_reference(x, packed.codes.dtype)
        x64 = codes.double() * scale.double()
    expected = F.linear(x64, packed.dequantize(torch.float64), bias.double())
    return relative_error(actual, expected)


def check_packed_experts(
    packed_format: str,
    tokens: int,
    run_experts: Callable[..., torch.Tensor],
    device: str,
    kind: str = "plain",
    size: int = 384,
    hidden: int = 512,
) -> float:
    """Relative error of packed experts: eight of them, two per token."""
    options = make_expert_options(kind, 8, size, hidden, torch.bfloat16, device)
    up_rows = 2 * size if options.activation.gated else size
    up = make_packed_weight(packed_format, 8 * up_rows, hidden, device)
    down = make_packed_weight(packed_format, 8 * hidden, size, device)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    topk_ids, topk_weights = route_topk(torch.randn(tokens, 8, device=device), 2, RouterSpec())
    routing = (topk_ids, topk_weights, up, down, 8, options)
    actual = run_in_poisoned_memory(lambda: run_experts(x, *routing))
    expected = packed_fused_experts_reference(x.double(), *routing)
    return relative_error(actual, expected)


def check_quantize_rows(
    rows: int, columns: int, dtype: torch.dtype, code_dtype: torch.dtype, device: str
) -> float:
    """Return the share of codes that are off by more than one rounding step, or the scales' error.

    Codes that differ by one step count a fiftieth, because either neighbour may be right.
    """
    x = torch.randn(rows, columns, device=device) * torch.rand(rows, 1, device=device)
    x = x.to(dtype)
    x[0] = 0
    codes, scale = quantize_rows.quantize_rows_triton(x, code_dtype)
    expected, expected_scale = quantize_rows.quantize_rows_reference(x, code_dtype)
    step: torch.Tensor | float = 1.01
    if code_dtype != torch.int8:
        step = expected.float().abs().clamp(min=2**-6) / 7.9
    difference = (codes.float() - expected.float()).abs()
    share_off = (difference > step).double().mean().item()
    share_different = (difference != 0).double().mean().item()
    return max(share_off, share_different / 50, relative_error(scale, expected_scale))


def check_quantize_groups(bits: int, group_size: int, device: str) -> float:
    """Return a tenth of the share of different codes, or the squared error over the reference's."""
    weight = torch.randn(70, 512, device=device) * torch.rand(70, 1, device=device) + 0.1
    weight[0] = 0
    weight[1] = 3.0
    actual = quantize_groups.quantize_groups_triton(weight, bits, group_size)
    expected = quantize_groups.quantize_groups_reference(weight, bits, group_size)
    stored_bits = 8 if bits == 3 else bits

    def squared_error(quantized: quantize_groups.QuantizedGroups) -> torch.Tensor:
        values = GroupedScales(*quantized, stored_bits).dequantize()
        return (values - weight).square().mean()

    excess = squared_error(actual) / squared_error(expected) - 1
    different = unpack_codes(actual[0], stored_bits) != unpack_codes(expected[0], stored_bits)
    return max(different.double().mean().item() / 10, excess.item())

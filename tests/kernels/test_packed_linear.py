"""The choice among the packed kernels, and dequantization of rows under the interpreter."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.packed import GroupedScales, pack_codes, unpack_codes
from bloomery.kernels.packed_gemm import PackedGemmTiling, packed_gemm_triton
from bloomery.kernels.packed_gemv import PackedGemvTiling, packed_gemv_triton
from bloomery.kernels.packed_linear import (
    dequantize_rows,
    packed_fused_linear,
    packed_linear,
    packed_linear_reference,
    select_packed_kernel,
)
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS
from tests.kernels.packed_oracles import ALL_FORMATS, check_packed_linear, make_packed_weight

FP16 = torch.float16
FP32 = torch.float32
FORMATS_WITHOUT_ACT_ORDER = [name for name in ALL_FORMATS if "order" not in name]


@pytest.mark.parametrize("packed_format", ALL_FORMATS)
def test_dequantized_linear_equals_reference(packed_format: str) -> None:
    torch.manual_seed(len(packed_format))
    error = check_packed_linear("dequantize", packed_format, 3, 70, 384, FP16, "cpu")
    assert error < LINEAR_ERROR_LIMITS[FP16]


@pytest.mark.parametrize("packed_format", FORMATS_WITHOUT_ACT_ORDER)
def test_dequantize_rows_takes_ranges_and_row_numbers(packed_format: str) -> None:
    torch.manual_seed(len(packed_format))
    packed = make_packed_weight(packed_format, 150, 384, "cpu")
    rows = torch.randint(150, (9,))
    expected = packed.dequantize(FP16)
    by_number = dequantize_rows(packed, rows, FP16)
    torch.testing.assert_close(by_number, expected[rows], rtol=2e-3, atol=1e-5)
    # The range contains row 128, with which the second block of FP8 scales begins.
    by_range = dequantize_rows(packed, range(3, 140), FP16)
    torch.testing.assert_close(by_range, expected[3:140], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("columns", [16384, 16640])
def test_nested_absmax(columns: int) -> None:
    """A row has one nested factor for up to 256 blocks of 64 columns, then several."""
    torch.manual_seed(columns)
    packed = make_packed_weight("nf4 64 nested", 40, columns, "cpu")
    x = torch.randn(2, columns)
    assert packed.absmax.dtype == torch.uint8
    assert packed.nested_scale.shape == (40, 2 + (columns > 16384))
    factor = packed.nested_scale[:, 1:].repeat_interleave(256, 1)[:, : columns // 64]
    absmax = packed.table[16:][packed.absmax.long()] * factor + packed.nested_scale[:, :1]
    weight = packed.table[unpack_codes(packed.codes, 4).long()] * absmax.repeat_interleave(64, 1)
    torch.testing.assert_close(packed.dequantize(), weight)
    torch.testing.assert_close(dequantize_rows(packed, range(3, 9), FP32), weight[3:9])
    actual = packed_gemv_triton(x, packed, tiling=PackedGemvTiling(8, 128, 4))
    torch.testing.assert_close(actual, x @ weight.T, rtol=1e-3, atol=1e-3)
    actual = packed_gemm_triton(x.half(), packed, tiling=PackedGemmTiling(16, 64, 4, 2, 2))
    torch.testing.assert_close(actual.float(), x @ weight.T, rtol=1e-2, atol=2e-2)


def test_kernel_selection() -> None:
    int4 = make_packed_weight("int4 128 zero", 64, 512, "cpu")
    nf4 = make_packed_weight("nf4 64", 64, 512, "cpu")
    int8_w8a8 = make_packed_weight("int8 row signed w8a8", 64, 512, "cpu")
    act_order = make_packed_weight("int4 128 zero order", 64, 512, "cpu")
    assert select_packed_kernel(1, int4, FP16) == "gemv"
    assert select_packed_kernel(64, int4, FP16) == "gemm"
    assert select_packed_kernel(64, nf4, FP16) == "gemm"
    assert select_packed_kernel(64, int4, FP32) == "dequantize"
    assert select_packed_kernel(5000, int4, FP16) == "dequantize"
    assert select_packed_kernel(2, int8_w8a8, FP16) == "gemv"
    assert select_packed_kernel(200, int8_w8a8, FP16) == "w8a8"
    assert select_packed_kernel(1, act_order, FP16) == "gemm", "which permutes the columns"
    groups_of_16 = GroupedScales(pack_codes(torch.zeros(4, 48), 4), torch.ones(4, 3))
    assert select_packed_kernel(3, groups_of_16, FP16) == "dequantize"
    rows_of_6_bytes = GroupedScales(pack_codes(torch.zeros(4, 12), 4), torch.ones(4, 1))
    assert select_packed_kernel(3, rows_of_6_bytes, FP16) == "dequantize"


def test_without_a_gpu_the_reference_runs() -> None:
    x = torch.randn(2, 512)
    packed = make_packed_weight("int4 128 zero", 8, 512, "cpu")
    assert torch.equal(packed_linear(x, packed), packed_linear_reference(x, packed))
    assert packed_fused_linear(x, packed, None, None, None) is None

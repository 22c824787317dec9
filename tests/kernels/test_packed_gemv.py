"""The packed GEMV kernel under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from bloomery.fusion import QkTransform, QkvEpilogue
from bloomery.kernels.packed import GroupedScales, pack_codes
from bloomery.kernels.packed_gemv import (
    PackedGemvTiling,
    packed_gemv_triton,
    select_packed_gemv_tiling,
    supports_packed_gemv,
)
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS, MODEL_SHAPES
from tests.kernels.packed_oracles import ALL_FORMATS, check_packed_gemv, make_packed_weight

FP16 = torch.float16
FP32 = torch.float32
SMALL_TILING = PackedGemvTiling(4, 32, 1)  # 768 columns of 4 bits end inside a tile
FORMATS_WITHOUT_ACT_ORDER = [name for name in ALL_FORMATS if "order" not in name]


@pytest.mark.parametrize("packed_format", FORMATS_WITHOUT_ACT_ORDER)
@pytest.mark.parametrize(
    ("tokens", "prologue", "epilogue", "dtype"),
    [(1, "rms", "gate silu", FP32), (3, "", "residual", FP16)],
)
def test_kernel_equals_reference(
    packed_format: str, tokens: int, prologue: str, epilogue: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(len(packed_format) + tokens)
    error = check_packed_gemv(
        packed_format, tokens, 20, 768, prologue, epilogue, dtype, "cpu", SMALL_TILING
    )
    assert error < LINEAR_ERROR_LIMITS[dtype]


@pytest.mark.parametrize("packed_format", ["int4 128 zero", "int4 row", "int8 row signed"])
def test_norm_before_dp4a(packed_format: str) -> None:
    torch.manual_seed(len(packed_format))
    error = check_packed_gemv(
        packed_format, 1, 20, 768, "rms", "gate silu", FP16, "cpu", SMALL_TILING
    )
    assert error < LINEAR_ERROR_LIMITS[FP16]


@pytest.mark.parametrize("packed_format", ["int4 128 zero", "int8 row signed"])
def test_dp4a_with_outliers_zeros_and_nan(packed_format: str) -> None:
    """dp4a rounds x relative to the largest value of a chunk."""
    torch.manual_seed(1)
    packed = make_packed_weight(packed_format, 20, 768, "cpu")
    x = torch.randn(4, 768).to(FP16)
    x[0, 5] = 6000.0
    x[1, 300:] = 0.0
    x[2] = 0.0
    x[3, 700] = float("nan")
    actual = packed_gemv_triton(x, packed, tiling=SMALL_TILING)
    expected = x.double() @ packed.dequantize(torch.float64).T
    torch.testing.assert_close(actual[:2].double(), expected[:2], rtol=2e-3, atol=1e-2)
    assert not actual[2].any()
    assert bool(actual[3].isnan().all())


def test_qkv_epilogue_applies_rope_and_writes_the_kv_cache() -> None:
    torch.manual_seed(0)
    error = check_packed_gemv(
        "int4 128 zero", 2, 40, 512, "rms", "qkv 3 1 8 8 tables scaled", FP32, "cpu", SMALL_TILING
    )
    assert error < LINEAR_ERROR_LIMITS[FP32]


def test_supported_weights_and_epilogues() -> None:
    kv_cache = torch.zeros(2, 4, 1, 8)
    slot_mapping = torch.zeros(1, dtype=torch.int32)
    packed = make_packed_weight("int4 64 zero", 24, 512, "cpu")
    assert supports_packed_gemv(packed, QkvEpilogue(kv_cache, slot_mapping, QkTransform()))
    assert not supports_packed_gemv(
        packed, QkvEpilogue(kv_cache, slot_mapping, QkTransform(clip=1.0))
    )
    rows_of_24_bytes = GroupedScales(pack_codes(torch.zeros(4, 48), 4), torch.ones(4, 1))
    assert not supports_packed_gemv(rows_of_24_bytes)


def test_every_shape_has_a_tiling() -> None:
    shapes = [shape for model in MODEL_SHAPES.values() for shape in model.linear_shapes().values()]
    for rows, columns, *_ in shapes:
        for row_bytes, paired, tokens in ((columns // 2, False, 1), (columns, True, 4)):
            tiling = select_packed_gemv_tiling(rows, row_bytes, paired, tokens)
            assert all(number & (number - 1) == 0 for number in tiling[:3]), "powers of two"
            assert tiling.chunks == 32 * tiling.warps

"""The dense GEMV kernel with prologue and epilogue, under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from bloomery.fusion import NormPrologue, QkTransform, QkvEpilogue
from bloomery.kernels.gemv import (
    GemvTiling,
    gemv_is_faster,
    select_gemv_tiling,
    supports_gemv,
)
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS, MODEL_SHAPES, check_gemv

FP16 = torch.float16
FP32 = torch.float32


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "prologue", "epilogue", "bias", "dtype"),
    [
        (1, 11, 576, "", "", True, FP16),
        (1, 8, 896, "rms", "", False, FP32),
        (1, 8, 1536, "layer", "residual", True, FP32),
        (1, 8, 6144, "layer bare", "activate gelu", False, FP16),
        (1, 8, 896, "rms", "residual", False, FP16),
        (1, 20, 576, "rms", "gate silu", True, FP32),
        (1, 8, 576, "layer", "activate gelu_tanh", True, FP32),
        (1, 8, 576, "", "activate relu", False, FP32),
        (3, 8, 576, "", "residual", True, FP32),
        (2, 8, 576, "rms", "", False, FP16),
        (1, 40, 576, "rms", "qkv 3 1 8 8 tables", True, FP32),
        (1, 32, 576, "", "qkv 2 1 8 0", False, FP16),
        (1, 32, 576, "layer", "qkv 2 1 8 4", True, FP32),
        (2, 32, 576, "rms", "qkv 2 1 8 4 interleaved tables", False, FP32),
        (1, 32, 576, "", "qkv 2 1 8 8 interleaved", False, FP32),
        (2, 32, 576, "rms", "qkv 2 1 8 8 tables scaled", True, FP32),
        (1, 32, 576, "", "qkv 2 1 8 0 scaled", False, FP32),
    ],
)
def test_kernel_equals_reference(
    tokens: int,
    rows: int,
    columns: int,
    prologue: str,
    epilogue: str,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(columns + rows)
    tiling = GemvTiling(8, 512 if columns % 512 == 0 else 1024, 4)
    error = check_gemv(tokens, rows, columns, prologue, epilogue, bias, dtype, "cpu", tiling)
    assert error < LINEAR_ERROR_LIMITS[dtype]


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_shape_has_a_tiling(tokens: int, itemsize: int) -> None:
    shapes = [
        shape[:2] for model in MODEL_SHAPES.values() for shape in model.linear_shapes().values()
    ]
    shapes += [(576, 576), (9, 896), (1536, 1536), (4672, 4544), (64, 8)]
    for rows, columns in shapes:
        for paired in (False, True):
            tiling = select_gemv_tiling(rows, columns, paired, itemsize, tokens)
            block_k = tiling.block_k
            assert all(number & (number - 1) == 0 for number in tiling), "powers of two"
            assert columns % block_k == 0 or columns < 2 * block_k or block_k >= 1024
            row_bytes_per_thread = block_k * itemsize / (32 * tiling.warps)
            assert row_bytes_per_thread >= 16 or tiling.warps == 1


def test_supported_weights_and_epilogues() -> None:
    kv_cache = torch.zeros(2, 4, 1, 8)
    slot_mapping = torch.zeros(1, dtype=torch.int32)
    weight = torch.zeros(24, 16)

    def supports_transform(transform: QkTransform) -> bool:
        return supports_gemv(weight, QkvEpilogue(kv_cache, slot_mapping, transform))

    assert supports_gemv(torch.zeros(4, 16))
    assert not supports_gemv(torch.zeros(4, 12)), "rows start at multiples of 16 bytes"
    assert not supports_gemv(torch.zeros(4, 16).t())
    assert supports_transform(QkTransform())
    assert not supports_transform(QkTransform(norm="rms")), "a norm needs the whole head"
    assert not supports_transform(QkTransform(clip=1.0))
    assert not supports_transform(QkTransform(v_norm=NormPrologue("rms", None, None, 1e-5)))
    assert not supports_transform(QkTransform(keys_as_values=True))
    assert supports_transform(QkTransform(query_scales=torch.ones(1)))
    gated = QkvEpilogue(kv_cache, slot_mapping, QkTransform(), torch.zeros(1, 8))
    assert not supports_gemv(weight, gated)


def test_the_kernel_is_never_faster_without_a_gpu() -> None:
    assert not gemv_is_faster(1, torch.zeros(4, 16))

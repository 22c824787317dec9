"""The packed GEMM kernels (split-K and stream-K) under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.packed_gemm import (
    PackedGemmTiling,
    reduce_stream_k_parts,
    select_split_k_tiling,
    select_stream_k_tiling,
    supports_packed_gemm,
)
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS, MODEL_SHAPES
from tests.kernels.packed_oracles import ALL_FORMATS, MXFP4, check_packed_linear, make_packed_weight

FP16 = torch.float16


@pytest.mark.parametrize("packed_format", ALL_FORMATS)
def test_split_k_equals_reference(packed_format: str) -> None:
    torch.manual_seed(len(packed_format))
    outputs = 64 * (1 + len(packed_format) % 3 % 2)
    split_k = 1 + len(packed_format) % 2
    tiling = PackedGemmTiling(16, outputs, 4, 2, split_k)
    error = check_packed_linear("gemm", packed_format, 20, 150, 384, FP16, "cpu", tiling)
    assert error < LINEAR_ERROR_LIMITS[FP16]


@pytest.mark.parametrize(
    "packed_format", ["int4 128 zero", "nf4 64", "int8 row signed", "fp8 block"]
)
@pytest.mark.parametrize("rows", [60, 150])
def test_stream_k_equals_reference(packed_format: str, rows: int) -> None:
    """Four programs: 150 rows are a tile each and two leftover tiles, 60 rows only leftovers."""
    torch.manual_seed(rows)
    tiling = PackedGemmTiling(16, 64, 4, 2, 0)
    error = check_packed_linear("gemm", packed_format, 20, rows, 384, FP16, "cpu", tiling)
    assert error < LINEAR_ERROR_LIMITS[FP16]


@pytest.mark.parametrize(
    ("packed_format", "columns"),
    [(MXFP4, 352), ("int4 32 zero", 160), ("int4 row", 224), ("nf4 64", 192), ("fp8 row", 400)],
)
@pytest.mark.parametrize("split_k", [0, 1, 2])
def test_the_last_unit_of_a_row_may_be_incomplete(
    packed_format: str, columns: int, split_k: int
) -> None:
    torch.manual_seed(columns)
    tiling = PackedGemmTiling(16, 64, 4, 2, split_k)
    error = check_packed_linear("gemm", packed_format, 20, 150, columns, FP16, "cpu", tiling)
    assert error < LINEAR_ERROR_LIMITS[FP16]


@pytest.mark.parametrize(
    ("programs", "tile_iters", "leftover_tiles"), [(4, 6, 3), (5, 3, 1), (7, 5, 4), (3, 4, 1)]
)
def test_stream_k_parts_are_added_up(programs: int, tile_iters: int, leftover_tiles: int) -> None:
    """Parts that no program writes are NaN and must not be read."""
    parts = torch.full((2 * programs, 16, 64), torch.nan)
    out = torch.zeros(20, 64 * 4)
    # 20 tokens are two tiles of 16 next to each other.
    expected = torch.zeros(16 * 2, 64 * 4)
    leftover_iters = leftover_tiles * tile_iters
    for program in range(programs):
        start = program * leftover_iters // programs
        end = (program + 1) * leftover_iters // programs
        end_tile = -(-end // tile_iters) if end > start else 0
        for part, tile in enumerate(range(start // tile_iters, end_tile)):
            parts[2 * program + part] = torch.randn(16, 64)
            expected_tile = expected[tile % 2 * 16 :][:16, tile // 2 * 64 :][:, :64]
            expected_tile += parts[2 * program + part]
    reduce_stream_k_parts(parts, None, out, tile_iters, 0, leftover_tiles)
    torch.testing.assert_close(out, expected[:20])


def test_supported_weights() -> None:
    assert supports_packed_gemm(make_packed_weight("int4 row", 24, 576, "cpu"))
    packed = make_packed_weight("int4 row", 24, 48, "cpu")
    assert not supports_packed_gemm(packed), "a thread reads 32 columns of 4 bits"


def test_every_shape_has_a_split_k_tiling() -> None:
    shapes = [shape for model in MODEL_SHAPES.values() for shape in model.linear_shapes().values()]
    for rows, columns, *_ in shapes:
        for tokens in (3, 20, 48, 100, 300):
            tiling = select_split_k_tiling(tokens, rows, columns // 128, "int", 4, 132)
            assert tiling.tokens == min(128, max(16, 1 << (tokens - 1).bit_length()))
            assert 1 <= tiling.split_k <= 8
    assert select_split_k_tiling(64, 128, 1, "int", 4, 132).split_k == 1, "one unit is not split"


def test_stream_k_needs_many_tokens_and_enough_work() -> None:
    tiling = select_stream_k_tiling(256, 24576, 6144, 4, 132)
    assert tiling is not None
    assert tiling.split_k == 0
    assert select_stream_k_tiling(256, 1024, 1024, 4, 132) is None
    assert select_stream_k_tiling(128, 24576, 6144, 4, 132) is None

"""The law of every weight format: rows, cols and cat commute with the product.

This must hold for any layout of q, k and v and any tensor parallel sharding. FORMATS lists the
formats.
"""

from __future__ import annotations

import pytest
import torch

from bloomery.errors import UnsupportedModel
from bloomery.models.weights import ungrouped_qkv_ranges
from bloomery.quant.base import WeightMatrix
from bloomery.quant.lazy_tensor import Range
from bloomery.spec import AttentionSpec
from tests.quant.formats import (
    CPU,
    FORMATS,
    QuantizeMatrix,
    open_matrix,
    select_packed_format,
)
from tests.quant.packers import PACKED_CASES


def multiply(matrix: WeightMatrix, x: torch.Tensor) -> torch.Tensor:
    return matrix.prepare(torch.float32, CPU).linear(x)


def qkv_shard(spec: AttentionSpec, rank: int, world_size: int) -> list[Range]:
    """The rows of one tensor parallel rank inside [all q, all k, all v]."""
    num_heads = spec.num_heads // world_size
    num_kv_heads = spec.num_kv_heads // world_size
    first_k = spec.num_heads
    first_v = spec.num_heads + spec.num_kv_heads
    head_ranges = (
        (rank * num_heads, num_heads),
        (first_k + rank * num_kv_heads, num_kv_heads),
        (first_v + rank * num_kv_heads, num_kv_heads),
    )
    return [
        (first * spec.head_dim, (first + count) * spec.head_dim) for first, count in head_ranges
    ]


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def quantize(request: pytest.FixtureRequest) -> QuantizeMatrix:
    return request.param


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_of_column_parallel_ranks_make_up_the_output(
    quantize: QuantizeMatrix, kv_heads: int, world_size: int
) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(8, kv_heads, 16)
    weight = torch.randn((8 + 2 * kv_heads) * 16, 64)
    x = torch.randn(5, 64)
    sizes = [8 * 16, kv_heads * 16, kv_heads * 16]
    shard_sizes = [size // world_size for size in sizes]
    for grouped in (False, True):
        matrix = quantize(weight)
        if grouped:
            matrix = matrix.rows(ungrouped_qkv_ranges(spec))
        expected = multiply(matrix, x).split(sizes, -1)
        shards = [matrix.rows(qkv_shard(spec, rank, world_size)) for rank in range(world_size)]
        outputs = [multiply(shard, x).split(shard_sizes, -1) for shard in shards]
        for expected_part, parts in zip(expected, zip(*outputs, strict=True), strict=True):
            actual = torch.cat(parts, -1)
            torch.testing.assert_close(actual, expected_part, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_of_row_parallel_ranks_add_up_to_the_output(
    quantize: QuantizeMatrix, world_size: int
) -> None:
    torch.manual_seed(1)
    matrix = quantize(torch.randn(64, 512))
    x = torch.randn(5, 512)
    columns = 512 // world_size
    outputs = []
    for rank in range(world_size):
        start = rank * columns
        end = start + columns
        outputs.append(multiply(matrix.cols(start, end), x[:, start:end]))
    actual = torch.stack(outputs).sum(0)
    torch.testing.assert_close(actual, multiply(matrix, x), rtol=1e-4, atol=1e-3)


def test_cat_concatenates_outputs(quantize: QuantizeMatrix) -> None:
    torch.manual_seed(2)
    matrices = [quantize(torch.randn(64, 64)) for _ in range(3)]
    x = torch.randn(5, 64)
    concatenated = matrices[0].cat(matrices[1:])
    assert concatenated.shape == (192, 64)
    expected = torch.cat([multiply(matrix, x) for matrix in matrices], -1)
    torch.testing.assert_close(multiply(concatenated, x), expected)


def test_linear_gather_and_dense_values_agree(quantize: QuantizeMatrix) -> None:
    torch.manual_seed(3)
    matrix = quantize(torch.randn(160, 256))
    x = torch.randn(3, 256)
    values = matrix.load_dense(torch.float32, CPU)
    weight = matrix.prepare(torch.float32, CPU)
    actual = weight.linear(x, torch.ones(160))
    torch.testing.assert_close(actual, x @ values.T + 1, rtol=1e-5, atol=1e-4)
    rows = torch.tensor([7, 0, 159, 130, 7])
    assert torch.equal(weight.gather(rows), values[rows])


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_checkpoints_have_the_values_that_were_packed(name: str) -> None:
    torch.manual_seed(4)
    tensors, values = PACKED_CASES[name].pack(torch.randn(96, 256))
    matrix = open_matrix(select_packed_format(name), tensors, (96, 256))
    actual = matrix.load_dense(torch.float32, CPU)
    torch.testing.assert_close(actual, values, rtol=1e-6, atol=1e-7)


def test_slices_with_different_columns_of_one_matrix_are_not_merged() -> None:
    weight = torch.randn(8, 128)
    matrix = FORMATS["int8"](weight)
    halves = matrix.cols(0, 64).cat([matrix.cols(64, 128)])
    values = matrix.load_dense(torch.float32, CPU)
    actual = halves.rows([(4, 12)]).load_dense(torch.float32, CPU)
    assert torch.equal(actual, torch.cat([values[4:, :64], values[:4, 64:]]))


def test_an_impossible_shard_is_reported_with_the_possible_numbers_of_devices() -> None:
    matrix = FORMATS["int4"](torch.randn(64, 384))
    with pytest.raises(
        UnsupportedModel,
        match="columns 0:100 of 384 .* evenly among 1, 2, 3, 4, 6, 8, 12, 24 devices",
    ):
        matrix.cols(0, 100).prepare(torch.float32, CPU)
    blockwise = FORMATS["fp8-blocks"](torch.randn(256, 384))
    with pytest.raises(
        UnsupportedModel, match="columns 0:192 of 384 cut through 128 .* among 1, 3 devices"
    ):
        blockwise.cols(0, 192).prepare(torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int8", 8), ("int4", 4.25), ("int4-64", 4.5), ("int3", 3.5), ("int2", 2.5), ("nf4", 4.19)],
)
def test_prepared_weights_take_the_bits_of_their_format(name: str, bits: float) -> None:
    weight = FORMATS[name](torch.randn(512, 1024)).prepare(torch.float32, CPU)
    assert weight.nbytes * 8 / (512 * 1024) == pytest.approx(bits, abs=0.05)

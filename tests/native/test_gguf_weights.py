"""Selecting rows and columns and concatenating commute with packing GGUF blocks."""

from __future__ import annotations

import pytest
import torch

from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.gguf import GgufMatrix
from bloomery.quant.lazy_tensor import LazyTensor, QuantizedBlocks, TensorPiece
from bloomery.quant.native import NativeWeight
from tests.native.test_ops import (
    GGUF_TYPES,
    assert_close,
    block_columns,
    random_blocks,
    random_normal,
    round_activations,
)

CPU = torch.device("cpu")


def store_blocks(kind: str, rows: int, columns: int, seed: int) -> tuple[GgufMatrix, torch.Tensor]:
    """A matrix that is stored in blocks, and its values."""
    raw, values = random_blocks(kind, rows, columns, seed)
    block_values = block_columns(kind)
    block_bytes = raw.shape[1] * block_values // columns
    blocks = QuantizedBlocks(kind, block_values, block_bytes, LazyTensor.from_tensor(raw))
    piece = TensorPiece(
        lambda r, c: values[slice(*r), slice(*c)], (0, rows), (0, columns), None, blocks
    )
    return GgufMatrix(LazyTensor((piece,), torch.float32)), values


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_slices_of_blocks_equal_slices_of_values(pool: ThreadPool, kind: str) -> None:
    first, first_values = store_blocks(kind, 40, 1024, 1)
    second, second_values = store_blocks("Q8_0", 21, 1024, 2)
    ranges = [(16, 24), (3, 10), (30, 40)]
    matrix = first.rows(ranges).cat([second]).cols(256, 768)
    selected = [first_values[slice(*rows)] for rows in ranges]
    values = torch.cat([*selected, second_values])[:, 256:768]
    assert matrix.shape == tuple(values.shape)
    assert torch.equal(matrix.load_dense(torch.float32, CPU), values)
    weight = matrix.prepare(torch.float32, CPU, pool)
    assert isinstance(weight, NativeWeight) and weight.nbytes < values.nbytes / 2
    packed_values = weight.gather(torch.arange(len(values)))
    if kind in ops.ROUNDED_TYPES:
        assert_close(packed_values, values, 6e-3)
    else:
        assert torch.equal(packed_values, values)
    x = random_normal(3, 5, 512)
    bias = random_normal(4, len(values))
    assert_close(weight.linear(x, bias), weight.reference(round_activations(x, pool), bias))


def test_a_few_unquantized_rows_are_rounded_to_eight_bits(pool: ThreadPool) -> None:
    blocks, values = store_blocks("Q4_1", 64, 128, 0)
    few = random_normal(1, 4, 128)
    weight = blocks.cat([GgufMatrix(LazyTensor.from_tensor(few))]).prepare(torch.float32, CPU, pool)
    assert isinstance(weight, NativeWeight)
    assert torch.equal(weight.gather(torch.arange(64)), values)
    assert_close(weight.gather(torch.arange(64, 68)), few, 6e-3)
    many = GgufMatrix(LazyTensor.from_tensor(random_normal(1, 16, 128)))
    dense = blocks.cat([many]).prepare(torch.float32, CPU, pool)
    assert dense.nbytes == 80 * 128 * 4
    assert torch.equal(dense.gather(torch.arange(64)), values)


def test_a_slice_through_a_block_is_rounded_to_eight_bits(pool: ThreadPool) -> None:
    matrix, values = store_blocks("Q4_1", 8, 96, 0)
    weight = matrix.cols(16, 80).prepare(torch.float32, CPU, pool)
    expected = values[:, 16:80]
    assert isinstance(weight, NativeWeight)
    assert (weight.gather(torch.arange(8)) - expected).norm() < 6e-3 * expected.norm()
    not_whole_blocks = matrix.cols(16, 56).prepare(torch.float32, CPU, pool)
    assert torch.equal(not_whole_blocks.gather(torch.arange(8)), values[:, 16:56])

"""The law of formats for GGUF's blocks: rows, cols and cat are the same before and after the blocks are packed."""

from __future__ import annotations

import pytest
import torch

from bloomery.native import ops
from bloomery.quant.base import Coded, Piece, Stored
from bloomery.quant.dense import DenseReady
from bloomery.quant.gguf import Blocks
from bloomery.quant.native import BlocksReady
from tests.native.test_kernels import blocks, close, random, rounded

CPU = torch.device("cpu")


def stored(kind: str, rows: int, columns: int, seed: int) -> tuple[Blocks, torch.Tensor]:
    raw, values = blocks(kind, rows, columns, seed)
    size = 256 if kind.endswith("_K") else 32
    coded = Coded(kind, size, raw.shape[1] * size // columns, Stored.of(raw))
    piece = Piece(lambda r, c: values[slice(*r), slice(*c)], (0, rows), (0, columns), None, coded)
    return Blocks(Stored((piece,), torch.float32)), values


@pytest.mark.parametrize("kind", ops.PACKED)
def test_moves_commute(kind: str) -> None:
    first, a = stored(kind, 40, 1024, 1)
    second, b = stored("Q8_0", 21, 1024, 2)
    ranges = [(16, 24), (3, 10), (30, 40)]
    moved = first.rows(ranges).cat([second]).cols(256, 768)
    values = torch.cat([*(a[slice(*r)] for r in ranges), b])[:, 256:768]
    assert moved.shape == tuple(values.shape) and torch.equal(
        moved.dense(torch.float32, CPU), values
    )
    ready = moved.prepare(torch.float32, CPU)
    assert isinstance(ready, BlocksReady) and ready.nbytes < values.nbytes / 2
    assert torch.equal(ready.gather(torch.arange(len(values))), values)
    x = random(3, 5, 512)
    bias = random(4, len(values))
    close(ready.linear(x, bias), ready.reference(rounded(x), bias))


def test_a_cut_through_a_block_is_rounded_to_eight_bits() -> None:
    whole, values = stored("Q4_1", 8, 96, 0)
    ready = whole.cols(16, 80).prepare(torch.float32, CPU)
    want = values[:, 16:80]
    assert isinstance(ready, BlocksReady)
    assert (ready.gather(torch.arange(8)) - want).norm() < 6e-3 * want.norm()
    ready = whole.cols(16, 56).prepare(torch.float32, CPU)  # not whole blocks of 32
    assert isinstance(ready, DenseReady) and torch.equal(ready.weight, values[:, 16:56])

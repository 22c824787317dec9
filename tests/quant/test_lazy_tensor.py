"""Lazy tensors: rows and columns are selected without reading, and only these are read."""

from __future__ import annotations

import pytest
import torch

from bloomery.models.weights import ungrouped_qkv_ranges
from bloomery.quant.lazy_tensor import LazyTensor, Range
from bloomery.spec import AttentionSpec

CPU = torch.device("cpu")


def test_grouped_qkv_rows_are_ungrouped() -> None:
    """A matrix stored as [kv head][its q heads, k, v], compared with slicing it by hand."""
    spec = AttentionSpec(6, 2, 4)
    stored = torch.arange((6 + 4) * 4)[:, None].float().expand(-1, 3).contiguous()
    groups = stored.view(2, 5, 4, 3)
    q = groups[:, :3].reshape(-1, 3)
    k = groups[:, 3].reshape(-1, 3)
    v = groups[:, 4].reshape(-1, 3)
    ungrouped = LazyTensor.from_tensor(stored).rows(ungrouped_qkv_ranges(spec))
    assert torch.equal(ungrouped.load(torch.float32, CPU), torch.cat([q, k, v]))


def test_only_selected_rows_and_columns_are_read() -> None:
    reads: list[tuple[Range, Range | None]] = []
    data = torch.randn(20, 8)

    def read(rows: Range, cols: Range | None) -> torch.Tensor:
        reads.append((rows, cols))
        return data[slice(*rows), slice(*(cols or (0, 8)))]

    tensor = LazyTensor.from_reader(data.shape, data.dtype, read)
    selected = tensor.rows([(15, 18), (2, 4)]).cols(2, 6)
    assert selected.shape == (5, 4) and not reads
    expected = torch.cat([data[15:18, 2:6], data[2:4, 2:6]])
    assert torch.equal(selected.load(torch.float32, CPU), expected)
    assert reads == [((15, 18), (2, 6)), ((2, 4), (2, 6))]
    with pytest.raises(IndexError, match="rows 18:21 of a tensor with 20"):
        LazyTensor.from_tensor(data).rows([(18, 21)])


def test_deinterleaved_rows_are_the_even_ones_above_the_odd_ones() -> None:
    tensor = torch.arange(48.0).view(12, 4)
    lazy = LazyTensor.from_tensor(tensor).deinterleave()
    expected = torch.cat((tensor[::2], tensor[1::2]))
    cpu = torch.device("cpu")
    assert torch.equal(lazy.load(torch.float32, cpu), expected)
    part = lazy.rows([(1, 3), (4, 8), (10, 12)]).cols(1, 3)
    rows = torch.cat((expected[1:3], expected[4:8], expected[10:12]))
    assert torch.equal(part.load(torch.float32, cpu), rows[:, 1:3])
    assert torch.equal(lazy.pieces[0].read((5, 7), (0, 4)), expected[5:7])
    vector = LazyTensor.from_tensor(torch.arange(6.0)).deinterleave()
    assert vector.load(torch.float32, cpu).tolist() == [0, 2, 4, 1, 3, 5]

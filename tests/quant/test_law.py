"""The law of every format: rows, cols and cat commute with the product, for any layout of q, k and v and any sharding.

A format joins by an entry in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bloomery.models.weights import grouped_ranges
from bloomery.quant.base import Matrix, Range, Stored
from bloomery.quant.dense import Dense
from bloomery.spec import Attention

FORMATS: dict[str, Callable[[torch.Tensor], Matrix]] = {"dense": lambda weight: Dense(Stored.of(weight))}
CPU = torch.device("cpu")


def times(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    return matrix.prepare(torch.float32, CPU).linear(x)


def shard(spec: Attention, rank: int, world: int) -> list[Range]:
    """Rows of one rank's q, k and v, inside [all q, all k, all v]."""
    dim, heads, kv = spec.head_dim, spec.num_heads // world, spec.num_kv_heads // world
    first_k, first_v = spec.num_heads, spec.num_heads + spec.num_kv_heads
    spans = ((rank * heads, heads), (first_k + rank * kv, kv), (first_v + rank * kv, kv))
    return [(start * dim, (start + count) * dim) for start, count in spans]


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def quantize(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], Matrix]:
    return request.param


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_columns_of_ranks_add_up_to_the_whole(quantize: Callable, kv_heads: int, world: int) -> None:
    torch.manual_seed(0)
    spec = Attention(8, kv_heads, 16)
    stored, x = torch.randn((8 + 2 * kv_heads) * 16, 64), torch.randn(5, 64)
    sizes = [8 * 16, kv_heads * 16, kv_heads * 16]
    for grouped in (False, True):
        whole = quantize(stored).rows(grouped_ranges(spec)) if grouped else quantize(stored)
        want = times(whole, x).split(sizes, -1)
        ranks = [times(whole.rows(shard(spec, rank, world)), x) for rank in range(world)]
        parts = [part.split([size // world for size in sizes], -1) for part in ranks]
        for wanted, got in zip(want, zip(*parts, strict=True), strict=True):
            torch.testing.assert_close(torch.cat(got, -1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_ranks_sum_to_the_whole(quantize: Callable, world: int) -> None:
    torch.manual_seed(1)
    matrix, x = quantize(torch.randn(64, 128)), torch.randn(5, 128)
    width = 128 // world
    parts = [
        times(matrix.cols(rank * width, (rank + 1) * width), x[:, rank * width : (rank + 1) * width])
        for rank in range(world)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), times(matrix, x), rtol=1e-4, atol=1e-3)


def test_cat_stacks_outputs(quantize: Callable) -> None:
    torch.manual_seed(2)
    parts, x = [quantize(torch.randn(64, 64)) for _ in range(3)], torch.randn(5, 64)
    together = parts[0].cat(parts[1:])
    assert together.shape == (192, 64)
    torch.testing.assert_close(times(together, x), torch.cat([times(part, x) for part in parts], -1))


def test_grouped_rows_are_found_where_they_lie() -> None:
    """A matrix stored as [kv head][its q heads, k, v], against taking it apart by hand."""
    spec = Attention(6, 2, 4)
    stored = torch.arange((6 + 4) * 4)[:, None].float().expand(-1, 3).contiguous()
    groups = stored.view(2, 5, 4, 3)
    by_hand = torch.cat([groups[:, :3].reshape(-1, 3), groups[:, 3].reshape(-1, 3), groups[:, 4].reshape(-1, 3)])
    got = Stored.of(stored).rows(grouped_ranges(spec)).load(torch.float32, CPU)
    assert torch.equal(got, by_hand)


def test_stored_tensors_read_only_what_is_wanted() -> None:
    read: list[tuple[Range, Range | None]] = []
    data = torch.randn(20, 8)

    def reader(rows: Range, cols: Range | None) -> torch.Tensor:
        read.append((rows, cols))
        return data[slice(*rows), slice(*(cols or (0, 8)))]

    part = Stored.whole(data.shape, data.dtype, reader).rows([(15, 18), (2, 4)]).cols(2, 6)
    assert part.shape == (5, 4) and not read
    assert torch.equal(part.load(torch.float32, CPU), torch.cat([data[15:18, 2:6], data[2:4, 2:6]]))
    assert read == [((15, 18), (2, 6)), ((2, 4), (2, 6))]
    with pytest.raises(IndexError, match="rows 18:21 of a tensor with 20"):
        Stored.of(data).rows([(18, 21)])

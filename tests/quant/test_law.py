"""The law of every format: rows, cols and cat commute with the product, for any layout of q, k and v and any sharding.

A format joins by an entry in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch

from bloomery.config import QUANTIZE
from bloomery.errors import UnsupportedModel
from bloomery.families.quantization import quantization
from bloomery.families.reader import Reader
from bloomery.kernels.packed import Packed
from bloomery.models.weights import grouped_ranges
from bloomery.quant.base import Coded, Format, Matrix, Piece, Product, Range, Ready, Stored
from bloomery.quant.choose import ON_LOAD, choose
from bloomery.quant.dense import DenseFormat
from bloomery.quant.gguf import Blocks
from bloomery.quant.gguf_blocks import STEPS
from bloomery.quant.int4 import int4
from bloomery.quant.int8 import int8
from bloomery.quant.onload import CACHED, OnLoad
from bloomery.quant.packed import as_ready, values
from bloomery.spec import Attention
from tests.parity import gguf_writer
from tests.quant.packers import CASES


class Held:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = {
            name: tensor.reshape(1) if tensor.dim() == 0 else tensor
            for name, tensor in tensors.items()
        }

    def tensor(
        self, name: str, shape: object, transposed: bool = False, expert: int | None = None
    ) -> Stored:
        found = self.tensors[name].T if transposed else self.tensors[name]
        assert tuple(found.shape) == tuple(shape), name  # type: ignore[call-overload]
        return Stored.of(found)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def stored(form: Format, parts: dict[str, torch.Tensor], shape: tuple[int, ...]) -> Matrix:
    return form.matrix(
        Held({f"m.{name}": part for name, part in parts.items()}), Product("m", shape)
    )  # type: ignore[arg-type]


def on_load(name: str) -> Callable[[torch.Tensor], Matrix]:
    return lambda weight: stored(ON_LOAD[name], {"weight": weight}, tuple(weight.shape))


def ready_made(name: str) -> Callable[[torch.Tensor], Matrix]:
    form = choose(quantization(Reader({"quantization_config": CASES[name].config})))
    return lambda weight: stored(form, CASES[name].pack(weight)[0], tuple(weight.shape))


class Kept(Blocks):
    """GGUF's blocks as any device but a CPU keeps them, also in float32 on a CPU."""

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        return as_ready(self.held(dtype, device), dtype)

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.cat([values(held, dtype) for held in self.held(dtype, device)])


def in_blocks(kind: str, weight: torch.Tensor) -> Stored:
    """Columns that fill no block are the first of one."""
    number = gguf.GGMLQuantizationType[kind]
    (rows, width) = weight.shape
    size, octets = gguf.GGML_QUANT_SIZES[number]
    full = torch.nn.functional.pad(weight, (0, -width % size)).contiguous().numpy()
    raw = gguf_writer.blocks(full, number)
    meant = torch.from_numpy(gguf.quants.dequantize(raw, number))
    coded = Coded(kind, size, octets, Stored.of(torch.from_numpy(raw)))
    piece = Piece(
        lambda r, c: meant[slice(*r), slice(*(c or (0, width)))], (0, rows), (0, width), None, coded
    )
    return Stored((piece,), torch.float32)


def kept(kind: str) -> Callable[[torch.Tensor], Matrix]:
    return lambda weight: Kept(in_blocks(kind, weight))


FORMATS: dict[str, Callable[[torch.Tensor], Matrix]] = {
    "dense": lambda weight: stored(DenseFormat(), {"weight": weight}, tuple(weight.shape)),
    **{name: on_load(name) for name in ON_LOAD},
    **{name: ready_made(name) for name in CASES},
    **{kind: kept(kind) for kind in STEPS},
}
CPU = torch.device("cpu")


def times(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    return matrix.prepare(torch.float32, CPU).linear(x)


def shard(spec: Attention, rank: int, world: int) -> list[Range]:
    """Rows of one rank's q, k and v, inside [all q, all k, all v]."""
    dim = spec.head_dim
    heads = spec.num_heads // world
    kv = spec.num_kv_heads // world
    first_k = spec.num_heads
    first_v = spec.num_heads + spec.num_kv_heads
    spans = ((rank * heads, heads), (first_k + rank * kv, kv), (first_v + rank * kv, kv))
    return [(start * dim, (start + count) * dim) for start, count in spans]


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def quantize(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], Matrix]:
    return request.param


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_columns_of_ranks_add_up_to_the_whole(
    quantize: Callable, kv_heads: int, world: int
) -> None:
    torch.manual_seed(0)
    spec = Attention(8, kv_heads, 16)
    weight = torch.randn((8 + 2 * kv_heads) * 16, 64)
    x = torch.randn(5, 64)
    sizes = [8 * 16, kv_heads * 16, kv_heads * 16]
    for grouped in (False, True):
        matrix = quantize(weight)
        whole = matrix.rows(grouped_ranges(spec)) if grouped else matrix
        want = times(whole, x).split(sizes, -1)
        ranks = [times(whole.rows(shard(spec, rank, world)), x) for rank in range(world)]
        parts = [part.split([size // world for size in sizes], -1) for part in ranks]
        for wanted, got in zip(want, zip(*parts, strict=True), strict=True):
            torch.testing.assert_close(torch.cat(got, -1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_ranks_sum_to_the_whole(quantize: Callable, world: int) -> None:
    torch.manual_seed(1)
    matrix = quantize(torch.randn(64, 512))
    x = torch.randn(5, 512)
    width = 512 // world
    parts = [
        times(
            matrix.cols(rank * width, (rank + 1) * width), x[:, rank * width : (rank + 1) * width]
        )
        for rank in range(world)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), times(matrix, x), rtol=1e-4, atol=1e-3)


def test_cat_stacks_outputs(quantize: Callable) -> None:
    torch.manual_seed(2)
    parts = [quantize(torch.randn(64, 64)) for _ in range(3)]
    x = torch.randn(5, 64)
    together = parts[0].cat(parts[1:])
    assert together.shape == (192, 64)
    torch.testing.assert_close(
        times(together, x), torch.cat([times(part, x) for part in parts], -1)
    )


def test_all_ways_agree(quantize: Callable) -> None:
    """The product, rows gathered as an embedding does, and the numbers in full."""
    torch.manual_seed(3)
    matrix = quantize(torch.randn(160, 256))
    x = torch.randn(3, 256)
    values = matrix.dense(torch.float32, CPU)
    ready = matrix.prepare(torch.float32, CPU)
    torch.testing.assert_close(
        ready.linear(x, torch.ones(160)), x @ values.T + 1, rtol=1e-5, atol=1e-4
    )
    some = torch.tensor([7, 0, 159, 130, 7])
    assert torch.equal(ready.gather(some), values[some])


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_that_were_packed(name: str) -> None:
    torch.manual_seed(4)
    weight = torch.randn(96, 256)
    parts, values = CASES[name].pack(weight)
    form = choose(quantization(Reader({"quantization_config": CASES[name].config})))
    got = stored(form, parts, (96, 256)).dense(torch.float32, CPU)
    torch.testing.assert_close(got, values, rtol=1e-6, atol=1e-7)


def test_loading_never_holds_a_dense_matrix() -> None:
    """Nor does a row's result depend on the panel it was rounded in."""
    seen: list[int] = []

    def recording(weight: torch.Tensor) -> Packed:
        seen.append(weight.numel())
        return int4(weight)

    weight = torch.randn(3 * CACHED // 512, 512)
    matrix = stored(OnLoad(recording, int8), {"weight": weight}, tuple(weight.shape))
    ready = matrix.rows([(700, 3000), (0, 100)]).prepare(torch.float32, CPU)
    assert len(seen) > 2 and max(seen) <= CACHED and sum(seen) == 2400 * 512
    assert torch.equal(
        ready.gather(torch.tensor([2299, 2300])), int4(weight[[2999, 0]]).dequantize()
    )


def test_formats_have_the_names_the_command_line_knows() -> None:
    assert set(QUANTIZE) == {"auto", *ON_LOAD}


def test_a_shard_that_cuts_what_belongs_together_is_told_what_would_fit() -> None:
    matrix = FORMATS["int4"](torch.randn(64, 384))
    with pytest.raises(
        UnsupportedModel,
        match="columns 0:100 of 384 .* evenly among 1, 2, 3, 4, 6, 8, 12, 24 devices",
    ):
        matrix.cols(0, 100).prepare(torch.float32, CPU)
    with pytest.raises(
        UnsupportedModel, match="columns 0:192 of 384 cut through 128 .* among 1, 3 devices"
    ):
        FORMATS["fp8-squares"](torch.randn(256, 384)).cols(0, 192).prepare(torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int8", 8), ("int4", 4.25), ("int4-64", 4.5), ("int3", 3.5), ("int2", 2.5), ("nf4", 4.19)],
)
def test_takes_the_bits_it_says(name: str, bits: float) -> None:
    ready = FORMATS[name](torch.randn(512, 1024)).prepare(torch.float32, CPU)
    assert ready.nbytes * 8 / (512 * 1024) == pytest.approx(bits, abs=0.05)


def test_grouped_rows_are_found_where_they_lie() -> None:
    """A matrix stored as [kv head][its q heads, k, v], against taking it apart by hand."""
    spec = Attention(6, 2, 4)
    stored = torch.arange((6 + 4) * 4)[:, None].float().expand(-1, 3).contiguous()
    groups = stored.view(2, 5, 4, 3)
    by_hand = torch.cat(
        [groups[:, :3].reshape(-1, 3), groups[:, 3].reshape(-1, 3), groups[:, 4].reshape(-1, 3)]
    )
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

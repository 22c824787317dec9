"""Products with matrices of fewer bits, every way and format, under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.packed import KINDS, MORE, check_groups, check_quantize, check_rows, check_way, made
from benchmarks.products import LIMITS, MODELS
from bloomery.kernels import packed_gemm, packed_gemv
from bloomery.kernels.gemv import Heads
from bloomery.kernels.packed import Codebook, Fp8, Grid, pack, unpack
from bloomery.kernels.packed_linear import (
    packed_linear,
    packed_linear_reference,
    packed_phrase,
    unpacked,
    way,
)
from bloomery.kernels.quantize_rows import quantize_rows_reference
from bloomery.kernels.store import Turn

HALF = torch.float16
FULL = torch.float32
EVERY = (*KINDS.values(), *MORE)


def test_codes_are_what_they_mean() -> None:
    codes = torch.randint(16, (3, 64))
    assert torch.equal(unpack(pack(codes, 4), 4), codes.byte())
    assert pack(torch.tensor([[1, 2]]), 4).item() == 0x21, "the even column is the low half"
    grid = Grid(pack(codes, 4), torch.full((3, 2), 0.5), torch.full((3, 2), 3.0))
    assert grid.shape == (3, 64) and grid.group == 32
    assert torch.equal(grid.dequantize(), (codes - 3) * 0.5)
    assert torch.equal(Grid(pack(codes, 4), torch.ones(3, 1)).dequantize(), codes - 8.0), (
        "no zero: the middle"
    )
    order = torch.randperm(64).int()
    x = torch.randn(2, 64)
    moved = Grid(grid.codes, grid.scale, grid.zero, 4, order)
    torch.testing.assert_close(
        x @ moved.dequantize().t(), x[:, order.long()] @ grid.dequantize().t()
    )
    book = Codebook(pack(codes, 4), torch.arange(16) / 4, torch.full((3, 1), 2.0))
    assert torch.equal(book.dequantize(), codes / 2)
    blocks = Fp8(
        torch.ones(130, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    )
    assert blocks.dequantize()[129, 255] == 4 and blocks.dequantize()[0, 128] == 2 and blocks.blocks


@pytest.mark.parametrize("kind", [kind for kind in EVERY if "order" not in kind])
@pytest.mark.parametrize(
    ("tokens", "before", "after", "dtype"), [(1, "rms", "gate silu", FULL), (3, "", "add", HALF)]
)
def test_few_tokens_equal_the_reference(
    kind: str, tokens: int, before: str, after: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(len(kind) + tokens)
    cut = packed_gemv.Tiling(4, 32, 1)  # 768 columns of 4 bits end inside a tile
    assert check_rows(kind, tokens, 20, 768, before, after, dtype, "cpu", cut) < LIMITS[dtype]


@pytest.mark.parametrize("columns", [16384, 16640])
def test_maxima_of_a_codebook_are_codes_themselves(columns: int) -> None:
    """One factor a row up to 256 blocks, then several."""
    torch.manual_seed(columns)
    packed = made("nf4 64 nested", 40, columns, "cpu")
    x = torch.randn(2, columns)
    assert packed.absmax.dtype == torch.uint8 and packed.outer.shape == (40, 2 + (columns > 16384))
    factor = packed.outer[:, 1:].repeat_interleave(256, 1)[:, : columns // 64]
    by_hand = packed.table[16:][packed.absmax.long()] * factor + packed.outer[:, :1]
    values = packed.table[unpack(packed.codes, 4).long()] * by_hand.repeat_interleave(64, 1)
    torch.testing.assert_close(packed.dequantize(), values)
    torch.testing.assert_close(unpacked(packed, range(3, 9), FULL), values[3:9])
    got = packed_gemv.packed_rows(x, packed, cut=packed_gemv.Tiling(8, 128, 4))
    torch.testing.assert_close(got, x @ values.T, rtol=1e-3, atol=1e-3)
    got = packed_gemm.packed_product(x.half(), packed, cut=packed_gemm.Tiling(16, 64, 4, 2, 2))
    torch.testing.assert_close(got.float(), x @ values.T, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["int4 128 zero", "int4 row", "int8 row signed"])
def test_a_norm_goes_before_whole_numbers(kind: str) -> None:
    torch.manual_seed(len(kind))
    cut = packed_gemv.Tiling(4, 32, 1)
    assert check_rows(kind, 1, 20, 768, "rms", "gate silu", HALF, "cpu", cut) < LIMITS[HALF]


@pytest.mark.parametrize("kind", ["int4 128 zero", "int8 row signed"])
def test_whole_numbers_hide_nothing(kind: str) -> None:
    """Inputs are rounded to the largest of their chunk: beside one of thousands, among zeros, and where one is none."""
    torch.manual_seed(1)
    packed = made(kind, 20, 768, "cpu")
    x = torch.randn(4, 768).to(HALF)
    x[0, 5], x[1, 300:], x[2], x[3, 700] = 6000.0, 0.0, 0.0, float("nan")
    got = packed_gemv.packed_rows(x, packed, cut=packed_gemv.Tiling(4, 32, 1))
    wanted = x.double() @ packed.dequantize(torch.float64).T
    torch.testing.assert_close(got[:2].double(), wanted[:2], rtol=2e-3, atol=1e-2)
    assert not got[2].any() and bool(got[3].isnan().all())


def test_heads_are_turned_and_stored() -> None:
    torch.manual_seed(0)
    cut = packed_gemv.Tiling(4, 32, 1)
    found = check_rows("int4 128 zero", 2, 40, 512, "rms", "heads 3 1 8 8 tables", FULL, "cpu", cut)
    assert found < LIMITS[FULL]


@pytest.mark.parametrize("kind", EVERY)
def test_dozens_of_tokens_equal_the_reference(kind: str) -> None:
    torch.manual_seed(len(kind))
    cut = packed_gemm.Tiling(16, 64 * (1 + len(kind) % 3 % 2), 4, 2, 1 + len(kind) % 2)
    assert check_way("product", kind, 20, 150, 384, HALF, "cpu", cut) < LIMITS[HALF]


@pytest.mark.parametrize("kind", ["int4 128 zero", "nf4 64", "int8 row signed", "fp8 block"])
@pytest.mark.parametrize("rows", [60, 150])
def test_programs_share_the_tiles(kind: str, rows: int) -> None:
    """Four programs: of 150 rows a tile each, and a stretch of two more; of 60 rows only stretches."""
    torch.manual_seed(rows)
    cut = packed_gemm.Tiling(16, 64, 4, 2, 0)
    assert check_way("product", kind, 20, rows, 384, HALF, "cpu", cut) < LIMITS[HALF]


@pytest.mark.parametrize(
    ("programs", "turns", "rest"), [(4, 6, 3), (5, 3, 1), (7, 5, 4), (3, 4, 1)]
)
def test_stretches_are_added_up(programs: int, turns: int, rest: int) -> None:
    """A tile's parts by whoever had a stretch of it; what nobody wrote is no number."""
    parts = torch.full((2 * programs, 16, 64), torch.nan)
    out = torch.zeros(20, 64 * 4)
    wanted = torch.zeros(
        16 * 2, 64 * 4
    )  # two tiles beside each other, for there are more tokens than a tile has
    for p in range(programs):
        start = p * rest * turns // programs
        end = (p + 1) * rest * turns // programs
        for piece, tile in enumerate(range(start // turns, -(-end // turns) if end > start else 0)):
            parts[2 * p + piece] = torch.randn(16, 64)
            wanted[tile % 2 * 16 :][:16, tile // 2 * 64 :][:, :64] += parts[2 * p + piece]
    packed_gemm.gather(parts, None, out, turns, 0, rest)
    torch.testing.assert_close(out, wanted[:20])


@pytest.mark.parametrize("kind", EVERY)
def test_unpacking_equals_the_reference(kind: str) -> None:
    torch.manual_seed(len(kind))
    assert check_way("scratch", kind, 3, 70, 384, HALF, "cpu") < LIMITS[HALF]


@pytest.mark.parametrize("kind", [kind for kind in EVERY if "order" not in kind])
def test_rows_are_unpacked_wherever_they_stand(kind: str) -> None:
    torch.manual_seed(len(kind))
    packed = made(kind, 150, 384, "cpu")
    rows = torch.randint(150, (9,))
    whole = packed.dequantize(HALF)
    torch.testing.assert_close(unpacked(packed, rows, HALF), whole[rows], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(
        unpacked(packed, range(3, 140), HALF), whole[3:140], rtol=2e-3, atol=1e-5
    )


@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.int8])
def test_rows_are_rounded_like_the_reference(to: torch.dtype) -> None:
    torch.manual_seed(3)
    assert check_quantize(5, 100, HALF, to, "cpu") < 0.03, (
        "the interpreter rounds 8-bit floats towards zero"
    )
    x = torch.randn(4, 64)
    codes, scale = quantize_rows_reference(x, to)
    step = scale * (0.5 if to == torch.int8 else codes.float().abs().clamp(min=2**-6) / 8)
    assert bool(((codes.float() * scale - x).abs() <= step * 1.01).all())


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 64), (3, 32), (2, 16)])
def test_groups_are_rounded_like_the_reference(bits: int, group: int) -> None:
    torch.manual_seed(bits)
    assert check_groups(bits, group, "cpu") < 0.002


def test_ways_go_by_shape() -> None:
    grid = made("int4 128 zero", 64, 512, "cpu")
    both = made("int8 row signed both", 64, 512, "cpu")
    assert way(1, grid, HALF) == "rows"
    assert way(64, grid, HALF) == "product"
    assert way(64, made("nf4 64", 64, 512, "cpu"), HALF) == "product"
    assert way(64, grid, FULL) == way(5000, grid, HALF) == "scratch"
    assert way(2, both, HALF) == "rows" and way(200, both, HALF) == "rounded"
    assert way(1, made("int4 128 zero order", 64, 512, "cpu"), HALF) == "product", (
        "which puts the columns in order"
    )
    assert way(3, Grid(pack(torch.zeros(4, 48), 4), torch.ones(4, 3)), HALF) == "scratch", (
        "groups of 16"
    )
    assert way(3, Grid(pack(torch.zeros(4, 12), 4), torch.ones(4, 1)), HALF) == "scratch", (
        "rows of 6 bytes"
    )


def test_possible() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    slots = torch.zeros(1, dtype=torch.int32)
    grid = made("int4 64 zero", 24, 512, "cpu")
    assert packed_gemv.possible(grid, Heads(cache, slots, Turn()))
    assert not packed_gemv.possible(grid, Heads(cache, slots, Turn(clip=1.0)))
    assert not packed_gemv.possible(Grid(pack(torch.zeros(4, 48), 4), torch.ones(4, 1))), (
        "rows of 24 bytes"
    )
    assert not packed_gemm.possible(made("int4 row", 24, 576, "cpu")), "blocks of 128 columns"


def test_every_shape_has_a_cut() -> None:
    for rows, columns, *_ in [
        line for model in MODELS.values() for line in model.linears().values()
    ]:
        for width, paired, tokens in ((columns // 2, False, 1), (columns, True, 4)):
            cut = packed_gemv.tiling(rows, width, paired, tokens)
            assert (
                all(number & (number - 1) == 0 for number in cut[:3])
                and cut.chunks == 32 * cut.warps
            )
        for tokens in (3, 20, 48, 100, 300):
            cut = packed_gemm.tiling(tokens, rows, columns // 128, "grid", 4, 132)
            assert (
                cut.tokens == min(128, max(16, 1 << (tokens - 1).bit_length()))
                and 1 <= cut.splits <= 8
            )
    assert packed_gemm.tiling(64, 128, 1, "grid", 4, 132).splits == 1, "one unit is not cut"
    assert packed_gemm.sharing(256, 24576, 6144, 4, 132).splits == 0
    assert (
        packed_gemm.sharing(256, 1024, 1024, 4, 132)
        is packed_gemm.sharing(128, 24576, 6144, 4, 132)
        is None
    )


def test_without_a_kernel_the_reference_answers() -> None:
    x = torch.randn(2, 512)
    grid = made("int4 128 zero", 8, 512, "cpu")
    assert torch.equal(packed_linear(x, grid), packed_linear_reference(x, grid))
    assert packed_phrase(x, grid, None, None, None) is None

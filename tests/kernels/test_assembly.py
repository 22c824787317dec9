"""The matrix-unit kernels' assembly, which no interpreter of Triton runs: read here, line by line, over every code."""

from __future__ import annotations

import re

import pytest
import torch

from bloomery.kernels import packed_woven
from bloomery.kernels.packed_gemm import assembly

MASK = 0xFFFFFFFF


def halves(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n] words -> [n, 2] floats."""
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word).int()
    return signed.view(torch.int16).view(dtype).view(-1, 2)


def words(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.int32).view(-1).long() & MASK


def run(text: str, given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Registers after the last line; each holds many words at once."""
    held = dict(given)
    size = len(next(iter(given.values())))

    def value(name: str) -> torch.Tensor:
        return held[name] if name in held else torch.full((size,), int(name, 0))

    for line in text.strip("{}\n").split("\n"):
        if line.startswith(".reg"):
            continue
        if line.startswith("wgmma.wait_group"):
            assert held.keys() == given.keys(), "what matrix units may still read was written"
            continue
        operation, to, *names = re.findall(r"[\w.$]+", line)
        a, *more = map(value, names)
        match operation.split("."):
            case ["mov", _]:
                held[to] = a
            case ["mad", "lo", _]:
                held[to] = a * more[0] + more[1] & MASK
            case ["shr", _]:
                held[to] = a >> more[0]
            case ["shl", _]:
                held[to] = a << more[0] & MASK
            case ["and", _]:
                held[to] = a & more[0]
            case ["xor", _]:
                held[to] = a ^ more[0]
            case ["lop3", _]:
                assert names[3] == "0xEA"
                held[to] = a & more[0] | more[1]
            case ["prmt", _]:
                octets = [a >> 8 * i & 255 for i in range(4)] + [
                    more[0] >> 8 * i & 255 for i in range(4)
                ]
                picks = [more[1] >> 4 * i & 15 for i in range(4)]
                assert all(bool((pick < 8).all()) for pick in picks)
                stacked = torch.stack(octets)
                held[to] = sum(
                    stacked.gather(0, pick[None])[0] << 8 * i for i, pick in enumerate(picks)
                )
            case [arithmetic, "rn", _]:
                first, *others = (halves(v, dtype).double() for v in (a, *more))
                result = {
                    "sub": lambda x, y: x - y,
                    "mul": lambda x, y: x * y,
                    "fma": lambda x, y, z: x * y + z,
                }
                held[to] = words(result[arithmetic](first, *others).to(dtype))
            case _:
                raise AssertionError(f"unknown: {line}")
    return held


def both(value: float, dtype: torch.dtype, size: int) -> torch.Tensor:
    return words(torch.full((size, 2), value, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "bits", "signed"), [("grid", 4, False), ("codebook", 4, False)])
def test_four_bits(form: str, bits: int, signed: bool, dtype: torch.dtype) -> None:
    word = torch.randint(0, 1 << 32, (5000,))
    codes = torch.stack([word >> 4 * j & 15 for j in range(8)])
    given = {"$4": word, "$5": both(0.25, dtype, len(word))}
    if form == "grid":
        above = 128 if dtype == torch.bfloat16 else 1024
        given |= {"$6": both(0.125, dtype, len(word)), "$7": both(above + 5, dtype, len(word))}
        wanted = (codes - 5) * 0.25 + 0.125
    else:
        table = torch.randn(16).to(dtype)
        octets = table.view(torch.uint8).view(16, 2).long()
        for i in range(8):
            plane = octets[4 * (i % 4) : 4 * (i % 4) + 4, i // 4]
            packed = sum(int(plane[j]) << 8 * j for j in range(4))
            given[f"${6 + 2 * i}"] = torch.full((len(word),), packed)
        wanted = (table[codes].double() * 0.25).to(dtype)
    found = run(assembly(form, bits, signed, dtype, False, True), given, dtype)
    for q in range(4):
        assert torch.equal(
            halves(found[f"${q}"], dtype).double(),
            torch.stack([wanted[q], wanted[q + 4]], -1).double(),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("form", "signed"), [("grid", False), ("grid", True), ("fp8", False)])
def test_eight_bits(form: str, signed: bool, late: bool, dtype: torch.dtype) -> None:
    octets = torch.arange(256)[torch.randperm(1024) % 256].view(-1, 4)
    if form == "fp8":
        octets = torch.where(octets & 127 == 127, 0, octets)  # no number
        values = octets.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        values = (
            octets.to(torch.uint8).view(torch.int8).double() if signed else octets.double() - 128
        )
    word = (octets << torch.arange(0, 32, 8)).sum(1)
    given = {"$2": word, "$3": both(0.5, dtype, len(word)), "$4": both(8.0, dtype, len(word))}
    if not late:
        values = values * 0.5 + (8.0 if form == "grid" else 0.0)
    found = run(assembly(form, 8, signed, dtype, late, True), given, dtype)
    for q in range(2):
        wanted = values[:, [q, q + 2]].to(dtype)
        assert torch.equal(halves(found[f"${q}"], dtype).double(), wanted.double())


@pytest.mark.parametrize(("form", "bits"), [("grid", 4), ("grid", 8), ("codebook", 4), ("fp8", 8)])
def test_matrix_units_have_read_what_is_written_next(form: str, bits: int) -> None:
    """They read registers while the program goes on; without them there is nothing to wait for."""
    assert (
        assembly(form, bits, False, torch.bfloat16, False, True).count(
            "wgmma.wait_group.sync.aligned 0;"
        )
        == 1
    )
    assert "wgmma" not in assembly(form, bits, False, torch.bfloat16, False, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_pairs_of_neighbours(bits: int, dtype: torch.dtype) -> None:
    """Two codes that stand side by side: every pair there is."""
    word = torch.arange(1 << 2 * bits)
    codes = torch.stack((word & ((1 << bits) - 1), word >> bits), -1)
    text = packed_woven.assembly(bits, dtype)
    given = {"$1": word}
    if bits == 4:
        above = 128 if dtype == torch.bfloat16 else 1024
        given |= {
            f"${i}": both(value, dtype, len(word))
            for i, value in ((2, 0.25), (3, 0.125), (4, above + 5))
        }
        wanted = (codes - 5) * 0.25 + 0.125
    else:
        wanted = codes - 256 * (codes > 127)
    assert torch.equal(
        halves(run(text["UNPACK"], given, dtype)["$0"], dtype).double(), wanted.double()
    )

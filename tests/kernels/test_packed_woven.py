"""The interleaved product: how a matrix is cut, and that its kernel compiles for a Hopper. No interpreter runs it;
benchmarks/packed.py check compares it on a card."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from bloomery.kernels.packed_woven import HALF, MOST, TALL, Cut, cut_for, gluon

SHAPES = [
    (24576, 6144),
    (6144, 24576),
    (6400, 6144),
    (28672, 4096),
    (4096, 4096),
    (4096, 14336),
    (1008, 8192),
    (640, 512),
]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_turns_are_whole(rows: int, columns: int, bits: int) -> None:
    for tokens, count in product([65, 128, 129, 200, 256, 257, 512, 1000, 2048], [132, 78, 7]):
        cut = cut_for(tokens, rows, columns, bits, count)
        assert cut is None or columns % (cut.span * cut.slots) == 0
        assert cut is not TALL or tokens > 128, "half of every tile would be empty"


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "bits", "cut"),
    [
        (256, 24576, 6144, 8, TALL),
        (256, 6144, 6144, 4, TALL),
        (256, 4096, 4096, 8, HALF),  # little to do, and smaller pieces to add up
        (384, 28672, 4096, 8, HALF),  # a quarter of the large tiles would be empty,
        (384, 28672, 4096, 4, TALL),  # which costs less than unpacking for fewer tokens
        (128, 24576, 6144, 4, HALF),
        (128, 28672, 4096, 4, None),  # other kernels are quicker
    ],
)
def test_cuts_as_measured(tokens: int, rows: int, columns: int, bits: int, cut: Cut | None) -> None:
    """On 132 processors."""
    assert cut_for(tokens, rows, columns, bits, 132) == cut


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(64, 24576, 6144), (256, 24576, 6272), (256, 1024, 4096), (4096, 24576, 6144)],
)
def test_what_other_kernels_do_better(tokens: int, rows: int, columns: int) -> None:
    assert all(cut_for(tokens, rows, columns, bits, 132) is None for bits in MOST)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from bloomery.kernels.packed_woven import assembly, block, woven_kernel
bits, tokens, span, slots = {bits}, {tokens}, {span}, {slots}
half, codes = torch.bfloat16, torch.int16 if bits == 8 else torch.uint8
def outline(dtype, name, lines, width):
    layout = block(torch.empty(512, 512, dtype=dtype), lines, width).layout
    return f"tensordesc<{{name}}[{{lines}}, {{width}}],{{layout!r}}>"
kinds = dict(
    x=outline(half, "bf16", tokens, span), codes=outline(codes, "i16" if bits == 8 else "u8", 128, span // 2),
    out=outline(half, "bf16", tokens, 128), scale="*fp32" if bits == 8 else "*fp16", zero="*fp16", bias="*bf16",
    sums="*fp32", given="*i32", **dict.fromkeys(("tokens", "rows", "columns", "rounds", "rest", "each"), "i32"),
)
fixed = dict(
    BITS=bits, GROUP=0 if bits == 8 else 128, ZERO=bits == 4, BIAS=True, N=tokens, SPAN=span, SLOTS=slots, PDL=True,
    **assembly(bits, half),
)
names = woven_kernel.arg_names
source = GluonASTSource(
    woven_kernel, {{name: kinds.get(name, "constexpr") for name in names}},
    {{(names.index(name),): value for name, value in fixed.items()}},
)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 8}})
print("products", made.asm["ptx"].count("wgmma.mma_async"), "shared", made.metadata.shared)
"""


@pytest.mark.skipif(gluon is None, reason="no Gluon")
@pytest.mark.parametrize(("bits", "tile"), [(8, TALL), (4, HALF)])
def test_it_compiles_for_a_hopper(bits: int, tile: Cut) -> None:
    """In a process of its own, for this one's kernels are interpreted. One product for every 16 columns of a turn, and
    no more shared memory than a processor has."""
    tokens, span, slots = tile
    script = COMPILE.format(bits=bits, tokens=tokens, span=span, slots=slots)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _, products, _, shared = done.stdout.split()
    assert int(products) == slots * span // 16
    assert int(shared) <= 227 * 1024

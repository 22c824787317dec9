"""The wgmma GEMM: its tilings, and that the kernel compiles for Hopper without a GPU.

The interpreter cannot run Gluon. `benchmarks/packed.py check` compares the results on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from bloomery.kernels.packed_wgmma import (
    LARGE_TILING,
    MAX_TOKENS,
    SMALL_TILING,
    WgmmaTiling,
    gluon,
    select_tiling_by_shape,
)

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
def test_columns_are_whole_iterations(rows: int, columns: int, bits: int) -> None:
    token_counts = [65, 128, 129, 200, 256, 257, 512, 1000, 2048]
    for tokens, multiprocessors in product(token_counts, [132, 78, 7]):
        tiling = select_tiling_by_shape(tokens, rows, columns, bits, multiprocessors)
        assert tiling is None or columns % (tiling.slot_columns * tiling.slots) == 0
        assert tiling is not LARGE_TILING or tokens > 128, "half of every tile would be empty"


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "bits", "expected"),
    [
        (256, 24576, 6144, 8, LARGE_TILING),
        (256, 6144, 6144, 4, LARGE_TILING),
        (256, 4096, 4096, 8, SMALL_TILING),  # little work, and smaller partial sums
        (384, 28672, 4096, 8, SMALL_TILING),  # a quarter of the large tiles would be empty
        (384, 28672, 4096, 4, LARGE_TILING),  # dequantizing for fewer tokens would cost more
        (128, 24576, 6144, 4, SMALL_TILING),
        (128, 28672, 4096, 4, None),  # other kernels are faster
    ],
)
def test_tilings_as_measured_on_132_multiprocessors(
    tokens: int, rows: int, columns: int, bits: int, expected: WgmmaTiling | None
) -> None:
    assert select_tiling_by_shape(tokens, rows, columns, bits, 132) == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(64, 24576, 6144), (256, 24576, 6272), (256, 1024, 4096), (4096, 24576, 6144)],
)
def test_shapes_for_which_other_kernels_are_faster(tokens: int, rows: int, columns: int) -> None:
    for bits in MAX_TOKENS:
        assert select_tiling_by_shape(tokens, rows, columns, bits, 132) is None


COMPILE_SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from bloomery.kernels.packed_wgmma import (
    build_dequantize_asm, describe_blocks, packed_wgmma_kernel
)

bits, tokens, slot_columns, slots = {bits}, {tokens}, {slot_columns}, {slots}
code_dtype = torch.int16 if bits == 8 else torch.uint8

def descriptor_type(dtype, name, rows, columns):
    layout = describe_blocks(torch.empty(512, 512, dtype=dtype), rows, columns).layout
    return f"tensordesc<{{name}}[{{rows}}, {{columns}}],{{layout!r}}>"

types = dict(
    x=descriptor_type(torch.bfloat16, "bf16", tokens, slot_columns),
    codes=descriptor_type(code_dtype, "i16" if bits == 8 else "u8", 128, slot_columns // 2),
    out=descriptor_type(torch.bfloat16, "bf16", tokens, 128),
    scale="*fp32" if bits == 8 else "*fp16",
    zero="*fp16",
    bias="*bf16",
    partial_sums="*fp32",
    flags="*i32",
    tokens="i32",
    rows="i32",
    columns="i32",
    rounds="i32",
    leftover_iters="i32",
    program_iters="i32",
)
constants = dict(
    BITS=bits,
    GROUP_SIZE=0 if bits == 8 else 128,
    HAS_ZERO=bits == 4,
    HAS_BIAS=True,
    TILE_TOKENS=tokens,
    SLOT_COLUMNS=slot_columns,
    SLOTS=slots,
    PDL=True,
    **build_dequantize_asm(bits, torch.bfloat16),
)
names = packed_wgmma_kernel.arg_names
source = GluonASTSource(
    packed_wgmma_kernel,
    {{name: types.get(name, "constexpr") for name in names}},
    {{(names.index(name),): value for name, value in constants.items()}},
)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 8}})
print("wgmma", kernel.asm["ptx"].count("wgmma.mma_async"), "shared", kernel.metadata.shared)
"""


@pytest.mark.skipif(gluon is None, reason="no Gluon")
@pytest.mark.parametrize(("bits", "tiling"), [(8, LARGE_TILING), (4, SMALL_TILING)])
def test_kernel_compiles_for_hopper(bits: int, tiling: WgmmaTiling) -> None:
    """One wgmma per 16 columns of an iteration, and no more shared memory than Hopper has.

    The script runs in its own process, because this one interprets kernels.
    """
    tokens, slot_columns, slots = tiling
    script = COMPILE_SCRIPT.format(bits=bits, tokens=tokens, slot_columns=slot_columns, slots=slots)
    completed = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    _, num_wgmma, _, shared_bytes = completed.stdout.split()
    assert int(num_wgmma) == slots * slot_columns // 16
    assert int(shared_bytes) <= 227 * 1024

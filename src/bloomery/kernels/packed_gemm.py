"""Packed GEMM: a linear layer with quantized weights for dozens of tokens.

    y [tokens, out] = x @ packed.dequantize().T + bias                             x [tokens, in]

Weights are dequantized in registers and multiplied by the tensor cores. kernels/packed_linear.py
chooses this file; kernels/packed_moe.py builds on `multiply_tile`.

Layout. A unit is 64 bytes of a row of codes: 128 columns of 4-bit codes or 64 of 8-bit codes. Four
threads share a unit, and each reads 16 neighbouring bytes of it:

    unit of a row   | thread 0: 16 bytes | thread 1 | thread 2 | thread 3 |
                      = 4 words = 8 halfwords; a halfword holds 4 (or 2) codes

The weights are the left operand of the matrix product, straight from registers, and the tokens are
the right one. For a step over 16 columns the tensor cores need four values of a row from each
thread. Any order of the columns is correct as long as both operands use it. So the kernel takes the
codes that one mask extracts from a word, and `permute_inputs` puts x into the same order
(`source_column`) beforehand. Threads exchange no values.

Dequantization (`build_dequantize_asm`): a masked code below a fixed exponent is a float, 128 + code
in bfloat16 or 1024 + code in float16. A subtraction yields the code, exactly, and a fused
multiply-add the weight, two weights per instruction. Where a row has one scale, it is applied to
the sums instead.

How the work is divided: a tile is `outputs` outputs of `tokens` tokens.

    split-K    one program per tile and per part of the columns. Short matrices are split along
               their columns too, and split_k_reduce_kernel adds the parts in order.
    stream-K   one program per multiprocessor, for many tokens. Every program computes the same
               number of whole tiles. The leftover tiles are divided evenly by loop iterations, so
               no program waits for the last one, and stream_k_reduce_kernel adds the parts.

This file must not know layers, checkpoint formats or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from bloomery.kernels.launch import (
    is_hopper,
    jit,
    kernel_constant,
    launch_dependents,
    next_power_of_2,
    num_multiprocessors,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.packed import GroupedScales, PackedLayout, PackedWeight, describe_layout
from bloomery.kernels.packed_gemv import load_nested_absmax, scale_to_float

MAX_SPLIT_K = 8
MIN_STREAM_K_COLUMNS = 1200  # columns of a tile that keep a program busy, measured on an H200
REDUCE_WIDTH = 1024  # outputs per program of split_k_reduce_kernel
REDUCE_TOKENS = 16  # tokens per program of stream_k_reduce_kernel
PERMUTE_WIDTH = 2048  # columns per program of permute_inputs_kernel


# The moved bits of a 4-bit float are 2 ** -126 of its value in bfloat16 (`mxfp4_to_16bit_asm`). Its
# scale corrects a part of that, and a multiplication of the sums the rest. So scales up to 2 ** 87
# do not overflow, and weights from 2 ** -40 on keep their precision.
FP4_SCALE_FACTOR = kernel_constant(2.0**40)
FP4_SUM_FACTOR = kernel_constant(2.0**86)


class PackedGemmTiling(NamedTuple):
    """How the work is divided among programs; see the module docstring."""

    tokens: int
    outputs: int
    warps: int
    stages: int
    split_k: int  # parts of the columns; 0: stream-K
    units_per_iter: int = 1  # the units of a split-K part are a multiple of it


# Tokens per tile -> pipeline stages -> programs of 128 outputs with 4-bit codes that fit on one
# multiprocessor of an H200.
PROGRAMS_PER_MULTIPROCESSOR: Mapping[int, Mapping[int, int]] = {
    32: {3: 3},
    64: {3: 3, 4: 2, 6: 1},
    128: {3: 2, 4: 1},
}


@lru_cache(maxsize=4096)
def select_split_k_tiling(
    tokens: int, rows: int, units: int, kind: str, bits: int, multiprocessors: int
) -> PackedGemmTiling:
    """Choose the split-K tiling for rows of `units` units.

    The rules are measured on an H200 with `benchmarks/packed.py tune`.
    """
    tile_tokens = min(max(16, next_power_of_2(tokens)), 128)
    token_tiles = -(-tokens // tile_tokens)
    is_codebook = kind == "codebook"  # a codebook needs more registers and instructions
    if bits == 4 and not is_codebook and tile_tokens >= 32:
        programs = -(-rows // 128) * token_tiles
        return select_4bit_tiling(tile_tokens, programs, units, multiprocessors)
    outputs = 128
    if is_codebook and tile_tokens <= 64:
        outputs = 64
    elif bits == 8 and tile_tokens <= 32:
        # 16 tokens and many rows fill the device with 128 outputs per program as well.
        outputs = 128 if tile_tokens == 16 and rows >= 128 * multiprocessors else 64
    programs = -(-rows // outputs) * token_tiles
    waves = target_waves(tokens, tile_tokens, outputs, bits)
    min_units = min_units_per_program(tile_tokens, bits, is_codebook)
    split_k = 1
    while (
        programs * split_k < waves * multiprocessors
        and units >= 2 * min_units * split_k
        and split_k < MAX_SPLIT_K
    ):
        split_k *= 2
    if bits == 8 and tile_tokens <= 64 and units % (2 * split_k) == 0:
        # One unit per iteration is too little to dequantize while the tensor cores work.
        return PackedGemmTiling(tile_tokens, outputs, 4, 3, split_k, 2)
    stages = pipeline_stages(tile_tokens, bits, is_codebook)
    return PackedGemmTiling(tile_tokens, outputs, 4, stages, split_k)


def target_waves(tokens: int, tile_tokens: int, outputs: int, bits: int) -> float:
    """Programs per multiprocessor up to which splitting the columns helps."""
    if tokens > 128:
        return 3
    if tile_tokens == 128 or (tile_tokens == 64 and bits == 8):
        return 1.4
    if (outputs == 64 and tile_tokens <= 32) or (tile_tokens == 16 and bits == 4):
        return 5
    return 2.5


def min_units_per_program(tile_tokens: int, bits: int, is_codebook: bool) -> int:
    """Units that are worth a program of their own."""
    if tile_tokens == 16 and bits == 4 and not is_codebook:
        return 4
    if is_codebook or tile_tokens <= 32:
        return 6
    return 12


def pipeline_stages(tile_tokens: int, bits: int, is_codebook: bool) -> int:
    """Loads in flight."""
    if tile_tokens <= 32 and bits == 8:
        return 6
    if tile_tokens <= 32 and is_codebook:
        return 4
    if bits == 8 and tile_tokens == 128:
        return 4
    return 3


def select_4bit_tiling(
    tile_tokens: int, programs: int, units: int, multiprocessors: int
) -> PackedGemmTiling:
    """Choose stages and split-K of 4-bit codes so that the multiprocessors are busiest."""
    startup_units = 3 if tile_tokens == 32 else 7  # a program's start costs the time of these
    places = PROGRAMS_PER_MULTIPROCESSOR[tile_tokens]

    def busy_share(stages: int, split_k: int) -> float:
        rounds = programs * split_k / (places[stages] * multiprocessors)
        filled = rounds / max(1, ceil(rounds - 0.05))
        # A program that is alone on its multiprocessor waits a quarter of its time.
        filled *= 0.75 if places[stages] == 1 else 1.0
        return filled * units / (units + startup_units * split_k)

    choices = [
        (stages, split_k)
        for stages in places
        for split_k in (1, 2, 4, MAX_SPLIT_K)
        if units >= 4 * split_k or split_k == 1
    ]
    stages, split_k = max(choices, key=lambda choice: busy_share(*choice))
    return PackedGemmTiling(tile_tokens, 128, 4, stages, split_k)


def select_stream_k_tiling(
    tokens: int, rows: int, columns: int, bits: int, multiprocessors: int
) -> PackedGemmTiling | None:
    """Choose the stream-K tiling for more than 128 tokens, or None if programs lack work.

    The tile needs the shared memory of a Hopper GPU.
    """
    tiles = -(-tokens // 256) * -(-rows // 128)
    if tokens <= 128 or tiles * columns < MIN_STREAM_K_COLUMNS * multiprocessors:
        return None
    return PackedGemmTiling(256, 128, 8, 4 if bits == 8 else 3, 0)


def unit_columns(bits: int) -> int:
    """Columns of a unit, which is 64 bytes."""
    return 512 // bits


def count_units(columns: int, bits: int) -> int:
    """Units of a row; the last one may be incomplete."""
    return -(-columns // unit_columns(bits))


def supports_packed_gemm(packed: PackedWeight) -> bool:
    """Whether rows are whole quarters of units, and the 16 bytes of a thread have one scale."""
    layout = describe_layout(packed)
    columns = packed.shape[1]
    if layout.bits not in (4, 8) or not packed.codes.is_contiguous():
        return False
    unit = unit_columns(layout.bits)
    if columns % (unit // 4):  # the 16 bytes of a thread
        return False
    if columns % unit and layout.columns_per_nested_scale:
        return False
    group_size = layout.group_size
    return group_size >= columns or group_size % unit == 0 or group_size in (unit // 2, unit // 4)


def packed_gemm_triton(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    tiling: PackedGemmTiling | None = None,
) -> torch.Tensor:
    """Run the kernels: x [tokens, in] -> [tokens, out]."""
    tokens, columns = x.shape
    rows = packed.shape[0]
    layout = describe_layout(packed)
    units = count_units(columns, layout.bits)
    multiprocessors = num_multiprocessors(x.device)
    if tiling is None and is_hopper(x.device):
        tiling = select_stream_k_tiling(tokens, rows, columns, layout.bits, multiprocessors)
    if tiling is None:
        tiling = select_split_k_tiling(
            tokens, rows, units, layout.kind, layout.bits, multiprocessors
        )
    act_order = packed.act_order if isinstance(packed, GroupedScales) else None
    x = permute_inputs(x, layout, act_order)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tiling.split_k == 0:
        return run_stream_k(x, packed, bias, tiling, out, multiprocessors)
    parts = out
    if tiling.split_k > 1:
        parts = torch.empty(tiling.split_k, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (-(-tokens // tiling.tokens), -(-rows // tiling.outputs), tiling.split_k)
    split_k_kernel[grid](
        x,
        layout.codes.view(torch.int16),
        layout.scale,
        x if layout.zero_point is None else layout.zero_point,
        x if layout.table is None else layout.table,
        x if bias is None else bias,
        parts,
        tokens,
        rows,
        columns,
        -(-units // tiling.split_k),
        HAS_BIAS=bias is not None,
        SPLIT=tiling.split_k > 1,
        **layout_constants(packed, x.dtype, x.device),
        BLOCK_OUT=tiling.outputs,
        BLOCK_TOKENS=tiling.tokens,
        WARPS=tiling.warps,
        STAGES=tiling.stages,
        UNITS_PER_ITER=tiling.units_per_iter,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    if tiling.split_k > 1:
        split_k_reduce_kernel[(tokens, -(-rows // REDUCE_WIDTH))](
            parts,
            out if bias is None else bias,
            out,
            rows,
            SPLIT_K=tiling.split_k,
            HAS_BIAS=bias is not None,
            WIDTH=REDUCE_WIDTH,
            num_warps=4,
            **pdl_options(x.device),
        )
    return out


def run_stream_k(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    tiling: PackedGemmTiling,
    out: torch.Tensor,
    programs: int,
) -> torch.Tensor:
    """Multiply permuted x [tokens, in] into `out` [tokens, out] with `programs` programs."""
    tokens = len(x)
    rows, columns = packed.shape
    layout = describe_layout(packed)
    tile_iters = -(-count_units(columns, layout.bits) // tiling.units_per_iter)
    tiles = -(-tokens // tiling.tokens) * -(-rows // tiling.outputs)
    rounds, leftover_tiles = divmod(tiles, programs)
    num_parts = 2 * programs if leftover_tiles else 1
    parts = torch.empty(
        num_parts, tiling.tokens, tiling.outputs, dtype=torch.float32, device=x.device
    )
    stream_k_kernel[(programs,)](
        x,
        layout.codes.view(torch.int16),
        layout.scale,
        x if layout.zero_point is None else layout.zero_point,
        x if layout.table is None else layout.table,
        x if bias is None else bias,
        out,
        parts,
        tokens,
        rows,
        columns,
        rounds,
        leftover_tiles * tile_iters,
        HAS_BIAS=bias is not None,
        **layout_constants(packed, x.dtype, x.device),
        BLOCK_OUT=tiling.outputs,
        BLOCK_TOKENS=tiling.tokens,
        WARPS=tiling.warps,
        STAGES=tiling.stages,
        UNITS_PER_ITER=tiling.units_per_iter,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    if leftover_tiles:
        reduce_stream_k_parts(parts, bias, out, tile_iters, rounds, leftover_tiles)
    return out


def reduce_stream_k_parts(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile_iters: int,
    rounds: int,
    leftover_tiles: int,
) -> None:
    """Add up the leftover tiles of stream-K, which follow `rounds` whole tiles per program.

    `parts` [2 * programs, tokens, outputs] holds each program's partial sums of its two tiles.
    """
    num_parts, tile_tokens, outputs = parts.shape
    tokens, rows = out.shape
    stream_k_reduce_kernel[(leftover_tiles, tile_tokens // REDUCE_TOKENS)](
        parts,
        out if bias is None else bias,
        out,
        tokens,
        rows,
        tile_iters,
        rounds,
        leftover_tiles * tile_iters,
        num_parts // 2,
        HAS_BIAS=bias is not None,
        BLOCK_OUT=outputs,
        BLOCK_TOKENS=tile_tokens,
        REDUCE_TOKENS=REDUCE_TOKENS,
        num_warps=4,
        **pdl_options(out.device),
    )


def layout_constants(
    packed: PackedWeight, dtype: torch.dtype, device: torch.device, units_per_iter: int = 1
) -> dict[str, str | int | bool | None]:
    """Return the constants that describe a packed matrix to the kernels.

    GROUP_SIZE 0: one scale per row. ROWS_PER_SCALE 0: one scale for all rows. SCALE_SUMS: the
    scale of a row is applied to the sums. PARTIAL_UNIT: the last iteration of a row is incomplete.
    DEQUANTIZE_ASM None: dequantize without inline assembly.
    """
    layout = describe_layout(packed)
    rows, columns = packed.shape
    scale_sums = layout.bits == 8 and layout.group_size >= columns and layout.zero_point is None
    asm = None
    if is_hopper(device):
        asm = build_dequantize_asm(
            layout.kind, layout.bits, layout.signed, dtype, scale_sums, has_async_wgmma(device)
        )
    return {
        "KIND": layout.kind,
        "BITS": layout.bits,
        "GROUP_SIZE": layout.group_size if layout.group_size < columns else 0,
        "ROWS_PER_SCALE": layout.rows_per_scale if layout.rows_per_scale < rows else 0,
        "NESTED_COLUMNS": layout.columns_per_nested_scale,
        "HAS_ZERO": layout.zero_point is not None,
        "SIGNED": layout.signed,
        "SCALE_SUMS": scale_sums,
        "PARTIAL_UNIT": columns % (units_per_iter * unit_columns(layout.bits)) != 0,
        "DEQUANTIZE_ASM": asm,
    }


@lru_cache
def has_async_wgmma(device: torch.device) -> bool:
    """Whether the tensor cores read registers asynchronously, as Hopper's wgmma does."""
    return torch.cuda.get_device_capability(device)[0] == 9


def permute_inputs(
    x: torch.Tensor,
    layout: PackedLayout,
    act_order: torch.Tensor | None,
    units_per_iter: int = 1,
) -> torch.Tensor:
    """Return x [tokens, in] with its columns in the order in which the kernels multiply them.

    An incomplete iteration at the end of the rows is filled up with zeros.
    """
    x = x.contiguous()
    tokens, columns = x.shape
    iter_columns = units_per_iter * unit_columns(layout.bits)
    width = -(-columns // iter_columns) * iter_columns
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    permute_inputs_kernel[(tokens, -(-width // PERMUTE_WIDTH))](
        x,
        out if act_order is None else act_order,
        out,
        columns,
        width,
        BITS=layout.bits,
        HAS_ACT_ORDER=act_order is not None,
        WIDTH=PERMUTE_WIDTH,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


# ---- kernels -------------------------------------------------------------------------------------


@jit
def source_column(k, BITS: tl.constexpr):
    """Return the column of x that stands at place k of the permuted x.

    From the slowest to the fastest index,
    a place is  (unit, pair of codes in a halfword, word, code of the pair, thread, halfword),
    a column is (unit, thread, word, halfword, pair of codes in a halfword, code of the pair).
    """
    CODES: tl.constexpr = 16 // BITS  # per halfword
    halfword = k % 2
    thread = k // 2 % 4
    code = k // 8 % 2
    word = k // 16 % 4
    pair = k // 64 % (CODES // 2)
    return (
        k // (32 * CODES) * (32 * CODES)
        + thread * (8 * CODES)
        + word * (2 * CODES)
        + halfword * CODES
        + 2 * pair
        + code
    )


@jit
def permute_inputs_kernel(
    x,
    act_order,
    out,
    columns,
    width,
    BITS: tl.constexpr,
    HAS_ACT_ORDER: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Permute WIDTH columns of one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source = source_column(k, BITS)
    is_column = (k < width) & (source < columns)
    if HAS_ACT_ORDER:
        source = tl.load(act_order + source, mask=is_column, other=0)
    v = tl.load(x + row * columns + source, mask=is_column, other=0.0)
    tl.store(out + row * width + k, v, mask=k < width)


@jit(do_not_specialize=["tokens", "program_units"])
def split_k_kernel(
    x,  # [tokens, columns], permuted
    codes,  # [rows, row bytes / 2] int16
    scale,
    zero,
    table,
    bias,
    out,  # [tokens, rows], or [SPLIT_K, tokens, rows] in float32
    tokens,
    rows,
    columns,
    program_units,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    PARTIAL_UNIT: tl.constexpr,
    SPLIT: tl.constexpr,
    DEQUANTIZE_ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    UNITS_PER_ITER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of BLOCK_TOKENS tokens over `program_units` units."""
    launch_dependents(PDL)
    first_row = tl.program_id(1) * BLOCK_OUT
    row = first_row + tl.arange(0, BLOCK_OUT)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    first_unit = tl.program_id(2) * program_units
    UNIT: tl.constexpr = 512 // BITS
    end_unit = tl.minimum(first_unit + program_units, (columns + UNIT - 1) // UNIT)
    y = multiply_tile(
        x,
        tl.minimum(token, tokens - 1),
        codes,
        scale,
        zero,
        table,
        first_row,
        rows,
        first_unit,
        end_unit,
        columns,
        KIND,
        BITS,
        GROUP_SIZE,
        ROWS_PER_SCALE,
        NESTED_COLUMNS,
        HAS_ZERO,
        SIGNED,
        SCALE_SUMS,
        PARTIAL_UNIT,
        DEQUANTIZE_ASM,
        BLOCK_OUT,
        BLOCK_TOKENS,
        WARPS,
        STAGES,
        UNITS_PER_ITER,
        PDL,
    )
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    offset = token.to(tl.int64)[None, :] * rows + row[:, None]
    if SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * tokens * rows + offset, y, mask=mask)
    else:
        if HAS_BIAS:
            y += tl.load(bias + tl.minimum(row, rows - 1)).to(tl.float32)[:, None]
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


@jit
def split_k_reduce_kernel(
    parts,  # [SPLIT_K, tokens, rows] float32
    bias,
    out,
    rows,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of WIDTH outputs of one token, in order."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    tokens = tl.num_programs(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    y = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(SPLIT_K):
        y += tl.load(parts + (part * tokens + token) * rows + i, mask=i < rows, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + i, mask=i < rows, other=0.0).to(tl.float32)
    tl.store(out + token * rows + i, y.to(out.dtype.element_ty), mask=i < rows)


@jit(do_not_specialize=["tokens", "rounds", "leftover_iters"])
def stream_k_kernel(
    x,  # [tokens, columns], permuted
    codes,  # [rows, row bytes / 2] int16
    scale,
    zero,
    table,
    bias,
    out,  # [tokens, rows]
    parts,  # [2 * programs, BLOCK_TOKENS, BLOCK_OUT] float32
    tokens,
    rows,
    columns,
    rounds,
    leftover_iters,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    PARTIAL_UNIT: tl.constexpr,
    DEQUANTIZE_ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    UNITS_PER_ITER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `rounds` whole tiles, then this program's share of the leftover iterations.

    The share is less than a tile, so it touches at most two tiles. parts[2 * program] and the next
    one hold what the program contributed to them.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    ITER_COLUMNS: tl.constexpr = 512 // BITS * UNITS_PER_ITER
    tile_iters = (columns + ITER_COLUMNS - 1) // ITER_COLUMNS
    token_tiles = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    start = program * leftover_iters // programs
    end = (program + 1) * leftover_iters // programs
    for i in range(rounds + 2):
        leftover = start // tile_iters + i - rounds
        leftover_start = leftover * tile_iters
        first = tl.where(i < rounds, 0, tl.maximum(start, leftover_start) - leftover_start)
        last = tl.where(
            i < rounds, tile_iters, tl.minimum(end, (leftover + 1) * tile_iters) - leftover_start
        )
        tile = tl.where(i < rounds, i * programs + program, rounds * programs + leftover)
        if first < last:
            first_row = tile // token_tiles * BLOCK_OUT
            token = tile % token_tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            y = multiply_tile(
                x,
                tl.minimum(token, tokens - 1),
                codes,
                scale,
                zero,
                table,
                first_row,
                rows,
                first * UNITS_PER_ITER,
                last * UNITS_PER_ITER,
                columns,
                KIND,
                BITS,
                GROUP_SIZE,
                ROWS_PER_SCALE,
                NESTED_COLUMNS,
                HAS_ZERO,
                SIGNED,
                SCALE_SUMS,
                PARTIAL_UNIT,
                DEQUANTIZE_ASM,
                BLOCK_OUT,
                BLOCK_TOKENS,
                WARPS,
                STAGES,
                UNITS_PER_ITER,
                False,
            )
            row = first_row + tl.arange(0, BLOCK_OUT)
            if i < rounds:
                if HAS_BIAS:
                    y += tl.load(bias + tl.minimum(row, rows - 1)).to(tl.float32)[:, None]
                offset = token.to(tl.int64)[None, :] * rows + row[:, None]
                tl.store(
                    out + offset,
                    y.to(out.dtype.element_ty),
                    mask=(row < rows)[:, None] & (token < tokens)[None, :],
                )
            else:
                part = parts + (2 * program + i - rounds).to(tl.int64) * (BLOCK_OUT * BLOCK_TOKENS)
                tl.store(
                    part
                    + tl.arange(0, BLOCK_TOKENS)[None, :] * BLOCK_OUT
                    + tl.arange(0, BLOCK_OUT)[:, None],
                    y,
                )


@jit(do_not_specialize=["tokens", "tile_iters", "rounds", "leftover_iters", "programs"])
def stream_k_reduce_kernel(
    parts,  # [2 * programs, BLOCK_TOKENS, BLOCK_OUT] float32
    bias,
    out,
    tokens,
    rows,
    tile_iters,
    rounds,
    leftover_iters,
    programs,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    REDUCE_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up REDUCE_TOKENS tokens of a leftover tile, in the order of the programs."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    leftover = tl.program_id(0)
    token_tiles = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    tile = rounds * programs + leftover
    tile_token = tl.program_id(1) * REDUCE_TOKENS + tl.arange(0, REDUCE_TOKENS)
    token = tile % token_tiles * BLOCK_TOKENS + tile_token
    row = tile // token_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    part_offset = tile_token[:, None] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[None, :]
    # The first program that has iterations of this tile. Divisions round down.
    program = leftover * tile_iters * programs // leftover_iters
    while (program + 1) * leftover_iters // programs <= leftover * tile_iters:
        program += 1
    y = tl.zeros([REDUCE_TOKENS, BLOCK_OUT], tl.float32)
    start = program * leftover_iters // programs
    while start < (leftover + 1) * tile_iters and program < programs:
        end = (program + 1) * leftover_iters // programs
        if start < end:  # with fewer iterations than programs some have none
            part = (2 * program + leftover - start // tile_iters).to(tl.int64)
            y += tl.load(parts + part * (BLOCK_OUT * BLOCK_TOKENS) + part_offset)
        start = end
        program += 1
    if HAS_BIAS:
        y += tl.load(bias + tl.minimum(row, rows - 1)).to(tl.float32)[None, :]
    offset = token.to(tl.int64)[:, None] * rows + row[None, :]
    mask = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


@jit
def multiply_tile(
    x,  # [tokens, columns], permuted
    token,  # [BLOCK_TOKENS] rows of x
    codes,
    scale,
    zero,
    table,
    first_row,
    end_row,
    first_unit,
    end_unit,
    columns,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    PARTIAL_UNIT: tl.constexpr,
    DEQUANTIZE_ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    UNITS_PER_ITER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the rows first_row..end_row by these tokens over the units first_unit..end_unit.

    Returns [BLOCK_OUT, BLOCK_TOKENS] in float32.
    """
    UNIT: tl.constexpr = 512 // BITS  # columns
    TYPE: tl.constexpr = x.dtype.element_ty
    row = tl.minimum(first_row + tl.arange(0, BLOCK_OUT), end_row - 1)
    halfword = tl.arange(0, 32)[None, :]
    if PARTIAL_UNIT:
        # Both forms let the compiler see that rows begin at multiples of 16 bytes.
        row_halfwords = columns // (UNIT // 4) * 8
        ITER_COLUMNS: tl.constexpr = UNITS_PER_ITER * UNIT
        x_stride = (columns + ITER_COLUMNS - 1) // ITER_COLUMNS * ITER_COLUMNS
    else:
        row_halfwords = columns // UNIT * 32
        x_stride = columns
    codes_ptr = codes + row.to(tl.int64)[:, None] * row_halfwords + halfword
    x_ptr = x + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, 64)[None, :]
    next_scale, next_zero = load_unit_scales(
        scale,
        zero,
        table,
        first_row,
        end_row,
        first_unit,
        columns,
        KIND,
        GROUP_SIZE,
        ROWS_PER_SCALE,
        NESTED_COLUMNS,
        HAS_ZERO,
        PARTIAL_UNIT,
        UNIT,
        BLOCK_OUT,
        WARPS,
    )
    table_words = (0, 0, 0, 0, 0, 0, 0, 0)
    if KIND == "codebook":
        table_words = pack_table_bytes(table, TYPE)
    wait_for_previous(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_TOKENS], tl.float32)
    for unit0 in tl.range(first_unit, end_unit, UNITS_PER_ITER, num_stages=STAGES):
        for i in tl.static_range(UNITS_PER_ITER):
            if PARTIAL_UNIT:
                in_row = (unit0 + i) * 32 + halfword < row_halfwords
                halfwords = tl.load(codes_ptr + (unit0 + i) * 32, mask=in_row, other=0)
            else:
                halfwords = tl.load(codes_ptr + (unit0 + i) * 32)
            unit_scale = next_scale
            unit_zero = next_zero
            if GROUP_SIZE > 0:  # load the scales of the next unit
                next_scale, next_zero = load_unit_scales(
                    scale,
                    zero,
                    table,
                    first_row,
                    end_row,
                    tl.minimum(unit0 + i + 1, end_unit - 1),
                    columns,
                    KIND,
                    GROUP_SIZE,
                    ROWS_PER_SCALE,
                    NESTED_COLUMNS,
                    HAS_ZERO,
                    PARTIAL_UNIT,
                    UNIT,
                    BLOCK_OUT,
                    WARPS,
                )
            weights = dequantize_unit(
                halfwords,
                unit_scale,
                unit_zero,
                table_words,
                table,
                TYPE,
                KIND,
                BITS,
                HAS_ZERO,
                SIGNED,
                SCALE_SUMS,
                DEQUANTIZE_ASM,
            )
            for pair in tl.static_range(UNIT // 64):
                a = arrange_operand(weights[2 * pair], weights[2 * pair + 1], BLOCK_OUT, WARPS)
                b = tl.trans(tl.load(x_ptr + (unit0 + i) * UNIT + pair * 64))
                y = tl.dot(a, b, y)
    # Restore the order of the rows, which arrange_operand has changed.
    y = tl.reshape(y, (BLOCK_OUT // (16 * WARPS), WARPS, 2, 8, BLOCK_TOKENS))
    y = tl.permute(y, (0, 2, 1, 3, 4))
    y = tl.reshape(y, (BLOCK_OUT, BLOCK_TOKENS))
    if SCALE_SUMS:
        y = y * tl.load(scale + scale_row(row, ROWS_PER_SCALE)).to(tl.float32)[:, None]
    if KIND == "mxfp4" and tl.bfloat16 == TYPE and DEQUANTIZE_ASM is not None:
        y = y * FP4_SUM_FACTOR
    return y


@jit
def arrange_operand(even, odd, BLOCK_OUT: tl.constexpr, WARPS: tl.constexpr):
    """Join two [outputs, 32] tiles into [outputs, 64] in the layout of the tensor cores' operand.

    The values that a thread has read are those that the tensor cores need from it. The rows
    (tiles, half, warp, 8) become (tiles, warp, half, 8).
    """
    v = tl.reshape(tl.join(even, odd), (BLOCK_OUT // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2))
    return tl.reshape(tl.permute(v, (0, 2, 1, 3, 5, 7, 4, 6)), (BLOCK_OUT, 64))


# ---- scales and zero points ----------------------------------------------------------------------


@jit
def scale_row(row, ROWS_PER_SCALE: tl.constexpr):
    """Return the row of the scales that a weight row uses. ROWS_PER_SCALE 0: all share one."""
    if ROWS_PER_SCALE == 0:
        return row * 0
    else:
        return row // ROWS_PER_SCALE


@jit
def load_unit_scales(
    scale,
    zero,
    table,
    first_row,
    end_row,
    unit,
    columns,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PARTIAL_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load the scales and zero points of one unit of BLOCK_OUT rows, as float32.

    Both are [outputs, 1, 2 or 4]: a unit may have one, two or four groups. No load covers more
    rows than half the number of threads, so that Triton lets every thread load its own scales
    instead of exchanging them.
    """
    s, z = load_row_block_scales(
        scale,
        zero,
        table,
        first_row,
        end_row,
        unit,
        columns,
        KIND,
        GROUP_SIZE,
        ROWS_PER_SCALE,
        NESTED_COLUMNS,
        HAS_ZERO,
        PARTIAL_UNIT,
        UNIT,
        WARPS,
    )
    if BLOCK_OUT > 16 * WARPS:
        first_row += 16 * WARPS
        s2, z2 = load_row_block_scales(
            scale,
            zero,
            table,
            first_row,
            end_row,
            unit,
            columns,
            KIND,
            GROUP_SIZE,
            ROWS_PER_SCALE,
            NESTED_COLUMNS,
            HAS_ZERO,
            PARTIAL_UNIT,
            UNIT,
            WARPS,
        )
        s = tl.reshape(tl.permute(tl.join(s, s2), (2, 0, 1)), (BLOCK_OUT, s.shape[1]))
        z = tl.reshape(tl.permute(tl.join(z, z2), (2, 0, 1)), (BLOCK_OUT, z.shape[1]))
    return s, z


@jit
def load_row_block_scales(
    scale,
    zero,
    table,
    first_row,
    end_row,
    unit,
    columns,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PARTIAL_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load the scales and zero points of one unit of 16 * WARPS rows, see load_unit_scales."""
    row = tl.minimum(first_row + tl.arange(0, 16 * WARPS), end_row - 1)[:, None]
    offset = scale_row(row, ROWS_PER_SCALE)
    if GROUP_SIZE > 0:
        num_groups = (columns + GROUP_SIZE - 1) // GROUP_SIZE
        offset = offset * num_groups + unit * UNIT // GROUP_SIZE
    column = unit * UNIT
    s, z = load_scale_and_zero(
        scale, zero, table, offset, row, column, columns, KIND, NESTED_COLUMNS, HAS_ZERO
    )
    if GROUP_SIZE > 0 and GROUP_SIZE * 4 == UNIT:
        place = tl.arange(0, 4)[None, :]
        if PARTIAL_UNIT:  # it has fewer groups; the other scales meet zeros
            place = tl.minimum(place, num_groups - 1 - unit * 4)
        offset += place
        s, z = load_scale_and_zero(
            scale, zero, table, offset, row, column, columns, KIND, NESTED_COLUMNS, HAS_ZERO
        )
    elif GROUP_SIZE > 0 and GROUP_SIZE * 2 == UNIT:
        second = offset + 1
        if PARTIAL_UNIT:
            second = offset + tl.minimum(num_groups - 1 - 2 * unit, 1)
        s2, z2 = load_scale_and_zero(
            scale, zero, table, second, row, column, columns, KIND, NESTED_COLUMNS, HAS_ZERO
        )
        s = tl.reshape(tl.join(s, s2), (16 * WARPS, 2))
        z = tl.reshape(tl.join(z, z2), (16 * WARPS, 2))
    return s, z


@jit
def load_scale_and_zero(
    scale,
    zero,
    table,
    offset,
    row,
    column,
    columns,
    KIND: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Load scale and zero point at `offset`. Without zero points the second is a placeholder."""
    if KIND == "codebook" and HAS_ZERO:
        s = load_nested_absmax(scale, zero, table, offset, row, column, columns, NESTED_COLUMNS)
        return s, s
    else:
        s = scale_to_float(tl.load(scale + offset), KIND)
        return s, tl.load(zero + offset).to(tl.float32) if HAS_ZERO else s


@jit
def broadcast_scales(s, TYPE: tl.constexpr):
    """Expand [outputs, groups] to [outputs, 32 halfwords]."""
    v = tl.broadcast_to(s.to(TYPE)[:, :, None], (s.shape[0], s.shape[1], 32 // s.shape[1]))
    return tl.reshape(v, (s.shape[0], 32))


# ---- dequantization of a unit --------------------------------------------------------------------


@jit
def dequantize_unit(
    halfwords,
    s,
    z,
    table_words,
    table,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    DEQUANTIZE_ASM: tl.constexpr,
):
    """Dequantize the codes of a unit [outputs, 32 halfwords].

    Returns one tile [outputs, 32] for each code of a halfword: two of 8 bits or four of 4 bits.
    """
    if KIND == "int" and not HAS_ZERO:
        z = z * 0 + (1 << (BITS - 1))
    if DEQUANTIZE_ASM is None:
        first = dequantize_code(halfwords, 0, s, z, table, TYPE, KIND, BITS, SIGNED, SCALE_SUMS)
        second = dequantize_code(halfwords, 1, s, z, table, TYPE, KIND, BITS, SIGNED, SCALE_SUMS)
        if BITS == 8:
            return first, second
        else:
            third = dequantize_code(halfwords, 2, s, z, table, TYPE, KIND, BITS, SIGNED, SCALE_SUMS)
            fourth = dequantize_code(
                halfwords, 3, s, z, table, TYPE, KIND, BITS, SIGNED, SCALE_SUMS
            )
            return first, second, third, fourth
    else:
        if KIND == "mxfp4" and tl.bfloat16 == TYPE:
            s = s * FP4_SCALE_FACTOR
        factor = broadcast_scales(s, TYPE)
        if KIND == "codebook":
            return tl.inline_asm_elementwise(
                DEQUANTIZE_ASM,
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [
                    halfwords,
                    factor,
                    table_words[0],
                    table_words[1],
                    table_words[2],
                    table_words[3],
                    table_words[4],
                    table_words[5],
                    table_words[6],
                    table_words[7],
                ],
                (factor.dtype, factor.dtype, factor.dtype, factor.dtype),
                True,
                2,
            )
        elif KIND == "mxfp4":
            return tl.inline_asm_elementwise(
                DEQUANTIZE_ASM,
                "=&r,=&r,=&r,=&r,r,r",
                [halfwords, factor],
                (factor.dtype, factor.dtype, factor.dtype, factor.dtype),
                True,
                2,
            )
        elif KIND == "fp8":
            return tl.inline_asm_elementwise(
                DEQUANTIZE_ASM,
                "=&r,=&r,r,r",
                [halfwords, factor],
                (factor.dtype, factor.dtype),
                True,
                2,
            )
        elif BITS == 8:
            # The assembly subtracts 128 from every code.
            addend = broadcast_scales((128.0 - z) * s, TYPE)
            return tl.inline_asm_elementwise(
                DEQUANTIZE_ASM,
                "=&r,=&r,r,r,r",
                [halfwords, factor, addend],
                (factor.dtype, factor.dtype),
                True,
                2,
            )
        else:
            # The integer part of the zero point is subtracted exactly, before anything is rounded.
            integer_zero = tl.minimum(tl.maximum(tl.floor(z + 0.5), 0.0), 127.0)
            EXPONENT: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
            subtrahend = broadcast_scales(EXPONENT + integer_zero, TYPE)
            addend = broadcast_scales((integer_zero - z) * s, TYPE)
            return tl.inline_asm_elementwise(
                DEQUANTIZE_ASM,
                "=&r,=&r,=&r,=&r,r,r,r,r",
                [halfwords, factor, addend, subtrahend],
                (factor.dtype, factor.dtype, factor.dtype, factor.dtype),
                True,
                2,
            )


@jit
def dequantize_code(
    halfwords,
    i: tl.constexpr,
    s,
    z,
    table,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
):
    """Dequantize code i of every halfword without assembly, with the result of the assembly."""
    code = (halfwords.to(tl.int32) >> (BITS * i)) & ((1 << BITS) - 1)
    if KIND == "codebook" or KIND == "mxfp4":
        v = tl.load(table + code)
    elif KIND == "fp8":
        v = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif SIGNED:
        v = (code ^ 128).to(tl.float32) - broadcast_scales(z, tl.float32)
    else:
        v = code.to(tl.float32) - broadcast_scales(z, tl.float32)
    if not SCALE_SUMS:
        v = v * broadcast_scales(s, tl.float32)
    return v.to(TYPE)


# 128 in bfloat16, 1024 in float16, in both halves of a word: the last mantissa bit is worth one.
EXPONENT_WORD = {torch.bfloat16: "0x43004300", torch.float16: "0x64006400"}

# A byte permutation (prmt) selects from 8 bytes, and the table has 16 values of 2 bytes. So both
# halves of the table are looked up, low bytes and high bytes separately, and the fourth bit of
# each code chooses between the halves. First bytes 0 and 2 of the word of codes, then 1 and 3.
CODEBOOK_ASM = [
    line.format(bytes=0x4420 + 0x11 * half, first=2 * half, second=2 * half + 1)
    for half in range(2)
    for line in (
        "prmt.b32 m, w, 0, {bytes};",
        "shr.u32 u, m, 1;",
        "and.b32 m, m, 0x7777;",
        "lop3.b32 u, u, 0x4444, 0x3210, 0xEA;",
        "prmt.b32 la, $6, $8, m;",
        "prmt.b32 lb, $10, $12, m;",
        "prmt.b32 ha, $14, $16, m;",
        "prmt.b32 hb, $18, $20, m;",
        "prmt.b32 la, la, lb, u;",
        "prmt.b32 ha, ha, hb, u;",
        "prmt.b32 v{first}, la, ha, 0x6240;",
        "prmt.b32 v{second}, la, ha, 0x7351;",
    )
]


@lru_cache
def build_dequantize_asm(
    kind: str, bits: int, signed: bool, dtype: torch.dtype, scale_sums: bool, wait_wgmma: bool
) -> str:
    """Build the PTX that turns a word of codes into two or four pairs of 16-bit weights.

    Operands: the resulting pairs ($0 and up), the word, the scale, then for integer codes the
    addend after scaling and (4 bits) the subtrahend before it, or for a codebook the bytes of the
    table. With `wait_wgmma` the assembly first waits for the tensor cores, which may still be
    reading the registers of the previous iteration; Triton does not insert this wait.
    """
    is_bf16 = dtype == torch.bfloat16
    vector_type = "bf16x2" if is_bf16 else "f16x2"
    num_pairs = 4 if bits == 4 else 2
    word, scale, addend, subtrahend = (f"${num_pairs + i}" for i in range(4))
    lines = [".reg .b32 w, t, u, m, la, lb, ha, hb, v0, v1, v2, v3;"]
    if wait_wgmma:
        lines.append("wgmma.wait_group.sync.aligned 0;")
    lines.append(f"mov.b32 w, {word};")
    if kind == "codebook":
        lines += CODEBOOK_ASM
    elif kind == "mxfp4":
        lines += mxfp4_to_16bit_asm(vector_type, is_bf16)
    elif kind == "fp8":
        lines += fp8_to_16bit_asm(vector_type, is_bf16)
    elif bits == 4:
        for i in range(4):
            lines += [
                f"shr.u32 t, w, {4 * i};",
                f"lop3.b32 v{i}, t, 0x000f000f, {EXPONENT_WORD[dtype]}, 0xEA;",
                f"sub.rn.{vector_type} v{i}, v{i}, {subtrahend};",
            ]
    else:
        lines += int8_to_16bit_asm(vector_type, dtype, signed)
    for i in range(num_pairs):
        if scale_sums:
            lines.append(f"mov.b32 ${i}, v{i};")
        elif kind == "int":
            lines.append(f"fma.rn.{vector_type} ${i}, v{i}, {scale}, {addend};")
        else:
            lines.append(f"mul.rn.{vector_type} ${i}, v{i}, {scale};")
    return "\n".join(["{", *lines, "}"])


def mxfp4_to_16bit_asm(vector_type: str, is_bf16: bool) -> list[str]:
    """Move the bits of 4-bit floats to their places; a factor then corrects the exponent.

    A code has a sign, two bits of the exponent and one of the mantissa. Without exponent bits it is
    a denormal number, and the moved bits are so too. The range of bfloat16 lets the scale do a part
    of the correction, and one multiplication of the sums the rest (FP4_SCALE_FACTOR).
    """
    lowest_bit = 6 if is_bf16 else 9
    mask = "0x01c001c0" if is_bf16 else "0x0e000e00"
    lines = [] if is_bf16 else ["mov.b32 m, 0x74007400;"]  # 2 ** 14
    # Left shifts may run as multiplications on another unit, so only one is a right shift.
    lines.append(f"shr.u32 la, w, {12 - lowest_bit};")
    for i in range(4):
        shift = lowest_bit - 4 * i
        source = "w" if shift >= 0 else "la"
        lines += [
            f"shl.b32 t, w, {12 - 4 * i};",
            "and.b32 u, t, 0x80008000;",
            f"shl.b32 t, {source}, {shift if shift >= 0 else 12 - 4 * i};",
            f"lop3.b32 v{i}, t, {mask}, u, 0xEA;",
        ]
        if not is_bf16:
            lines.append(f"mul.rn.{vector_type} v{i}, v{i}, m;")
    return lines


def fp8_to_16bit_asm(vector_type: str, is_bf16: bool) -> list[str]:
    """Move the bits of 8-bit floats to their places; a factor then corrects the exponent."""
    shift = 4 if is_bf16 else 1
    mask = "0x07f007f0" if is_bf16 else "0x3f803f80"
    factor = "0x7b807b80" if is_bf16 else "0x5c005c00"  # 2 ** 120, 2 ** 8
    lines = []
    for i in range(2):
        lines += [
            f"shl.b32 t, w, {8 - 8 * i};",
            "and.b32 u, t, 0x80008000;",
            f"shr.u32 t, t, {shift};",
            f"lop3.b32 v{i}, t, {mask}, u, 0xEA;",
            f"mov.b32 m, {factor};",
            f"mul.rn.{vector_type} v{i}, v{i}, m;",
        ]
    return lines


def int8_to_16bit_asm(vector_type: str, dtype: torch.dtype, signed: bool) -> list[str]:
    """Turn unsigned bytes into code - 128, and signed bytes into the code.

    A bfloat16 has seven mantissa bits, so the eighth bit of a code selects the subtrahend.
    """
    is_bf16 = dtype == torch.bfloat16
    exponent = EXPONENT_WORD[dtype]
    lines = []
    if is_bf16 != signed:
        lines.append("xor.b32 w, w, 0x80808080;")
    code_mask = "0x007f007f" if is_bf16 else "0x00ff00ff"
    subtrahend = "mov.b32 u, 0x64806480;"
    if is_bf16:
        subtrahend = f"lop3.b32 u, t, 0x00800080, {exponent}, 0xEA;"
    for i in range(2):
        lines += [
            f"shr.u32 t, w, {8 * i};",
            f"lop3.b32 v{i}, t, {code_mask}, {exponent}, 0xEA;",
            subtrahend,
            f"sub.rn.{vector_type} v{i}, v{i}, u;",
        ]
    return lines


@jit
def pack_table_bytes(table, TYPE: tl.constexpr):
    """Pack the low bytes of the 16 table values into four words, and the high bytes into four."""
    a, e = pack_four_values(table, TYPE)
    b, f = pack_four_values(table + 4, TYPE)
    c, g = pack_four_values(table + 8, TYPE)
    d, h = pack_four_values(table + 12, TYPE)
    return a, b, c, d, e, f, g, h


@jit
def pack_four_values(table, TYPE: tl.constexpr):
    """Return a word of the low bytes of four values, and a word of their high bytes."""
    low = 0
    high = 0
    for j in tl.static_range(4):
        value = tl.load(table + j).to(TYPE).to(tl.uint16, bitcast=True).to(tl.int32)
        low |= (value & 255) << (8 * j)
        high |= (value >> 8) << (8 * j)
    return low, high

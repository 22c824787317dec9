"""Pipelined wgmma GEMM: a linear layer with 4- or 8-bit integer weights for hundreds of tokens.

    y [tokens, out] = x @ packed.dequantize().T + bias                             x [tokens, in]

Written in Gluon, Triton's lower level, for Hopper GPUs. With hundreds of tokens the arithmetic
dominates, so the tensor cores must never wait. They read the weights, their left operand, from
registers: the same threads dequantize the next 16 columns while the tensor cores multiply the
current 16 (wgmma is asynchronous). kernels/packed_linear.py chooses this file.

Shared memory. The TMA copies x and codes into a ring of slots, `slot_columns` columns each. A slot
is refilled as soon as its products are done. Its next content may belong to the next tile.

    slot s   | x tile [tokens, slot_columns] | codes [128 rows, slot_columns / 2] | 2 barriers |

    codes    viewed as pairs of neighbouring columns: a byte of two 4-bit codes, or an int16 of two
             8-bit codes. The tensor cores need pairs of neighbouring columns from every thread, so
             x stays in its order.

How the work is divided (stream-K). There is one program per multiprocessor. A tile is 128 outputs
of `tokens` tokens. Every program computes `rounds` whole tiles. The iterations of leftover tiles
are divided evenly. A program's work is therefore a sequence of segments: (tile, first iteration,
last iteration), where one iteration is all slots once. The program that has the first columns of a
leftover tile adds the partial sums of the others.

The interpreter cannot run Gluon. `benchmarks/packed.py check` compares this kernel with
packed.dequantize on a GPU. Without Gluon (`gluon` is None) kernels/packed_gemm.py is used instead.
This file must not know layers, checkpoint formats or models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch

from bloomery.kernels.launch import is_hopper, num_multiprocessors, pdl_options
from bloomery.kernels.packed import GroupedScales, PackedWeight
from bloomery.kernels.packed_gemm import MIN_STREAM_K_COLUMNS, has_async_wgmma

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if hasattr(gl, "barrier"):  # its name since Triton 3.7
        barrier = gl.barrier
    else:
        barrier = gl.thread_barrier
    if hasattr(tma, "async_load"):  # the names after Triton 3.7
        tma_load = tma.async_load
        tma_store = tma.async_store
    else:
        tma_load = tma.async_copy_global_to_shared
        tma_store = tma.async_copy_shared_to_global
except ImportError:
    gluon = gl = None


def jit(function: Callable | None = None, **options: Any) -> Any:
    """Apply gluon.jit if Gluon is installed; else return the function, which then never runs."""
    if gluon is None:
        return function if function is not None else lambda function: function
    return gluon.jit(function, **options)


TILE_OUTPUTS = 128


class WgmmaTiling(NamedTuple):
    """Sizes of a tile and of the ring of slots in shared memory."""

    tokens: int  # of a tile
    slot_columns: int
    slots: int


LARGE_TILING = WgmmaTiling(256, 64, 4)
SMALL_TILING = WgmmaTiling(128, 128, 4)
# Costs in columns of a LARGE_TILING tile, measured on an H200 with `benchmarks/packed.py bench`:
# one column of a SMALL_TILING tile by bits, and adding the partial sums by tiling.
SMALL_COLUMN_COST = {8: 0.66, 4: 0.75}
REDUCTION_COST = {LARGE_TILING: 1000, SMALL_TILING: 450}
# Bits -> tokens beyond which dequantizing all weights beforehand is faster, measured likewise.
MAX_TOKENS = {8: 2048, 4: 1024}


@lru_cache(maxsize=4096)
def select_tiling_by_shape(
    tokens: int, rows: int, columns: int, bits: int, multiprocessors: int
) -> WgmmaTiling | None:
    """Choose the faster tiling; None if another kernel is faster or must run.

    The rules are measured on an H200 with `benchmarks/packed.py bench`.
    """
    row_tiles = -(-rows // TILE_OUTPUTS)
    if columns % 512 or not 64 < tokens <= MAX_TOKENS[bits]:
        return None
    token_tiles = max(2, -(-tokens // 128))
    if token_tiles * row_tiles * columns < MIN_STREAM_K_COLUMNS * multiprocessors:
        return None
    if tokens <= 128:
        gemm_is_faster = bits == 4 and row_tiles >= multiprocessors and columns < 6144
        return None if gemm_is_faster else SMALL_TILING

    def estimate_cost(tiling: WgmmaTiling) -> float:
        iter_columns = tiling.slot_columns * tiling.slots
        tiles = row_tiles * -(-tokens // tiling.tokens)
        program_iters = -(-tiles * (columns // iter_columns) // multiprocessors)
        column_cost = 1 if tiling == LARGE_TILING else SMALL_COLUMN_COST[bits]
        return program_iters * iter_columns * column_cost + REDUCTION_COST[tiling]

    return min(LARGE_TILING, SMALL_TILING, key=estimate_cost)


def supports_packed_wgmma(packed: PackedWeight, dtype: torch.dtype) -> TypeGuard[GroupedScales]:
    """Whether the kernel can read this matrix.

    8-bit codes need one scale per row. 4-bit codes need one scale per 128, 256 or a multiple of 512
    columns, so that whole slots share a scale.
    """
    if gluon is None or not isinstance(packed, GroupedScales):
        return False
    if packed.act_order is not None or dtype.itemsize != 2:
        return False
    codes = packed.codes
    if packed.shape[0] % 16 or not codes.is_contiguous() or codes.data_ptr() % 16:
        return False
    if not is_hopper(codes.device) or not has_async_wgmma(codes.device):
        return False
    if packed.bits == 8:
        one_scale_per_row = packed.group_size == packed.shape[1]
        return codes.dtype == torch.int8 and one_scale_per_row and packed.zero_point is None
    return packed.bits == 4 and (packed.group_size in (128, 256) or packed.group_size % 512 == 0)


def select_wgmma_tiling(
    tokens: int, packed: PackedWeight, dtype: torch.dtype
) -> WgmmaTiling | None:
    """Choose the tiling for this matrix, or None if another kernel should run."""
    if tokens <= 64 or not supports_packed_wgmma(packed, dtype):
        return None
    multiprocessors = num_multiprocessors(packed.codes.device)
    return select_tiling_by_shape(tokens, *packed.shape, packed.bits, multiprocessors)


def packed_wgmma_gluon(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    tiling: WgmmaTiling | None = None,
    programs: int = 0,
) -> torch.Tensor:
    """Run the kernel: x [tokens, in] -> [tokens, out].

    `programs` is at most one per multiprocessor, because programs wait for each other. 0: exactly
    one per multiprocessor.
    """
    if not supports_packed_wgmma(packed, x.dtype):
        raise TypeError(
            "the wgmma GEMM does not support this matrix; see packed_wgmma.supports_packed_wgmma"
        )
    x = x.contiguous()
    tokens = len(x)
    rows, columns = packed.shape
    tiling = tiling or select_wgmma_tiling(tokens, packed, x.dtype) or LARGE_TILING
    multiprocessors = num_multiprocessors(x.device)
    programs = programs or multiprocessors
    iter_columns = tiling.slots * tiling.slot_columns
    if programs > multiprocessors or columns % iter_columns:
        raise ValueError(
            f"{programs} programs and {columns} columns: at most {multiprocessors} programs fit,"
            f" and the columns must be a multiple of {iter_columns}"
        )
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    tiles = -(-tokens // tiling.tokens) * -(-rows // TILE_OUTPUTS)
    rounds, leftover_tiles = divmod(tiles, programs)
    leftover_iters = leftover_tiles * (columns // iter_columns)
    partial_sums = torch.empty(
        programs if leftover_iters else 1,
        TILE_OUTPUTS,
        tiling.tokens,
        dtype=torch.float32,
        device=x.device,
    )
    codes = packed.codes.view(torch.int16) if packed.bits == 8 else packed.codes
    packed_wgmma_kernel[(programs,)](
        describe_blocks(x, tiling.tokens, tiling.slot_columns),
        describe_blocks(codes, TILE_OUTPUTS, tiling.slot_columns // 2),
        describe_blocks(out, tiling.tokens, TILE_OUTPUTS),
        packed.scale,
        packed.scale if packed.zero_point is None else packed.zero_point,
        out if bias is None else bias,
        partial_sums,
        partial_sum_flags(x.device),
        tokens,
        rows,
        columns,
        rounds,
        leftover_iters,
        -(-leftover_iters // programs),
        BITS=packed.bits,
        GROUP_SIZE=packed.group_size if packed.bits == 4 else 0,
        HAS_ZERO=packed.zero_point is not None,
        HAS_BIAS=bias is not None,
        TILE_TOKENS=tiling.tokens,
        SLOT_COLUMNS=tiling.slot_columns,
        SLOTS=tiling.slots,
        **build_dequantize_asm(packed.bits, x.dtype),
        num_warps=8,
        **pdl_options(x.device),
    )
    return out


@cache
def partial_sum_flags(device: torch.device) -> torch.Tensor:
    """Flags of the programs whose partial sums are ready: all zero between launches.

    All launches on a device share them, so two of these kernels must not run at the same time. A
    process runs them on one stream per device.
    """
    return torch.zeros(num_multiprocessors(device), dtype=torch.int32, device=device)


def describe_blocks(matrix: torch.Tensor, block_rows: int, block_columns: int) -> Any:
    """Describe a matrix to the TMA, which copies [block_rows, block_columns] blocks of it."""
    itemsize = matrix.element_size()
    layout = gl.NVMMASharedLayout(min(block_columns * itemsize, 128), 8 * itemsize, 2)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_columns], layout
    )


@lru_cache
def build_dequantize_asm(bits: int, dtype: torch.dtype) -> dict[str, str]:
    """Build the PTX snippets of the kernel.

    DEQUANTIZE_ASM turns a pair of codes ($1) into two 16-bit weights ($0). With 4 bits, $2 is the
    scale, $3 the addend after scaling and $4 the subtrahend before it. DUPLICATE_ASM rounds a
    float32 to 16 bits and puts it into both halves of a word.

    As in packed_gemm.build_dequantize_asm, a code below the exponent of 128 (bfloat16) or 1024
    (float16) is a float. bfloat16 has seven mantissa bits, so the eighth bit of a code selects
    the subtrahend.
    """
    is_bf16 = dtype == torch.bfloat16
    vector_type = "bf16x2" if is_bf16 else "f16x2"
    exponent = "0x43004300" if is_bf16 else "0x64006400"  # 128, 1024 in both halves
    if bits == 4:
        lines = [
            "mad.lo.u32 v, $1, 0x1001, 0;",
            f"lop3.b32 v, v, 0x000f000f, {exponent}, 0xEA;",
            f"sub.rn.{vector_type} v, v, $4;",
            f"fma.rn.{vector_type} $0, v, $2, $3;",
        ]
    elif is_bf16:
        lines = [
            "prmt.b32 u, $1, 0, 0x4140;",
            f"lop3.b32 v, u, 0x007f007f, {exponent}, 0xEA;",
            f"lop3.b32 u, u, 0x00800080, {exponent}, 0xEA;",
            f"sub.rn.{vector_type} $0, v, u;",
        ]
    else:
        lines = [
            "prmt.b32 u, $1, 0, 0x4140;",
            "xor.b32 u, u, 0x00800080;",
            f"lop3.b32 v, u, 0x00ff00ff, {exponent}, 0xEA;",
            "mov.b32 u, 0x64806480;",
            f"sub.rn.{vector_type} $0, v, u;",
        ]
    dequantize = "\n".join(["{", ".reg .b32 v, u;", *lines, "}"])
    return {
        "DEQUANTIZE_ASM": dequantize,
        "DUPLICATE_ASM": f"cvt.rn.{vector_type}.f32 $0, $1, $1;",
    }


# ---- segments: the tiles and columns of a program ------------------------------------------------
# `work` is (program, programs, rounds, start, end, tile_iters, token_tiles), where start and end
# are the program's share of the leftover iterations.


@jit
def locate_segment(i, work):
    """Return tile, first and last iteration of the program's i-th segment."""
    program, programs, rounds, start, end, tile_iters, _ = work
    leftover = start // tile_iters + i - rounds
    first = gl.where(
        i < rounds, 0, gl.maximum(start, leftover * tile_iters) - leftover * tile_iters
    )
    last = gl.where(
        i < rounds,
        tile_iters,
        gl.minimum(end, (leftover + 1) * tile_iters) - leftover * tile_iters,
    )
    tile = gl.where(i < rounds, i * programs + program, rounds * programs + leftover)
    return tile, first, last


# A load position is (row, token, slot index, end of the slot indices, segment). The slot index
# counts slots along the columns.


@jit
def first_load(i, work, TILE_TOKENS: gl.constexpr, SLOTS: gl.constexpr):
    """Return the first load position of segment i."""
    tile, first, last = locate_segment(i, work)
    token_tiles = work[6]
    return (
        tile // token_tiles * 128,
        tile % token_tiles * TILE_TOKENS,
        first * SLOTS,
        last * SLOTS,
        i,
    )


@jit
def next_load(position, work, TILE_TOKENS: gl.constexpr, SLOTS: gl.constexpr):
    """Return the load position after this one, in the next segment if need be."""
    row, token, k, end, i = position
    k += 1
    if k == end:
        row, token, k, end, i = first_load(i + 1, work, TILE_TOKENS, SLOTS)
    return row, token, k, end, i


# ---- slots: x, codes, and a barrier for each -----------------------------------------------------
# A slot is (x tile, codes tile, barrier of x, barrier of the codes).


@jit
def allocate_slot(x, codes):
    """Allocate a slot in shared memory."""
    x_tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    codes_tile = gl.allocate_shared_memory(codes.dtype, codes.block_type.shape, codes.layout)
    x_barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    codes_barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(x_barrier, count=1)
    mbarrier.init(codes_barrier, count=1)
    return x_tile, codes_tile, x_barrier, codes_barrier


@jit
def expect_loads(x, codes, slot, enabled):
    """Set the number of bytes that the barriers of a slot wait for."""
    mbarrier.expect(slot[2], x.block_type.nbytes, enabled)
    mbarrier.expect(slot[3], codes.block_type.nbytes, enabled)


@jit
def load_x(x, slot, position, enabled):
    """Start the copy of the x tile at a load position into a slot."""
    tma_load(x, [position[1], position[2] * x.block_type.shape[1]], slot[2], slot[0], enabled)


@jit
def load_codes(codes, slot, position, enabled):
    """Start the copy of the codes at a load position into a slot."""
    tma_load(
        codes, [position[0], position[2] * codes.block_type.shape[1]], slot[3], slot[1], enabled
    )


# ---- dequantization ------------------------------------------------------------------------------


def pair_layout(COLUMNS):
    """Return the layout of pairs of codes [128, COLUMNS / 2] that matches the wgmma operand.

    The lists hold the (row, pair) offset of each bit of the register, lane and warp number.
    """
    registers = [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]][: {16: 2, 64: 4, 128: 5}[COLUMNS]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, COLUMNS // 2])


pair_layout = pair_layout if gluon is None else gluon.constexpr_function(pair_layout)


@jit
def load_scales(
    scale,
    zero,
    first_row,
    column,
    rows,
    columns,
    BITS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """Load scales and zero points [128] of the group of a column, in their own type.

    8-bit codes have one scale per row, which is applied to the sums.
    """
    if BITS == 8:
        return 0, 0
    else:
        row = gl.arange(0, 128, gl.SliceLayout(1, pair_layout(16)))
        row = gl.minimum(first_row + row, rows - 1)
        row_offset = row * (columns // GROUP_SIZE)
        offset = row_offset + gl.minimum(column, columns - 1) // GROUP_SIZE
        s = gl.load(scale + offset)
        return s, gl.load(zero + offset) if HAS_ZERO else s


@jit
def prepare_scales(
    s,
    z,
    TYPE: gl.constexpr,
    BITS: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    DUPLICATE_ASM: gl.constexpr,
):
    """Return factor, addend and subtrahend of DEQUANTIZE_ASM, each twice in a word.

    The integer part of the zero point is subtracted exactly, before anything is rounded.
    """
    if BITS == 8:
        return 0, 0, 0
    else:
        s = s.to(gl.float32)
        z = z.to(gl.float32) if HAS_ZERO else s * 0 + 8.0
        # Adding 1.5 * 2 ** 23 rounds to an integer: a float32 of that size has no fraction.
        integer_zero = (z + 12582912.0) - 12582912.0
        integer_zero = gl.minimum(gl.maximum(integer_zero, 0.0), 127.0)
        EXPONENT: gl.constexpr = 128.0 if gl.bfloat16 == TYPE else 1024.0
        return (
            duplicate(s, DUPLICATE_ASM),
            duplicate((integer_zero - z) * s, DUPLICATE_ASM),
            duplicate(EXPONENT + integer_zero, DUPLICATE_ASM),
        )


@jit
def duplicate(s, DUPLICATE_ASM: gl.constexpr):
    """Round float32 values [128] to 16 bits, twice in a word: [128, 1]."""
    words = gl.inline_asm_elementwise(DUPLICATE_ASM, "=r,f", [s], gl.int32, False, 1)
    return gl.expand_dims(words, 1)


@jit
def read_pairs(codes, SLOT_COLUMNS: gl.constexpr):
    """Read the pairs of a slot: a tuple of [128, 8] tiles of 16 columns each, a pair per word."""
    w = codes.load(pair_layout(SLOT_COLUMNS))
    w = w.to(gl.uint16, bitcast=True).to(gl.int32) if w.dtype == gl.int16 else w.to(gl.int32)
    if SLOT_COLUMNS == 64:
        return split_in_4(w)
    else:
        return split_in_4(split_in_2(w)[0]) + split_in_4(split_in_2(w)[1])


@jit
def split_in_4(w):
    """Split a tile along its columns into four."""
    left, right = split_in_2(w)
    return split_in_2(left) + split_in_2(right)


@jit
def split_in_2(w):
    """Split a tile along its columns into two."""
    left, right = gl.split(gl.permute(gl.reshape(w, [w.shape[0], 2, w.shape[1] // 2]), (0, 2, 1)))
    return left, right


@jit
def dequantize_pairs(w, prepared, BITS: gl.constexpr, DEQUANTIZE_ASM: gl.constexpr):
    """Dequantize pairs [128, 8] to two weights per word. `prepared` is from prepare_scales."""
    w = gl.convert_layout(w, pair_layout(16), assert_trivial=True)
    if BITS == 8:
        return gl.inline_asm_elementwise(DEQUANTIZE_ASM, "=r,r", [w], gl.int32, False, 1)
    else:
        return gl.inline_asm_elementwise(
            DEQUANTIZE_ASM,
            "=r,r,r,r,r",
            [w, prepared[0], prepared[1], prepared[2]],
            gl.int32,
            False,
            1,
        )


@jit
def to_operand(v, TYPE: gl.constexpr, OPERAND: gl.constexpr):
    """View words of two weights [128, 8] as the left wgmma operand [128, 16]."""
    even = (v & 0xFFFF).to(gl.int16).to(TYPE, bitcast=True)
    odd = (v >> 16).to(gl.int16).to(TYPE, bitcast=True)
    weights = gl.reshape(gl.join(even, odd), [128, 16])
    return gl.convert_layout(weights, OPERAND, assert_trivial=True)


# ---- the kernel ----------------------------------------------------------------------------------


@jit
def multiply_segment(
    x,
    codes,
    slots,
    scale,
    zero,
    s,
    z,
    first_row,
    first,
    last,
    position,
    num_loaded,
    num_loads,
    phase,
    rows,
    columns,
    work,
    BITS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    DEQUANTIZE_ASM: gl.constexpr,
    DUPLICATE_ASM: gl.constexpr,
    SLOT_COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr,
    MMA: gl.constexpr,
):
    """Multiply 128 rows by the tokens of a segment, over its iterations.

    s and z are the scales of the first columns. Returns the sums [128, tokens], the next load
    position, the number of loads so far and the phase of the slots' barriers.
    """
    TYPE: gl.constexpr = x.dtype
    TILE_TOKENS: gl.constexpr = x.block_type.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    STEPS: gl.constexpr = SLOT_COLUMNS // 16  # wgmma instructions per slot
    SLOTS_PER_SCALE: gl.constexpr = min(GROUP_SIZE // SLOT_COLUMNS, SLOTS) if BITS == 4 else SLOTS
    prepared = prepare_scales(s, z, TYPE, BITS, HAS_ZERO, DUPLICATE_ASM)
    column = (first * SLOTS + SLOTS_PER_SCALE) * SLOT_COLUMNS
    s, z = load_scales(scale, zero, first_row, column, rows, columns, BITS, GROUP_SIZE, HAS_ZERO)
    y = gl.zeros([128, TILE_TOKENS], gl.float32, MMA)
    mbarrier.wait(slots[0][3], phase)
    w = read_pairs(slots[0][1], SLOT_COLUMNS)
    v = dequantize_pairs(w[0], prepared, BITS, DEQUANTIZE_ASM)
    in_use = v
    mbarrier.wait(slots[0][2], phase)
    for iteration in range(first, last):
        for q in gl.static_range(SLOTS):
            # The codes after the last slot of a segment are of other rows. They are read here but
            # not used; the next segment reads them again, with their scales.
            next_slot = slots[(q + 1) % SLOTS]
            next_phase = phase ^ ((q + 1) // SLOTS)
            has_next = (iteration + 1 < last) | (q + 1 < SLOTS)
            next_w = w
            next_prepared = prepared
            for f in gl.static_range(STEPS):
                x_columns = slots[q][0].slice(16 * f, 16, 1).permute((1, 0))
                y = warpgroup_mma(to_operand(v, TYPE, OPERAND), x_columns, y, is_async=True)
                if f == 1:  # all products with the previous slot are done: refill it
                    free_slot = slots[(q + SLOTS - 1) % SLOTS]
                    expect_loads(x, codes, free_slot, num_loaded < num_loads)
                    barrier()
                    load_codes(codes, free_slot, position, num_loaded < num_loads)
                    load_x(x, free_slot, position, num_loaded < num_loads)
                    position = next_load(position, work, TILE_TOKENS, SLOTS)
                    num_loaded += 1
                if f == STEPS - 2:
                    mbarrier.wait(next_slot[3], next_phase, has_next)
                    next_w = read_pairs(next_slot[1], SLOT_COLUMNS)
                    if (q + 1) % SLOTS % SLOTS_PER_SCALE == 0:
                        next_prepared = prepare_scales(s, z, TYPE, BITS, HAS_ZERO, DUPLICATE_ASM)
                        column = (iteration * SLOTS + q + 1 + SLOTS_PER_SCALE) * SLOT_COLUMNS
                        s, z = load_scales(
                            scale,
                            zero,
                            first_row,
                            column,
                            rows,
                            columns,
                            BITS,
                            GROUP_SIZE,
                            HAS_ZERO,
                        )
                if f == STEPS - 1:
                    w = next_w
                    prepared = next_prepared
                current = v
                v = dequantize_pairs(w[(f + 1) % STEPS], prepared, BITS, DEQUANTIZE_ASM)
                if f == STEPS - 1:
                    mbarrier.wait(next_slot[2], next_phase, has_next)
                # The operand of the previous wgmma must stay in its registers until that is done.
                y, in_use = warpgroup_mma_wait(1, deps=(y, in_use))
                in_use = current
        phase ^= 1
    return warpgroup_mma_wait(0, deps=(y,)), position, num_loaded, phase


@jit
def partial_sum_pointers(partial_sums, program, TILE_TOKENS: gl.constexpr, MMA: gl.constexpr):
    """Return pointers to a program's partial sums [128, TILE_TOKENS].

    They lie in squares of 8 by 8, so that one warp accesses whole squares.
    """
    n = gl.arange(0, 128, gl.SliceLayout(1, MMA))
    m = gl.arange(0, TILE_TOKENS, gl.SliceLayout(0, MMA))
    row_offset = n // 16 * 64 + n // 8 % 2 * 512 + n % 8 * 8
    row_ptr = partial_sums + program.to(gl.int64) * (128 * TILE_TOKENS) + row_offset
    return gl.expand_dims(row_ptr, 1) + gl.expand_dims(m // 8 * 1024 + m % 8, 0)


@jit
def add_partial_sums(
    y, partial_sums, flags, program, last, TILE_TOKENS: gl.constexpr, MMA: gl.constexpr
):
    """Add the partial sums of the programs after this one, from the last one down.

    The last one ends with another tile, so it has finished this tile first. Clearing the flag
    allows the next launch to set it again.
    """
    for q in range(last, program, -1):
        while gl.atomic_cas(flags + q, 1, 0, sem="acquire") == 0:
            pass
        y += gl.load(partial_sum_pointers(partial_sums, q, TILE_TOKENS, MMA), cache_modifier=".cg")
    return y


@jit(do_not_specialize=["tokens", "rounds", "leftover_iters", "program_iters"])
def packed_wgmma_kernel(
    x,  # TMA descriptors of x, codes and out
    codes,
    out,
    scale,
    zero,
    bias,
    partial_sums,  # [programs, 128, TILE_TOKENS]
    flags,  # [multiprocessors]
    tokens,
    rows,
    columns,
    rounds,
    leftover_iters,
    program_iters,
    BITS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    SLOT_COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr,
    DEQUANTIZE_ASM: gl.constexpr,
    DUPLICATE_ASM: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute `rounds` whole tiles, then `program_iters` of the leftover iterations.

    A program's share is at most a tile, so it touches at most two leftover tiles. The program that
    has the first iteration of a tile owns it, and this is the last segment of that program. The
    others store their partial sums before they wait for anything. So a program waits only for
    programs with higher numbers, and of those that still run all but one finish without waiting:
    there is no deadlock.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TILE_TOKENS, 16])
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1
        )
    slots = (allocate_slot(x, codes),)
    for _ in gl.static_range(SLOTS - 1):
        slots = slots + (allocate_slot(x, codes),)  # type: ignore[assignment]
    out_tile = gl.allocate_shared_memory(x.dtype, [TILE_TOKENS, 128], out.layout)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tile_iters = columns // (SLOTS * SLOT_COLUMNS)
    start = gl.minimum(program * program_iters, leftover_iters)
    end = gl.minimum((program + 1) * program_iters, leftover_iters)
    token_tiles = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    work = (program, programs, rounds, start, end, tile_iters, token_tiles)
    num_loads = SLOTS * (rounds * tile_iters + end - start)
    for q in gl.static_range(SLOTS - 1):
        expect_loads(x, codes, slots[q], q < num_loads)
    fence_async_shared()
    barrier()
    # Codes and scales are weights, which may be loaded before the previous kernel has ended.
    codes_position = first_load(0, work, TILE_TOKENS, SLOTS)
    for q in gl.static_range(SLOTS - 1):
        load_codes(codes, slots[q], codes_position, q < num_loads)
        codes_position = next_load(codes_position, work, TILE_TOKENS, SLOTS)
    first_row, _, k, _, _ = first_load(0, work, TILE_TOKENS, SLOTS)
    s, z = load_scales(
        scale, zero, first_row, k * SLOT_COLUMNS, rows, columns, BITS, GROUP_SIZE, HAS_ZERO
    )
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    position = first_load(0, work, TILE_TOKENS, SLOTS)
    for q in gl.static_range(SLOTS - 1):
        load_x(x, slots[q], position, q < num_loads)
        position = next_load(position, work, TILE_TOKENS, SLOTS)
    num_loaded = SLOTS - 1
    phase = 0
    for i in range(rounds + 2):
        tile, first, last = locate_segment(i, work)
        if first < last:
            first_row = tile // token_tiles * 128
            row = gl.minimum(first_row + gl.arange(0, 128, gl.SliceLayout(1, MMA)), rows - 1)
            row_scale = gl.load(scale + row) if BITS == 8 else row
            row_bias = gl.load(bias + row) if HAS_BIAS else row
            y, position, num_loaded, phase = multiply_segment(
                x,
                codes,
                slots,
                scale,
                zero,
                s,
                z,
                first_row,
                first,
                last,
                position,
                num_loaded,
                num_loads,
                phase,
                rows,
                columns,
                work,
                BITS,
                GROUP_SIZE,
                HAS_ZERO,
                DEQUANTIZE_ASM,
                DUPLICATE_ASM,
                SLOT_COLUMNS,
                SLOTS,
                MMA,
            )
            next_segment = first_load(i + 1, work, TILE_TOKENS, SLOTS)
            s, z = load_scales(
                scale,
                zero,
                next_segment[0],
                next_segment[2] * SLOT_COLUMNS,
                rows,
                columns,
                BITS,
                GROUP_SIZE,
                HAS_ZERO,
            )
            if first > 0:
                gl.store(partial_sum_pointers(partial_sums, program, TILE_TOKENS, MMA), y)
                barrier()
                gl.atomic_xchg(flags + program, 1, sem="release")
            else:
                if last < tile_iters:
                    last_iter = (tile - rounds * programs + 1) * tile_iters - 1
                    last_program = last_iter // program_iters
                    y = add_partial_sums(
                        y, partial_sums, flags, program, last_program, TILE_TOKENS, MMA
                    )
                if BITS == 8:
                    y = y * gl.expand_dims(row_scale.to(gl.float32), 1)
                if HAS_BIAS:
                    y = y + gl.expand_dims(row_bias.to(gl.float32), 1)
                tma.store_wait(0)
                out_tile.store(gl.permute(y.to(x.dtype), (1, 0)))
                fence_async_shared()
                tma_store(out, [tile % token_tiles * TILE_TOKENS, first_row], out_tile)
    tma.store_wait(0)

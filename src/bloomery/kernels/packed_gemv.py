"""Packed GEMV: a fused linear layer with quantized weights for one token, or a few.

    y [tokens, out] = epilogue(prologue(x) @ packed.dequantize().T + bias)         x [tokens, in]

The prologue is an RMS norm. The epilogues are those of kernels/gemv.py, which this file extends to
packed weights (kernels/packed.py). kernels/packed_linear.py and kernels/packed_moe.py choose it.

Layout. A thread reads a chunk, 16 bytes of a row, and all values of x that belong to it: 32
columns of 4-bit codes or 16 of 8-bit codes. Threads exchange no values before the last sum.

    row of codes   | chunk 0 | chunk 1 | ... | chunk BLOCK_CHUNKS - 1 | next iteration ...
                     thread 0  thread 1

How the work is divided: program (i, j) computes PackedGemvTiling.outputs outputs for all tokens and
loops over the chunks of their rows. With experts (MoE), j is the token-expert pair.

With fewer bytes per weight, unpacking takes a larger part of the time. The memory of an H200
delivers 4.2 TB/s, which is 8,500 billion 4-bit codes per second and leaves about four instructions
per code. So no code is converted:

    dp4a       integer codes with 16-bit x (`uses_dp4a`). The values of x in a chunk are rounded to
               16-bit integers, relative to the largest of the chunk. The dp4a instruction then
               multiplies and adds four bytes of codes, first with the high and then with the low
               bytes.
    mask       integer codes with float32 x. A code is masked in its place. As a float, its bits
               are a denormal number: the code times a power of two that depends on the place.
               x is scaled by the inverse power.
    fp8        the GPU converts 8-bit floats, two at a time.
    codebook   the lanes of a warp hold the table, and a code is the lane to read from (shfl).
    mxfp4      4-bit floats, whose scales are exponents: with 16-bit x by dp4a, after a look-up of
               four codes at once (prmt); with float32 x as a codebook

Scales are applied to the sum of each chunk, or to the final sum where a row has one scale.

This file must not know layers, checkpoint formats or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from bloomery.fusion import Epilogue, NormPrologue
from bloomery.kernels.gemv import (
    ExpertRouting,
    build_epilogue_args,
    needs_paired_rows,
    store_with_epilogue,
    supports_epilogue,
    weight_rows,
)
from bloomery.kernels.launch import (
    is_hopper,
    jit,
    kernel_constant,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.packed import (
    FP8_BLOCK_SIZE,
    CodebookWeight,
    GroupedScales,
    PackedLayout,
    PackedWeight,
    describe_layout,
)

CHUNK_BYTES = 16  # one vector load of a thread


class PackedGemvTiling(NamedTuple):
    """How the work is divided among programs.

    A program computes `outputs` results and reads `chunks` chunks of their rows per iteration, 32
    per warp. Paired rows double the rows that are read.
    """

    outputs: int
    chunks: int
    warps: int
    prefetch_x: bool = False  # x is loaded one iteration ahead, which takes registers


# (rows, bytes per row) -> fastest tiling, measured on an H200 with `benchmarks/packed.py tune`.
# Integer codes multiplied by dp4a:
DP4A_TILINGS: Mapping[tuple[int, int], PackedGemvTiling] = {
    (6400, 3072): PackedGemvTiling(4, 64, 2),
    (6144, 3072): PackedGemvTiling(8, 64, 2, True),
    (24576, 3072): PackedGemvTiling(16, 64, 2),
    (6144, 12288): PackedGemvTiling(16, 128, 4),
    (6144, 2048): PackedGemvTiling(8, 128, 4),
    (4096, 2048): PackedGemvTiling(16, 128, 4),
    (28672, 2048): PackedGemvTiling(8, 128, 4),
    (4096, 7168): PackedGemvTiling(8, 128, 4),
    (6400, 6144): PackedGemvTiling(4, 128, 4),
    (6144, 6144): PackedGemvTiling(8, 128, 4),
    (24576, 6144): PackedGemvTiling(16, 128, 4),
    (6144, 24576): PackedGemvTiling(16, 128, 4),
    (6144, 4096): PackedGemvTiling(8, 128, 4),
    (4096, 4096): PackedGemvTiling(4, 128, 4, True),
    (28672, 4096): PackedGemvTiling(8, 128, 4),
    (4096, 14336): PackedGemvTiling(4, 128, 4),
}

# Codebooks, and integer codes multiplied by masking:
MASK_TILINGS: Mapping[tuple[int, int], PackedGemvTiling] = {
    (6400, 3072): PackedGemvTiling(4, 64, 2, True),
    (6144, 3072): PackedGemvTiling(8, 64, 2, True),
    (24576, 3072): PackedGemvTiling(8, 64, 2),
    (6144, 12288): PackedGemvTiling(8, 128, 4, True),
    (6144, 2048): PackedGemvTiling(8, 128, 4),
    (4096, 2048): PackedGemvTiling(4, 128, 4),
    (28672, 2048): PackedGemvTiling(8, 128, 4),
    (4096, 7168): PackedGemvTiling(8, 128, 4, True),
}

# 8-bit floats, which take more instructions:
FP8_TILINGS: Mapping[tuple[int, int], PackedGemvTiling] = {
    (6400, 6144): PackedGemvTiling(4, 128, 4),
    (6144, 6144): PackedGemvTiling(8, 128, 4),
    (24576, 6144): PackedGemvTiling(8, 128, 4),
    (6144, 24576): PackedGemvTiling(8, 128, 4),
    (6144, 4096): PackedGemvTiling(4, 64, 2, True),
    (4096, 4096): PackedGemvTiling(4, 128, 4),
    (28672, 4096): PackedGemvTiling(4, 128, 4),
    (4096, 14336): PackedGemvTiling(4, 128, 4, True),
}


def supports_packed_gemv(packed: PackedWeight, epilogue: Epilogue = None) -> bool:
    """Whether rows are whole chunks, each chunk has one scale, and the epilogue is supported."""
    if isinstance(packed, GroupedScales):
        if packed.act_order is not None or packed.bits not in (4, 8):
            return False
        group_size = packed.group_size
    elif isinstance(packed, CodebookWeight):
        group_size = packed.block_size
    else:
        group_size = FP8_BLOCK_SIZE
    codes = packed.codes
    columns = packed.shape[1]
    columns_per_chunk = CHUNK_BYTES * columns // max(codes.shape[1], 1)
    if codes.shape[1] % CHUNK_BYTES or not codes.is_contiguous():
        return False
    if group_size < columns and group_size % columns_per_chunk:
        return False
    return supports_epilogue(epilogue)


def select_packed_gemv_tiling(
    rows: int, row_bytes: int, paired: bool, tokens: int = 1, method: str = "int"
) -> PackedGemvTiling:
    """Choose the tiling for rows of `row_bytes` bytes: the measured one, or one by rule.

    `method` is "dp4a" or the kind of the packed layout.
    """
    measured = {"dp4a": DP4A_TILINGS, "fp8": FP8_TILINGS}.get(method, MASK_TILINGS)
    if tokens == 1 and (rows, row_bytes) in measured:
        return measured[rows, row_bytes]
    row_chunks = row_bytes // CHUNK_BYTES
    chunks = 128 if row_chunks >= 512 or row_chunks == 128 else 64
    if 64 < row_chunks < 256 and 0 < row_chunks % 64 <= 32:
        # With 64, half of the last iteration's threads would have nothing to read. One warp holds
        # fewer rows, so that registers do not limit the number of programs.
        return PackedGemvTiling(2 if paired else 4, 32, 1)
    while chunks > 32 and row_chunks < chunks:
        chunks //= 2
    outputs = 4 if paired and row_chunks > chunks else 8
    prefetch_x = tokens == 1 and row_chunks > chunks and rows < 16384
    return PackedGemvTiling(outputs, chunks, chunks // 32, prefetch_x)


def uses_dp4a(layout: PackedLayout, dtype: torch.dtype) -> bool:
    """Whether codes are multiplied as integers: 16-bit integers are precise enough for 16-bit x.

    The values of 4-bit floats are multiples of a half, so they are integers as well.
    """
    return layout.kind in ("int", "mxfp4") and dtype.itemsize == 2


def packed_gemv_triton(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    prologue: NormPrologue | None = None,
    epilogue: Epilogue = None,
    tiling: PackedGemvTiling | None = None,
    routing: ExpertRouting | None = None,
) -> torch.Tensor:
    """Run the kernel. A norm prologue must be an RMS norm.

    With `routing`, the packed matrix holds the weights of all experts, one below the other. See
    gemv.gemv_triton for the meaning of the rows.
    """
    x = x.contiguous()
    num_tokens, columns = x.shape
    layout = describe_layout(packed)
    expert_ids = None
    input_weights = None
    num_experts = 0
    num_results = num_tokens
    top_k = 1
    if routing is not None:
        expert_ids, num_experts, input_weights = routing
        num_results = expert_ids.numel()
        top_k = num_results // num_tokens
        num_tokens = 1  # per program
    rows = packed.shape[0] // max(num_experts, 1)
    paired = needs_paired_rows(epilogue)
    num_outputs = rows // 2 if paired else rows
    dp4a = uses_dp4a(layout, x.dtype)
    if tiling is None:
        method = "dp4a" if dp4a else layout.kind
        row_bytes = layout.codes.shape[1]
        tiling = select_packed_gemv_tiling(rows, row_bytes, paired, num_tokens, method)
    args = build_epilogue_args(x, epilogue, rows, (num_results, num_outputs))
    norm_weight = None if prologue is None else prologue.weight
    optional = (layout.zero_point, layout.table, expert_ids, input_weights, bias, norm_weight)
    grid = (-(-num_outputs // tiling.outputs), num_results if num_experts else 1)
    packed_gemv_kernel[grid](
        x,
        layout.codes.view(torch.int32),
        layout.scale,
        *(x if tensor is None else tensor for tensor in optional),
        *args.tensors,
        0.0 if prologue is None else prologue.eps,
        *args.numbers,
        NUM_OUTPUTS=num_outputs,
        COLUMNS=columns,
        NUM_TOKENS=num_tokens,
        TOKENS_POW2=next_power_of_2(num_tokens),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        WEIGHTS_INPUT=input_weights is not None,
        KIND=layout.kind,
        BITS=layout.bits,
        GROUP_SIZE=layout.group_size,
        ROWS_PER_SCALE=layout.rows_per_scale,
        NESTED_COLUMNS=layout.columns_per_nested_scale,
        HAS_ZERO=layout.zero_point is not None,
        SIGNED=layout.signed,
        HAS_BIAS=bias is not None,
        NORM=prologue is not None,
        HAS_NORM_WEIGHT=norm_weight is not None,
        PAIRED=paired,
        **args.constants,
        DP4A=dp4a,
        PREFETCH_X=tiling.prefetch_x,
        BLOCK_OUT=tiling.outputs,
        INLINE_ASM=is_hopper(x.device) if layout.kind == "fp8" else x.is_cuda,
        BLOCK_CHUNKS=tiling.chunks,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return args.out


@jit
def packed_gemv_kernel(
    x,  # [tokens, COLUMNS]
    codes,  # [rows, row bytes / 4] int32
    scale,
    zero,  # zero points, or the nested scales of a codebook
    table,
    expert_ids,  # [results]
    input_weights,  # [results]
    bias,  # [rows]
    norm_weight,  # [COLUMNS]
    residual_or_cache,
    slot_mapping,
    positions,
    cos,
    sin,
    query_scales,
    out,
    eps,
    residual_scale,
    kv_stride,
    param0,
    param1,
    param2,
    NUM_OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    TOKENS_POW2: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTS_INPUT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    PAIRED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROPE_TABLES: tl.constexpr,
    SCALE_QUERIES: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    DP4A: tl.constexpr,
    PREFETCH_X: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of all tokens.

    Tiles are [chunks, tokens, outputs], so that the threads of a warp lie along the chunks.
    """
    launch_dependents(PDL)
    CHUNK_COLUMNS: tl.constexpr = 128 // BITS
    ROW_CHUNKS: tl.constexpr = COLUMNS // CHUNK_COLUMNS
    GROUPED: tl.constexpr = GROUP_SIZE < COLUMNS
    output = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Without a minimum the compiler sees that the rows are equally far apart.
    row = output if NUM_OUTPUTS % BLOCK_OUT == 0 else tl.minimum(output, NUM_OUTPUTS - 1)
    first_row, second_row = weight_rows(row, NUM_OUTPUTS, HEAD_DIM, ROPE_DIM, INTERLEAVED, EPILOGUE)
    if NUM_EXPERTS > 0:
        wait_for_previous(PDL)  # the router of this step writes expert_ids
        result = tl.program_id(1).to(tl.int64)
        expert = tl.load(expert_ids + result)
        expert_row = tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, 0) * (
            NUM_OUTPUTS * (2 if PAIRED else 1)
        )
        first_row = first_row + expert_row
        second_row = second_row + expert_row
        x += result // TOP_K * COLUMNS
        out += result * NUM_OUTPUTS
    token = tl.arange(0, TOKENS_POW2)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    word = chunk[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    first_ptr = codes + first_row[None, None, :, None] * (ROW_CHUNKS * 4) + word
    second_ptr = codes + second_row[None, None, :, None] * (ROW_CHUNKS * 4) + word
    next_first = load_chunks(first_ptr, 0, chunk, ROW_CHUNKS)
    next_second = next_first
    next_first_scale, next_first_zero = load_chunk_scales(
        scale,
        zero,
        table,
        first_row,
        0,
        chunk,
        KIND,
        COLUMNS,
        CHUNK_COLUMNS,
        GROUP_SIZE,
        ROWS_PER_SCALE,
        NESTED_COLUMNS,
        HAS_ZERO,
    )
    next_second_scale = next_first_scale
    next_second_zero = next_first_zero
    if PAIRED:
        next_second = load_chunks(second_ptr, 0, chunk, ROW_CHUNKS)
        next_second_scale, next_second_zero = load_chunk_scales(
            scale,
            zero,
            table,
            second_row,
            0,
            chunk,
            KIND,
            COLUMNS,
            CHUNK_COLUMNS,
            GROUP_SIZE,
            ROWS_PER_SCALE,
            NESTED_COLUMNS,
            HAS_ZERO,
        )
    lane_table = chunk[:, None, None]
    if KIND == "codebook" or KIND == "mxfp4":
        lane_table = tl.load(table + chunk % 16)[:, None, None]
    wait_for_previous(PDL)
    x_ptr = x + tl.minimum(token, NUM_TOKENS - 1)[None, :, None, None] * COLUMNS
    x_ptr += chunk[:, None, None, None] * CHUNK_COLUMNS + tl.arange(0, 8)[None, None, None, :]
    if PREFETCH_X:
        next_x0, next_x1, next_x2, next_x3 = load_x(x_ptr, 0, chunk, COLUMNS, CHUNK_COLUMNS)
    y = tl.zeros([BLOCK_CHUNKS, TOKENS_POW2, BLOCK_OUT], tl.float32)
    y_pair = y
    square_sum = tl.zeros([BLOCK_CHUNKS, TOKENS_POW2, 1], tl.float32)
    x_sum = square_sum  # for the zero points: of a chunk where GROUPED, else of all chunks
    for chunk0 in tl.range(0, ROW_CHUNKS, BLOCK_CHUNKS, num_stages=1):
        first = next_first
        second = next_second
        first_scale = next_first_scale
        second_scale = next_second_scale
        first_zero = next_first_zero
        second_zero = next_second_zero
        if PREFETCH_X:
            x0 = next_x0
            x1 = next_x1
            x2 = next_x2
            x3 = next_x3
            next_x0, next_x1, next_x2, next_x3 = load_x(
                x_ptr, chunk0 + BLOCK_CHUNKS, chunk, COLUMNS, CHUNK_COLUMNS
            )
        else:
            x0, x1, x2, x3 = load_x(x_ptr, chunk0, chunk, COLUMNS, CHUNK_COLUMNS)
        next_first = load_chunks(first_ptr, chunk0 + BLOCK_CHUNKS, chunk, ROW_CHUNKS)
        if GROUPED:
            next_first_scale, next_first_zero = load_chunk_scales(
                scale,
                zero,
                table,
                first_row,
                chunk0 + BLOCK_CHUNKS,
                chunk,
                KIND,
                COLUMNS,
                CHUNK_COLUMNS,
                GROUP_SIZE,
                ROWS_PER_SCALE,
                NESTED_COLUMNS,
                HAS_ZERO,
            )
        if PAIRED:
            next_second = load_chunks(second_ptr, chunk0 + BLOCK_CHUNKS, chunk, ROW_CHUNKS)
            if GROUPED:
                next_second_scale, next_second_zero = load_chunk_scales(
                    scale,
                    zero,
                    table,
                    second_row,
                    chunk0 + BLOCK_CHUNKS,
                    chunk,
                    KIND,
                    COLUMNS,
                    CHUNK_COLUMNS,
                    GROUP_SIZE,
                    ROWS_PER_SCALE,
                    NESTED_COLUMNS,
                    HAS_ZERO,
                )
        # The four words of a chunk: a of the first row, b of the second row of a pair.
        a0, a1, a2, a3 = split_words(first, BLOCK_OUT, BLOCK_CHUNKS, SIGNED)
        b0, b1, b2, b3 = split_words(second, BLOCK_OUT, BLOCK_CHUNKS, SIGNED)
        if GROUPED:
            y_part = tl.zeros([BLOCK_CHUNKS, TOKENS_POW2, BLOCK_OUT], tl.float32)
            y_pair_part = y_part
            x_sum = tl.zeros([BLOCK_CHUNKS, TOKENS_POW2, 1], tl.float32)
        else:
            y_part = y
            y_pair_part = y_pair
        norm_ptr = (
            norm_weight
            + (chunk0 + chunk)[:, None, None, None] * CHUNK_COLUMNS
            + tl.arange(0, 8)[None, None, None, :]
        )
        inside = ((chunk0 + chunk) * CHUNK_COLUMNS < COLUMNS)[:, None, None, None]
        if DP4A:
            v0, square_sum = apply_norm_weight(
                x0, square_sum, norm_ptr, inside, NORM, HAS_NORM_WEIGHT, TOKENS_POW2, BLOCK_CHUNKS
            )
            v1, square_sum = apply_norm_weight(
                x1,
                square_sum,
                norm_ptr + 8,
                inside,
                NORM,
                HAS_NORM_WEIGHT,
                TOKENS_POW2,
                BLOCK_CHUNKS,
            )
            v2 = v0
            v3 = v1
            if BITS == 4:
                v2, square_sum = apply_norm_weight(
                    x2,
                    square_sum,
                    norm_ptr + 16,
                    inside,
                    NORM,
                    HAS_NORM_WEIGHT,
                    TOKENS_POW2,
                    BLOCK_CHUNKS,
                )
                v3, square_sum = apply_norm_weight(
                    x3,
                    square_sum,
                    norm_ptr + 24,
                    inside,
                    NORM,
                    HAS_NORM_WEIGHT,
                    TOKENS_POW2,
                    BLOCK_CHUNKS,
                )
            x_scale, high, low, high_sum, low_sum = quantize_x(
                v0, v1, v2, v3, KIND, BITS, INLINE_ASM
            )
            zeros = tl.zeros([BLOCK_CHUNKS, TOKENS_POW2, BLOCK_OUT], tl.int32)
            y_part += x_scale * dot_chunk(
                (a0, a1, a2, a3), high, low, zeros, KIND, BITS, INLINE_ASM
            )
            if PAIRED:
                y_pair_part += x_scale * dot_chunk(
                    (b0, b1, b2, b3), high, low, zeros, KIND, BITS, INLINE_ASM
                )
            x_sum += x_scale * (high_sum * 256 + low_sum).to(tl.float32)
        else:
            for eighth in tl.static_range(CHUNK_COLUMNS // 8):
                v, square_sum = apply_norm_weight(
                    select4(x0, x1, x2, x3, eighth),
                    square_sum,
                    norm_ptr + eighth * 8,
                    inside,
                    NORM,
                    HAS_NORM_WEIGHT,
                    TOKENS_POW2,
                    BLOCK_CHUNKS,
                )
                if KIND == "int":
                    x_sum += (v[0] + v[1] + v[2] + v[3]) + (v[4] + v[5] + v[6] + v[7])
                    v = compensate_bit_position(v, BITS)
                if BITS == 4:
                    a = select4(a0, a1, a2, a3, eighth)
                    y_part = add_eight_4bit(y_part, a, v, lane_table, table, KIND, INLINE_ASM)
                    if PAIRED:
                        b = select4(b0, b1, b2, b3, eighth)
                        y_pair_part = add_eight_4bit(
                            y_pair_part, b, v, lane_table, table, KIND, INLINE_ASM
                        )
                else:
                    left = select4(a0, a1, a2, a3, 2 * eighth)
                    right = select4(a0, a1, a2, a3, 2 * eighth + 1)
                    y_part = add_eight_8bit(y_part, left, right, v, KIND, INLINE_ASM)
                    if PAIRED:
                        left = select4(b0, b1, b2, b3, 2 * eighth)
                        right = select4(b0, b1, b2, b3, 2 * eighth + 1)
                        y_pair_part = add_eight_8bit(y_pair_part, left, right, v, KIND, INLINE_ASM)
        if GROUPED:
            y += first_scale * subtract_zero(y_part, x_sum, first_zero, KIND, BITS, HAS_ZERO, DP4A)
            if PAIRED:
                y_pair += second_scale * subtract_zero(
                    y_pair_part, x_sum, second_zero, KIND, BITS, HAS_ZERO, DP4A
                )
        else:
            y = y_part
            y_pair = y_pair_part
    y = tl.sum(y, 0)
    y_pair = tl.sum(y_pair, 0)
    if not GROUPED:
        x_sum = tl.sum(x_sum, 0)
        row_scale, row_zero = load_row_scales(
            scale, zero, first_row, KIND, ROWS_PER_SCALE, HAS_ZERO
        )
        y = row_scale * subtract_zero(y, x_sum, row_zero, KIND, BITS, HAS_ZERO, DP4A)
        if PAIRED:
            row_scale, row_zero = load_row_scales(
                scale, zero, second_row, KIND, ROWS_PER_SCALE, HAS_ZERO
            )
            y_pair = row_scale * subtract_zero(y_pair, x_sum, row_zero, KIND, BITS, HAS_ZERO, DP4A)
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(square_sum, 0) / COLUMNS + eps)
        y = y * inverse_rms
        y_pair = y_pair * inverse_rms
    if WEIGHTS_INPUT:
        input_weight = tl.load(input_weights + tl.program_id(1)).to(tl.float32)
        y = y * input_weight
        y_pair = y_pair * input_weight
    if HAS_BIAS:
        y += tl.load(bias + first_row)[None, :].to(tl.float32)
        if PAIRED:
            y_pair += tl.load(bias + second_row)[None, :].to(tl.float32)
    store_with_epilogue(
        y,
        y_pair,
        output,
        token,
        residual_or_cache,
        slot_mapping,
        positions,
        cos,
        sin,
        query_scales,
        out,
        residual_scale,
        kv_stride,
        param0,
        param1,
        param2,
        NUM_OUTPUTS,
        NUM_TOKENS,
        PAIRED,
        EPILOGUE,
        ACTIVATION,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        ROPE_DIM,
        INTERLEAVED,
        ROPE_TABLES,
        SCALE_QUERIES,
    )


# ---- loading codes and x -------------------------------------------------------------------------


@jit
def load_chunks(ptr, chunk0, chunk, ROW_CHUNKS: tl.constexpr):
    """Load codes [chunks, 1, outputs, 4 words] from chunk0 on, zeros past the end of the row."""
    inside = (chunk0 + chunk < ROW_CHUNKS)[:, None, None, None]
    return tl.load(ptr + chunk0 * 4, mask=inside, other=0, eviction_policy="evict_first")


@jit
def split_words(words, BLOCK_OUT: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, SIGNED: tl.constexpr):
    """Split chunks into their four words, each [chunks, 1, outputs].

    Signed bytes become unsigned ones that are 128 larger: 0x80 is flipped in every byte.
    """
    if SIGNED:
        words = words ^ -2139062144
    even, odd = tl.split(tl.reshape(words, (BLOCK_CHUNKS, 1, BLOCK_OUT, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def select4(a, b, c, d, i: tl.constexpr):
    """Return the i-th of four values."""
    if i < 2:
        return a if i == 0 else b
    else:
        return c if i == 2 else d


@jit
def load_x(ptr, chunk0, chunk, COLUMNS: tl.constexpr, CHUNK_COLUMNS: tl.constexpr):
    """Load x of the chunks from chunk0 on: two or four times [chunks, tokens, 1, 8 columns].

    Columns past the end of the row are zero. 8-bit codes have two such parts per chunk.
    """
    inside = ((chunk0 + chunk) * CHUNK_COLUMNS < COLUMNS)[:, None, None, None]
    first = tl.load(ptr + chunk0 * CHUNK_COLUMNS, mask=inside, other=0.0)
    second = tl.load(ptr + chunk0 * CHUNK_COLUMNS + 8, mask=inside, other=0.0)
    if CHUNK_COLUMNS == 32:
        third = tl.load(ptr + chunk0 * CHUNK_COLUMNS + 16, mask=inside, other=0.0)
        fourth = tl.load(ptr + chunk0 * CHUNK_COLUMNS + 24, mask=inside, other=0.0)
        return first, second, third, fourth
    else:
        return first, second, chunk, chunk


@jit
def split_eight(v, TOKENS_POW2: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Split [chunks, tokens, 1, 8] into eight columns [chunks, tokens, 1] in float32."""
    even, odd = tl.split(tl.reshape(v.to(tl.float32), (BLOCK_CHUNKS, TOKENS_POW2, 1, 2, 2, 2)))
    even_low, even_high = tl.split(even)  # columns 0 and 4, 2 and 6
    odd_low, odd_high = tl.split(odd)  # columns 1 and 5, 3 and 7
    v0, v4 = tl.split(even_low)
    v2, v6 = tl.split(even_high)
    v1, v5 = tl.split(odd_low)
    v3, v7 = tl.split(odd_high)
    return v0, v1, v2, v3, v4, v5, v6, v7


@jit
def apply_norm_weight(
    x,
    square_sum,
    norm_ptr,
    inside,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    TOKENS_POW2: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Multiply eight columns of x by the norm's weight; add the squares of x to square_sum."""
    v = split_eight(x, TOKENS_POW2, BLOCK_CHUNKS)
    if NORM:
        square_sum += v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]
        square_sum += v[4] * v[4] + v[5] * v[5] + v[6] * v[6] + v[7] * v[7]
    if HAS_NORM_WEIGHT:
        weight = split_eight(tl.load(norm_ptr, mask=inside, other=0.0), 1, BLOCK_CHUNKS)
        v = multiply_eight(v, weight)
    return v, square_sum


@jit
def multiply_eight(v, w):
    """Multiply two tuples of eight tiles element by element."""
    return (
        v[0] * w[0],
        v[1] * w[1],
        v[2] * w[2],
        v[3] * w[3],
        v[4] * w[4],
        v[5] * w[5],
        v[6] * w[6],
        v[7] * w[7],
    )


# ---- products of masked codes, codebook values and 8-bit floats ----------------------------------


@jit
def compensate_bit_position(v, BITS: tl.constexpr):
    """Scale eight columns of x to compensate for the bit positions of their codes.

    A code at bit b of a word, read as a float32, is the code times 2 ** (b - 149). After this, the
    product of code and x is 2 ** -45 times the true one; subtract_zero multiplies by 2 ** 45.
    add_eight_4bit and code_byte_to_float shift the codes at bit 24 and above down by 8 bits.
    """
    ONE: tl.constexpr = 2.0**104
    if BITS == 4:
        return (
            v[0] * ONE,
            v[1] * (ONE / 2**4),
            v[2] * (ONE / 2**8),
            v[3] * (ONE / 2**12),
            v[4] * (ONE / 2**16),
            v[5] * (ONE / 2**20),
            v[6] * (ONE / 2**16),
            v[7] * (ONE / 2**20),
        )
    else:
        return (
            v[0] * ONE,
            v[1] * (ONE / 2**8),
            v[2] * (ONE / 2**16),
            v[3] * (ONE / 2**16),
            v[4] * ONE,
            v[5] * (ONE / 2**8),
            v[6] * (ONE / 2**16),
            v[7] * (ONE / 2**16),
        )


@jit
def mask_as_float(word, MASK: tl.constexpr):
    """Read masked bits as a float32: a denormal, or a number of the lowest normal binade.

    In both, one unit of the last bit is worth the same.
    """
    return (word & MASK).to(tl.float32, bitcast=True)


@jit
def add_eight_4bit(acc, word, v, lane_table, table, KIND: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Add the products of the eight 4-bit codes of a word with the eight columns v."""
    if KIND == "int":
        for j in tl.static_range(6):
            acc += mask_as_float(word, 15 << (4 * j)) * v[j]
        word = word >> 8
        acc += mask_as_float(word, 15 << 16) * v[6]
        acc += mask_as_float(word, 15 << 20) * v[7]
    else:
        for j in tl.static_range(8):
            acc += look_up(word >> (4 * j), lane_table, table, INLINE_ASM) * v[j]
    return acc


@jit
def look_up(word, lane_table, table, INLINE_ASM: tl.constexpr):
    """Return the codebook value of the lowest four bits.

    Lane l of every half warp holds value l of the table (`lane_table`, one entry per chunk).
    """
    if INLINE_ASM:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;",
            "=f,f,r",
            [lane_table, word],
            tl.float32,
            True,
            1,
        )
    else:
        return tl.load(table + (word & 15))


@jit
def add_eight_8bit(acc, left, right, v, KIND: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Add the products of the eight bytes of two words with the eight columns v."""
    if KIND == "fp8" and INLINE_ASM:
        a = convert_fp8_word(left)
        b = convert_fp8_word(right)
        for j in tl.static_range(4):
            acc += a[j] * v[j]
        for j in tl.static_range(4):
            acc += b[j] * v[4 + j]
    else:
        for j in tl.static_range(4):
            acc += code_byte_to_float(left, j, KIND) * v[j]
        for j in tl.static_range(4):
            acc += code_byte_to_float(right, j, KIND) * v[4 + j]
    return acc


@jit
def convert_fp8_word(word):
    """Convert the four 8-bit floats of a word to float32, two per instruction."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 l, h, p, q, r, s;
        .reg .b32 a, b;
        mov.b32 {l, h}, $4;
        cvt.rn.f16x2.e4m3x2 a, l;
        cvt.rn.f16x2.e4m3x2 b, h;
        mov.b32 {p, q}, a;
        mov.b32 {r, s}, b;
        cvt.f32.f16 $0, p;
        cvt.f32.f16 $1, q;
        cvt.f32.f16 $2, r;
        cvt.f32.f16 $3, s;
        }""",
        "=&f,=&f,=&f,=&f,r",
        [word],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        True,
        1,
    )


@jit
def code_byte_to_float(word, j: tl.constexpr, KIND: tl.constexpr):
    """Return byte j of a word as a float: an 8-bit float's value, or as mask_as_float reads it."""
    if KIND == "fp8":
        # Sign to bit 31, exponent and mantissa to bits 26..20 (mask 0x87f00000). The exponent is
        # then 120 too small.
        bits = ((word << (24 - 8 * j)) >> 4) & -2014314496
        return bits.to(tl.float32, bitcast=True) * 2.0**120
    elif j < 3:
        return mask_as_float(word, 255 << (8 * j))
    else:
        return mask_as_float(word >> 8, 255 << 16)


# ---- products by dp4a ----------------------------------------------------------------------------


@jit
def quantize_x(v0, v1, v2, v3, KIND: tl.constexpr, BITS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Round the values of x in a chunk, each [chunks, tokens, 1], to 16-bit integers.

    Returns their scale (NaN where a value is NaN), the high and the low bytes that meet each word
    of codes (for 4-bit integers the even columns, then the odd ones), and the sums of both.
    """
    INTERLEAVED: tl.constexpr = BITS == 4 and KIND == "int"
    absmax = tl.maximum(absmax_of_eight(v0), absmax_of_eight(v1), propagate_nan=tl.PropagateNan.ALL)
    if BITS == 4:
        absmax = tl.maximum(absmax, absmax_of_eight(v2), propagate_nan=tl.PropagateNan.ALL)
        absmax = tl.maximum(absmax, absmax_of_eight(v3), propagate_nan=tl.PropagateNan.ALL)
    inverse_scale = 32767.0 / tl.maximum(absmax, 1e-30)
    h0, l0, h1, l1 = pack_eight(v0, inverse_scale, INTERLEAVED, INLINE_ASM)
    h2, l2, h3, l3 = pack_eight(v1, inverse_scale, INTERLEAVED, INLINE_ASM)
    if BITS == 4:
        h4, l4, h5, l5 = pack_eight(v2, inverse_scale, INTERLEAVED, INLINE_ASM)
        h6, l6, h7, l7 = pack_eight(v3, inverse_scale, INTERLEAVED, INLINE_ASM)
        high = (h0, h1, h2, h3, h4, h5, h6, h7)
        low = (l0, l1, l2, l3, l4, l5, l6, l7)
        return with_byte_sums(absmax, high, low, 8, INLINE_ASM)
    else:
        return with_byte_sums(absmax, (h0, h1, h2, h3), (l0, l1, l2, l3), 4, INLINE_ASM)


@jit
def with_byte_sums(absmax, high, low, COUNT: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Complete the result of quantize_x: the scale, the bytes, and the sums of the bytes."""
    ones = high[0] * 0 + 0x01010101
    high_sum = high[0] * 0
    low_sum = high[0] * 0
    for i in tl.static_range(COUNT):
        high_sum = dot4(high_sum, ones, high[i], True, INLINE_ASM)
        low_sum = dot4(low_sum, ones, low[i], False, INLINE_ASM)
    return absmax / 32767.0, high, low, high_sum, low_sum


@jit
def absmax_of_eight(v):
    """Return the largest magnitude of eight columns, NaN where one is NaN."""
    absmax = tl.abs(v[0])
    for j in tl.static_range(1, 8):
        absmax = tl.maximum(absmax, tl.abs(v[j]), propagate_nan=tl.PropagateNan.ALL)
    return absmax


@jit
def pack_eight(v, inverse_scale, INTERLEAVED: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Round eight columns; return high and low bytes of the first four, then of the last four.

    The first four are columns 0, 2, 4, 6 if they are interleaved, else columns 0, 1, 2, 3.
    """
    if INTERLEAVED:
        high0, low0 = round_and_pack(v[0], v[2], v[4], v[6], inverse_scale, INLINE_ASM)
        high1, low1 = round_and_pack(v[1], v[3], v[5], v[7], inverse_scale, INLINE_ASM)
    else:
        high0, low0 = round_and_pack(v[0], v[1], v[2], v[3], inverse_scale, INLINE_ASM)
        high1, low1 = round_and_pack(v[4], v[5], v[6], v[7], inverse_scale, INLINE_ASM)
    return high0, low0, high1, low1


@jit
def round_and_pack(a, b, c, d, inverse_scale, INLINE_ASM: tl.constexpr):
    """Round four values to 16-bit integers; pack the high bytes in a word and the low in another.

    Adding 1.5 * 2 ** 23 leaves the nearest integer in the low bits of a float32, so no conversion
    is needed.
    """
    MAGIC: tl.constexpr = 12582912.0
    a = (a * inverse_scale + MAGIC).to(tl.int32, bitcast=True)
    b = (b * inverse_scale + MAGIC).to(tl.int32, bitcast=True)
    c = (c * inverse_scale + MAGIC).to(tl.int32, bitcast=True)
    d = (d * inverse_scale + MAGIC).to(tl.int32, bitcast=True)
    if INLINE_ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $2, $3, 0x5410;
            prmt.b32 u, $4, $5, 0x5410;
            prmt.b32 $0, t, u, 0x7531;
            prmt.b32 $1, t, u, 0x6420;
            }""",
            "=&r,=&r,r,r,r,r",
            [a, b, c, d],
            (tl.int32, tl.int32),
            True,
            1,
        )
    else:
        high = (
            ((a >> 8) & 255)
            | (((b >> 8) & 255) << 8)
            | (((c >> 8) & 255) << 16)
            | (((d >> 8) & 255) << 24)
        )
        return high, (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)


@jit
def dot_chunk(
    words, high, low, zeros, KIND: tl.constexpr, BITS: tl.constexpr, INLINE_ASM: tl.constexpr
):
    """Sum codes times 16-bit integers over each chunk: [chunks, tokens, outputs] in float32.

    The sums of 4-bit integers are below 2 ** 24, so they are exact. The code of a 4-bit float is
    what `fp4_to_bytes` makes of it.
    """
    high_sum = zeros
    low_sum = zeros
    for i in tl.static_range(4):
        if BITS == 4:
            if KIND == "mxfp4":
                first, second = fp4_to_bytes(words[i], INLINE_ASM)
            else:
                first = words[i] & 0x0F0F0F0F
                second = (words[i] >> 4) & 0x0F0F0F0F
            high_sum = dot4(high_sum, first, high[2 * i], True, INLINE_ASM)
            high_sum = dot4(high_sum, second, high[2 * i + 1], True, INLINE_ASM)
            low_sum = dot4(low_sum, first, low[2 * i], False, INLINE_ASM)
            low_sum = dot4(low_sum, second, low[2 * i + 1], False, INLINE_ASM)
        else:
            high_sum = dot4(high_sum, words[i], high[i], True, INLINE_ASM)
            low_sum = dot4(low_sum, words[i], low[i], False, INLINE_ASM)
    return (high_sum * 256 + low_sum).to(tl.float32)


FP4_TO_BYTES_ASM = kernel_constant(
    """{
.reg .b32 t, u, a, b;
xor.b32 t, $2, 0x88888888;
prmt.b32 a, 0x0f0e0d0c, 0x18141210, $2;
prmt.b32 b, 0x090a0b0c, 0x00040608, t;
or.b32 $0, a, b;
shr.u32 u, $2, 16;
shr.u32 t, t, 16;
prmt.b32 a, 0x0f0e0d0c, 0x18141210, u;
prmt.b32 b, 0x090a0b0c, 0x00040608, t;
or.b32 $1, a, b;
}"""
)


@jit
def fp4_to_bytes(word, INLINE_ASM: tl.constexpr):
    """Turn eight 4-bit floats into bytes, 12 plus twice the value; return the first four, the last.

    A byte permutation (prmt) looks up four codes at once. The fourth bit of a code is its sign. In
    a selector it replaces the selected byte by copies of that byte's highest bit, which is 0 here.
    So one table serves the positive codes, another one the negative codes, and both results are
    combined.
    """
    if INLINE_ASM:
        return tl.inline_asm_elementwise(
            FP4_TO_BYTES_ASM,
            "=&r,=&r,r",
            [word],
            (tl.int32, tl.int32),
            True,
            1,
        )
    else:
        first = word * 0
        second = first
        for j in tl.static_range(4):
            first |= fp4_to_byte(word >> (4 * j)) << (8 * j)
            second |= fp4_to_byte(word >> (4 * j + 16)) << (8 * j)
        return first, second


@jit
def fp4_to_byte(word):
    """Return 12 plus twice the value of the 4-bit float in the lowest bits."""
    magnitude = word & 7
    twice = tl.where(magnitude < 5, magnitude, tl.where(magnitude < 7, 2 * magnitude - 4, 12))
    return tl.where((word & 8) == 0, 12 + twice, 12 - twice)


@jit
def dot4(acc, codes, v, SIGNED: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Return acc plus the products of the four bytes of two words; those of v may be signed."""
    if INLINE_ASM:
        INSTRUCTION: tl.constexpr = (
            "dp4a.u32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.u32 $0, $1, $2, $3;"
        )
        return tl.inline_asm_elementwise(
            INSTRUCTION, "=r,r,r,r", [codes, v, acc], tl.int32, True, 1
        )
    else:
        for j in tl.static_range(4):
            part = ((v << (24 - 8 * j)) >> 24) if SIGNED else ((v >> (8 * j)) & 255)
            acc = acc + ((codes >> (8 * j)) & 255) * part
        return acc


# ---- scales and zero points ----------------------------------------------------------------------


@jit
def subtract_zero(
    sums,
    x_sum,
    zero,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    DP4A: tl.constexpr,
):
    """Turn sums of raw codes times x into sums of (code - zero point) times x."""
    if KIND == "mxfp4" and DP4A:
        return 0.5 * sums - 6.0 * x_sum  # see fp4_to_bytes
    elif KIND != "int":
        return sums
    else:
        FACTOR: tl.constexpr = 1.0 if DP4A else 2.0**45  # see compensate_bit_position
        return sums * FACTOR - x_sum * (zero if HAS_ZERO else (1 << (BITS - 1)))


@jit
def load_chunk_scales(
    scale,
    zero,
    table,
    rows,
    chunk0,
    chunk,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK_COLUMNS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Load the scales and zero points of the chunks from chunk0 on, each [chunks, 1, outputs].

    The second result is a placeholder where there are no zero points.
    """
    NUM_GROUPS: tl.constexpr = (COLUMNS + GROUP_SIZE - 1) // GROUP_SIZE
    group = tl.minimum((chunk0 + chunk) * CHUNK_COLUMNS // GROUP_SIZE, NUM_GROUPS - 1)
    offset = (rows // ROWS_PER_SCALE)[None, None, :] * NUM_GROUPS + group[:, None, None]
    if KIND == "codebook" and HAS_ZERO:
        column = group[:, None, None] * GROUP_SIZE
        absmax = load_nested_absmax(
            scale, zero, table, offset, rows[None, None, :], column, COLUMNS, NESTED_COLUMNS
        )
        return absmax, absmax
    else:
        s = scale_to_float(tl.load(scale + offset), KIND)
        return s, tl.load(zero + offset).to(tl.float32) if HAS_ZERO else s


@jit
def scale_to_float(s, KIND: tl.constexpr):
    """Return stored scales in float32. Those of MXFP4 are exponents: their bits are moved.

    Exponent 0, which is 2 ** -127, becomes 0.
    """
    if KIND == "mxfp4":
        return (s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return s.to(tl.float32)


@jit
def load_nested_absmax(
    codes, nested_scale, table, offset, row, column, columns, NESTED_COLUMNS: tl.constexpr
):
    """Dequantize the absmax code at `offset`, which belongs to the block at that row and column.

    NESTED_COLUMNS 0: a row has one nested factor.
    """
    value = tl.load(table + 16 + tl.load(codes + offset))
    if NESTED_COLUMNS == 0:
        return value * tl.load(nested_scale + 2 * row + 1) + tl.load(nested_scale + 2 * row)
    else:
        row_ptr = nested_scale + row * (1 + (columns + NESTED_COLUMNS - 1) // NESTED_COLUMNS)
        return value * tl.load(row_ptr + 1 + column // NESTED_COLUMNS) + tl.load(row_ptr)


@jit
def load_row_scales(
    scale,
    zero,
    rows,
    KIND: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Load the scales and zero points of whole rows, each [1, outputs]."""
    s = scale_to_float(tl.load(scale + rows // ROWS_PER_SCALE)[None, :], KIND)
    if HAS_ZERO:
        return s, tl.load(zero + rows)[None, :].to(tl.float32)
    else:
        return s, s

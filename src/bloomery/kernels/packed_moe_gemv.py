"""Packed experts for a few tokens: GEMVs that read the chosen experts once, in two launches.

    h [pairs, size]     = activation(up_e(x) + bias)
    y [tokens, hidden]  = sum over the chosen experts e of topk_weights * (down_e(h) + bias)

A pair is a token with one of its experts. Both products multiply integers by dp4a, as
kernels/packed_gemv.py describes; this file adds what only experts need:

    prepare_inputs   The inputs of the up product are normed and rounded to integers once, by a
                     small launch, which routes the tokens as well. A program that reads a few rows
                     of a 4-bit matrix would otherwise spend more instructions on x than on codes.
    down             One program sums the products of all chosen experts of a token. Their rows are
                     treated as one long row, so no launch adds them up later.

Programmatic dependent launch: the experts are known when the up product has passed its wait. It
lets its successor start only then, so the down product may read them, and its first codes, before
the up product has ended.

kernels/packed_moe.py chooses this file. It must not know layers or checkpoint formats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.fusion import ActivationEpilogue, NormPrologue
from bloomery.kernels.activation import activate_tile
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.moe import (
    NO_FUSED_SHARED,
    ExpertOptions,
    ExpertsFusion,
    FusedSharedExperts,
    PreparedInputs,
    choose_experts,
    describe_expert_sum,
    describe_routing,
    store_expert_sum,
)
from bloomery.kernels.packed import PackedLayout, PackedWeight, describe_layout
from bloomery.kernels.packed_gemv import (
    apply_norm_weight,
    dot_chunk,
    load_chunk_scales,
    load_chunks,
    load_x,
    quantize_x,
    scale_to_float,
    split_words,
    subtract_zero,
    supports_packed_gemv,
    uses_dp4a,
)
from bloomery.spec import RouterSpec

PREPARED_CHUNKS = 32  # chunks of a row that a program of prepare_inputs handles


class ExpertGemvTiling(NamedTuple):
    """How the work is divided: outputs of a program, and the chunks that it reads per iteration."""

    outputs: int
    chunks: int
    warps: int


# The fastest for the MXFP4 experts of gpt-oss on an H200 (`benchmarks/packed.py tune experts`).
UP_TILING = ExpertGemvTiling(2, 32, 1)
DOWN_TILING = ExpertGemvTiling(8, 128, 4)


def supports_expert_gemv(packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the kernels can read these experts: integers whose scales belong to chunks."""
    layout = describe_layout(packed)
    has_chunk_scales = layout.group_size < packed.shape[1] and layout.rows_per_scale == 1
    return uses_dp4a(layout, dtype) and has_chunk_scales and supports_packed_gemv(packed)


def packed_experts_gemv_summed(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
    tilings: tuple[ExpertGemvTiling | None, ExpertGemvTiling | None] = (None, None),
) -> torch.Tensor:
    """Run the experts of each token: x [tokens, hidden], topk_* [tokens, top_k] -> like x."""
    up_tiling, down_tiling = tilings
    activation, up_bias, down_bias, weights_input = options
    prepared = fusion.prepared or prepare_inputs(x, describe_layout(up), fusion.prologue)
    input_weights = topk_weights if weights_input else None
    h = multiply_up(
        prepared, x, topk_ids, input_weights, up, up_bias, num_experts, activation, up_tiling
    )
    output_weights = None if weights_input else topk_weights
    return multiply_down(
        h, topk_ids, output_weights, down, down_bias, num_experts, x, fusion, down_tiling
    )


def chunk_columns(layout: PackedLayout) -> int:
    """Columns of a chunk of 16 bytes."""
    return 128 // layout.bits


class PreparationLaunch(NamedTuple):
    """The results of `prepare_chunks`, its arguments, and the blocks of a row."""

    prepared: PreparedInputs
    arguments: tuple[torch.Tensor | float, ...]
    constants: dict[str, str | int | bool]
    blocks: int


def describe_preparation(
    x: torch.Tensor, layout: PackedLayout, prologue: NormPrologue | None
) -> PreparationLaunch:
    """Allocate the rounded rows of x [rows, columns] and return the arguments of the kernel."""
    x = x.contiguous()
    rows, columns = x.shape
    chunks = columns // chunk_columns(layout)
    num_words = 16 if layout.bits == 4 else 8
    words = torch.empty(rows, chunks, num_words, dtype=torch.int32, device=x.device)
    scales = torch.empty(rows, chunks, 2, dtype=torch.float32, device=x.device)
    norm_weight = None if prologue is None else prologue.weight
    arguments = (
        x,
        x if norm_weight is None else norm_weight,
        words,
        scales,
        0.0 if prologue is None else prologue.eps,
    )
    constants: dict[str, str | int | bool] = {
        "COLUMNS": columns,
        "KIND": layout.kind,
        "BITS": layout.bits,
        "NORM": prologue is not None,
        "HAS_NORM_WEIGHT": norm_weight is not None,
        "INLINE_ASM": x.is_cuda,
        "BLOCK_CHUNKS": PREPARED_CHUNKS,
    }
    blocks = -(-chunks // PREPARED_CHUNKS)
    return PreparationLaunch(PreparedInputs(words, scales), arguments, constants, blocks)


def prepare_inputs(
    x: torch.Tensor, layout: PackedLayout, prologue: NormPrologue | None
) -> PreparedInputs:
    """Norm the rows of x [rows, columns] and round them for codes of this layout."""
    launch = describe_preparation(x, layout, prologue)
    prepare_inputs_kernel[(launch.blocks, len(x))](
        *launch.arguments, **launch.constants, num_warps=1, **pdl_options(x.device)
    )
    return launch.prepared


def route_and_prepare(
    x: torch.Tensor,
    layout: PackedLayout,
    prologue: NormPrologue | None,
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> tuple[torch.Tensor, torch.Tensor, PreparedInputs]:
    """Run `route_topk` and `prepare_inputs` in one launch."""
    routing = describe_routing(logits, top_k, router, correction_bias, expert_scale, fused_shared)
    preparation = describe_preparation(x, layout, prologue)
    route_and_prepare_kernel[(1 + preparation.blocks, len(x))](
        *routing.arguments,
        *preparation.arguments,
        **routing.constants,
        **preparation.constants,
        num_warps=routing.warps,
        **pdl_options(x.device),
    )
    return routing.topk_ids, routing.topk_weights, preparation.prepared


def layout_constants(packed: PackedWeight) -> dict[str, str | int | bool]:
    """The constants that describe a packed matrix to the kernel."""
    layout = describe_layout(packed)
    return {
        "COLUMNS": packed.shape[1],
        "KIND": layout.kind,
        "BITS": layout.bits,
        "GROUP_SIZE": layout.group_size,
        "HAS_ZERO": layout.zero_point is not None,
        "SIGNED": layout.signed,
        "INLINE_ASM": layout.codes.is_cuda,
    }


def multiply_up(
    prepared: PreparedInputs,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    input_weights: torch.Tensor | None,
    up: PackedWeight,
    bias: torch.Tensor | None,
    num_experts: int,
    activation: ActivationEpilogue,
    tiling: ExpertGemvTiling | None = None,
) -> torch.Tensor:
    """Multiply each pair by the up projection of its expert: [pairs, size], like x."""
    layout = describe_layout(up)
    tiling = tiling or UP_TILING
    rows = up.shape[0] // num_experts
    outputs = rows // 2 if activation.gated else rows
    num_pairs = topk_ids.numel()
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    name, gated, params = activation
    expert_up_kernel[(-(-outputs // tiling.outputs), num_pairs)](
        prepared.words,
        prepared.scales,
        layout.codes.view(torch.int32),
        layout.scale,
        layout.scale if layout.zero_point is None else layout.zero_point,
        topk_ids,
        topk_ids if input_weights is None else input_weights,
        out if bias is None else bias,
        out,
        *params,
        NUM_OUTPUTS=outputs,
        NUM_EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        WEIGHTS_INPUT=input_weights is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        ACTIVATION=name,
        **layout_constants(up),
        BLOCK_OUT=tiling.outputs,
        BLOCK_CHUNKS=tiling.chunks,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out


def multiply_down(
    h: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    down: PackedWeight,
    bias: torch.Tensor | None,
    num_experts: int,
    x: torch.Tensor,
    fusion: ExpertsFusion,
    tiling: ExpertGemvTiling | None = None,
) -> torch.Tensor:
    """Multiply h [pairs, size] by the down projections and sum: [tokens, hidden], like x.

    Without weights all of them are 1. The shared expert's output and the residual are added.
    """
    layout = describe_layout(down)
    tiling = tiling or DOWN_TILING
    outputs = down.shape[0] // num_experts
    tokens, top_k = topk_ids.shape
    launch = describe_expert_sum(x, fusion)
    expert_down_kernel[(-(-outputs // tiling.outputs), tokens)](
        h,
        layout.codes.view(torch.int32),
        layout.scale,
        layout.scale if layout.zero_point is None else layout.zero_point,
        topk_ids,
        topk_ids if topk_weights is None else topk_weights,
        x if bias is None else bias,
        *launch.arguments,
        NUM_OUTPUTS=outputs,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        HAS_WEIGHTS=topk_weights is not None,
        HAS_BIAS=bias is not None,
        **launch.constants,
        **layout_constants(down),
        BLOCK_OUT=tiling.outputs,
        BLOCK_CHUNKS=tiling.chunks,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return launch.out


# ---- kernels -------------------------------------------------------------------------------------


@jit
def prepare_inputs_kernel(
    x,  # [rows, COLUMNS]
    norm_weight,  # [COLUMNS]
    words,  # [rows, chunks, WORDS]
    scales,  # [rows, chunks, 2]
    eps,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program rounds BLOCK_CHUNKS chunks of one row."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    prepare_chunks(
        tl.program_id(0),
        tl.program_id(1).to(tl.int64),
        x,
        norm_weight,
        words,
        scales,
        eps,
        COLUMNS,
        KIND,
        BITS,
        NORM,
        HAS_NORM_WEIGHT,
        INLINE_ASM,
        BLOCK_CHUNKS,
    )


@jit
def route_and_prepare_kernel(
    logits,  # [tokens, NUM_EXPERTS], rows `stride` apart
    correction_bias,  # [NUM_EXPERTS]
    expert_scale,  # [NUM_EXPERTS]
    topk_ids,  # [tokens, TOP_K + NUM_SHARED]
    topk_weights,  # [tokens, TOP_K + NUM_SHARED]
    stride,
    logit_scale,
    softcap,
    min_normalizer,
    weight_scale,
    threshold,
    shared_weight,
    x,  # [rows, COLUMNS]
    norm_weight,  # [COLUMNS]
    words,  # [rows, chunks, WORDS]
    scales,  # [rows, chunks, 2]
    eps,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    SCORE: tl.constexpr,
    SCORE_CHOSEN_ONLY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_MEMBERS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program of a token chooses its experts, the others round chunks of its row."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        choose_experts(
            row,
            logits,
            correction_bias,
            expert_scale,
            topk_ids,
            topk_weights,
            stride,
            logit_scale,
            softcap,
            min_normalizer,
            weight_scale,
            threshold,
            shared_weight,
            NUM_EXPERTS,
            EXPERTS_POW2,
            TOP_K,
            TOP_K_POW2,
            NUM_SHARED,
            HAS_SHARED_GATE,
            SCORE,
            SCORE_CHOSEN_ONLY,
            SOFTCAP,
            HAS_CORRECTION,
            HAS_EXPERT_SCALE,
            NUM_GROUPS,
            GROUPS_POW2,
            TOP_GROUPS,
            GROUP_MEMBERS,
            NORMALIZE,
        )
    else:
        prepare_chunks(
            tl.program_id(0) - 1,
            row,
            x,
            norm_weight,
            words,
            scales,
            eps,
            COLUMNS,
            KIND,
            BITS,
            NORM,
            HAS_NORM_WEIGHT,
            INLINE_ASM,
            BLOCK_CHUNKS,
        )


@jit
def prepare_chunks(
    block,
    row,
    x,  # [rows, COLUMNS]
    norm_weight,  # [COLUMNS]
    words,  # [rows, chunks, WORDS]
    scales,  # [rows, chunks, 2]
    eps,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Norm and round a block of BLOCK_CHUNKS chunks of one row, whose norm is recomputed."""
    CHUNK_COLUMNS: tl.constexpr = 128 // BITS
    ROW_CHUNKS: tl.constexpr = COLUMNS // CHUNK_COLUMNS
    HALF: tl.constexpr = 8 if BITS == 4 else 4  # words of high bytes
    chunk = tl.arange(0, BLOCK_CHUNKS)
    column = chunk[:, None, None, None] * CHUNK_COLUMNS + tl.arange(0, 8)[None, None, None, :]
    x_ptr = x + row * COLUMNS + column
    square_sum = tl.zeros([BLOCK_CHUNKS, 1, 1], tl.float32)
    if NORM:
        for chunk0 in tl.range(0, ROW_CHUNKS, BLOCK_CHUNKS, num_stages=1):
            parts = load_x(x_ptr, chunk0, chunk, COLUMNS, CHUNK_COLUMNS)
            for i in tl.static_range(CHUNK_COLUMNS // 8):
                _, square_sum = apply_norm_weight(
                    parts[i], square_sum, norm_weight, None, True, False, 1, BLOCK_CHUNKS
                )
    own = block * BLOCK_CHUNKS
    inside = (own + chunk < ROW_CHUNKS)[:, None, None, None]
    parts = load_x(x_ptr, own, chunk, COLUMNS, CHUNK_COLUMNS)
    norm_ptr = norm_weight + own * CHUNK_COLUMNS + column
    v0, _ = apply_norm_weight(
        parts[0], square_sum, norm_ptr, inside, False, HAS_NORM_WEIGHT, 1, BLOCK_CHUNKS
    )
    v1, _ = apply_norm_weight(
        parts[1], square_sum, norm_ptr + 8, inside, False, HAS_NORM_WEIGHT, 1, BLOCK_CHUNKS
    )
    v2 = v0
    v3 = v1
    if BITS == 4:
        v2, _ = apply_norm_weight(
            parts[2], square_sum, norm_ptr + 16, inside, False, HAS_NORM_WEIGHT, 1, BLOCK_CHUNKS
        )
        v3, _ = apply_norm_weight(
            parts[3], square_sum, norm_ptr + 24, inside, False, HAS_NORM_WEIGHT, 1, BLOCK_CHUNKS
        )
    scale, high, low, high_sum, low_sum = quantize_x(v0, v1, v2, v3, KIND, BITS, INLINE_ASM)
    if NORM:
        scale *= tl.rsqrt(tl.sum(square_sum, 0) / COLUMNS + eps)[None, :, :]
    is_chunk = (own + chunk < ROW_CHUNKS)[:, None, None]
    place = row * ROW_CHUNKS + own + chunk[:, None, None]
    for i in tl.static_range(HALF):
        tl.store(words + place * (2 * HALF) + i, high[i], mask=is_chunk)
        tl.store(words + place * (2 * HALF) + HALF + i, low[i], mask=is_chunk)
    tl.store(scales + place * 2, scale, mask=is_chunk)
    tl.store(scales + place * 2 + 1, scale * (high_sum * 256 + low_sum).to(tl.float32), is_chunk)


@jit
def load_prepared(words, scales, place, inside, BITS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Load the prepared chunks at `place` [chunks]: scale, high and low words, and the sums."""
    WORDS: tl.constexpr = 16 if BITS == 4 else 8
    ptr = words + place[:, None, None, None] * WORDS + tl.arange(0, 4)[None, None, None, :]
    mask = inside[:, None, None, None]
    first = split_words(tl.load(ptr, mask=mask, other=0), 1, BLOCK_CHUNKS, False)
    second = split_words(tl.load(ptr + 4, mask=mask, other=0), 1, BLOCK_CHUNKS, False)
    scale_ptr = scales + place[:, None, None] * 2
    scale = tl.load(scale_ptr, mask=inside[:, None, None], other=0.0)
    x_sum = tl.load(scale_ptr + 1, mask=inside[:, None, None], other=0.0)
    if BITS == 4:
        third = split_words(tl.load(ptr + 8, mask=mask, other=0), 1, BLOCK_CHUNKS, False)
        fourth = split_words(tl.load(ptr + 12, mask=mask, other=0), 1, BLOCK_CHUNKS, False)
        return scale, first + second, third + fourth, x_sum
    else:
        return scale, first, second, x_sum


@jit
def expert_up_kernel(
    x_words,  # [tokens, chunks, words]
    x_scales,  # [tokens, chunks, 2]
    codes,  # [experts * rows, row bytes / 4] int32
    scale,
    zero,
    expert_ids,  # [pairs]
    input_weights,  # [pairs]
    bias,  # [experts, rows]
    out,  # [pairs, NUM_OUTPUTS]
    param0,
    param1,
    param2,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTS_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of one pair. Tiles are [chunks, 1, outputs]."""
    wait_for_previous(PDL)
    launch_dependents(PDL)  # after the wait: the next kernel may read the expert ids early
    CHUNK_COLUMNS: tl.constexpr = 128 // BITS
    ROW_CHUNKS: tl.constexpr = COLUMNS // CHUNK_COLUMNS
    EXPERT_ROWS: tl.constexpr = 2 * NUM_OUTPUTS if GATED else NUM_OUTPUTS
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(expert_ids + pair)
    expert = tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, 0).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = output if NUM_OUTPUTS % BLOCK_OUT == 0 else tl.minimum(output, NUM_OUTPUTS - 1)
    row = expert * EXPERT_ROWS + row
    chunk = tl.arange(0, BLOCK_CHUNKS)
    x_place = pair // TOP_K * ROW_CHUNKS + chunk
    word = chunk[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    ptr = codes + row[None, None, :, None] * (ROW_CHUNKS * 4) + word
    UP: tl.constexpr = NUM_OUTPUTS if GATED else 0
    y = tl.zeros([BLOCK_CHUNKS, 1, BLOCK_OUT], tl.float32)
    z = y
    next_gate = load_chunks(ptr, 0, chunk, ROW_CHUNKS)
    next_up = next_gate
    if GATED:
        next_up = load_chunks(ptr + UP * (ROW_CHUNKS * 4), 0, chunk, ROW_CHUNKS)
    for chunk0 in tl.range(0, ROW_CHUNKS, BLOCK_CHUNKS, num_stages=1):
        gate = next_gate
        up = next_up
        next_gate = load_chunks(ptr, chunk0 + BLOCK_CHUNKS, chunk, ROW_CHUNKS)
        if GATED:
            next_up = load_chunks(
                ptr + UP * (ROW_CHUNKS * 4), chunk0 + BLOCK_CHUNKS, chunk, ROW_CHUNKS
            )
        inside = chunk0 + chunk < ROW_CHUNKS
        x_scale, high, low, x_sum = load_prepared(
            x_words, x_scales, x_place + chunk0, inside, BITS, BLOCK_CHUNKS
        )
        zeros = tl.zeros([BLOCK_CHUNKS, 1, BLOCK_OUT], tl.int32)
        part = x_scale * dot_chunk(
            split_words(gate, BLOCK_OUT, BLOCK_CHUNKS, SIGNED),
            high,
            low,
            zeros,
            KIND,
            BITS,
            INLINE_ASM,
        )
        s, zero_point = load_chunk_scales(
            scale,
            zero,
            scale,
            row,
            chunk0,
            chunk,
            KIND,
            COLUMNS,
            CHUNK_COLUMNS,
            GROUP_SIZE,
            1,
            0,
            HAS_ZERO,
        )
        y += s * subtract_zero(part, x_sum, zero_point, KIND, BITS, HAS_ZERO, True)
        if GATED:
            part = x_scale * dot_chunk(
                split_words(up, BLOCK_OUT, BLOCK_CHUNKS, SIGNED),
                high,
                low,
                zeros,
                KIND,
                BITS,
                INLINE_ASM,
            )
            s, zero_point = load_chunk_scales(
                scale,
                zero,
                scale,
                row + UP,
                chunk0,
                chunk,
                KIND,
                COLUMNS,
                CHUNK_COLUMNS,
                GROUP_SIZE,
                1,
                0,
                HAS_ZERO,
            )
            z += s * subtract_zero(part, x_sum, zero_point, KIND, BITS, HAS_ZERO, True)
    y = tl.sum(y, 0)
    z = tl.sum(z, 0)
    if WEIGHTS_INPUT:
        input_weight = tl.load(input_weights + pair).to(tl.float32)
        y = y * input_weight
        z = z * input_weight
    if HAS_BIAS:
        y += tl.load(bias + row)[None, :].to(tl.float32)
        if GATED:
            z += tl.load(bias + row + UP)[None, :].to(tl.float32)
    y = activate_tile(y, z, ACTIVATION, GATED, param0, param1, param2)
    offset = pair * NUM_OUTPUTS + output
    tl.store(
        out + offset[None, :], y.to(out.dtype.element_ty), mask=(output < NUM_OUTPUTS)[None, :]
    )


@jit
def expert_down_kernel(
    x,  # [tokens * TOP_K, COLUMNS]
    codes,  # [experts * NUM_OUTPUTS, row bytes / 4] int32
    scale,
    zero,
    expert_ids,  # [tokens, TOP_K]
    topk_weights,  # [tokens, TOP_K]
    bias,  # [experts, NUM_OUTPUTS]
    shared,  # [tokens, NUM_OUTPUTS]
    gate_logits,  # [tokens]
    residual,  # [tokens, NUM_OUTPUTS]
    out,  # [tokens, NUM_OUTPUTS]
    residual_scale,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    INLINE_ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of one token: the sum over its TOP_K experts.

    The rows of the experts are one row of TOP_K * ROW_CHUNKS chunks. Tiles are [chunks, 1,
    outputs].
    """
    launch_dependents(PDL)
    CHUNK_COLUMNS: tl.constexpr = 128 // BITS
    ROW_CHUNKS: tl.constexpr = COLUMNS // CHUNK_COLUMNS
    ALL_CHUNKS: tl.constexpr = TOP_K * ROW_CHUNKS
    NUM_GROUPS: tl.constexpr = COLUMNS // GROUP_SIZE
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = output if NUM_OUTPUTS % BLOCK_OUT == 0 else tl.minimum(output, NUM_OUTPUTS - 1)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    # The kernel before this one has passed its wait, so the experts are known (see above).
    next_row, next_weight = find_expert_chunks(
        expert_ids,
        topk_weights,
        token,
        chunk,
        NUM_OUTPUTS,
        NUM_EXPERTS,
        TOP_K,
        ROW_CHUNKS,
        HAS_WEIGHTS,
    )
    next_words = load_expert_chunks(codes, next_row, row, chunk, ROW_CHUNKS, ALL_CHUNKS)
    wait_for_previous(PDL)
    x_ptr = x + token * (TOP_K * COLUMNS)
    x_ptr += chunk[:, None, None, None] * CHUNK_COLUMNS + tl.arange(0, 8)[None, None, None, :]
    y = tl.zeros([BLOCK_CHUNKS, 1, BLOCK_OUT], tl.float32)
    for chunk0 in tl.range(0, ALL_CHUNKS, BLOCK_CHUNKS, num_stages=1):
        words = next_words
        expert_row = next_row
        weight = next_weight
        place = chunk0 + BLOCK_CHUNKS + chunk
        next_row, next_weight = find_expert_chunks(
            expert_ids,
            topk_weights,
            token,
            place,
            NUM_OUTPUTS,
            NUM_EXPERTS,
            TOP_K,
            ROW_CHUNKS,
            HAS_WEIGHTS,
        )
        next_words = load_expert_chunks(codes, next_row, row, place, ROW_CHUNKS, ALL_CHUNKS)
        x0, x1, x2, x3 = load_x(x_ptr, chunk0, chunk, TOP_K * COLUMNS, CHUNK_COLUMNS)
        v0, _ = apply_norm_weight(x0, y, x, None, False, False, 1, BLOCK_CHUNKS)
        v1, _ = apply_norm_weight(x1, y, x, None, False, False, 1, BLOCK_CHUNKS)
        v2 = v0
        v3 = v1
        if BITS == 4:
            v2, _ = apply_norm_weight(x2, y, x, None, False, False, 1, BLOCK_CHUNKS)
            v3, _ = apply_norm_weight(x3, y, x, None, False, False, 1, BLOCK_CHUNKS)
        x_scale, high, low, high_sum, low_sum = quantize_x(v0, v1, v2, v3, KIND, BITS, INLINE_ASM)
        x_scale *= weight[:, None, None]
        part = x_scale * dot_chunk(
            split_words(words, BLOCK_OUT, BLOCK_CHUNKS, SIGNED),
            high,
            low,
            tl.zeros([BLOCK_CHUNKS, 1, BLOCK_OUT], tl.int32),
            KIND,
            BITS,
            INLINE_ASM,
        )
        x_sum = x_scale * (high_sum * 256 + low_sum).to(tl.float32)
        group = (chunk0 + chunk) % ROW_CHUNKS * CHUNK_COLUMNS // GROUP_SIZE
        first_scale = (expert_row * NUM_GROUPS + group)[:, None, None]
        row_scale = (row * NUM_GROUPS)[None, None, :]
        s = scale_to_float(tl.load((scale + first_scale) + row_scale), KIND)
        zero_point = s
        if HAS_ZERO:
            zero_point = tl.load((zero + first_scale) + row_scale).to(tl.float32)
        y += s * subtract_zero(part, x_sum, zero_point, KIND, BITS, HAS_ZERO, True)
    total = tl.sum(tl.sum(y, 0), 0)
    if HAS_BIAS:
        for choice in tl.static_range(TOP_K):
            expert = tl.load(expert_ids + token * TOP_K + choice)
            is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
            bias_weight = tl.where(is_expert, 1.0, 0.0)
            if HAS_WEIGHTS:
                bias_weight *= tl.load(topk_weights + token * TOP_K + choice).to(tl.float32)
            bias_row = tl.where(is_expert, expert, 0).to(tl.int64) * NUM_OUTPUTS
            total += bias_weight * tl.load(bias + bias_row + row).to(tl.float32)
    store_expert_sum(
        total,
        token,
        output,
        shared,
        gate_logits,
        residual,
        out,
        residual_scale,
        NUM_OUTPUTS,
        HAS_SHARED,
        HAS_GATE,
        HAS_RESIDUAL,
    )


@jit
def find_expert_chunks(
    expert_ids,
    topk_weights,
    token,
    place,  # [chunks]
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Return for chunks of the long row: their expert's first row, and its weight.

    The weight is 0 past the last chunk, and where the id is no expert.
    """
    choice = place // ROW_CHUNKS
    pair = token * TOP_K + tl.minimum(choice, TOP_K - 1)
    expert = tl.load(expert_ids + pair)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS) & (choice < TOP_K)
    weight = tl.where(is_expert, 1.0, 0.0)
    if HAS_WEIGHTS:
        weight *= tl.load(topk_weights + pair).to(tl.float32)
    return tl.where(is_expert, expert, 0).to(tl.int64) * NUM_OUTPUTS, weight


@jit
def load_expert_chunks(
    codes,
    expert_row,  # [chunks]
    row,  # [outputs]
    place,  # [chunks]
    ROW_CHUNKS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
):
    """Load the codes of these chunks [chunks, 1, outputs, 4 words], zeros past the last chunk."""
    first = (expert_row * ROW_CHUNKS + place % ROW_CHUNKS) * 4
    offset = (row * (ROW_CHUNKS * 4))[None, None, :, None] + tl.arange(0, 4)[None, None, None, :]
    ptr = (codes + first[:, None, None, None]) + offset
    inside = (place < ALL_CHUNKS)[:, None, None, None]
    return tl.load(ptr, mask=inside, other=0, eviction_policy="evict_first")

"""Mixture of experts with packed weights: kernels/moe.py without dequantizing in memory.

    y [tokens, hidden] = sum over the top-k experts e of topk_weights * down_e(act(gate_e, up_e))

The weights of all experts lie one below the other in a single packed matrix: `up` is
[experts * (gate | up), hidden] and `down` is [experts * hidden, size].

    gemv      few token-expert pairs, which seldom share an expert: kernels/packed_moe_gemv.py, or
              kernels/packed_gemv.py for formats that it cannot read
    grouped   pairs sorted by expert, on the tensor cores: kernels/packed_gemm.py. One program
              computes BLOCK_OUT outputs of up to BLOCK_PAIRS pairs of one expert.

A pair is a token with one of its experts: pair i = token * top_k + j. quant/experts.py chooses this
file. It must not know layers or checkpoint formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bloomery.fusion import ActivationEpilogue
from bloomery.kernels.activation import activate_tile
from bloomery.kernels.gemv import ExpertRouting
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    num_multiprocessors,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.moe import (
    ExpertOptions,
    ExpertOrder,
    ExpertsFusion,
    fused_experts_reference,
    locate_expert_block,
    sort_by_expert,
    sum_expert_outputs,
)
from bloomery.kernels.packed import GroupedScales, PackedWeight, describe_layout
from bloomery.kernels.packed_gemm import (
    PackedGemmTiling,
    count_units,
    layout_constants,
    multiply_tile,
    permute_inputs,
    select_split_k_tiling,
    supports_packed_gemm,
)
from bloomery.kernels.packed_gemv import (
    PackedGemvTiling,
    packed_gemv_triton,
    supports_packed_gemv,
)
from bloomery.kernels.packed_moe_gemv import packed_experts_gemv_summed, supports_expert_gemv

# Pairs per expert, rounded up to a power of two -> fastest tiling of 4-bit floats, measured on an
# H200 with `benchmarks/packed.py tune experts`.
MXFP4_TILINGS: Mapping[int, PackedGemmTiling] = {
    16: PackedGemmTiling(16, 64, 4, 3, 1),
    32: PackedGemmTiling(64, 128, 4, 3, 1),
}


def supports_packed_experts(packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether both kernels can read this matrix."""
    if isinstance(packed, GroupedScales) and packed.act_order is not None:
        return False
    if dtype.itemsize != 2:
        return False
    return supports_packed_gemv(packed) and supports_packed_gemm(packed)


def packed_fused_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
) -> torch.Tensor:
    """Run the experts of each token: x [tokens, hidden], topk_* [tokens, top_k] -> like x."""
    run: Callable[..., torch.Tensor] = packed_experts_grouped
    top_k = topk_ids.shape[1]
    if can_prepare_experts(x, up, down, num_experts, top_k):
        run = packed_experts_gemv_summed
    elif has_few_pairs(len(x), top_k, num_experts):
        run = packed_experts_gemv
    return run(x, topk_ids, topk_weights, up, down, num_experts, options, fusion)


def has_few_pairs(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether pairs seldom share an expert."""
    return tokens * top_k <= max(top_k, num_experts // 4)


def can_prepare_experts(
    x: torch.Tensor, up: PackedWeight, down: PackedWeight, num_experts: int, top_k: int
) -> bool:
    """Whether `packed_fused_experts` rounds x [tokens, hidden] before it multiplies."""
    is_fast = supports_expert_gemv(up, x.dtype) and supports_expert_gemv(down, x.dtype)
    return is_fast and has_few_pairs(len(x), top_k, num_experts)


def packed_fused_experts_reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
) -> torch.Tensor:
    """The torch reference: a loop over dequantized experts."""
    up_weight = up.dequantize(x.dtype).unflatten(0, (num_experts, -1))
    down_weight = down.dequantize(x.dtype).unflatten(0, (num_experts, -1))
    return fused_experts_reference(
        x, topk_ids, topk_weights, up_weight, down_weight, options, fusion
    )


def packed_experts_gemv(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
    tilings: tuple[PackedGemvTiling | None, PackedGemvTiling | None] = (None, None),
) -> torch.Tensor:
    """Run the experts with one GEMV per token-expert pair."""
    activation, up_bias, down_bias, weights_input = options
    up_routing = ExpertRouting(topk_ids, num_experts, topk_weights if weights_input else None)
    down_routing = ExpertRouting(topk_ids, num_experts)
    up_tiling, down_tiling = tilings
    # Every program would recompute a fused norm, and each of them reads a few rows only.
    x, fusion = fusion.apply_prologue(x)
    h = packed_gemv_triton(x, up, up_bias, None, activation, up_tiling, up_routing)
    y = packed_gemv_triton(h, down, down_bias, None, None, down_tiling, down_routing)
    output_weights = None if weights_input else topk_weights
    return sum_expert_outputs(y, topk_ids, output_weights, num_experts, x, fusion)


def packed_experts_grouped(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
    tilings: tuple[PackedGemmTiling | None, PackedGemmTiling | None] = (None, None),
) -> torch.Tensor:
    """Run the experts with grouped GEMMs over the pairs, sorted by expert."""
    activation, up_bias, down_bias, weights_input = options
    input_weights = topk_weights if weights_input else None
    up_tiling, down_tiling = tilings
    x, fusion = fusion.apply_prologue(x)
    order = sort_by_expert(topk_ids, num_experts)
    top_k = topk_ids.shape[1]
    h = packed_grouped_gemm(x, up, up_bias, order, top_k, activation, input_weights, up_tiling)
    y = packed_grouped_gemm(h, down, down_bias, order, 1, None, None, down_tiling)
    output_weights = None if weights_input else topk_weights
    return sum_expert_outputs(y, topk_ids, output_weights, num_experts, x, fusion)


def packed_pair_products(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    num_experts: int,
) -> torch.Tensor:
    """Multiply the row of every pair by the matrix of its expert: [pairs, in] -> [pairs, out]."""
    if topk_ids.numel() <= max(topk_ids.shape[1], num_experts // 4):
        routing = ExpertRouting(topk_ids, num_experts)
        return packed_gemv_triton(x, packed, bias, None, None, None, routing)
    order = sort_by_expert(topk_ids, num_experts)
    return packed_grouped_gemm(order.gather(x), packed, bias, order, 1, None)


def packed_grouped_gemm(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    order: ExpertOrder,
    top_k: int,
    activation: ActivationEpilogue | None,
    input_weights: torch.Tensor | None = None,
    tiling: PackedGemmTiling | None = None,
) -> torch.Tensor:
    """Multiply every pair by the weights of its expert: [pairs, outputs].

    With an activation, x has one row per token, and row i of the result belongs to
    sorted_pairs[i]. Without one, x has the rows of such a result, and the rows of the result are in
    the order of the pairs. `input_weights` [tokens, top_k] multiply the rows of x.
    """
    num_pairs = len(order.sorted_pairs)
    num_experts = order.expert_ranges.shape[1]
    gated = activation is not None and activation.gated
    name, _, params = activation or ActivationEpilogue("", False)
    layout = describe_layout(packed)
    columns = packed.shape[1]
    rows = packed.shape[0] // num_experts
    outputs = rows // 2 if gated else rows
    if tiling is None:
        pairs_per_expert = min(128, max(16, num_pairs // num_experts))
        tiling = select_grouped_tiling(packed, pairs_per_expert, gated, x.device)
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    x = permute_inputs(x, layout, None, tiling.units_per_iter)
    max_blocks = (num_pairs + num_experts * (tiling.tokens - 1)) // tiling.tokens
    grid = (min(num_pairs, max_blocks), -(-outputs // tiling.outputs))
    packed_grouped_gemm_kernel[grid](
        x,
        layout.codes.view(torch.int16),
        layout.scale,
        x if layout.zero_point is None else layout.zero_point,
        x if layout.table is None else layout.table,
        x if bias is None else bias,
        x if input_weights is None else input_weights,
        out,
        order.sorted_pairs,
        order.expert_ranges,
        outputs,
        columns,
        *params,
        NUM_EXPERTS=num_experts,
        EXPERTS_POW2=next_power_of_2(num_experts),
        TOP_K=top_k,
        IS_UP=activation is not None,
        ACTIVATION=name,
        GATED=gated,
        HAS_BIAS=bias is not None,
        WEIGHTS_INPUT=input_weights is not None,
        **layout_constants(packed, x.dtype, x.device, tiling.units_per_iter),
        BLOCK_OUT=tiling.outputs,
        BLOCK_PAIRS=tiling.tokens,
        WARPS=tiling.warps,
        STAGES=tiling.stages,
        UNITS_PER_ITER=tiling.units_per_iter,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out


def select_grouped_tiling(
    packed: PackedWeight, pairs_per_expert: int, gated: bool, device: torch.device
) -> PackedGemmTiling:
    """Choose the tiling for experts that have so many pairs on average, 16 to 128."""
    layout = describe_layout(packed)
    tile_pairs = next_power_of_2(pairs_per_expert)
    if layout.kind == "mxfp4" and tile_pairs in MXFP4_TILINGS:
        return MXFP4_TILINGS[tile_pairs]
    rows, columns = packed.shape
    units = count_units(columns, layout.bits)
    tiling = select_split_k_tiling(
        pairs_per_expert, rows, units, layout.kind, layout.bits, num_multiprocessors(device)
    )
    if gated and tiling.tokens >= 64:
        return tiling._replace(outputs=64)  # two sums are in registers
    return tiling


@jit
def packed_grouped_gemm_kernel(
    x,  # [tokens or pairs, columns], permuted
    codes,  # [experts * rows, row bytes / 2] int16
    scale,
    zero,
    table,
    bias,  # [experts, rows]
    input_weights,  # [pairs]
    out,  # [pairs, outputs]
    sorted_pairs,
    expert_ranges,
    outputs,
    columns,
    param0,
    param1,
    param2,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTS_INPUT: tl.constexpr,
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
    BLOCK_PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    UNITS_PER_ITER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of up to BLOCK_PAIRS pairs of one expert: gate first, then up."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert, start, end = locate_expert_block(
        tl.program_id(0), expert_ranges, NUM_EXPERTS, EXPERTS_POW2, BLOCK_PAIRS
    )
    if expert < NUM_EXPERTS:
        place = start + tl.arange(0, BLOCK_PAIRS)
        pair = tl.load(sorted_pairs + tl.minimum(place, end - 1))
        x_row = pair // TOP_K if IS_UP else tl.minimum(place, end - 1)
        first_output = tl.program_id(1) * BLOCK_OUT
        expert_row = expert * (2 * outputs if GATED else outputs)
        UNIT: tl.constexpr = 512 // BITS
        num_units = (columns + UNIT - 1) // UNIT
        y = multiply_tile(
            x,
            x_row,
            codes,
            scale,
            zero,
            table,
            expert_row + first_output,
            expert_row + outputs,
            0,
            num_units,
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
            BLOCK_PAIRS,
            WARPS,
            STAGES,
            UNITS_PER_ITER,
            False,
        )
        up = y
        if GATED:
            up = multiply_tile(
                x,
                x_row,
                codes,
                scale,
                zero,
                table,
                expert_row + outputs + first_output,
                expert_row + 2 * outputs,
                0,
                num_units,
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
                BLOCK_PAIRS,
                WARPS,
                STAGES,
                UNITS_PER_ITER,
                False,
            )
        output = first_output + tl.arange(0, BLOCK_OUT)
        is_output = output < outputs
        if WEIGHTS_INPUT:
            input_weight = tl.load(input_weights + pair).to(tl.float32)[None, :]
            y = y * input_weight
            up = up * input_weight
        if HAS_BIAS:
            bias_ptr = bias + expert_row + output
            y += tl.load(bias_ptr, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
                up += up_bias.to(tl.float32)[:, None]
        if IS_UP:
            y = activate_tile(y, up, ACTIVATION, GATED, param0, param1, param2)
        out_row = (place if IS_UP else pair).to(tl.int64)
        offset = out_row[None, :] * outputs + output[:, None]
        mask = is_output[:, None] & (place < end)[None, :]
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)

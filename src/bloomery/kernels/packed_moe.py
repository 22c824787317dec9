"""Mixture of experts with packed weights: kernels/moe.py without dequantizing in memory.

    y [tokens, hidden] = sum over the top-k experts e of topk_weights * down_e(act(gate_e, up_e))

The weights of all experts lie one below the other in a single packed matrix: `up` is
[experts * (gate | up), hidden] and `down` is [experts * hidden, size].

    gemv      few token-expert pairs, which seldom share an expert: kernels/packed_gemv.py
    grouped   pairs sorted by expert, on the tensor cores: kernels/packed_gemm.py. One program
              computes BLOCK_OUT outputs of up to BLOCK_PAIRS pairs of one expert.

A pair is a token with one of its experts: pair i = token * top_k + j. quant/experts.py chooses this
file. It must not know layers or checkpoint formats.
"""

from __future__ import annotations

import torch

from bloomery.fusion import ActivationEpilogue
from bloomery.kernels.activation import activation_tile
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
    fused_experts_reference,
    locate_expert_block,
    sort_by_expert_kernel,
    sum_expert_outputs,
)
from bloomery.kernels.packed import GroupedScales, PackedWeight, describe_layout
from bloomery.kernels.packed_gemm import (
    PackedGemmTiling,
    layout_constants,
    multiply_tile,
    permute_inputs,
    select_split_k_tiling,
    supports_packed_gemm,
    unit_columns,
)
from bloomery.kernels.packed_gemv import (
    PackedGemvTiling,
    packed_gemv_triton,
    supports_packed_gemv,
)


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
    activation: str = "silu",
) -> torch.Tensor:
    """Run the experts of each token: x [tokens, hidden], topk_* [tokens, top_k] -> like x."""
    few_pairs = topk_ids.numel() <= max(topk_ids.shape[1], num_experts // 4)
    run = packed_experts_gemv if few_pairs else packed_experts_grouped
    return run(x, topk_ids, topk_weights, up, down, num_experts, activation)


def packed_fused_experts_reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    activation: str = "silu",
) -> torch.Tensor:
    """The torch reference: a loop over dequantized experts."""
    up_weight = up.dequantize(x.dtype).unflatten(0, (num_experts, -1))
    down_weight = down.dequantize(x.dtype).unflatten(0, (num_experts, -1))
    return fused_experts_reference(x, topk_ids, topk_weights, up_weight, down_weight, activation)


def packed_experts_gemv(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    activation: str = "silu",
    tiling: PackedGemvTiling | None = None,
) -> torch.Tensor:
    """Run the experts with one GEMV per token-expert pair."""
    gate = ActivationEpilogue(activation, True)
    h = packed_gemv_triton(x, up, None, None, gate, tiling, topk_ids, num_experts)
    y = packed_gemv_triton(h, down, None, None, None, tiling, topk_ids, num_experts)
    return sum_expert_outputs(y, topk_ids, topk_weights, num_experts, x, None, 1.0)


def packed_experts_grouped(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    activation: str = "silu",
    tiling: PackedGemmTiling | None = None,
) -> torch.Tensor:
    """Run the experts with grouped GEMMs over the pairs, sorted by expert."""
    num_pairs = topk_ids.numel()
    sorted_pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    # The first pair of each expert in the sorted order, and how many it has.
    expert_ranges = torch.empty(2, num_experts, dtype=torch.int32, device=x.device)
    sort_by_expert_kernel[(num_experts,)](
        topk_ids,
        sorted_pairs,
        expert_ranges,
        num_pairs,
        num_experts,
        WIDTH=min(8192, max(32, next_power_of_2(num_pairs))),
        num_warps=8 if num_pairs > 1024 else 4,
        **pdl_options(x.device),
    )
    top_k = topk_ids.shape[1]
    h = packed_grouped_gemm(x, up, sorted_pairs, expert_ranges, top_k, activation, tiling)
    y = packed_grouped_gemm(h, down, sorted_pairs, expert_ranges, 1, None, tiling)
    return sum_expert_outputs(y, topk_ids, topk_weights, num_experts, x, None, 1.0)


def packed_grouped_gemm(
    x: torch.Tensor,
    packed: PackedWeight,
    sorted_pairs: torch.Tensor,
    expert_ranges: torch.Tensor,
    top_k: int,
    activation: str | None,
    tiling: PackedGemmTiling | None = None,
) -> torch.Tensor:
    """Multiply every pair by the weights of its expert: [pairs, outputs].

    With an activation, x has one row per token, the weights are gate | up, and row i of the result
    belongs to sorted_pairs[i]. Without one, x has the rows of such a result, and the rows of the
    result are in the order of the pairs.
    """
    num_pairs = len(sorted_pairs)
    num_experts = expert_ranges.shape[1]
    layout = describe_layout(packed)
    columns = packed.shape[1]
    rows = packed.shape[0] // num_experts
    outputs = rows // 2 if activation else rows
    if tiling is None:
        units = columns // unit_columns(layout.bits)
        tokens = min(128, max(16, num_pairs // num_experts))
        multiprocessors = num_multiprocessors(x.device)
        tiling = select_split_k_tiling(
            tokens, packed.shape[0], units, layout.kind, layout.bits, multiprocessors
        )
        if activation and tiling.tokens >= 64:
            tiling = tiling._replace(outputs=64)  # two sums are in registers
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    x = permute_inputs(x, layout, None)
    max_blocks = (num_pairs + num_experts * (tiling.tokens - 1)) // tiling.tokens
    grid = (min(num_pairs, max_blocks), -(-outputs // tiling.outputs))
    packed_grouped_gemm_kernel[grid](
        x,
        layout.codes.view(torch.int16),
        layout.scale,
        x if layout.zero_point is None else layout.zero_point,
        x if layout.table is None else layout.table,
        out,
        sorted_pairs,
        expert_ranges,
        outputs,
        columns,
        NUM_EXPERTS=num_experts,
        EXPERTS_POW2=next_power_of_2(num_experts),
        TOP_K=top_k,
        ACTIVATION=activation,
        **layout_constants(packed, x.dtype, x.device),
        BLOCK_OUT=tiling.outputs,
        BLOCK_PAIRS=tiling.tokens,
        WARPS=tiling.warps,
        STAGES=tiling.stages,
        UNITS_PER_ITER=tiling.units_per_iter,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out


@jit
def packed_grouped_gemm_kernel(
    x,  # [tokens or pairs, columns], permuted
    codes,  # [experts * rows, row bytes / 2] int16
    scale,
    zero,
    table,
    out,  # [pairs, outputs]
    sorted_pairs,
    expert_ranges,
    outputs,
    columns,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
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
        GATED: tl.constexpr = ACTIVATION is not None
        x_row = pair // TOP_K if GATED else tl.minimum(place, end - 1)
        first_output = tl.program_id(1) * BLOCK_OUT
        expert_row = expert * (2 * outputs if GATED else outputs)
        num_units = columns // (512 // BITS)
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
            DEQUANTIZE_ASM,
            BLOCK_OUT,
            BLOCK_PAIRS,
            WARPS,
            STAGES,
            UNITS_PER_ITER,
            False,
        )
        if GATED:
            expert_row += outputs
            up = multiply_tile(
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
                DEQUANTIZE_ASM,
                BLOCK_OUT,
                BLOCK_PAIRS,
                WARPS,
                STAGES,
                UNITS_PER_ITER,
                False,
            )
            y = activation_tile(y, ACTIVATION) * up
        output = first_output + tl.arange(0, BLOCK_OUT)
        out_row = (place if GATED else pair).to(tl.int64)
        offset = out_row[None, :] * outputs + output[:, None]
        mask = (output < outputs)[:, None] & (place < end)[None, :]
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)

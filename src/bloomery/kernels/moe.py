"""Mixture of experts: route tokens to experts, run the experts, and sum their outputs.

    route_topk      a router's logits -> the experts of each token and their weights
    fused_experts   activation(gate) * up of the chosen experts, back down, and the weighted sum

A pair is a (token, choice) pair: one token at one of its top_k experts. Pairs are sorted by expert,
so that the weights of an expert are read once for all of its tokens. The pairs of each expert are
split into blocks. A launch has as many programs as there could be blocks; programs beyond the last
block return immediately. All shapes are known to the host, so a step can be captured in a CUDA
graph. The sum over a token's choices runs in their order, so a result does not depend on other
tokens of the batch. If there are few pairs, which seldom share an expert, each pair is a GEMV of
its own (kernels/gemv).

An expert id outside the range, as a padding row may have, selects no expert and adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bloomery.fusion import ActivationEpilogue
from bloomery.kernels.activation import activation_tile, gated_activation_reference
from bloomery.kernels.gemv import gemv_triton, supports_gemv
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)

FEW_TOKENS = 16  # up to this many, the reference multiplies all tokens by every chosen expert


class GroupedGemmTiling(NamedTuple):
    """How a grouped GEMM is divided into programs."""

    pairs: int
    outputs: int
    inputs: int  # of 16-bit inputs; half as many of 32-bit inputs
    warps: int
    stages: int


# By pairs of a block. The up projection computes two products (gate and up), down computes one.
UP_TILINGS: Mapping[int, GroupedGemmTiling] = {
    16: GroupedGemmTiling(16, 64, 128, 4, 4),
    32: GroupedGemmTiling(32, 64, 128, 4, 4),
    64: GroupedGemmTiling(64, 64, 64, 4, 4),
    128: GroupedGemmTiling(128, 128, 64, 8, 3),
}
DOWN_TILINGS: Mapping[int, GroupedGemmTiling] = {
    16: GroupedGemmTiling(16, 64, 128, 4, 5),
    32: GroupedGemmTiling(32, 64, 128, 4, 5),
    64: GroupedGemmTiling(64, 128, 64, 4, 4),
    128: GroupedGemmTiling(128, 256, 64, 8, 3),
}


# ---- routing ----


def route_topk(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest experts of each token and their weights, for logits [tokens, experts].

    Expert ids [tokens, top_k] are int32, likeliest first; weights are float32.
    """
    if use_triton(logits):
        return route_topk_triton(logits, top_k, renormalize)
    return route_topk_reference(logits, top_k, renormalize)


def route_topk_reference(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch reference of `route_topk`."""
    probabilities = logits.float().softmax(-1)
    weights, expert_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    topk_weights = weights[:, :top_k]
    topk_ids = expert_ids[:, :top_k]
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    return topk_ids.to(torch.int32), topk_weights.contiguous()


def route_topk_triton(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel."""
    tokens, num_experts = logits.shape
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    topk_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    route_topk_kernel[(tokens,)](
        logits,
        topk_ids,
        topk_weights,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_POW2=next_power_of_2(num_experts),
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        num_warps=1 if num_experts <= 128 else 4,
        **pdl_options(logits.device),
    )
    return topk_ids, topk_weights


@jit
def route_topk_kernel(
    logits,  # [tokens, NUM_EXPERTS], rows `stride` apart
    topk_ids,  # [tokens, TOP_K]
    topk_weights,  # [tokens, TOP_K]
    stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program routes one token: it takes the best expert TOP_K times."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS_POW2)
    scores = tl.load(logits + token * stride + e, mask=e < NUM_EXPERTS, other=-float("inf"))
    scores = scores.to(tl.float32)
    top = tl.max(scores, 0)
    remaining = scores
    total = tl.sum(tl.exp(scores - top), 0)
    if RENORMALIZE:
        total = 0.0
        for _ in tl.static_range(TOP_K):
            best = tl.max(remaining, 0)
            total += tl.exp(best - top)
            expert = tl.min(tl.where(remaining == best, e, NUM_EXPERTS - 1), 0)
            remaining = tl.where(e == expert, -float("inf"), remaining)
        remaining = scores
    for j in tl.static_range(TOP_K):
        best = tl.max(remaining, 0)
        expert = tl.min(tl.where(remaining == best, e, NUM_EXPERTS - 1), 0)
        tl.store(topk_ids + token * TOP_K + j, expert)
        tl.store(topk_weights + token * TOP_K + j, tl.exp(best - top) / total)
        remaining = tl.where(e == expert, -float("inf"), remaining)


# ---- experts ----


def fused_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return residual + scale * the weighted sum of each token's experts.

    x [tokens, hidden], topk_ids and topk_weights [tokens, top_k], up [experts, gate | up, hidden],
    down [experts, hidden, expert size].
    """
    run_experts = fused_experts_reference
    if use_triton(x):
        run_experts = fused_experts_grouped
        seldom_shared = topk_ids.numel() <= max(topk_ids.shape[1], len(up) // 4)
        if seldom_shared and supports_gemv(up) and supports_gemv(down):
            run_experts = fused_experts_gemv
    return run_experts(x, topk_ids, topk_weights, up, down, activation, residual, scale)


def fused_experts_reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Loop over the chosen experts.

    With a few tokens, all of them are multiplied by every chosen expert. Reading the weights
    dominates the time anyway, and so the sums of a token do not depend on how many others chose the
    same expert.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    all_tokens = len(x) <= FEW_TOKENS
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < len(up):
            continue
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        inputs = x if all_tokens else x[token]
        h = gated_activation_reference(F.linear(inputs, up[expert]), activation)
        outputs = F.linear(h, down[expert])
        if all_tokens:
            outputs = outputs[token]
        weights = topk_weights[token, choice, None].float()
        y.index_add_(0, token, outputs.float() * weights)
    if residual is not None:
        y = residual.float() + scale * y
    return y.to(x.dtype)


def fused_experts_gemv(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Run the kernels for a few tokens: one GEMV for each pair."""
    gated = ActivationEpilogue(activation, True)
    h = gemv_triton(x, up, epilogue=gated, expert_ids=topk_ids)
    y = gemv_triton(h, down, expert_ids=topk_ids)
    return sum_expert_outputs(y, topk_ids, topk_weights, len(up), x, residual, scale)


def fused_experts_grouped(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    tilings: tuple[GroupedGemmTiling, GroupedGemmTiling] | None = None,
) -> torch.Tensor:
    """Run the kernels for many tokens: a grouped GEMM over experts."""
    x = x.contiguous()
    num_experts, _, expert_size = down.shape
    num_pairs = topk_ids.numel()
    # float32 does not use tensor cores here: its sums fill the registers.
    max_block = 32 if x.dtype == torch.float32 else 128
    block = min(max_block, max(16, next_power_of_2(num_pairs // num_experts)))
    up_tiling, down_tiling = tilings or (UP_TILINGS[block], DOWN_TILINGS[block])
    sorted_pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
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
    h = torch.empty(num_pairs, expert_size, dtype=x.dtype, device=x.device)
    y = torch.empty(num_pairs, x.shape[1], dtype=x.dtype, device=x.device)
    grouped_gemm(x, up, h, sorted_pairs, expert_ranges, up_tiling, top_k, activation)
    grouped_gemm(h, down, y, sorted_pairs, expert_ranges, down_tiling, 1, None)
    return sum_expert_outputs(y, topk_ids, topk_weights, num_experts, x, residual, scale)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    sorted_pairs: torch.Tensor,
    expert_ranges: torch.Tensor,
    tiling: GroupedGemmTiling,
    pairs_per_row: int,
    activation: str | None,
) -> None:
    """Multiply every pair by the weights of its expert.

    With an activation (the up projection), x has one row for each token, of `pairs_per_row` pairs,
    and out has one row for each sorted pair. Without (down), x has sorted pairs and out pairs.
    """
    num_experts, rows, inputs = weight.shape
    num_pairs = len(sorted_pairs)
    outputs = rows // 2 if activation else rows
    block_in = tiling.inputs * 2 // x.element_size()
    max_blocks = (num_pairs + num_experts * (tiling.pairs - 1)) // tiling.pairs
    blocks = min(num_pairs, max_blocks)
    grouped_gemm_kernel[(-(-outputs // tiling.outputs), blocks)](
        x,
        weight,
        out,
        sorted_pairs,
        expert_ranges,
        NUM_EXPERTS=num_experts,
        EXPERTS_POW2=next_power_of_2(num_experts),
        OUTPUTS=outputs,
        INPUTS=inputs,
        PAIRS_PER_ROW=pairs_per_row,
        ACTIVATION=activation,
        BLOCK_PAIRS=tiling.pairs,
        BLOCK_OUT=tiling.outputs,
        BLOCK_IN=block_in,
        STAGES=tiling.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )


@jit
def sort_by_expert_kernel(
    topk_ids,  # [pairs]
    sorted_pairs,  # [pairs]
    expert_ranges,  # [2, experts]: each expert's first place in sorted_pairs, and its pairs
    num_pairs,
    num_experts,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places the pairs of one expert, in their order, after those of lower experts."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    place = 0
    count = 0
    for start in range(0, num_pairs, WIDTH):
        pair = start + tl.arange(0, WIDTH)
        e = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1)
        place += tl.sum(((e >= 0) & (e < expert)).to(tl.int32), 0)
        count += tl.sum((e == expert).to(tl.int32), 0)
    tl.store(expert_ranges + expert, place)
    tl.store(expert_ranges + num_experts + expert, count)
    for start in range(0, num_pairs, WIDTH):
        pair = start + tl.arange(0, WIDTH)
        is_member = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1) == expert
        tl.store(
            sorted_pairs + place + tl.cumsum(is_member.to(tl.int32), 0) - 1, pair, mask=is_member
        )
        place += tl.sum(is_member.to(tl.int32), 0)


@jit
def grouped_gemm_kernel(
    x,  # [rows, INPUTS]
    weight,  # [NUM_EXPERTS, OUTPUTS, INPUTS], or [NUM_EXPERTS, 2 * OUTPUTS, INPUTS] if gated
    out,  # [pairs, OUTPUTS]
    sorted_pairs,  # [pairs]
    expert_ranges,  # [2, NUM_EXPERTS]
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT outputs of up to BLOCK_PAIRS pairs of one expert."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert, start, end = locate_expert_block(
        tl.program_id(1), expert_ranges, NUM_EXPERTS, EXPERTS_POW2, BLOCK_PAIRS
    )
    if expert < NUM_EXPERTS:
        place = start + tl.arange(0, BLOCK_PAIRS)
        is_pair = (place < end)[:, None]
        pair = tl.load(sorted_pairs + place, mask=place < end, other=0).to(tl.int64)
        n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        k = tl.arange(0, BLOCK_IN)
        GATED: tl.constexpr = ACTIVATION is not None
        WEIGHT_ROWS: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
        x_row = pair // PAIRS_PER_ROW if GATED else place.to(tl.int64)
        x_tile = x + x_row[:, None] * INPUTS + k[None, :]
        weight_row = expert.to(tl.int64) * WEIGHT_ROWS + n
        weight_tile = weight + weight_row[:, None] * INPUTS + k[None, :]
        y = tl.zeros([BLOCK_PAIRS, BLOCK_OUT], tl.float32)
        z = y
        is_output = (n < OUTPUTS)[:, None]
        for k0 in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            is_input = (k0 + k < INPUTS)[None, :]
            v = tl.load(x_tile + k0, mask=is_pair & is_input, other=0.0)
            w = tl.load(weight_tile + k0, mask=is_output & is_input, other=0.0)
            y = tl.dot(v, tl.trans(w), y, input_precision=PRECISION)
            if GATED:
                up_tile = weight_tile + OUTPUTS * INPUTS + k0
                w_up = tl.load(up_tile, mask=is_output & is_input, other=0.0)
                z = tl.dot(v, tl.trans(w_up), z, input_precision=PRECISION)
        if GATED:
            y = activation_tile(y, ACTIVATION) * z
        out_row = (place if GATED else pair).to(tl.int64)
        out_offset = out_row[:, None] * OUTPUTS + n[None, :]
        out_mask = is_pair & (n < OUTPUTS)[None, :]
        tl.store(out + out_offset, y.to(out.dtype.element_ty), mask=out_mask)


@jit
def locate_expert_block(
    block,
    expert_ranges,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Return the expert of a block, its first place in sorted_pairs, and the end of the expert.

    The expert is NUM_EXPERTS or more if there is no such block.
    """
    e = tl.arange(0, EXPERTS_POW2)
    count = tl.load(expert_ranges + NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=0)
    blocks = (count + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    last_blocks = tl.cumsum(blocks, 0)
    expert = tl.sum((last_blocks <= block).to(tl.int32), 0)
    is_member = e == expert
    expert_start = tl.load(expert_ranges + tl.minimum(expert, NUM_EXPERTS - 1))
    first_block = tl.sum(tl.where(is_member, last_blocks - blocks, 0), 0)
    start = expert_start + (block - first_block) * BLOCK_PAIRS
    return expert, start, expert_start + tl.sum(tl.where(is_member, count, 0), 0)


def sum_expert_outputs(
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the weighted sum over each token's experts, [tokens, hidden], for y [pairs, hidden].

    With a residual: residual + scale * the sum.
    """
    out = torch.empty_like(x)
    tokens, hidden = x.shape
    width = min(1024, next_power_of_2(hidden))
    sum_expert_outputs_kernel[(tokens, -(-hidden // width))](
        y,
        topk_ids,
        topk_weights,
        out if residual is None else residual.contiguous(),
        out,
        scale,
        num_experts,
        HIDDEN=hidden,
        TOP_K=topk_ids.shape[1],
        WIDTH=width,
        ADD_RESIDUAL=residual is not None,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


@jit
def sum_expert_outputs_kernel(
    y,  # [tokens * TOP_K, HIDDEN]
    topk_ids,  # [tokens, TOP_K]
    topk_weights,  # [tokens, TOP_K]
    residual,  # [tokens, HIDDEN]
    out,  # [tokens, HIDDEN]
    scale,
    num_experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program sums WIDTH columns of one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(topk_ids + pair)
        # The rows of invalid experts were never written, so they are not read either.
        valid_width = tl.where((expert >= 0) & (expert < num_experts), HIDDEN, 0)
        expert_output = tl.load(y + pair * HIDDEN + column, mask=column < valid_width, other=0.0)
        weight = tl.load(topk_weights + pair).to(tl.float32)
        total += expert_output.to(tl.float32) * weight
    if ADD_RESIDUAL:
        r = tl.load(residual + token * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        total = r.to(tl.float32) + scale * total
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)

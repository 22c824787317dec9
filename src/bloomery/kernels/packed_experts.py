"""Experts of fewer bits: kernels/experts with packed matrices, none of which is ever unpacked in memory.

    singly    visits so few that they seldom share an expert: products of their own (kernels/packed_gemv)
    grouped   expert by expert, by the matrix units (kernels/packed_gemm)

An expert's matrices lie one below the other in a single packed matrix. This file must not know layers or formats.
"""

from __future__ import annotations

import torch

from bloomery.kernels import packed_gemm, packed_gemv
from bloomery.kernels.activation import activated
from bloomery.kernels.experts import added_up, block_of, mix_reference, order_kernel
from bloomery.kernels.gemv import Activation
from bloomery.kernels.launch import begin, jit, overlap, power_of_two, processors, tl, wait
from bloomery.kernels.packed import Grid, Packed
from bloomery.kernels.packed_gemm import Tiling, arranged, choices, summed, tiling, unit
from bloomery.kernels.packed_gemv import layout


def possible(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether the kernels can."""
    plain = not (isinstance(packed, Grid) and packed.order is not None)
    return (
        plain
        and dtype.itemsize == 2
        and packed_gemv.possible(packed)
        and packed_gemm.possible(packed)
    )


def mix_packed(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: Packed,
    down: Packed,
    experts: int,
    activation: str = "silu",
) -> torch.Tensor:
    """kernels.experts.mix; up [experts * (gate | up), hidden], down [experts * hidden, size]."""
    seldom = chosen.numel() <= max(chosen.shape[1], experts // 4)
    return (singly if seldom else grouped)(x, chosen, weights, up, down, experts, activation)


def mix_packed_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: Packed,
    down: Packed,
    experts: int,
    activation: str = "silu",
) -> torch.Tensor:
    first, second = (
        packed.dequantize(x.dtype).unflatten(0, (experts, -1)) for packed in (up, down)
    )
    return mix_reference(x, chosen, weights, first, second, activation)


def singly(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: Packed,
    down: Packed,
    experts: int,
    activation: str = "silu",
    cut: packed_gemv.Tiling | None = None,
) -> torch.Tensor:
    """The kernel for a few tokens: visit by visit."""
    h = packed_gemv.packed_rows(
        x, up, None, None, Activation(activation, True), cut, chosen, experts
    )
    y = packed_gemv.packed_rows(h, down, None, None, None, cut, chosen, experts)
    return added_up(y, chosen, weights, experts, x, None, 1.0)


def grouped(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: Packed,
    down: Packed,
    experts: int,
    activation: str = "silu",
    cut: Tiling | None = None,
) -> torch.Tensor:
    """The kernels for many tokens: expert by expert."""
    visits = chosen.numel()
    order = torch.empty(visits, dtype=torch.int32, device=x.device)
    ranges = torch.empty(2, experts, dtype=torch.int32, device=x.device)
    order_kernel[(experts,)](
        chosen,
        order,
        ranges,
        visits,
        experts,
        WIDTH=min(8192, max(32, power_of_two(visits))),
        num_warps=8 if visits > 1024 else 4,
        **overlap(x.device),
    )
    h = products(x, up, order, ranges, chosen.shape[1], activation, cut)
    return added_up(
        products(h, down, order, ranges, 1, None, cut), chosen, weights, experts, x, None, 1.0
    )


def products(
    x: torch.Tensor,
    packed: Packed,
    order: torch.Tensor,
    ranges: torch.Tensor,
    share: int,
    activation: str | None,
    cut: Tiling | None = None,
) -> torch.Tensor:
    """With an activation from tokens (`share` visits each) to visits in order; without, from there to the visits."""
    visits = len(order)
    experts = ranges.shape[1]
    how = layout(packed)
    columns = packed.shape[1]
    rows = packed.shape[0] // experts
    units = columns // unit(how.bits)
    outputs = rows // 2 if activation else rows
    if cut is None:
        tokens = min(128, max(16, visits // experts))
        cut = tiling(tokens, packed.shape[0], units, how.kind, how.bits, processors(x.device))
        cut = (
            cut._replace(outputs=64) if activation and cut.tokens >= 64 else cut
        )  # two sums in registers
    out = torch.empty(visits, outputs, dtype=x.dtype, device=x.device)
    x = arranged(x, how, None)
    blocks = min(visits, (visits + experts * (cut.tokens - 1)) // cut.tokens)
    given = (how.zero, how.table)
    packed_grouped_kernel[(blocks, -(-outputs // cut.outputs))](
        x,
        how.codes.view(torch.int16),
        how.scale,
        *(x if part is None else part for part in given),
        out,
        order,
        ranges,
        outputs,
        columns,
        EXPERTS=experts,
        EXPERTS_UP=power_of_two(experts),
        SHARE=share,
        ACTIVATION=activation,
        **choices(packed, x.dtype, x.device),
        BLOCK_OUT=cut.outputs,
        VISITS=cut.tokens,
        WARPS=cut.warps,
        STAGES=cut.stages,
        TURN=cut.turn,
        num_warps=cut.warps,
        **overlap(x.device),
    )
    return out


@jit
def packed_grouped_kernel(
    x,
    codes,
    scale,
    zero,
    table,
    out,
    order,
    ranges,
    outputs,
    columns,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TALL: tl.constexpr,
    NEST: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    LATE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    VISITS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program makes BLOCK_OUT outputs of up to VISITS visits to one expert; gates first, then what they gate."""
    begin(PDL)
    wait(PDL)
    expert, place, end = block_of(tl.program_id(0), ranges, EXPERTS, EXPERTS_UP, VISITS)
    if expert < EXPERTS:
        m = place + tl.arange(0, VISITS)
        visit = tl.load(order + tl.minimum(m, end - 1))
        gated: tl.constexpr = ACTIVATION is not None
        token = visit // SHARE if gated else tl.minimum(m, end - 1)
        n0 = tl.program_id(1) * BLOCK_OUT
        base = expert * (2 * outputs if gated else outputs)
        last = columns // (512 // BITS)
        y = summed(
            x,
            token,
            codes,
            scale,
            zero,
            table,
            base + n0,
            base + outputs,
            0,
            last,
            columns,
            KIND,
            BITS,
            GROUP,
            TALL,
            NEST,
            ZERO,
            SIGNED,
            LATE,
            ASSEMBLY,
            BLOCK_OUT,
            VISITS,
            WARPS,
            STAGES,
            TURN,
            False,
        )
        if gated:
            base += outputs
            z = summed(
                x,
                token,
                codes,
                scale,
                zero,
                table,
                base + n0,
                base + outputs,
                0,
                last,
                columns,
                KIND,
                BITS,
                GROUP,
                TALL,
                NEST,
                ZERO,
                SIGNED,
                LATE,
                ASSEMBLY,
                BLOCK_OUT,
                VISITS,
                WARPS,
                STAGES,
                TURN,
                False,
            )
            y = activated(y, ACTIVATION) * z
        n = n0 + tl.arange(0, BLOCK_OUT)
        at = (m if gated else visit).to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(
            out + at, y.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & (m < end)[None, :]
        )

"""Many experts, of which each token visits a few: chosen, multiplied and added up while the host knows nothing of it.

    route   a router's logits -> the experts a token visits and the weight of each
    mix     activation(gate) * up of the chosen experts, back down, and their weighted sum

A visit is a (token, choice) pair. Visits are put in order of their experts, so that an expert's weights are read once
for all who chose it; each expert's visits are cut into blocks, and a launch has as many programs as there could be
blocks, of which those beyond the last leave at once. All shapes are known beforehand, so a step can be captured. The
sum over a token's choices runs in their order: nothing depends on who else is in the batch. Visits so few that they
seldom share an expert are products of their own (kernels/gemv) instead.

An expert outside the range, as a line that only pads a batch may have, is visited by nobody and adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bloomery.kernels.activation import activated, gate_reference
from bloomery.kernels.gemv import Activation, possible, product_rows
from bloomery.kernels.launch import begin, fused, jit, overlap, power_of_two, tl, wait

FEW = 16  # tokens


class Blocks(NamedTuple):
    """How a grouped product is cut."""

    visits: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# By visits of a block: up makes two products at once, down one.
UP: Mapping[int, Blocks] = {
    16: Blocks(16, 64, 128, 4, 4),
    32: Blocks(32, 64, 128, 4, 4),
    64: Blocks(64, 64, 64, 4, 4),
    128: Blocks(128, 128, 64, 8, 3),
}
DOWN: Mapping[int, Blocks] = {
    16: Blocks(16, 64, 128, 4, 5),
    32: Blocks(32, 64, 128, 4, 5),
    64: Blocks(64, 128, 64, 4, 4),
    128: Blocks(128, 256, 64, 8, 3),
}


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> chosen [tokens, top_k] int32, likeliest first, and their weights in float32."""
    return (route_rows if fused(logits) else route_reference)(logits, top_k, renormalize)


def route_reference(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :top_k]
    chosen = chosen[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen.to(torch.int32), weights.contiguous()


def route_rows(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel."""
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    route_kernel[(tokens,)](
        logits,
        chosen,
        weights,
        logits.stride(0),
        EXPERTS=experts,
        EXPERTS_UP=power_of_two(experts),
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        num_warps=1 if experts <= 128 else 4,
        **overlap(logits.device),
    )
    return chosen, weights


@jit
def route_kernel(
    logits,
    chosen,
    weights,
    stride,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS_UP)
    s = tl.load(logits + token * stride + e, mask=e < EXPERTS, other=-float("inf")).to(tl.float32)
    top = tl.max(s, 0)
    rest = s
    total = tl.sum(tl.exp(s - top), 0)
    if RENORMALIZE:
        total = 0.0
        for _ in tl.static_range(TOP_K):
            best = tl.max(rest, 0)
            total += tl.exp(best - top)
            rest = tl.where(
                e == tl.min(tl.where(rest == best, e, EXPERTS - 1), 0), -float("inf"), rest
            )
        rest = s
    for j in tl.static_range(TOP_K):
        best = tl.max(rest, 0)
        expert = tl.min(tl.where(rest == best, e, EXPERTS - 1), 0)
        tl.store(chosen + token * TOP_K + j, expert)
        tl.store(weights + token * TOP_K + j, tl.exp(best - top) / total)
        rest = tl.where(e == expert, -float("inf"), rest)


def mix(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """residual + scale * the sum of each token's experts, weighted.

    x [tokens, hidden], chosen and weights [tokens, k], up [experts, gate | up, hidden], down [experts, hidden, size].
    """
    call = mix_reference
    if fused(x):
        seldom = chosen.numel() <= max(chosen.shape[1], len(up) // 4)
        call = mix_singly if seldom and possible(up) and possible(down) else mix_grouped
    return call(x, chosen, weights, up, down, activation, residual, scale)


def mix_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if not 0 <= expert < len(up):
            continue
        token, place = (chosen == expert).nonzero(as_tuple=True)
        # Of a few tokens all are multiplied: the weights' bytes are what it costs, and nobody's sums depend on how
        # many others chose the same expert.
        every = len(x) <= FEW
        h = gate_reference(F.linear(x if every else x[token], up[expert]), activation)
        product = F.linear(h, down[expert])
        y.index_add_(
            0,
            token,
            (product[token] if every else product).float() * weights[token, place, None].float(),
        )
    return (y if residual is None else residual.float() + scale * y).to(x.dtype)


def mix_singly(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """The kernel for a few tokens: visit by visit."""
    h = product_rows(x, up, after=Activation(activation, True), visits=chosen)
    return added_up(
        product_rows(h, down, visits=chosen), chosen, weights, len(up), x, residual, scale
    )


def mix_grouped(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    cuts: tuple[Blocks, Blocks] | None = None,
) -> torch.Tensor:
    """The kernels for many tokens: expert by expert."""
    x = x.contiguous()
    experts, _, size = down.shape
    visits = chosen.numel()
    largest = (
        32 if x.dtype == torch.float32 else 128
    )  # float32 has no matrix units: its sums fill the registers
    spread = min(largest, max(16, power_of_two(visits // experts)))
    up_cut, down_cut = cuts or (UP[spread], DOWN[spread])
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
    h = torch.empty(visits, size, dtype=x.dtype, device=x.device)
    y = torch.empty(visits, x.shape[1], dtype=x.dtype, device=x.device)
    grouped(x, up, h, order, ranges, up_cut, chosen.shape[1], activation)
    grouped(h, down, y, order, ranges, down_cut, 1, None)
    return added_up(y, chosen, weights, experts, x, residual, scale)


def grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    ranges: torch.Tensor,
    cut: Blocks,
    share: int,
    activation: str | None,
) -> None:
    """With an activation from tokens (`share` visits each) to visits in order; without, from there to the visits."""
    (experts, rows, inputs) = weight.shape
    visits = len(order)
    outputs = rows // 2 if activation else rows
    width = cut.inputs * 2 // x.element_size()
    blocks = min(visits, (visits + experts * (cut.visits - 1)) // cut.visits)
    grouped_kernel[(-(-outputs // cut.outputs), blocks)](
        x,
        weight,
        out,
        order,
        ranges,
        EXPERTS=experts,
        EXPERTS_UP=power_of_two(experts),
        OUTPUTS=outputs,
        INPUTS=inputs,
        SHARE=share,
        ACTIVATION=activation,
        VISITS=cut.visits,
        BLOCK_OUT=cut.outputs,
        BLOCK_IN=width,
        STAGES=cut.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=cut.warps,
        **overlap(x.device),
    )


@jit
def order_kernel(chosen, order, ranges, visits, experts, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """One program an expert: its visits, in their order, behind those of the experts before it."""
    begin(PDL)
    wait(PDL)
    expert = tl.program_id(0)
    before = 0
    own = 0
    for start in range(0, visits, WIDTH):
        i = start + tl.arange(0, WIDTH)
        e = tl.load(chosen + i, mask=i < visits, other=-1)
        before += tl.sum(((e >= 0) & (e < expert)).to(tl.int32), 0)
        own += tl.sum((e == expert).to(tl.int32), 0)
    tl.store(ranges + expert, before)
    tl.store(ranges + experts + expert, own)
    for start in range(0, visits, WIDTH):
        i = start + tl.arange(0, WIDTH)
        mine = tl.load(chosen + i, mask=i < visits, other=-1) == expert
        tl.store(order + before + tl.cumsum(mine.to(tl.int32), 0) - 1, i, mask=mine)
        before += tl.sum(mine.to(tl.int32), 0)


@jit
def grouped_kernel(
    x,
    weight,
    out,
    order,
    ranges,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    VISITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program makes BLOCK_OUT outputs of up to VISITS visits to one expert."""
    begin(PDL)
    wait(PDL)
    expert, place, end = block_of(tl.program_id(1), ranges, EXPERTS, EXPERTS_UP, VISITS)
    if expert < EXPERTS:
        m = place + tl.arange(0, VISITS)
        here = (m < end)[:, None]
        visit = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
        n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        k = tl.arange(0, BLOCK_IN)
        gated: tl.constexpr = ACTIVATION is not None
        at_x = x + (visit // SHARE if gated else m.to(tl.int64))[:, None] * INPUTS + k[None, :]
        rows: tl.constexpr = 2 * OUTPUTS if gated else OUTPUTS
        at_w = weight + (expert.to(tl.int64) * rows + n)[:, None] * INPUTS + k[None, :]
        y = tl.zeros([VISITS, BLOCK_OUT], tl.float32)
        z = y
        real = (n < OUTPUTS)[:, None]
        for k0 in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            inside = (k0 + k < INPUTS)[None, :]
            v = tl.load(at_x + k0, mask=here & inside, other=0.0)
            y = tl.dot(
                v,
                tl.trans(tl.load(at_w + k0, mask=real & inside, other=0.0)),
                y,
                input_precision=PRECISION,
            )
            if gated:
                w = tl.load(at_w + OUTPUTS * INPUTS + k0, mask=real & inside, other=0.0)
                z = tl.dot(v, tl.trans(w), z, input_precision=PRECISION)
        if gated:
            y = activated(y, ACTIVATION) * z
        at = (m if gated else visit).to(tl.int64)[:, None] * OUTPUTS + n[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=here & (n < OUTPUTS)[None, :])


@jit
def block_of(block, ranges, EXPERTS: tl.constexpr, EXPERTS_UP: tl.constexpr, VISITS: tl.constexpr):
    """The expert of a block (EXPERTS or more: none), the first of its visits, and the end of the expert's."""
    e = tl.arange(0, EXPERTS_UP)
    count = tl.load(ranges + EXPERTS + e, mask=e < EXPERTS, other=0)
    blocks = (count + VISITS - 1) // VISITS
    until = tl.cumsum(blocks, 0)
    expert = tl.sum((until <= block).to(tl.int32), 0)
    mine = e == expert
    start = tl.load(ranges + tl.minimum(expert, EXPERTS - 1))
    place = start + (block - tl.sum(tl.where(mine, until - blocks, 0), 0)) * VISITS
    return expert, place, start + tl.sum(tl.where(mine, count, 0), 0)


def added_up(
    y: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """y [visits, hidden] -> [tokens, hidden]."""
    out = torch.empty_like(x)
    tokens, hidden = x.shape
    width = min(1024, power_of_two(hidden))
    sum_kernel[(tokens, -(-hidden // width))](
        y,
        chosen,
        weights,
        out if residual is None else residual.contiguous(),
        out,
        scale,
        experts,
        HIDDEN=hidden,
        TOP_K=chosen.shape[1],
        WIDTH=width,
        ADD=residual is not None,
        num_warps=4,
        **overlap(x.device),
    )
    return out


@jit
def sum_kernel(
    y,
    chosen,
    weights,
    residual,
    out,
    scale,
    experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for j in tl.static_range(TOP_K):
        visit = token * TOP_K + j
        expert = tl.load(chosen + visit)
        width = tl.where((expert >= 0) & (expert < experts), HIDDEN, 0)
        part = tl.load(y + visit * HIDDEN + i, mask=i < width, other=0.0).to(tl.float32)
        total += part * tl.load(weights + visit).to(tl.float32)
    if ADD:
        total = (
            tl.load(residual + token * HIDDEN + i, mask=i < HIDDEN, other=0.0).to(tl.float32)
            + scale * total
        )
    tl.store(out + token * HIDDEN + i, total.to(out.dtype.element_ty), mask=i < HIDDEN)

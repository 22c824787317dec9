"""Weights rounded to a few bits on an even grid, groups of columns with a scale and a zero of their own.

Rounding to a grid and fitting the grid to what was rounded to it take turns: twice is worth a quarter of the error that
the range of the values alone would leave. The kernel holds a group in registers from the first look to the last bit.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import begin, fused, jit, overlap, tl, wait
from bloomery.kernels.packed import pack

START = {4: 0.92, 3: 0.88, 2: 0.75}  # of a group's range: its ends are rare
TURNS = {4: 2, 3: 3, 2: 4}
SMALLEST = 2.0**-24  # a scale of half precision

Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_groups(weight: torch.Tensor, bits: int, group: int) -> Rounded:
    """weight [out, in] in float32 -> codes, scales and zeros [out, in / group] in half precision.

    Codes of 3 bits take a byte, [out, in]; others as many bits as they have.
    """
    possible = group & (group - 1) == 0 and group <= 1024
    return (quantize_kernel_groups if fused(weight) and possible else quantize_groups_reference)(
        weight, bits, group
    )


def quantize_groups_reference(weight: torch.Tensor, bits: int, group: int) -> Rounded:
    blocks = weight.unflatten(1, (-1, group))
    low = blocks.amin(-1, keepdim=True)
    high = blocks.amax(-1, keepdim=True)
    middle = (low + high) / 2
    reach = (high - low) / 2 * START[bits]
    scale = 2 * reach / (2**bits - 1)
    offset = middle - reach
    mean = blocks.mean(-1, keepdim=True)
    for turn in range(TURNS[bits] + 1):
        scale, zero = grid(scale, offset)
        codes = rounded(blocks, scale, zero, bits)
        if turn < TURNS[bits]:  # the line that passes nearest to (code, value)
            off = codes - codes.mean(-1, keepdim=True)
            slope = (off * (blocks - mean)).sum(-1, keepdim=True) / off.square().sum(
                -1, keepdim=True
            ).clamp_(min=1e-9)
            scale = slope.abs_()
            offset = mean - scale * codes.mean(-1, keepdim=True)
    numbers = codes.flatten(1).to(torch.uint8)
    return (
        numbers if bits == 3 else pack(numbers, bits),
        scale.flatten(1).half(),
        zero.flatten(1).half(),
    )


def grid(scale: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero as half precision keeps them; a grid so far from zero that it cannot say where is made coarser."""
    scale = torch.maximum(scale, offset.abs() / 2048).half().float().clamp_(min=SMALLEST)
    return scale, (-offset / scale).half().float()


def rounded(
    blocks: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    return (blocks / scale + zero).round_().clamp_(0, 2**bits - 1)


def quantize_kernel_groups(weight: torch.Tensor, bits: int, group: int) -> Rounded:
    """The kernel. A group is a line of it, whichever row it is of."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    codes = torch.empty(
        rows, columns // (2 if bits == 4 else 1), dtype=torch.uint8, device=weight.device
    )
    scale = torch.empty(rows, columns // group, dtype=torch.float16, device=weight.device)
    zero = torch.empty_like(scale)
    lines = 2048 // group
    quantize_kernel[(-(-scale.numel() // lines),)](
        weight,
        codes,
        scale,
        zero,
        scale.numel(),
        START[bits],
        SMALLEST,
        TOP=2**bits - 1,
        TURNS=TURNS[bits],
        GROUP=group,
        LINES=lines,
        num_warps=4,
        **overlap(weight.device),
    )
    return pack(codes, bits) if bits == 2 else codes, scale, zero


@jit
def quantize_kernel(
    weight,
    codes,
    scale,
    zero,
    count,
    start,
    smallest,
    TOP: tl.constexpr,
    TURNS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    here = line < count
    at = line.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(weight + at, mask=here[:, None], other=0.0)
    low = tl.min(x, 1)
    high = tl.max(x, 1)
    reach = (high - low) / 2 * start
    mean = tl.sum(x, 1) / GROUP
    s = 2 * reach / TOP
    offset = (low + high) / 2 - reach
    q = x
    for turn in tl.static_range(TURNS + 1):
        s = tl.maximum(tl.maximum(s, tl.abs(offset) / 2048).to(tl.float16).to(tl.float32), smallest)
        z = (-offset / s).to(tl.float16).to(tl.float32)
        q = tl.minimum(tl.maximum(tl.floor(x / s[:, None] + z[:, None] + 0.5), 0.0), TOP)
        if turn < TURNS:
            average = tl.sum(q, 1) / GROUP
            off = q - average[:, None]
            slope = tl.sum(off * (x - mean[:, None]), 1) / tl.maximum(tl.sum(off * off, 1), 1e-9)
            s = tl.abs(slope)
            offset = mean - s * average
    if TOP == 15:  # two a byte
        even, odd = tl.split(tl.reshape(q.to(tl.int32), (LINES, GROUP // 2, 2)))
        at = line.to(tl.int64)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes + at, (even | odd << 4).to(tl.uint8), mask=here[:, None])
    else:
        tl.store(codes + at, q.to(tl.uint8), mask=here[:, None])
    tl.store(scale + line, s.to(tl.float16), mask=here)
    tl.store(zero + line, z.to(tl.float16), mask=here)

"""Few bits on an even grid, asymmetric: groups of columns have a scale and a zero of their own, both of half precision.

Rounding to a grid and fitting the grid to what was rounded to it take turns: twice is worth a quarter of the error that
the range of the values alone would leave.
"""

from __future__ import annotations

import torch

from bloomery.kernels.packed import Grid, pack
from bloomery.quant.int8 import int8
from bloomery.quant.packed import ThreeBits

START = {4: 0.92, 3: 0.88, 2: 0.75}  # of a group's range: its ends are rare
TURNS = {4: 2, 3: 3, 2: 4}
SMALLEST = 2.0**-24  # a scale of half precision


def int4(weight: torch.Tensor, bits: int = 4, group: int = 128) -> Grid:
    """Groups shrink by halves until they divide the row; a row they cannot divide is kept in eight bits."""
    while weight.shape[1] % group:
        group //= 2
    if group < 8:
        return int8(weight)
    blocks = weight.unflatten(1, (-1, group))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2 * START[bits]
    scale, offset, mean = 2 * reach / (2**bits - 1), middle - reach, blocks.mean(-1, keepdim=True)
    for turn in range(TURNS[bits] + 1):
        scale, zero = grid(scale, offset)
        codes = rounded(blocks, scale, zero, bits)
        if turn < TURNS[bits]:  # the line that passes nearest to (code, value)
            off = codes - codes.mean(-1, keepdim=True)
            slope = (off * (blocks - mean)).sum(-1, keepdim=True) / off.square().sum(-1, keepdim=True).clamp_(min=1e-9)
            scale = slope.abs_()
            offset = mean - scale * codes.mean(-1, keepdim=True)
    codes, scale, zero = codes.flatten(1), scale.flatten(1).half(), zero.flatten(1).half()
    return ThreeBits.pack(codes, scale, zero) if bits == 3 else Grid(pack(codes, bits), scale, zero, bits)


def grid(scale: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero as half precision keeps them; a grid so far from zero that it cannot say where is made coarser."""
    scale = torch.maximum(scale, offset.abs() / 2048).half().float().clamp_(min=SMALLEST)
    return scale, (-offset / scale).half().float()


def rounded(blocks: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (blocks / scale + zero).round_().clamp_(0, 2**bits - 1)


def whole_zeros(weight: torch.Tensor, bits: int, group: int) -> Grid:
    """As checkpoints keep it: zeros are codes. Whichever range, drawn in or not, brings a group nearest."""
    blocks = weight.unflatten(1, (-1, group))
    low, high = blocks.amin(-1, keepdim=True).clamp_(max=0), blocks.amax(-1, keepdim=True).clamp_(min=0)
    found = [fitted(blocks, low * shrink, high * shrink, bits) for shrink in (1.0, 0.92, 0.84)]
    best = torch.stack([error for error, _, _ in found]).argmin(0, keepdim=True)
    scale, zero = (torch.stack([one[i] for one in found]).gather(0, best)[0] for i in (1, 2))
    codes = rounded(blocks, scale, zero, bits).flatten(1)
    return Grid(pack(codes, bits), scale.flatten(1).half(), zero.flatten(1).half(), bits)


def fitted(
    blocks: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Error, scale and zero of a range."""
    top = 2**bits - 1
    scale = ((high - low) / top).half().float().clamp_(min=SMALLEST)
    zero = (-low / scale).round_().clamp_(0, top)
    values = rounded(blocks, scale, zero, bits).sub_(zero).mul_(scale)
    return (values - blocks).square().sum(-1, keepdim=True), scale, zero

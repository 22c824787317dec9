"""Few bits on an even grid, asymmetric: groups of columns have a scale and a zero of their own, of half precision."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import Grid, pack
from bloomery.kernels.quantize_groups import SMALLEST, quantize_groups, rounded
from bloomery.quant.int8 import int8


def int4(weight: torch.Tensor, bits: int = 4, group: int = 128) -> Grid:
    """Groups shrink by halves until they divide the row; a row they cannot divide is kept in eight bits."""
    while weight.shape[1] % group:
        group //= 2
    if group < 8:
        return int8(weight)
    codes, scale, zero = quantize_groups(weight, bits, group)
    return Grid(pack(codes, 3) if bits == 3 else codes, scale, zero, bits)


def whole_zeros(weight: torch.Tensor, bits: int, group: int) -> Grid:
    """As checkpoints keep it: zeros are codes. Whichever range, drawn in or not, brings a group nearest."""
    blocks = weight.unflatten(1, (-1, group))
    low = blocks.amin(-1, keepdim=True).clamp_(max=0)
    high = blocks.amax(-1, keepdim=True).clamp_(min=0)
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

"""Four bits that name one of sixteen values, times the largest magnitude of 64 neighbours: bitsandbytes' codebooks."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import Codebook, pack
from bloomery.quant.int8 import int8

BLOCK = 64
# Quantiles of a normal distribution, and the floats of two exponent bits and one of mantissa, both up to 1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
TABLES = {"nf4": NF4, "fp4": FP4}


def nearest(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Numbers of the values of a table that are nearest to values from -1 to 1."""
    sorted_values, order = table.sort(stable=True)
    return order[torch.bucketize(values, (sorted_values[:-1] + sorted_values[1:]) / 2)]


def codebook(weight: torch.Tensor, values: tuple[float, ...], largest: torch.dtype = torch.float16):
    """`largest`: the precision of the blocks' largest magnitudes."""
    width, block = weight.shape[1], BLOCK
    while width % block:
        block //= 2
    if block < 8:
        return int8(weight)
    table = torch.tensor(values, device=weight.device)
    blocks = weight.unflatten(1, (-1, block))
    absmax = blocks.abs().amax(-1).to(largest)
    inverse = 1.0 / absmax.float().clamp(min=1e-38)
    codes = nearest(table, (blocks * inverse[..., None]).clamp_(-1, 1)).flatten(1)
    return Codebook(pack(codes, 4), table, absmax)


def nf4(weight: torch.Tensor):
    return codebook(weight, NF4)


def fp4(weight: torch.Tensor):
    return codebook(weight, FP4)

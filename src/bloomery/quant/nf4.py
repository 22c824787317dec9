"""Four bits that name one of sixteen values, times the largest magnitude of 64 neighbours: bitsandbytes' codebooks.

Largest magnitudes are codes themselves, of eight bits: less their mean, divided by the largest of 256 of them. Each row
is done by itself, as bitsandbytes does a matrix of that one row, so that ranks that share the rows out agree.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from bloomery.kernels.packed import NESTED, Codebook, Grid, pack
from bloomery.quant.int8 import int8

BLOCK = 64
# Quantiles of a normal distribution, and the floats of two exponent bits and one of mantissa, both up to 1.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
FP4 = tuple(
    sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
)
TABLES = {"nf4": NF4, "fp4": FP4}


def dynamic() -> tuple[float, ...]:
    """256 values from -1 to 1: seven decades, the larger the finer divided, and 0 and 1."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += [sign * value for sign in (1, -1) for value in middles]
    return tuple(sorted(found))


DYNAMIC = dynamic()  # what largest magnitudes are rounded to


def nearest(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Numbers of the values of a table that are nearest to values from -1 to 1."""
    sorted_values, order = table.sort(stable=True)
    return order[torch.bucketize(values, (sorted_values[:-1] + sorted_values[1:]) / 2)]


def codebook(weight: torch.Tensor, values: tuple[float, ...]) -> Codebook | Grid:
    """Blocks shrink by halves until they divide the row; a row they cannot divide is kept in eight bits."""
    width = weight.shape[1]
    block = BLOCK
    while width % block:
        block //= 2
    if block < 8:
        return int8(weight)
    table = on(weight.device, values)
    blocks = weight.unflatten(1, (-1, block))
    absmax = blocks.abs().amax(-1)
    inverse = 1.0 / absmax.clamp(min=1e-38)
    codes = nearest(table, (blocks * inverse[..., None]).clamp_(-1, 1)).flatten(1)
    return nested(pack(codes, 4), table, absmax)


def nested(codes: torch.Tensor, table: torch.Tensor, absmax: torch.Tensor) -> Codebook:
    """`absmax` [rows, blocks] rounded too; a single block's stays as it is."""
    blocks = absmax.shape[1]
    if blocks == 1:
        return Codebook(codes, table, absmax.half())
    fine = on(absmax.device, DYNAMIC)
    mean = absmax.mean(1, keepdim=True)
    several = -(-blocks // NESTED)
    parts = F.pad(absmax - mean, (0, several * NESTED - blocks)).unflatten(1, (several, -1))
    outer = parts.abs().amax(-1)
    inner = nearest(fine, (parts / outer.clamp(min=1e-38)[..., None]).clamp_(-1, 1)).flatten(1)[
        :, :blocks
    ]
    return Codebook(
        codes,
        torch.cat((table, fine)),
        inner.to(torch.uint8).contiguous(),
        torch.cat((mean, outer), 1),
    )


@cache
def on(device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """A table, sent to a device once: the host would wait for it each time."""
    return torch.tensor(values, device=device)

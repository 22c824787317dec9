"""4-bit codebook quantization as bitsandbytes does it: NF4 and FP4 with nested absmax values.

A code is the index of one of 16 table values, which is multiplied by the largest magnitude (absmax)
of its block of 64 columns. The absmax values are quantized too (bitsandbytes' double quantization):
the mean of the row is subtracted, 256 of them share a scale, and 8-bit codes index a second table.
Each row is quantized on its own, as bitsandbytes does with a matrix of one row, so that tensor
parallel ranks that divide the rows get the same weights.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from bloomery.kernels.packed import NESTED_BLOCK_SIZE, CodebookWeight, GroupedScales, pack_codes
from bloomery.quant.int8 import quantize_int8

BLOCK_SIZE = 64  # columns
SMALLEST_BLOCK = 8  # columns
SMALLEST_ABSMAX = 1e-38  # avoids division by zero
# NF4: quantiles of the normal distribution, scaled to 1.
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
# FP4: floats with two bits of exponent and one of mantissa, scaled to 1.
FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in FP4_MAGNITUDES)
CODEBOOKS = {"nf4": NF4, "fp4": FP4}


def build_absmax_codebook() -> tuple[float, ...]:
    """Build the 256 values of bitsandbytes' dynamic data type, sorted, from just above -1 to 1.

    Each of seven decades is divided evenly; the largest decade has the most values.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += middles.tolist()
        values += (-middles).tolist()
    return tuple(sorted(values))


ABSMAX_CODEBOOK = build_absmax_codebook()


def find_nearest(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the index of the table entry nearest to each value. Values are from -1 to 1."""
    sorted_table, order = table.sort(stable=True)
    midpoints = (sorted_table[:-1] + sorted_table[1:]) / 2
    return order[torch.bucketize(values, midpoints)]


def quantize_codebook(
    weight: torch.Tensor, codebook: tuple[float, ...]
) -> CodebookWeight | GroupedScales:
    """Quantize weights [out, in] to a codebook of 16 values.

    The block size is halved until it divides the columns. If no block of at least SMALLEST_BLOCK
    columns does, the matrix is quantized to int8.
    """
    columns = weight.shape[1]
    block_size = BLOCK_SIZE
    while columns % block_size:
        block_size //= 2
    if block_size < SMALLEST_BLOCK:
        return quantize_int8(weight)
    table = table_on_device(weight.device, codebook)
    blocks = weight.unflatten(1, (-1, block_size))
    absmax = blocks.abs().amax(-1)
    inverse = 1.0 / absmax.clamp(min=SMALLEST_ABSMAX)
    scaled = (blocks * inverse[..., None]).clamp_(-1, 1)
    codes = find_nearest(table, scaled).flatten(1)
    return quantize_absmax(pack_codes(codes, 4), table, absmax)


def quantize_absmax(
    codes: torch.Tensor, table: torch.Tensor, absmax: torch.Tensor
) -> CodebookWeight:
    """Build a CodebookWeight with nested quantization of `absmax` [rows, blocks].

    The absmax of a single block is not quantized.
    """
    num_blocks = absmax.shape[1]
    if num_blocks == 1:
        return CodebookWeight(codes, table, absmax.half())
    absmax_table = table_on_device(absmax.device, ABSMAX_CODEBOOK)
    mean = absmax.mean(1, keepdim=True)
    num_nested = -(-num_blocks // NESTED_BLOCK_SIZE)
    padding = num_nested * NESTED_BLOCK_SIZE - num_blocks
    padded = F.pad(absmax - mean, (0, padding))
    nested = padded.unflatten(1, (num_nested, -1))
    nested_absmax = nested.abs().amax(-1)
    divisor = nested_absmax.clamp(min=SMALLEST_ABSMAX)[..., None]
    scaled = (nested / divisor).clamp_(-1, 1)
    absmax_codes = find_nearest(absmax_table, scaled).flatten(1)[:, :num_blocks]
    return CodebookWeight(
        codes,
        torch.cat((table, absmax_table)),
        absmax_codes.to(torch.uint8).contiguous(),
        torch.cat((mean, nested_absmax), 1),
    )


@cache
def table_on_device(device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """Copy a table to a device once; every copy would make the host wait."""
    return torch.tensor(values, device=device)

"""Checkpoints of bitsandbytes: rows of 8-bit integers, or blocks of 4-bit codes of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import gcd

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import Codebook, Grid
from bloomery.quant.base import FLOATS, Product, Range, Tensors, part, sizes
from bloomery.quant.nf4 import TABLES
from bloomery.quant.packed import PackedMatrix, claim, kept, rows_of

HOST = torch.device("cpu")


class BitsAndBytes:
    def matrix(self, tensors: Tensors, product: Product) -> PackedMatrix:
        name = product.name
        if tensors.has(f"{name}.SCB"):
            return integers(tensors, product)
        for kind in TABLES:
            if tensors.has(state := f"{name}.weight.quant_state.bitsandbytes__{kind}"):
                return codes(tensors, product, kind, state)
        return kept(tensors, product)


def integers(tensors: Tensors, product: Product) -> PackedMatrix:
    """A row's largest magnitude (SCB) is 127 steps. Outliers of the input need no second product: it is not rounded."""
    weight = part(tensors, f"{product.name}.weight", product.shape, (torch.int8,))
    largest = part(tensors, f"{product.name}.SCB", product.shape[:1])
    claim(tensors, product.name, "weight_format")

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Grid:
        scale = largest.rows(ranges).load(torch.float32, device)[:, None] / 127
        return Grid(rows_of(weight, ranges, device), scale, bits=8)

    return PackedMatrix.whole(product, read)


def codes(tensors: Tensors, product: Product, kind: str, state_name: str) -> PackedMatrix:
    """The matrix as one long row: two codes a byte, the first in the high half; a largest magnitude a block, itself
    perhaps a code of another table times a largest magnitude, less its mean."""
    (rows, width) = product.shape
    name = f"{product.name}.weight"
    state = described(tensors, state_name)
    block = state.get("blocksize")
    total = rows * width
    if (
        state.get("shape") != [rows, width]
        or not isinstance(block, int)
        or block < 1
        or total % block
        or width % 2
    ):
        raise CheckpointError(
            f"{state_name}: {state} does not describe a matrix of {rows} x {width}"
        )
    found = sizes(tensors, name)
    weight = part(tensors, name, found, (torch.uint8, torch.int8, *FLOATS))
    words = found[0] // rows  # a row
    if found != (words * rows, 1) or words * weight.dtype.itemsize * 2 != width:
        raise CheckpointError(
            f"{name}: {found} {weight.dtype} do not hold {rows} x {width} codes of four bits"
        )
    table = part(tensors, f"{name}.quant_map", (16,))
    nested = (
        nesting(tensors, name, state_name, state, total // block)
        if "nested_blocksize" in state
        else None
    )
    largest = part(
        tensors, f"{name}.absmax", (total // block,), FLOATS if nested is None else (torch.uint8,)
    ).load
    smaller = gcd(block, width)  # blocks that end with their row

    def read(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> Codebook:
        lines = [(start * words, end * words) for start, end in ranges]
        packed = rows_of(weight, lines, device).view(torch.uint8).view(-1, width // 2)
        absmax = largest(torch.float32 if nested is None else torch.uint8, device)
        absmax = absmax if nested is None else nested(absmax)
        each = absmax.repeat_interleave(block // smaller).view(rows, width // smaller)
        picked = torch.cat([each[start:end] for start, end in ranges])
        return Codebook(packed >> 4 | packed << 4, table.load(torch.float32, device), picked)

    return PackedMatrix.whole(product, read)


def nesting(
    tensors: Tensors, name: str, state_name: str, state: dict, count: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """8-bit codes of largest magnitudes -> the magnitudes."""
    block = state["nested_blocksize"]
    mean = state.get("nested_offset")
    if not isinstance(block, int) or block < 1 or not isinstance(mean, int | float):
        raise CheckpointError(f"{state_name}: {state} does not describe magnitudes of eight bits")
    table = part(tensors, f"{name}.nested_quant_map", (256,))
    largest = part(tensors, f"{name}.nested_absmax", (-(-count // block),))

    def magnitudes(codes: torch.Tensor) -> torch.Tensor:
        values = table.load(torch.float32, codes.device)[codes.long()]
        each = largest.load(torch.float32, codes.device).repeat_interleave(block)[:count]
        return values * each + mean

    return magnitudes


def described(tensors: Tensors, name: str) -> dict:
    """A JSON object, written as bytes into a tensor."""
    text = bytes(
        part(tensors, name, sizes(tensors, name, 1), (torch.uint8,))
        .load(torch.uint8, HOST)
        .tolist()
    )
    try:
        state = json.loads(text)
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}: is not a JSON object; the checkpoint is damaged")
    return state

"""bitsandbytes checkpoints: int8 with a scale per row, or 4-bit codes of a codebook in blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch

from bloomery.errors import CheckpointError
from bloomery.kernels.packed import CodebookWeight, GroupedScales
from bloomery.quant.base import (
    FLOAT_DTYPES,
    CheckpointTensors,
    LinearSpec,
    get_shape,
    get_tensor,
    load_rows,
    mark_as_used,
    select_rows,
)
from bloomery.quant.lazy_tensor import Range
from bloomery.quant.nf4 import CODEBOOKS
from bloomery.quant.packed_matrix import PackedMatrix, open_unquantized

HOST = torch.device("cpu")


class BitsAndBytesFormat:
    """Layers with `SCB` are int8, those with a `quant_state` are 4-bit, others full precision."""

    def open_matrix(self, tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
        name = linear.name
        if tensors.has(f"{name}.SCB"):
            return open_int8_rows(tensors, linear)
        for codebook_name in CODEBOOKS:
            state_name = f"{name}.weight.quant_state.bitsandbytes__{codebook_name}"
            if tensors.has(state_name):
                return open_4bit(tensors, linear, state_name)
        return open_unquantized(tensors, linear)


def open_int8_rows(tensors: CheckpointTensors, linear: LinearSpec) -> PackedMatrix:
    """int8 [out, in]; SCB [out] is the largest magnitude of a row, which has the code 127.

    bitsandbytes multiplies outliers of the input separately, because it rounds the input to 8 bits.
    We do not round the input, so one product is enough.
    """
    weight = get_tensor(tensors, f"{linear.name}.weight", linear.shape, (torch.int8,))
    absmax = get_tensor(tensors, f"{linear.name}.SCB", linear.shape[:1])
    mark_as_used(tensors, linear.name, "weight_format")

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> GroupedScales:
        codes = load_rows(weight, ranges, device)
        largest = absmax.rows(ranges).load(torch.float32, device)
        scale = largest[:, None] / 127
        return GroupedScales(codes, scale, bits=8)

    return PackedMatrix.from_loader(linear, load)


def open_4bit(tensors: CheckpointTensors, linear: LinearSpec, state_name: str) -> PackedMatrix:
    """4-bit codes of the matrix as one long row, and one absmax per block of that row.

    A byte holds two codes, the first one in the high half. `weight` is [n, 1] of any dtype: the
    writer chooses it, and it only stores the bytes. The absmax values may be quantized themselves
    (double quantization).
    """
    rows, columns = linear.shape
    num_values = rows * columns
    name = f"{linear.name}.weight"
    state = read_quant_state(tensors, state_name)
    block_size = state.get("blocksize")
    if (
        not isinstance(block_size, int)
        or block_size < 1
        or num_values % block_size
        or columns % 2
        or state.get("shape") != [rows, columns]
    ):
        raise CheckpointError(
            f"{state_name}: {state} does not describe a matrix of {rows} x {columns}"
        )
    stored_shape = get_shape(tensors, name)
    storage_dtypes = (torch.uint8, torch.int8, *FLOAT_DTYPES)
    weight = get_tensor(tensors, name, stored_shape, storage_dtypes)
    elements_per_row = stored_shape[0] // rows
    codes_per_row = elements_per_row * weight.dtype.itemsize * 2
    if stored_shape != (elements_per_row * rows, 1) or codes_per_row != columns:
        raise CheckpointError(
            f"{name}: {list(stored_shape)} of {weight.dtype} do not hold {rows} x {columns} codes "
            "of four bits"
        )
    codebook = get_tensor(tensors, f"{name}.quant_map", (16,))
    load_absmax = open_absmax(tensors, name, state_name, state, num_values // block_size)
    # Blocks may cross rows. Smaller ones, with repeated absmax values, end with their row.
    row_block_size = gcd(block_size, columns)

    def load(ranges: Sequence[Range], dtype: torch.dtype, device: torch.device) -> CodebookWeight:
        element_ranges = []
        for start, end in ranges:
            element_ranges.append((start * elements_per_row, end * elements_per_row))
        stored = load_rows(weight, element_ranges, device)
        packed = stored.view(torch.uint8).view(-1, columns // 2)
        # Kernels expect the first code in the low half.
        codes = packed >> 4 | packed << 4
        repeated = load_absmax(device).repeat_interleave(block_size // row_block_size)
        absmax = repeated.view(rows, columns // row_block_size)
        return CodebookWeight(
            codes,
            codebook.load(torch.float32, device),
            select_rows(absmax, ranges),
        )

    return PackedMatrix.from_loader(linear, load)


def open_absmax(
    tensors: CheckpointTensors,
    name: str,
    state_name: str,
    state: dict[str, Any],
    num_blocks: int,
) -> Callable[[torch.device], torch.Tensor]:
    """Return a function that loads the absmax values of all blocks, float32 [num_blocks]."""
    if "nested_blocksize" not in state:
        absmax = get_tensor(tensors, f"{name}.absmax", (num_blocks,))
        return lambda device: absmax.load(torch.float32, device)
    nested_size = state["nested_blocksize"]
    mean = state.get("nested_offset")
    has_nested_size = isinstance(nested_size, int) and nested_size > 0
    if not has_nested_size or not isinstance(mean, int | float):
        raise CheckpointError(f"{state_name}: {state} does not describe nested absmax values")
    codes = get_tensor(tensors, f"{name}.absmax", (num_blocks,), (torch.uint8,))
    table = get_tensor(tensors, f"{name}.nested_quant_map", (256,))
    num_nested = -(-num_blocks // nested_size)
    nested_absmax = get_tensor(tensors, f"{name}.nested_absmax", (num_nested,))

    def load_nested(device: torch.device) -> torch.Tensor:
        indices = codes.load(torch.uint8, device).long()
        values = table.load(torch.float32, device)[indices]
        scale = nested_absmax.load(torch.float32, device).repeat_interleave(nested_size)
        return values * scale[:num_blocks] + mean

    return load_nested


def read_quant_state(tensors: CheckpointTensors, name: str) -> dict[str, Any]:
    """Read the JSON object that bitsandbytes stores as bytes in a tensor."""
    shape = get_shape(tensors, name, num_dims=1)
    stored = get_tensor(tensors, name, shape, (torch.uint8,))
    text = bytes(stored.load(torch.uint8, HOST).tolist())
    try:
        state = json.loads(text)
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}: is not a JSON object; the checkpoint is damaged")
    return state

"""Weights as they are read from a checkpoint, before they are prepared for multiplication.

A LoadedWeight is one of

    torch.Tensor     [out, in], not quantized
    PackedWeight     codes and scales in a layout that kernels read (kernels/packed.py)
    ActOrderWeight   codes whose columns belong to groups in any order; no kernel reads them

The functions here cut rows and columns out of loaded weights and concatenate them along the rows.
They change no value: a cut through a group of columns that share a scale divides the matrix into
smaller groups and repeats their scales. This file must not know checkpoint formats or matrix
products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, cast

import torch

from bloomery.errors import UnsupportedModel
from bloomery.kernels.packed import (
    FP8_BLOCK_SIZE,
    CodebookWeight,
    Fp8Weight,
    GroupedScales,
    PackedWeight,
    unpack_codes,
)
from bloomery.kernels.quantize_rows import FP8

MIN_GROUP_SIZE = 16  # columns of the smallest group that kernels read
MAX_PROPOSED_DEVICES = 64  # error messages list possible numbers of devices up to this one
# Fields whose first axis is the rows of the matrix. All other fields apply to all rows.
ROW_FIELDS = ("codes", "scale", "zero_point", "absmax", "nested_scale")


@dataclass(frozen=True)
class ActOrderWeight:
    """Integer codes with a group index for every column: weight = (code - zero_point) * scale.

    GPTQ's act-order needs this when the columns are divided among tensor parallel ranks, or when
    the groups have different sizes. Codes take a byte each, since no kernel reads them.
    """

    codes: torch.Tensor  # [out, in] uint8
    scale: torch.Tensor  # [out, groups]
    zero_point: torch.Tensor  # [out, groups]
    g_idx: torch.Tensor  # [in] int64: the group of each column

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [out, in]."""
        scale = self.scale.float()[:, self.g_idx]
        zero_point = self.zero_point.float()[:, self.g_idx]
        steps = self.codes.float() - zero_point
        return (steps * scale).to(dtype)

    @classmethod
    def from_grouped(cls, grouped: GroupedScales) -> ActOrderWeight:
        """Put the columns of an act-order matrix back into the order of the input."""
        assert grouped.act_order is not None
        order = grouped.act_order.long()
        device = order.device
        codes = torch.empty(grouped.shape, dtype=torch.uint8, device=device)
        codes[:, order] = unpack_codes(grouped.codes, grouped.bits)
        sorted_columns = torch.arange(len(order), device=device)
        g_idx = torch.empty_like(order)
        g_idx[order] = sorted_columns // grouped.group_size
        zero_point = grouped.zero_point
        if zero_point is None:
            zero_point = torch.full_like(grouped.scale, grouped.default_zero_point)
        return cls(codes, grouped.scale, zero_point, g_idx)


QuantizedCodes = PackedWeight | ActOrderWeight
LoadedWeight = QuantizedCodes | torch.Tensor


def dequantize(weight: LoadedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [out, in]."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    return weight.dequantize(dtype)


# ---- columns -------------------------------------------------------------------------------------


def slice_columns(weight: LoadedWeight, start: int, end: int, name: str) -> LoadedWeight:
    """Cut out columns start:end.

    Raises UnsupportedModel, with `name` in the message, if the layout cannot be cut there.
    """
    match weight:
        case torch.Tensor():
            return weight[:, start:end].contiguous()
        case ActOrderWeight():
            codes = weight.codes[:, start:end].contiguous()
            g_idx = weight.g_idx[start:end]
            return replace(weight, codes=codes, g_idx=g_idx)
        case GroupedScales(act_order=torch.Tensor()):
            in_input_order = ActOrderWeight.from_grouped(weight)
            return slice_columns(in_input_order, start, end, name)
        case GroupedScales():
            return slice_grouped_columns(weight, start, end, name)
        case CodebookWeight():
            return slice_codebook_columns(weight, start, end, name)
        case Fp8Weight():
            return slice_fp8_columns(weight, start, end, name)


def slice_grouped_columns(weight: GroupedScales, start: int, end: int, name: str) -> GroupedScales:
    bits = weight.bits
    columns = weight.shape[1]
    scale = weight.scale
    zero_point = weight.zero_point
    if scale.shape[1] > 1:
        old_size = weight.group_size
        new_size = common_group_size(old_size, start, end, columns, name)
        scale = regroup_scales(scale, old_size, new_size, start, end)
        if zero_point is not None:
            zero_point = regroup_scales(zero_point, old_size, new_size, start, end)
    else:
        unit = 8 // gcd(8, bits)  # columns that fill whole bytes
        if start % unit or end % unit:
            raise uneven_split(name, start, end, columns, unit)
    first_byte = start * bits // 8
    end_byte = end * bits // 8
    codes = weight.codes[:, first_byte:end_byte].contiguous()
    return replace(weight, codes=codes, scale=scale, zero_point=zero_point)


def slice_codebook_columns(
    weight: CodebookWeight, start: int, end: int, name: str
) -> CodebookWeight:
    columns = weight.shape[1]
    block_size = common_group_size(weight.block_size, start, end, columns, name)
    if weight.nested_scale is not None:
        # The slice stays nested only if every row has one nested scale and whole blocks remain,
        # more than one of them. Otherwise the absmax values are dequantized.
        has_many_nested_scales = weight.columns_per_nested_scale < columns
        cuts_blocks = block_size < weight.block_size
        is_single_block = end - start == block_size
        if has_many_nested_scales or cuts_blocks or is_single_block:
            weight = CodebookWeight(weight.codes, weight.table[:16], weight.dequantized_absmax)
    absmax = regroup_scales(weight.absmax, weight.block_size, block_size, start, end)
    codes = weight.codes[:, start // 2 : end // 2].contiguous()
    return replace(weight, codes=codes, absmax=absmax)


def slice_fp8_columns(weight: Fp8Weight, start: int, end: int, name: str) -> Fp8Weight:
    columns = weight.shape[1]
    scale = weight.scale
    if scale.shape[1] > 1:
        cuts_last_block = end % FP8_BLOCK_SIZE and end != columns
        if start % FP8_BLOCK_SIZE or cuts_last_block:
            raise uneven_split(name, start, end, columns, FP8_BLOCK_SIZE)
        first_block = start // FP8_BLOCK_SIZE
        end_block = -(-end // FP8_BLOCK_SIZE)
        scale = scale[:, first_block:end_block].contiguous()
    codes = weight.codes[:, start:end].contiguous()
    return expand_single_block_column(replace(weight, codes=codes, scale=scale))


def expand_single_block_column(weight: Fp8Weight) -> Fp8Weight:
    """Give every row its own scale if the matrix is only one 128 x 128 block wide.

    scale [out / 128, 1] becomes [out, 1], which the GEMM with 8-bit inputs accepts.
    """
    num_rows = len(weight.codes)
    has_several_columns = weight.scale.shape[1] > 1
    has_row_scales = len(weight.scale) == num_rows
    if has_several_columns or has_row_scales:
        return weight
    scale = weight.scale.repeat_interleave(FP8_BLOCK_SIZE, 0)
    return replace(weight, scale=scale[:num_rows])


def common_group_size(group_size: int, start: int, end: int, columns: int, name: str) -> int:
    """Return the largest divisor of `group_size` that also divides `start` and `end`.

    With groups of that size, columns start:end are whole groups.
    """
    smaller = gcd(group_size, start, end)
    if smaller < min(MIN_GROUP_SIZE, group_size):
        raise uneven_split(name, start, end, columns, MIN_GROUP_SIZE)
    return smaller


def regroup_scales(
    scales: torch.Tensor, old_size: int, new_size: int, start: int, end: int
) -> torch.Tensor:
    """Repeat scales for smaller groups and select those of columns start:end.

    [out, in / old_size] -> [out, (end - start) / new_size]
    """
    repeated = scales.repeat_interleave(old_size // new_size, 1)
    first_group = start // new_size
    end_group = end // new_size
    return repeated[:, first_group:end_group].contiguous()


def uneven_split(name: str, start: int, end: int, columns: int, unit: int) -> UnsupportedModel:
    """Build the error for a slice that cuts through `unit` columns which cannot be separated."""
    device_counts = [
        str(count) for count in range(1, MAX_PROPOSED_DEVICES + 1) if columns % (count * unit) == 0
    ]
    return UnsupportedModel(
        f"{name}: columns {start}:{end} of {columns} cut through {unit} that cannot be separated; "
        f"this matrix can be split evenly among {', '.join(device_counts) or '1'} devices"
    )


# ---- rows ----------------------------------------------------------------------------------------


def slice_rows(weight: QuantizedCodes, rows: slice | torch.Tensor) -> QuantizedCodes:
    """Select rows; a slice gives views. A slice of a blockwise Fp8Weight must begin at a block."""
    if isinstance(weight, Fp8Weight) and weight.is_blockwise and isinstance(rows, slice):
        first_block = rows.start // FP8_BLOCK_SIZE
        end_block = -(-rows.stop // FP8_BLOCK_SIZE)
        return replace(
            weight,
            codes=weight.codes[rows],
            scale=weight.scale[first_block:end_block],
        )
    return combine_row_fields([weight], lambda fields: fields[0][rows])


def concatenate(weights: Sequence[LoadedWeight]) -> LoadedWeight:
    """Stack weights along the rows. They must be compatible (see can_concatenate)."""
    if len(weights) == 1:
        return weights[0]
    if isinstance(weights[0], torch.Tensor):
        return torch.cat(cast(Any, weights))
    return combine_row_fields(weights, torch.cat)


def concatenate_neighbors(weights: Iterable[LoadedWeight]) -> list[LoadedWeight]:
    """Stack neighboring weights that are compatible; the others stay separate."""
    stacks: list[list[LoadedWeight]] = []
    for weight in weights:
        if stacks and can_concatenate(stacks[-1], weight):
            stacks[-1].append(weight)
        else:
            stacks.append([weight])
    return [concatenate(stack) for stack in stacks]


def can_concatenate(stack: Sequence[LoadedWeight], below: LoadedWeight) -> bool:
    """Whether `below` has the layout of the weights in `stack` and can be stacked below them."""
    match stack[0], below:
        case torch.Tensor(), torch.Tensor():
            return True
        case GroupedScales() as first, GroupedScales() as second:
            return have_same_groups(first, second)
        case CodebookWeight() as first, CodebookWeight() as second:
            # The tables of nested weights are longer, so equal tables mean equal nesting.
            same_table = torch.equal(first.table, second.table)
            return first.block_size == second.block_size and same_table
        case Fp8Weight() as first, Fp8Weight() as second:
            if first.quantize_input != second.quantize_input:
                return False
            if first.is_blockwise != second.is_blockwise:
                return False
            num_rows = sum(weight.shape[0] for weight in stack)
            return not first.is_blockwise or num_rows % FP8_BLOCK_SIZE == 0
        case ActOrderWeight() as first, ActOrderWeight() as second:
            return torch.equal(first.g_idx, second.g_idx)
    return False


def have_same_groups(first: GroupedScales, second: GroupedScales) -> bool:
    """Whether two matrices have the same bits, groups and column order."""
    if first.act_order is None or second.act_order is None:
        same_order = first.act_order is second.act_order
    else:
        same_order = torch.equal(first.act_order, second.act_order)
    return (
        first.bits == second.bits
        and first.codes.dtype == second.codes.dtype
        and first.group_size == second.group_size
        and first.quantize_input == second.quantize_input
        and (first.zero_point is None) == (second.zero_point is None)
        and same_order
    )


def combine_row_fields(
    weights: Sequence[LoadedWeight], combine: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Any:
    """Apply `combine` to each row field of the weights; returns a weight of the same type.

    8-bit floats are passed to it as bytes, because torch can neither index nor stack them.
    """
    combined: dict[str, torch.Tensor] = {}
    for name in ROW_FIELDS:
        first_field = getattr(weights[0], name, None)
        if first_field is None:
            continue
        fields = [getattr(weight, name) for weight in weights]
        if first_field.dtype == FP8:
            byte_fields = [field.view(torch.uint8) for field in fields]
            combined[name] = combine(byte_fields).view(FP8)
        else:
            combined[name] = combine(fields)
    return replace(cast(Any, weights[0]), **combined)

"""Weights quantized to 2, 3 or 4 bits with a scale and a zero point per group of columns.

    weight [out, in] -> codes, scale [out, in / group_size], zero [out, in / group_size]
    weight is about (code - zero) * scale

Each group alternates between rounding to the current scale and zero point and refitting both to
the codes by least squares. The initial range is smaller than that of the group, because its largest
values are rare. Two refits remove a quarter of the error that rounding to the group's range would
leave.

One program quantizes 2048 / group_size groups and holds them in registers throughout. quant/int4.py
uses this file, which must not know checkpoint formats.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.packed import pack_codes

INITIAL_RANGE = {4: 0.92, 3: 0.88, 2: 0.75}  # bits -> fraction of a group's range
NUM_REFITS = {4: 2, 3: 3, 2: 4}  # bits -> refits
MIN_SCALE = 2.0**-24  # the smallest positive float16
PROGRAM_VALUES = 2048

QuantizedGroups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, scale, zero


def quantize_groups(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedGroups:
    """Quantize weight [out, in] (float32) to codes, with scales and zero points in float16.

    3-bit codes take a byte each, [out, in]. Others are packed by kernels/packed.pack_codes.
    """
    is_power_of_2 = group_size & (group_size - 1) == 0
    if use_triton(weight) and is_power_of_2 and group_size <= 1024:
        return quantize_groups_triton(weight, bits, group_size)
    return quantize_groups_reference(weight, bits, group_size)


def quantize_groups_reference(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedGroups:
    """The torch reference of `quantize_groups`."""
    groups = weight.unflatten(1, (-1, group_size))
    low = groups.amin(-1, keepdim=True)
    high = groups.amax(-1, keepdim=True)
    half_range = (high - low) / 2 * INITIAL_RANGE[bits]
    scale = 2 * half_range / (2**bits - 1)
    offset = (low + high) / 2 - half_range  # the value of code 0
    mean = groups.mean(-1, keepdim=True)
    for refit in range(NUM_REFITS[bits] + 1):
        scale, zero = round_scale_and_zero(scale, offset)
        codes = round_to_codes(groups, scale, zero, bits)
        if refit < NUM_REFITS[bits]:  # the least-squares line through (code, value)
            code_mean = codes.mean(-1, keepdim=True)
            deviation = codes - code_mean
            covariance = (deviation * (groups - mean)).sum(-1, keepdim=True)
            variance = deviation.square().sum(-1, keepdim=True).clamp_(min=1e-9)
            scale = (covariance / variance).abs_()
            offset = mean - scale * code_mean
    codes = codes.flatten(1).to(torch.uint8)
    if bits != 3:
        codes = pack_codes(codes, bits)
    return codes, scale.flatten(1).half(), zero.flatten(1).half()


def round_scale_and_zero(
    scale: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round scale and zero point to float16, in float32.

    Float16 counts integers up to 2048. Where the zero point would be larger, the scale grows.
    """
    scale = torch.maximum(scale, offset.abs() / 2048).half().float().clamp_(min=MIN_SCALE)
    return scale, (-offset / scale).half().float()


def round_to_codes(
    groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    """Round values to the nearest code, as floats."""
    return (groups / scale + zero).round_().clamp_(0, 2**bits - 1)


def quantize_groups_triton(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedGroups:
    """Run the kernel, for which the groups of all rows are one long list."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    code_bytes = columns // 2 if bits == 4 else columns
    codes = torch.empty(rows, code_bytes, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, columns // group_size, dtype=torch.float16, device=weight.device)
    zero = torch.empty_like(scale)
    block_groups = PROGRAM_VALUES // group_size
    quantize_groups_kernel[(-(-scale.numel() // block_groups),)](
        weight,
        codes,
        scale,
        zero,
        scale.numel(),
        INITIAL_RANGE[bits],
        MIN_SCALE,
        MAX_CODE=2**bits - 1,
        NUM_REFITS=NUM_REFITS[bits],
        GROUP_SIZE=group_size,
        BLOCK_GROUPS=block_groups,
        num_warps=4,
        **pdl_options(weight.device),
    )
    if bits == 2:
        codes = pack_codes(codes, bits)
    return codes, scale, zero


@jit
def quantize_groups_kernel(
    weight,  # [groups, GROUP_SIZE]
    codes,
    scale,
    zero,
    num_groups,
    initial_range,
    min_scale,
    MAX_CODE: tl.constexpr,
    NUM_REFITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize BLOCK_GROUPS groups, as the reference does. 4-bit codes are packed here."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    group = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    mask = group < num_groups
    offset_in = group.to(tl.int64)[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    x = tl.load(weight + offset_in, mask=mask[:, None], other=0.0)
    low = tl.min(x, 1)
    high = tl.max(x, 1)
    half_range = (high - low) / 2 * initial_range
    mean = tl.sum(x, 1) / GROUP_SIZE
    s = 2 * half_range / MAX_CODE
    offset = (low + high) / 2 - half_range
    q = x
    for refit in tl.static_range(NUM_REFITS + 1):
        s = tl.maximum(s, tl.abs(offset) / 2048).to(tl.float16).to(tl.float32)
        s = tl.maximum(s, min_scale)
        z = (-offset / s).to(tl.float16).to(tl.float32)
        q = tl.floor(x / s[:, None] + z[:, None] + 0.5)
        q = tl.minimum(tl.maximum(q, 0.0), MAX_CODE)
        if refit < NUM_REFITS:
            code_mean = tl.sum(q, 1) / GROUP_SIZE
            deviation = q - code_mean[:, None]
            covariance = tl.sum(deviation * (x - mean[:, None]), 1)
            variance = tl.maximum(tl.sum(deviation * deviation, 1), 1e-9)
            s = tl.abs(covariance / variance)
            offset = mean - s * code_mean
    if MAX_CODE == 15:  # two codes per byte
        even, odd = tl.split(tl.reshape(q.to(tl.int32), (BLOCK_GROUPS, GROUP_SIZE // 2, 2)))
        byte = tl.arange(0, GROUP_SIZE // 2)[None, :]
        offset_out = group.to(tl.int64)[:, None] * (GROUP_SIZE // 2) + byte
        tl.store(codes + offset_out, (even | odd << 4).to(tl.uint8), mask=mask[:, None])
    else:
        tl.store(codes + offset_in, q.to(tl.uint8), mask=mask[:, None])
    tl.store(scale + group, s.to(tl.float16), mask=mask)
    tl.store(zero + group, z.to(tl.float16), mask=mask)

"""The GPTQ algorithm: rounds one column after another and corrects the columns that follow.

The Hessian of a linear layer, the sum of x xT over its calibration inputs, tells how much a change
of one column can make up for the rounding error of another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.errors import CheckpointError

SCALE_CANDIDATES = (1.0, 0.95, 0.9, 0.85, 0.8)  # relative to the scale that clips no value
MIN_SCALE = 2.0**-24  # the smallest positive float16
LAZY_COLUMNS = 128  # columns that are rounded before the columns behind them are corrected


class GptqResult(NamedTuple):
    """Symmetric codes: weight = (code - 2 ** (bits - 1)) * scale[g_idx]."""

    codes: torch.Tensor  # [out, in] uint8
    scale: torch.Tensor  # [out, groups] float32 with float16 values
    g_idx: torch.Tensor  # [in] int32: the group of each column


def solve_gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group_size: int,
    act_order: bool = False,
    damping: float = 0.01,
) -> GptqResult:
    """Quantize weights [out, in] with their Hessian [in, in].

    `act_order`: columns with the largest inputs are rounded first. Columns whose inputs were all
    zero are rounded to the nearest code, because other texts may need them.
    """
    columns = weight.shape[1]
    device = weight.device
    hessian = hessian.float().clone()
    hessian.diagonal()[hessian.diagonal() == 0] = 1
    order = torch.arange(columns, device=device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True)
    # In the order of rounding; columns not rounded yet contain the corrections.
    corrected = weight.float()[:, order]
    inverse = factor_inverse(hessian[order][:, order], damping)
    middle = 1 << bits - 1
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=device)
    scales: list[torch.Tensor] = []
    for start in range(0, columns, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, columns)
        errors = torch.empty(len(weight), end - start, device=device)
        for i in range(start, end):
            if i % group_size == 0:
                scales.append(find_best_scale(corrected[:, i : i + group_size], bits))
            scale = scales[-1]
            column = corrected[:, i]
            steps = (column / scale).round_().clamp_(-middle, middle - 1)
            codes[:, i] = (steps + middle).to(torch.uint8)
            error = (column - steps * scale) / inverse[i, i]
            errors[:, i - start] = error
            corrected[:, i:end] -= error[:, None] * inverse[i, i:end]
        corrected[:, end:] -= errors @ inverse[start:end, end:]
    g_idx = torch.empty(columns, dtype=torch.int32, device=device)
    g_idx[order] = (torch.arange(columns, device=device) // group_size).int()
    codes_in_order = torch.empty_like(codes)
    codes_in_order[:, order] = codes
    return GptqResult(codes_in_order, torch.stack(scales, 1), g_idx)


def find_best_scale(group: torch.Tensor, bits: int) -> torch.Tensor:
    """For each row of a group [out, columns], the float16 scale with the least squared error."""
    middle = 1 << bits - 1
    full_scale = group.abs().amax(1) / (middle - 0.5)
    least_error = torch.full_like(full_scale, torch.inf)
    best_scale = full_scale
    for candidate in SCALE_CANDIDATES:
        scale = (full_scale * candidate).half().float().clamp_(min=MIN_SCALE)
        steps = (group / scale[:, None]).round_().clamp_(-middle, middle - 1)
        error = (steps * scale[:, None] - group).square().sum(1)
        best_scale = torch.where(error < least_error, scale, best_scale)
        least_error = torch.minimum(least_error, error)
    return best_scale


def factor_inverse(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse Hessian [in, in].

    If it does not exist, the damping is increased until it does.
    """
    mean = hessian.diagonal().mean()
    identity = torch.eye(len(hessian), device=hessian.device)
    while damping <= 1:
        lower, failed = torch.linalg.cholesky_ex(hessian + identity * (damping * mean))
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10
    raise CheckpointError(
        "the inputs of a linear layer have no usable statistics; give more calibration text"
    )

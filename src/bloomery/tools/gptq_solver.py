"""The GPTQ algorithm: rounds one column after another and corrects the columns that follow.

The Hessian of a linear layer is the sum of x xT over its calibration inputs. It determines how far
the columns that follow must change to compensate the rounding error of a column.
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
    zero are rounded to the nearest code, because their inputs may not be zero in other texts.
    """
    rows, columns = weight.shape
    device = weight.device
    hessian = hessian.float().clone()
    diagonal = hessian.diagonal()  # a view
    diagonal[diagonal == 0] = 1
    order = torch.arange(columns, device=device)
    if act_order:
        order = diagonal.argsort(descending=True)
    # The weights in the order of rounding. Columns not rounded yet contain the corrections.
    corrected = weight.float()[:, order]
    ordered_hessian = hessian[order][:, order]
    inverse = factor_inverse(ordered_hessian, damping)
    middle = 1 << bits - 1
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=device)
    scales: list[torch.Tensor] = []
    for start in range(0, columns, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, columns)
        errors = torch.empty(rows, end - start, device=device)
        for i in range(start, end):
            if i % group_size == 0:
                group = corrected[:, i : i + group_size]
                scales.append(find_best_scale(group, bits))
            scale = scales[-1]
            column = corrected[:, i]
            steps = (column / scale).round_().clamp_(-middle, middle - 1)
            codes[:, i] = (steps + middle).to(torch.uint8)
            error = (column - steps * scale) / inverse[i, i]
            errors[:, i - start] = error
            correction = error[:, None] * inverse[i, i:end]
            corrected[:, i:end] -= correction
        corrected[:, end:] -= errors @ inverse[start:end, end:]
    # Codes and groups are stored in the order of the input.
    ordered_groups = torch.arange(columns, device=device) // group_size
    g_idx = torch.empty(columns, dtype=torch.int32, device=device)
    g_idx[order] = ordered_groups.int()
    input_order_codes = torch.empty_like(codes)
    input_order_codes[:, order] = codes
    scale = torch.stack(scales, 1)
    return GptqResult(input_order_codes, scale, g_idx)


def find_best_scale(group: torch.Tensor, bits: int) -> torch.Tensor:
    """Find the float16 scale with the least squared error for each row of a group [out, columns].

    Returns float32 [out].
    """
    middle = 1 << bits - 1
    full_scale = group.abs().amax(1) / (middle - 0.5)
    least_error = torch.full_like(full_scale, torch.inf)
    best_scale = full_scale
    for candidate in SCALE_CANDIDATES:
        scale = (full_scale * candidate).half().float()
        scale.clamp_(min=MIN_SCALE)
        steps = (group / scale[:, None]).round_()
        steps.clamp_(-middle, middle - 1)
        difference = steps * scale[:, None] - group
        error = difference.square().sum(1)
        best_scale = torch.where(error < least_error, scale, best_scale)
        least_error = torch.minimum(least_error, error)
    return best_scale


def factor_inverse(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Compute the upper Cholesky factor of the inverse Hessian [in, in].

    `damping` times the mean of the diagonal is added to the diagonal. If the factor does not exist,
    the damping is increased tenfold, up to 1.
    """
    mean = hessian.diagonal().mean()
    identity = torch.eye(len(hessian), device=hessian.device)
    while damping <= 1:
        damped = hessian + identity * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10
    raise CheckpointError(
        "the inputs of a linear layer have no usable statistics; give more calibration text"
    )

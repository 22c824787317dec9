"""GPTQ: columns rounded one after another, each one's error made good by those that follow.

`hessian` is the sum of x xT over the inputs the product has seen: it says which errors can make up for which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bloomery.errors import CheckpointError

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
WIDTH = 128  # columns after which the rest of the matrix is told


class Solved(NamedTuple):
    codes: torch.Tensor  # [out, in] uint8
    scale: torch.Tensor  # [out, groups] float32, as half precision keeps it
    groups: torch.Tensor  # [in] int32: of each column


def solve(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group: int,
    act_order: bool = False,
    damping: float = 0.01,
) -> Solved:
    """weight [out, in], symmetric. `act_order`: columns whose inputs are largest go first.

    Columns whose inputs were never seen are rounded as they are: another text may need them.
    """
    width = weight.shape[1]
    weight = weight.float()
    hessian = hessian.float().clone()
    hessian.diagonal()[hessian.diagonal() == 0] = 1
    order = (
        hessian.diagonal().argsort(descending=True)
        if act_order
        else torch.arange(width, device=weight.device)
    )
    rest = weight[:, order]
    inverse = factor(hessian[order][:, order], damping)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = []
    for start in range(0, width, WIDTH):
        end = min(start + WIDTH, width)
        errors = torch.empty(len(weight), end - start, device=weight.device)
        for i in range(start, end):
            if i % group == 0:
                scales.append(scale_of(rest[:, i : i + group], bits))
            column = rest[:, i]
            scale = scales[-1]
            middle = 1 << bits - 1
            steps = (column / scale).round_().clamp_(-middle, middle - 1)
            codes[:, i] = (steps + middle).to(torch.uint8)
            errors[:, i - start] = (column - steps * scale) / inverse[i, i]
            rest[:, i:end] -= errors[:, i - start, None] * inverse[i, i:end]
        rest[:, end:] -= errors @ inverse[start:end, end:]
    groups = torch.empty(width, dtype=torch.int32, device=weight.device)
    groups[order] = (torch.arange(width, device=weight.device) // group).int()
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    return Solved(natural, torch.stack(scales, 1), groups)


def scale_of(block: torch.Tensor, bits: int) -> torch.Tensor:
    """The step for each row that brings its values nearest, as half precision keeps it."""
    middle = 1 << bits - 1
    full = block.abs().amax(1) / (middle - 0.5)
    best = torch.full_like(full, torch.inf)
    found = full
    for shrink in SHRINKS:
        scale = (full * shrink).half().float().clamp_(min=2.0**-24)
        steps = (block / scale[:, None]).round_().clamp_(-middle, middle - 1)
        error = (steps * scale[:, None] - block).square().sum(1)
        best, found = torch.minimum(best, error), torch.where(error < best, scale, found)
    return found


def factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Upper Cholesky factor of the inverse; damped more where it does not exist."""
    mean = hessian.diagonal().mean()
    while damping <= 1:
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    raise CheckpointError(
        "the inputs of a product have no usable statistics; give more calibration text"
    )

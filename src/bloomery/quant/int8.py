"""Eight bits: a row's largest magnitude is 127 steps."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import Grid

SMALLEST = 1e-12  # a scale, so that rows of zeros divide


def int8(weight: torch.Tensor, both: bool = False) -> Grid:
    """`both`: products may round their input to eight bits as well (W8A8)."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_(min=SMALLEST)
    return Grid((weight / scale).round_().to(torch.int8), scale, bits=8, both=both)


def w8a8(weight: torch.Tensor) -> Grid:
    return int8(weight, both=True)

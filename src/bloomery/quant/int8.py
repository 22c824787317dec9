"""Eight bits: a row's largest magnitude is 127 steps."""

from __future__ import annotations

import torch

from bloomery.kernels.packed import Grid
from bloomery.kernels.quantize_rows import INT8, quantize_rows


def int8(weight: torch.Tensor, both: bool = False) -> Grid:
    """`both`: products may round their input to eight bits as well (W8A8)."""
    codes, scale = quantize_rows(weight, INT8)
    return Grid(codes, scale, bits=8, both=both)

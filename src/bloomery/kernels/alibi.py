"""ALiBi: how much each head discounts distance."""

from __future__ import annotations

import math

import torch


def alibi_slopes(heads: int, max_bias: float) -> torch.Tensor:
    """[heads] float32; heads beyond a power of two take the odd steps of the next one."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-max_bias * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-max_bias * (2 * i + 1) / (2 * n)) for i in range(heads - n)]
    return torch.tensor(slopes[:heads])

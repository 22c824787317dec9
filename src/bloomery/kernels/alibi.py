"""ALiBi slopes: how much each head's attention scores fall with distance."""

from __future__ import annotations

import math

import torch


def alibi_slopes(heads: int, max_bias: float) -> torch.Tensor:
    """Return the slopes [heads] in float32.

    With n, the largest power of two not above `heads`, the first n slopes are a geometric series.
    The remaining heads take the odd steps of the series for 2 n heads.
    """
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-max_bias * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-max_bias * (2 * i + 1) / (2 * n)) for i in range(heads - n)]
    return torch.tensor(slopes[:heads])

"""What stands between the two halves of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """[tokens, gate | up] -> activation(gate) * up."""
    left, right = x.chunk(2, -1)
    return ACTIVATIONS[activation](left) * right

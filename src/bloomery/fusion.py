"""What a linear layer may fuse with its matrix product: a norm before it, an epilogue after it.

These are descriptions without behaviour. Layers build them, and a weight format passes them to a
kernel that does everything in one pass. If there is no such kernel, the layer runs the parts one by
one. This module imports only torch: no kernel, no weight format and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

TensorPair = tuple[torch.Tensor, torch.Tensor]


class NormPrologue(NamedTuple):
    """A norm of the input rows, before the product."""

    kind: Literal["rms", "layer"]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


class ResidualEpilogue(NamedTuple):
    """Returns tensor + scale * y, where y is the product."""

    tensor: torch.Tensor
    scale: float = 1.0


class ActivationEpilogue(NamedTuple):
    """Returns name(y), or name(gate) * up if the rows of the weights are gate | up."""

    name: str
    gated: bool


@dataclass(frozen=True)
class QkTransform:
    """How q, k and v change between the QKV projection and the attention.

    First q, k and v are clipped to [-clip, clip], then each head of q and k is normed, then rope is
    applied.
    """

    # cos, sin in float32: [tokens, rope dim / 2], or with `positions` tables [max len, ...]
    angles: TensorPair | None = None
    positions: torch.Tensor | None = None  # [tokens]
    interleaved: bool = False  # rope pairs are (0, 1), (2, 3), ... instead of two halves
    norm: Literal["rms", "layer"] | None = None
    weights: TensorPair | None = None  # of q and k: [head dim], or [heads, head dim]
    eps: float = 0.0
    clip: float | None = None


class QkvEpilogue(NamedTuple):
    """Applies rope to q and k, writes k and v to the KV cache, and returns q.

    The rows of the weights are q | k | v.
    """

    kv_cache: torch.Tensor  # [2, slots, kv heads, head dim]
    slot_mapping: torch.Tensor  # [tokens]: the KV cache slot of each token
    transform: QkTransform


Epilogue = ResidualEpilogue | ActivationEpilogue | QkvEpilogue | None

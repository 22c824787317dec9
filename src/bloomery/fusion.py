"""What a linear layer may fuse around its matrix product: a norm before it, an epilogue behind it.

These are plain descriptions. Layers build them, and a weight format hands them to a kernel that
does all of it in one pass; where there is no such kernel, the layer runs the parts one by one. This
module knows torch only: no kernel, no weight format and no model.
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
    """tensor + scale * y, where y is the product."""

    tensor: torch.Tensor
    scale: float = 1.0


class ActivationEpilogue(NamedTuple):
    """name(y), or name(gate) * up where the rows of the weights are gate | up."""

    name: str
    gated: bool


@dataclass(frozen=True)
class QkTransform:
    """How q and k change between the QKV projection and the attention.

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
    """The rows of the weights are q | k | v.

    q and k get rope, k and v go to the KV cache, q is the result.
    """

    kv_cache: torch.Tensor  # [2, slots, kv heads, head dim]
    slot_mapping: torch.Tensor  # [tokens]: the KV cache slot of each token
    transform: QkTransform


Epilogue = ResidualEpilogue | ActivationEpilogue | QkvEpilogue | None

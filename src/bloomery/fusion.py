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
    """Returns name(y), or name(gate) * up if the rows of the weights are gate | up.

    `params` are the numbers of activations that have some (see kernels/activation.py):
    clamped_swiglu has limit, alpha and offset of up; xielu has alpha_p, alpha_n and beta.
    """

    name: str
    gated: bool
    params: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class QkTransform:
    """How q, k and v change between the QKV projection and the attention.

    First q, k and v are clipped to [-clip, clip], then each head of q and k is normed, then rope is
    applied (with `norm_after_rope` the other way around), then q is scaled by its position. Values
    are normed and get no rope.
    """

    # cos, sin in float32: [tokens, rope dim / 2], or with `positions` tables [max len, ...]
    angles: TensorPair | None = None
    positions: torch.Tensor | None = None  # [tokens]
    interleaved: bool = False  # rope pairs are (0, 1), (2, 3), ... instead of two halves
    norm: Literal["rms", "layer"] | None = None
    weights: TensorPair | None = None  # of q and k: [head dim], or [heads, head dim]
    eps: float = 0.0
    clip: float | None = None
    norm_after_rope: bool = False
    v_norm: NormPrologue | None = None  # of each value head, without a bias
    keys_as_values: bool = False  # values are the clipped keys: the projection has only q | k
    # Factors of q in float32: [tokens], or with `positions` a table [max len]
    query_scales: torch.Tensor | None = None


class QkvEpilogue(NamedTuple):
    """Applies rope to q and k, writes k and v to the KV cache, and returns q.

    The rows of the weights are q | k | v, or q | k | v | gate. The products of the gate rows are
    written to `gate`.
    """

    kv_cache: torch.Tensor  # [2, slots, kv heads, head dim]
    slot_mapping: torch.Tensor  # [tokens]: the KV cache slot of each token
    transform: QkTransform
    gate: torch.Tensor | None = None  # [tokens, gate rows]


Epilogue = ResidualEpilogue | ActivationEpilogue | QkvEpilogue | None

"""The one product of the model, in a vocabulary that can be fused.

`linear(x, before, after)` says what surrounds the product: a norm of its input; a residual to add, an activation, or
the turning and storing of q, k and v behind its output. Where a matrix has a fused kernel for the batch at hand it may
take the whole phrase; otherwise the phrase is spoken word by word, which is what happens here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.activation import ACTIVATIONS, gate
from bloomery.kernels.rotate import rotate
from bloomery.kernels.store import store
from bloomery.layers.norm import Normalize
from bloomery.quant.base import Ready
from bloomery.spec import Attention, Rope


@dataclass(frozen=True)
class Add:
    """residual + scale * y"""

    residual: torch.Tensor
    scale: float = 1.0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return torch.add(self.residual, y, alpha=self.scale)


@dataclass(frozen=True)
class Activate:
    """activation(y), or activation(gate) * up when y is both side by side"""

    activation: str
    gated: bool

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return gate(y, self.activation) if self.gated else ACTIVATIONS[self.activation](y)


@dataclass(frozen=True)
class Rotate:
    """q | k | v side by side -> q normed and turned; k likewise, and v, stored in the cache at `slots`"""

    spec: Attention
    q_norm: Normalize | None
    k_norm: Normalize | None
    angles: tuple[torch.Tensor, torch.Tensor] | None  # cos, sin [tokens, turned / 2]
    cache: torch.Tensor  # [2, slots, kv heads, dim]
    slots: torch.Tensor  # [tokens]

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if spec.clip is not None:
            qkv = qkv.clamp(-spec.clip, spec.clip)
        kv = spec.num_kv_heads * spec.head_dim
        q, k, v = qkv.split((spec.num_heads * spec.head_dim, kv, kv), -1)
        q, k, v = self._turn(q, self.q_norm), self._turn(k, self.k_norm), v.unflatten(-1, (-1, spec.head_dim))
        store(k, v, self.cache, self.slots)
        return q

    def _turn(self, x: torch.Tensor, norm: Normalize | None) -> torch.Tensor:
        """[tokens, heads * dim] -> normed and turned [tokens, heads, dim]"""
        if norm is not None and self.spec.qk_norm_over == "all":
            x = norm(x)
        x = x.unflatten(-1, (-1, self.spec.head_dim))
        if norm is not None and self.spec.qk_norm_over != "all":
            x = norm(x)
        if self.angles is not None and isinstance(self.spec.position, Rope):
            x = rotate(x, *self.angles, self.spec.position.interleaved)
        return x


@dataclass(frozen=True)
class Linear:
    matrix: Ready
    bias: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, before: Normalize | None = None, after: Add | Activate | Rotate | None = None
    ) -> torch.Tensor:
        y = self.matrix.linear(x if before is None else before(x), self.bias)
        return y if after is None else after(y)

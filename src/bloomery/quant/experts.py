"""Experts of fewer bits: multiplied as they are where kernels read them, else unpacked while they are visited."""

from __future__ import annotations

from typing import Any

import torch

from bloomery.kernels.experts import mix, mix_reference
from bloomery.kernels.packed import Packed
from bloomery.kernels.packed_experts import mix_packed, possible
from bloomery.quant.base import Ready
from bloomery.quant.dense import DenseReady
from bloomery.quant.packed import PackedReady, has_kernels, height, slab


class Unpacking:
    """A stack of matrices that are unpacked when they are asked for."""

    def __init__(self, ready: Ready, experts: int):
        self.ready = ready
        self.experts = experts
        self.rows = height(ready) // experts

    def __len__(self) -> int:
        return self.experts

    def __getitem__(self, expert: int) -> torch.Tensor:
        return slab(self.ready, expert * self.rows, (expert + 1) * self.rows)

    def visited(self, experts: torch.Tensor | None) -> torch.Tensor:
        """[n] numbers -> [n, out, in], without the host knowing which; None: all."""
        if experts is None:
            return slab(self.ready, 0, self.experts * self.rows).unflatten(0, (self.experts, -1))
        rows = experts.long()[:, None] * self.rows + torch.arange(self.rows, device=experts.device)
        return self.ready.gather(rows.flatten()).unflatten(0, (-1, self.rows))


def mixed(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: Ready,
    down: Ready,
    experts: int,
    activation: str,
) -> torch.Tensor:
    """kernels.experts.mix in any format: up [experts * (gate | up), hidden], down [experts * hidden, size]."""
    if isinstance(up, DenseReady) and isinstance(down, DenseReady):
        first, second = (ready.weight.unflatten(0, (experts, -1)) for ready in (up, down))
        return mix(x, chosen, weights, first, second, activation)
    if x.is_cuda and (first := readable(up, x.dtype)) and (second := readable(down, x.dtype)):
        return mix_packed(x, chosen, weights, first, second, experts, activation)
    ups = Unpacking(up, experts)
    downs = Unpacking(down, experts)
    if not x.is_cuda:
        stacks: tuple[Any, Any] = ups, downs  # the reference asks for one matrix after another
        return mix_reference(x, chosen, weights, *stacks, activation)
    visits = None
    if chosen.numel() < experts:  # each visit has an expert of its own, if perhaps the same twice
        inside = (chosen >= 0) & (chosen < experts)
        visits = torch.where(inside, chosen, 0).flatten()
        chosen = torch.where(
            inside, torch.arange(len(visits), device=x.device).view_as(chosen), -1
        ).int()
    return mix(x, chosen, weights, ups.visited(visits), downs.visited(visits), activation)


def readable(ready: Ready, dtype: torch.dtype) -> Packed | None:
    """What kernels multiply as it is."""
    packed = ready.packed if isinstance(ready, PackedReady) else None
    return (
        packed if packed is not None and has_kernels(packed) and possible(packed, dtype) else None
    )

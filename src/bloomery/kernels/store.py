"""New keys and values into their places in the paged cache."""

from __future__ import annotations

import torch


def store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """k, v [tokens, kv heads, dim] -> cache [2, slots, kv heads, dim] at `slots` [tokens]."""
    cache[0].index_copy_(0, slots, k.to(cache.dtype))
    cache[1].index_copy_(0, slots, v.to(cache.dtype))

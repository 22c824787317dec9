"""The best of each line in an order that is the same everywhere: score first, and lowest id among equals.

Half-precision logits are full of equal values, and torch.topk promises nothing about them. This file must not know
what the order is for.
"""

from __future__ import annotations

import torch


def ordered(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [lines, vocab] float32 -> the `count` highest and their ids, each [lines, count], best first."""
    vocab = scores.shape[-1]
    backwards = torch.arange(vocab - 1, -1, -1, device=scores.device)
    if scores.is_cuda:
        best = _best(scores, backwards, count)
    else:  # one line at a time stays in the cache
        best = torch.stack([_best(line, backwards, count) for line in scores])
    ids = vocab - 1 - (best & 0xFFFFFFFF)
    return scores.gather(-1, ids), ids


def _best(scores: torch.Tensor, backwards: torch.Tensor, count: int) -> torch.Tensor:
    """Keys that compare like (score, -id): a float's bits, made to order as an integer does, above the id."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    key = torch.add(backwards, bits.to(torch.int64), alpha=1 << 32)
    if count == scores.shape[-1]:
        return key.sort(dim=-1, descending=True).values
    return key.topk(count, dim=-1).values

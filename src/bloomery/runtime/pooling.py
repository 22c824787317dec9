"""Embeddings: the final hidden states of a prompt as one vector of length 1, gathered chunk by chunk.

What a prompt's former chunks left is held by its row, and is gone with it: a preempted prompt begins anew.
"""

from __future__ import annotations

import torch

from bloomery.runtime.batch import Share


def pool(share: Share, hidden: torch.Tensor) -> torch.Tensor | None:
    """Take in this step's positions of hidden [tokens, width]; the pooled state [width] with the prompt's last."""
    row, item = share.row, share.item
    part = hidden[share.first : share.first + item.count]
    if row.start.pooling == "last":
        return part[-1].float() if item.samples else None
    summed = part.float().sum(0)
    row.pooled = summed if row.pooled is None else row.pooled + summed
    return row.pooled / row.start.prompt_len if item.samples else None


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)

"""Embeddings: the final hidden states of a prompt as one vector of length 1, gathered chunk by chunk.

What a prompt's former chunks left is held by its row, and is gone with it: a preempted prompt begins anew.
"""

from __future__ import annotations

import torch

from bloomery.runtime.batch import Share

# Means are summed in whole numbers of this part of one: their sum does not depend on how a prompt was cut into chunks.
# It holds 131,072 states of up to 65,536 each, to a billionth.
ONE = 2.0**30


def pool(share: Share, hidden: torch.Tensor) -> torch.Tensor | None:
    """Take in this step's positions of hidden [tokens, width]; the pooled state [width] with the prompt's last."""
    row = share.row
    item = share.item
    part = hidden[share.first : share.first + item.count]
    if row.start.pooling == "last":
        return part[-1].float() if item.samples else None
    summed = (part.double() * ONE).round().long().sum(0)
    row.pooled = summed if row.pooled is None else row.pooled + summed
    return (row.pooled.double() / (ONE * row.start.prompt_len)).float() if item.samples else None


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)

"""Embeddings: pools the final hidden states of a prompt into one vector, chunk by chunk.

The request's row holds the sum over the earlier chunks. A preempted request loses its row, so its
prompt starts again.
"""

from __future__ import annotations

import torch

from bloomery.runtime.step_batch import BatchedRequest

# Mean pooling adds integers in units of 1 / FIXED_POINT_ONE, so that the sum does not depend on how
# the prompt was split into chunks. An int64 holds the sum of 131,072 states of up to 65,536 each.
FIXED_POINT_ONE = 2.0**30


def pool_hidden_states(request: BatchedRequest, hidden: torch.Tensor) -> torch.Tensor | None:
    """Add this step's positions of hidden [tokens, width] to the request's pooled state.

    Returns the pooled state [width] for the last chunk of the prompt, and None for earlier chunks.
    """
    row = request.row
    scheduled = request.scheduled
    is_last_chunk = scheduled.samples
    first = request.first_token
    states = hidden[first : first + scheduled.count]
    if row.request.pooling == "last":
        return states[-1].float() if is_last_chunk else None
    chunk_sum = (states.double() * FIXED_POINT_ONE).round().long().sum(0)
    row.pooled_sum = chunk_sum if row.pooled_sum is None else row.pooled_sum + chunk_sum
    if not is_last_chunk:
        return None
    return (row.pooled_sum.double() / (FIXED_POINT_ONE * row.request.prompt_len)).float()


def normalize_embedding(vector: torch.Tensor) -> torch.Tensor:
    """Scale a vector to length 1."""
    return torch.nn.functional.normalize(vector, dim=-1)

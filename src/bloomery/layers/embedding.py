"""Token ids to vectors, and hidden states to logits; tensor parallel ranks split the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.vocab_shard import local_vocab_rows, zero_foreign_rows
from bloomery.layers.linear import LinearLayer
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import PreparedWeight


@dataclass(frozen=True)
class VocabEmbedding:
    """The embeddings of the token ids [first, end); without a group these are all token ids."""

    matrix: PreparedWeight  # [end - first, width]
    first: int
    end: int
    group: CommunicationGroup | None = None
    pool: ThreadPool | None = None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, width], the same on every rank."""
        if self.group is None:
            return self.matrix.gather(token_ids)
        rows = local_vocab_rows(token_ids, self.first, self.end, self.pool)
        x = self.matrix.gather(rows)
        return self.group.all_reduce(
            zero_foreign_rows(x, token_ids, self.first, self.end, self.pool)
        )


@dataclass(frozen=True)
class LogitsHead:
    """The output projection to logits; with a group each rank holds a range of token ids."""

    linear: LinearLayer
    vocab: int
    group: CommunicationGroup | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, vocab], the same on every rank."""
        logits = self.linear(hidden)
        if self.group is None:
            return logits
        return self.group.all_gather(logits, self.vocab)

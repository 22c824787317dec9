"""Token ids to vectors, and hidden states to logits; tensor parallel ranks split the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.vocab_shard import local_vocab_rows, zero_foreign_rows
from bloomery.layers.linear import LinearLayer
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import CommunicationGroup
from bloomery.quant.base import PreparedWeight
from bloomery.quant.lora import EmbeddingAdapters, TableAdapters


@dataclass(frozen=True)
class VocabEmbedding:
    """The embeddings of the token ids [first, end); without a group these are all token ids."""

    matrix: PreparedWeight  # [end - first, width]
    first: int
    end: int
    group: CommunicationGroup | None = None
    pool: ThreadPool | None = None
    adapters: EmbeddingAdapters | None = None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, width], the same on every rank."""
        if self.group is None:
            return self._adapt(token_ids, self.matrix.gather(token_ids))
        rows = local_vocab_rows(token_ids, self.first, self.end, self.pool)
        x = self.matrix.gather(rows)
        x = zero_foreign_rows(x, token_ids, self.first, self.end, self.pool)
        return self.group.all_reduce(self._adapt(token_ids, x))

    def _adapt(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Change the embeddings of tokens whose row has an adapter."""
        return x if self.adapters is None else self.adapters.add(token_ids, x, self.pool)


@dataclass(frozen=True)
class LogitsHead:
    """The output projection to logits; with a group each rank holds a range of token ids."""

    linear: LinearLayer
    vocab: int
    group: CommunicationGroup | None = None
    tables: TableAdapters | None = None  # heads of adapters that have their own

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, vocab], the same on every rank."""
        logits = self.linear(hidden)
        if self.tables is not None:
            self.tables.replace_logits(hidden, logits, self.linear.pool)
        if self.group is None:
            return logits
        return self.group.all_gather(logits, self.vocab)

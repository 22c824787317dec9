"""Tokens to vectors and back; where ranks share a model, each holds the rows of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.layers.linear import Linear
from bloomery.parallel.groups import Group
from bloomery.quant.base import Ready


@dataclass(frozen=True)
class Embedding:
    matrix: Ready  # [tokens of this rank, width]
    first: int  # its first token
    end: int
    group: Group

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self.matrix.gather(tokens)
        foreign = (tokens < self.first) | (tokens >= self.end)
        found = self.matrix.gather((tokens - self.first).masked_fill(foreign, 0))
        return self.group.sum(found.masked_fill(foreign[:, None], 0))


@dataclass(frozen=True)
class Head:
    linear: Linear
    vocab: int
    width: int  # tokens of a rank; the last one may have fewer
    group: Group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, vocab], the same on every rank."""
        scores = self.linear(hidden)
        if self.group.size == 1:
            return scores
        return self.group.join(torch.nn.functional.pad(scores, (0, self.width - scores.shape[1])))[:, : self.vocab]

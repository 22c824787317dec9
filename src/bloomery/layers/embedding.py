"""Tokens to vectors and back; where ranks share a model, each holds the rows of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.words import blank, own
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
        found = self.matrix.gather(own(tokens, self.first, self.end))
        return self.group.sum(blank(found, tokens, self.first, self.end))


@dataclass(frozen=True)
class Head:
    linear: Linear
    vocab: int
    group: Group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, vocab], the same on every rank."""
        scores = self.linear(hidden)
        return self.group.join(scores, self.vocab)

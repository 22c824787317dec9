"""Tokens picked on the device alone, for rows that ask for nothing a kernel cannot do: what a captured step needs.

Results are those of Sampler.sample, whose per-row parameters it reads; the other parameters are Sampler's affair.
"""

from __future__ import annotations

import torch

from bloomery.kernels.pick import Scratch, Wishes, pick
from bloomery.messages import NewRequestData
from bloomery.native import ops
from bloomery.native.team import team
from bloomery.runtime.sampler import Sampler


def plain(start: NewRequestData) -> bool:
    """Whether logits and the row's numbers are all it takes."""
    s = start.sampling
    edited = (
        s.allowed_token_ids
        or s.logit_bias
        or s.bad_words
        or s.watermark
        or (s.min_tokens and start.stop_ids)
    )
    penalised = (
        s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0
    )
    return not edited and not penalised and s.typical_p >= 1.0 and s.logprobs is None


class Picker:
    def __init__(self, sampler: Sampler, more: int = 0):
        """For a line each of all rows, and so many more."""
        self.numbers = sampler.numbers
        temperature, top_p, min_p = self.numbers[:, :3].unbind(1)
        self.wishes = Wishes(temperature, top_p, min_p, sampler.top_k, sampler.seeds)
        self.scratch = Scratch.of(len(sampler.top_k) + more, sampler.vocab, sampler.device)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """logits [lines, vocab]; rows and positions of the tokens to pick [lines] -> tokens [lines]."""
        if team().takes(logits):
            stride = self.numbers.stride(0)
            return ops.pick(
                logits, rows, positions, self.numbers, stride, self.wishes.top_k, self.wishes.seeds
            )
        return pick(logits, rows, positions, self.wishes, self.scratch).tokens

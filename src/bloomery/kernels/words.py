"""A rank's part of a table of words: the rows of those it has, and nothing for those it has not."""

from __future__ import annotations

import torch

from bloomery.native import ops
from bloomery.native.team import team


def own(words: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """words [n] -> their rows in a table of those from `first` to `end`; row 0 for others."""
    if (
        team().active
        and words.dtype == torch.int64
        and words.device.type == "cpu"
        and words.is_contiguous()
    ):
        return ops.own(words, first, end)
    return own_reference(words, first, end)


def own_reference(words: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return (words - first).masked_fill((words < first) | (words >= end), 0)


def blank(x: torch.Tensor, words: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """x [n, width] with zeros in the lines of words from elsewhere; x itself may be overwritten."""
    if team().takes(x) and words.dtype == torch.int64 and words.is_contiguous():
        ops.blank(x, words, first, end)
        return x
    return blank_reference(x, words, first, end)


def blank_reference(x: torch.Tensor, words: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return x.masked_fill(((words < first) | (words >= end))[:, None], 0)

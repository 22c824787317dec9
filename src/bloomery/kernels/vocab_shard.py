"""Embedding lookup when a tensor parallel rank holds only a range of the vocabulary.

A rank looks up row 0 for token ids it does not hold, then sets those rows of the result to zero, so
that the sum over all ranks is the whole embedding.
"""

from __future__ import annotations

import torch

from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool


def local_vocab_rows(
    token_ids: torch.Tensor, first: int, end: int, pool: ThreadPool | None = None
) -> torch.Tensor:
    """Map token ids [n] to rows of a table that holds ids first to end - 1; others map to row 0."""
    if (
        pool is not None
        and token_ids.dtype == torch.int64
        and token_ids.device.type == "cpu"
        and token_ids.is_contiguous()
    ):
        return ops.local_vocab_rows(pool, token_ids, first, end)
    return local_vocab_rows_reference(token_ids, first, end)


def local_vocab_rows_reference(token_ids: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The torch reference of `local_vocab_rows`."""
    foreign = (token_ids < first) | (token_ids >= end)
    return (token_ids - first).masked_fill(foreign, 0)


def zero_foreign_rows(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    first: int,
    end: int,
    pool: ThreadPool | None = None,
) -> torch.Tensor:
    """Return x [n, width] with zeros in the rows of ids outside first to end - 1.

    x itself may be overwritten.
    """
    if (
        pool is not None
        and pool.accepts(x)
        and token_ids.dtype == torch.int64
        and token_ids.is_contiguous()
    ):
        ops.zero_foreign_rows(pool, x, token_ids, first, end)
        return x
    return zero_foreign_rows_reference(x, token_ids, first, end)


def zero_foreign_rows_reference(
    x: torch.Tensor, token_ids: torch.Tensor, first: int, end: int
) -> torch.Tensor:
    """The torch reference of `zero_foreign_rows`."""
    foreign = (token_ids < first) | (token_ids >= end)
    return x.masked_fill(foreign[:, None], 0)

"""What a step looks like to attention, and what a backend must do.

Prefill, decode, chunks and drafts are one Ragged batch: each sequence brings `count` new positions to a cache that
holds `length - count` of its own already. The new keys and values of *all* sequences are stored before any attends: a
sequence may share blocks that another one fills in the same step. The cache is [2, slots, kv heads, dim] everywhere:
keys, then values; block b holds slots b * size to (b + 1) * size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bloomery.kernels.alibi import alibi_slopes
from bloomery.spec import Alibi, Attention


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's layout: new positions of several sequences, one after another; those with a single one come first.

    Integer tensors are int64 on the CPU and int32 on a GPU. The tuples are the host's copy of two of them; a captured
    step has none, for there the host does not know.
    """

    counts: tuple[int, ...]  # new positions of each sequence
    lengths: tuple[int, ...]  # positions of each sequence once they are stored
    singles: int  # how many leading sequences have one new position; a captured step may count few as `several` instead
    starts: torch.Tensor  # [sequences + 1] where each sequence's new positions begin in the step
    ends: torch.Tensor  # [sequences] the lengths
    positions: torch.Tensor  # [tokens] place in its sequence
    slots: torch.Tensor  # [tokens] place in the cache: block * size + offset
    tables: torch.Tensor  # [sequences, blocks] padded with any block: what lies there is masked
    block_size: int
    several: int = 0  # in a captured step: sequences behind the singles, of any length; nobody's have an end of 0


class Backend(Protocol):
    def refuses(self, spec: Attention, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this backend cannot serve such a layer, or None."""
        ...

    def plan(self, ragged: AttentionMetadata) -> Any:
        """Once a step: whatever `attend` needs that does not depend on the layer."""
        ...

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, spec: Attention, plan: Any
    ) -> torch.Tensor:
        """q [tokens, heads, dim] -> [tokens, heads * dim], over what the cache holds up to each token."""
        ...


def slopes(spec: Attention, alibi: Alibi) -> torch.Tensor:
    """[heads] float32: of the heads that are here."""
    every = alibi_slopes(alibi.heads or spec.num_heads, alibi.max_bias) * alibi.scale
    return every[alibi.first : alibi.first + spec.num_heads]


def cache_shape(spec: Attention, blocks: int, block_size: int) -> tuple[int, ...]:
    return (2, blocks * block_size, spec.num_kv_heads, spec.head_dim)

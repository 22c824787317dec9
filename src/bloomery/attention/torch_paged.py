"""Paged attention in plain torch: the oracle of every other backend, and the path on the CPU.

Memory is linear in the sequence: queries go in slices, so that a slice's scores stay under a fixed size. Sequences
with one new position attend together, padded to the longest; the others one by one. Heads that share a key head are
folded into the query axis, so keys and values are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

from bloomery.attention.base import AttentionMetadata, slopes
from bloomery.kernels.rounded_cache import read
from bloomery.spec import Alibi, Attention

SCORES = 1 << 22  # elements of a score matrix held at once


@dataclass(frozen=True)
class Group:
    """Sequences that attend in one call: all with the same number of queries."""

    tokens: slice  # which of the step's tokens, sequence by sequence
    queries: int
    slots: torch.Tensor  # [sequences, longest] where their keys lie
    q_positions: torch.Tensor  # [sequences, queries]
    k_positions: torch.Tensor  # [longest]
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, part: slice) -> torch.Tensor:
        """[sequences, queries of the part, longest] true where a query may look; layers alike share one."""
        key = (window, part.start)
        if key not in self.masks:
            distance = self.q_positions[:, part, None] - self.k_positions
            seen = distance >= 0
            self.masks[key] = seen if window is None else seen & (distance < window)
        return self.masks[key]


class TorchPaged:
    def __init__(self, fused: bool = True, alone: bool = False):
        self.fused = fused  # off: every score by the plain formula, the oracle's oracle
        self.alone = (
            alone  # no two sequences attend together: no result depends on a neighbour's length
        )

    def refuses(self, spec: Attention, dtype: torch.dtype, device: torch.device) -> str | None:
        return None

    def plan(self, ragged: AttentionMetadata) -> tuple[Group, ...]:
        starts = [0, *accumulate(ragged.counts)]
        first = 0 if self.alone else ragged.singles
        groups = [self._group(ragged, starts, [i]) for i in range(first, len(ragged.counts))]
        if first:
            groups.append(self._group(ragged, starts, list(range(ragged.singles))))
        return tuple(groups)

    def _group(self, ragged: AttentionMetadata, starts: list[int], members: list[int]) -> Group:
        longest = max(ragged.lengths[i] for i in members)
        queries = ragged.counts[members[0]]
        blocks = ragged.tables[members, : -(-longest // ragged.block_size)]
        offsets = torch.arange(ragged.block_size, device=blocks.device)
        slots = (blocks[:, :, None] * ragged.block_size + offsets).flatten(1)[:, :longest]
        tokens = slice(starts[members[0]], starts[members[-1] + 1])
        positions = ragged.positions[tokens].view(len(members), queries)
        return Group(tokens, queries, slots, positions, torch.arange(longest, device=blocks.device))

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, spec: Attention, plan: tuple[Group, ...]
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for group in plan:
            # [n, kv heads, longest, dim]
            keys, values = (half.transpose(1, 2) for half in read(cache, group.slots, q.dtype))
            n, heads, longest, _ = keys.shape
            queries = q[group.tokens].view(n, group.queries, heads, -1, spec.head_dim)
            width = max(1, SCORES // (n * spec.num_heads * longest))
            parts = [
                self._attend(
                    queries[:, a : a + width], keys, values, group, slice(a, a + width), spec
                )
                for a in range(0, group.queries, width)
            ]
            out[group.tokens] = torch.cat(parts, 1).reshape(-1, spec.num_heads, spec.head_dim)
        return out.flatten(1)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Group,
        part: slice,
        spec: Attention,
    ) -> torch.Tensor:
        """q [n, queries, kv heads, share, dim] -> the same shape."""
        n, queries, heads, share, dim = q.shape
        mask = group.mask(spec.window, part)[:, None, None]  # [n, 1, 1, queries, longest]
        bias = None
        if isinstance(spec.position, Alibi):
            each = slopes(spec, spec.position).to(q.device)
            distance = group.k_positions - group.q_positions[:, part, None]
            bias = (
                each.view(1, heads, share, 1, 1) * distance[:, None, None]
            )  # [n, kv heads, share, queries, longest]
            bias = bias.masked_fill(~mask, -torch.inf)
        folded = q.permute(0, 2, 3, 1, 4).reshape(n, heads, share * queries, dim)
        if self.fused and spec.softcap is None:
            extra = mask.expand(n, 1, share, queries, -1) if bias is None else bias.to(q.dtype)
            extra = extra.reshape(n, -1, share * queries, k.shape[2])
            out = F.scaled_dot_product_attention(
                folded, k, v, attn_mask=extra, scale=spec.softmax_scale
            )
        else:
            scores = (folded @ k.transpose(-1, -2)).float().view(
                n, heads, share, queries, -1
            ) * spec.softmax_scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            scores = scores.masked_fill(~mask, -torch.inf) if bias is None else scores + bias
            out = scores.softmax(-1).to(v.dtype).view(n, heads, share * queries, -1) @ v
        return out.view(n, heads, share, queries, dim).permute(0, 3, 1, 2, 4)

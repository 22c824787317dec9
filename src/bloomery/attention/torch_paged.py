"""Paged attention in torch: the reference of every other backend, and the fallback on a CPU.

Memory is linear in the sequence length: queries are processed in slices, so that the scores of a
slice stay below a fixed size. Decodes attend together, padded to the longest sequence; prefills
attend one by one. Query heads that share a KV head are folded into the query axis, so keys and
values are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

from bloomery.attention.base import (
    AttentionMetadata,
    BackendCapabilities,
    local_alibi_slopes,
    softmax_scale,
)
from bloomery.kernels.output_gate import apply_output_gate_reference
from bloomery.kernels.quantized_kv_cache import read_kv_cache
from bloomery.spec import AlibiSpec, AttentionSpec

MAX_SCORES = 1 << 22  # elements of the score matrix of one slice


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences that attend in one call: all have the same number of queries."""

    tokens: slice  # of the step, sequence by sequence
    num_queries: int
    slots: torch.Tensor  # [sequences, max length] KV cache slots of their keys
    query_positions: torch.Tensor  # [sequences, queries]
    key_positions: torch.Tensor  # [max length]: of the keys that some query may see
    masks: dict[tuple[int | None, int | None, int], torch.Tensor] = field(default_factory=dict)

    def causal_mask(self, spec: AttentionSpec, part: slice) -> torch.Tensor:
        """Return [sequences, queries of the part, max length], true where a query attends to a key.

        Layers with the same window and chunk share one mask.
        """
        key = (spec.window, spec.chunk, part.start)
        if key not in self.masks:
            positions = self.query_positions[:, part, None]
            distance = positions - self.key_positions
            mask = distance >= 0
            if spec.window is not None:
                mask = mask & (distance < spec.window)
            if spec.chunk is not None:
                mask = mask & (distance <= positions % spec.chunk)
            self.masks[key] = mask
        return self.masks[key]


class TorchPagedAttention:
    """The attention backend that needs nothing but torch.

    fused: use torch's scaled_dot_product_attention; if off, scores are computed step by step.
    one_by_one: no two sequences attend together, so no result depends on another's length.
    """

    def __init__(self, fused: bool = True, one_by_one: bool = False):
        self.fused = fused
        self.one_by_one = one_by_one

    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities()

    def unsupported_reason(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        return None

    def prepare(self, metadata: AttentionMetadata) -> tuple[SequenceGroup, ...]:
        starts = [0, *accumulate(metadata.host_query_lens)]
        num_together = 0 if self.one_by_one else metadata.num_decodes
        separate = range(num_together, len(metadata.host_query_lens))
        groups = [self._make_group(metadata, starts, [i]) for i in separate]
        if num_together:
            groups.append(self._make_group(metadata, starts, list(range(num_together))))
        return tuple(groups)

    def _make_group(
        self, metadata: AttentionMetadata, starts: list[int], members: list[int]
    ) -> SequenceGroup:
        """Lay out adjacent sequences as a group; `starts` has the first token of each sequence."""
        block_size = metadata.block_size
        max_len = max(metadata.host_seq_lens[i] for i in members)
        num_queries = metadata.host_query_lens[members[0]]
        tokens = slice(starts[members[0]], starts[members[-1] + 1])
        query_positions = metadata.positions[tokens].view(len(members), num_queries)
        blocks = metadata.block_tables[members]
        first_visible = [0] * len(members)
        if metadata.window is not None:
            num_visible = num_queries + metadata.window - 1
            first_visible = [max(metadata.host_seq_lens[i] - num_visible, 0) for i in members]
        key_positions = torch.arange(min(first_visible), max_len, device=blocks.device)
        # Masked keys repeat one that the sequence sees: a weight of zero would not hide a NaN.
        first = torch.tensor(first_visible, device=blocks.device)[:, None]
        last = metadata.seq_lens[members, None].to(first.dtype) - 1
        visible = torch.minimum(torch.maximum(key_positions, first), last)
        slots = blocks.gather(1, visible // block_size) * block_size + visible % block_size
        return SequenceGroup(tokens, num_queries, slots, query_positions, key_positions)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spec: AttentionSpec,
        plan: tuple[SequenceGroup, ...],
        sinks: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for group in plan:
            # [sequences, kv heads, max length, dim]
            keys, values = (
                half.transpose(1, 2) for half in read_kv_cache(cache, group.slots, q.dtype)
            )
            num_sequences, kv_heads, max_len, _ = keys.shape
            queries = q[group.tokens].view(
                num_sequences, group.num_queries, kv_heads, -1, spec.head_dim
            )
            width = max(1, MAX_SCORES // (num_sequences * spec.num_heads * max_len))
            parts = []
            for first in range(0, group.num_queries, width):
                part = slice(first, first + width)
                parts.append(
                    self._attend_part(queries[:, part], keys, values, group, part, spec, sinks)
                )
            attended = torch.cat(parts, 1)
            out[group.tokens] = attended.reshape(-1, spec.num_heads, spec.head_dim)
        if spec.gate is not None and gate is not None:
            out = apply_output_gate_reference(out, gate, spec.gate.activation)
        return out.flatten(1)

    def _attend_part(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: SequenceGroup,
        part: slice,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend for a slice of queries.

        q [sequences, queries, kv heads, query heads per kv head, dim] -> the same shape.
        """
        num_sequences, num_queries, kv_heads, heads_per_kv_head, dim = q.shape
        folded_queries = heads_per_kv_head * num_queries
        # [sequences, 1, 1, queries, max length]
        mask = group.causal_mask(spec, part)[:, None, None]
        bias = None
        if isinstance(spec.position, AlibiSpec):
            slopes = local_alibi_slopes(spec, spec.position).to(q.device)
            distance = group.key_positions - group.query_positions[:, part, None]
            # [sequences, kv heads, query heads per kv head, queries, max length]
            bias = slopes.view(1, kv_heads, heads_per_kv_head, 1, 1) * distance[:, None, None]
            bias = bias.masked_fill(~mask, -torch.inf)
        folded = q.permute(0, 2, 3, 1, 4).reshape(num_sequences, kv_heads, folded_queries, dim)
        if self.fused and spec.softcap is None and sinks is None:
            if bias is None:
                score_mask = mask.expand(num_sequences, 1, heads_per_kv_head, num_queries, -1)
            else:
                score_mask = bias.to(q.dtype)
            score_mask = score_mask.reshape(num_sequences, -1, folded_queries, keys.shape[2])
            out = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=score_mask, scale=softmax_scale(spec)
            )
        else:
            products = (folded @ keys.transpose(-1, -2)).float()
            scores = products.view(num_sequences, kv_heads, heads_per_kv_head, num_queries, -1)
            scores = scores * softmax_scale(spec)
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if bias is None:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = scores + bias
            if sinks is not None:
                # A sink takes its share of the weights, but has no value.
                sink_scores = sinks.view(1, kv_heads, heads_per_kv_head, 1, 1)
                sink_scores = sink_scores.expand(num_sequences, -1, -1, num_queries, 1)
                scores = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
            else:
                scores = scores.softmax(-1)
            weights = scores.to(values.dtype)
            out = weights.reshape(num_sequences, kv_heads, folded_queries, -1) @ values
        unfolded = out.view(num_sequences, kv_heads, heads_per_kv_head, num_queries, dim)
        return unfolded.permute(0, 3, 1, 2, 4)

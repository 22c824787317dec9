"""Paged attention by the CPU kernels: the fast path on a CPU.

It computes in float32 over a KV cache of any type. Decodes attend one by one, with a few heads for
each thread. Prefills attend in tiles of queries. No two sequences share a computation, so a result
does not depend on the other sequences of its step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bloomery.attention.base import (
    AttentionMetadata,
    BackendCapabilities,
    local_alibi_slopes,
    softmax_scale,
)
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.spec import AlibiSpec, AttentionSpec

QUERY_TILE = 32  # queries of a prefill that read the keys together


@dataclass(frozen=True)
class QueryTiles:
    """The attention plan of a step: tiles of queries, decodes first."""

    tiles: torch.Tensor  # [tiles, 4]: sequence, first token, first position, number of queries
    num_decodes: int
    max_queries: int  # queries of the largest tile
    block_tables: torch.Tensor  # [sequences, blocks]
    seq_lens: torch.Tensor | None  # [sequences] in steps whose positions the host does not know
    block_size: int


class CpuPagedAttention:
    """The attention backend of the CPU kernels."""

    def __init__(self, pool: ThreadPool):
        self.pool = pool

    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(cpu_traceable=True, float16_kv_cache=True)

    def unsupported_reason(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        if device.type != "cpu":
            return f"the CPU kernels do not run on {device.type}"
        if dtype != torch.float32:
            return f"the CPU kernels compute in float32, not {dtype}"
        if spec.head_dim % 8:
            return f"a head dimension of {spec.head_dim} is not a multiple of 8"
        return None

    def prepare(self, metadata: AttentionMetadata) -> QueryTiles:
        if metadata.host_query_lens:
            tiles = split_queries(metadata.host_query_lens, metadata.host_seq_lens)
            seq_lens = None
        else:
            # A traced step has only decodes; their positions are read from seq_lens.
            tiles = [(i, i, 0, 1) for i in range(metadata.num_decodes)]
            seq_lens = metadata.seq_lens
        tile_tensor = torch.from_numpy(np.array(tiles, np.int64).reshape(-1, 4))
        block_tables = metadata.block_tables
        if not block_tables.is_contiguous():
            block_tables = block_tables.contiguous()
        return QueryTiles(
            tiles=self.pool.keep_alive(tile_tensor),
            num_decodes=metadata.num_decodes,
            max_queries=max((num_queries for *_, num_queries in tiles), default=1),
            block_tables=block_tables,
            seq_lens=seq_lens,
            block_size=metadata.block_size,
        )

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spec: AttentionSpec,
        plan: QueryTiles,
        sinks: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slopes = None
        if isinstance(spec.position, AlibiSpec):
            slopes = self.pool.keep_alive(local_alibi_slopes(spec, spec.position).contiguous())
        return ops.paged_attention(
            self.pool,
            q if q.is_contiguous() else q.contiguous(),
            cache,
            plan.tiles,
            plan.num_decodes,
            plan.max_queries,
            plan.block_tables,
            plan.block_size,
            plan.seq_lens,
            softmax_scale(spec),
            spec.softcap,
            slopes,
            spec.window,
            spec.chunk,
            sinks,
            gate,
            "sigmoid" if spec.gate is None else spec.gate.activation,
        )


def split_queries(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """Split each sequence's queries into tiles: (sequence, first token, first position, queries).

    Decodes come first. The last tile of a prefill may also have one query; it counts as a prefill.
    """
    tiles = []
    first_token = 0
    for sequence, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first_position = seq_len - query_len
        for offset in range(0, query_len, QUERY_TILE):
            num_queries = min(QUERY_TILE, query_len - offset)
            tiles.append((sequence, first_token + offset, first_position + offset, num_queries))
        first_token += query_len
    return tiles

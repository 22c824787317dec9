"""The layout of one step as attention sees it, and the protocol of an attention backend.

Prefill, chunked prefill, decode and draft verification are one batch: each sequence brings
`query_len` new positions to a KV cache that already holds its earlier ones. The new keys and values
of *all* sequences are stored before any sequence attends, because a sequence may share blocks that
another one fills in the same step.

The KV cache of a layer is [2, slots, kv heads, head dim]: keys first, then values. Block b holds
the slots from b * block_size to (b + 1) * block_size - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bloomery.kernels.alibi import alibi_slopes
from bloomery.spec import AlibiSpec, AttentionSpec


@dataclass(frozen=True)
class AttentionMetadata:
    """The layout of one step: the new positions of all sequences, one sequence after another.

    Decodes (sequences with one new position) come first, then prefills. Integer tensors have
    `index_dtype`. The two tuples are the host's copy of the lengths. A step that is replayed from a
    CUDA graph or a CPU trace has none, because only the device knows its lengths.

    A model with several block tables (cache_groups.py) has one layout per table. They differ in
    `slot_mapping`, `block_tables` and `window`, and share the rest.
    """

    num_decodes: int  # leading sequences with one new position
    # Sequences after the decodes, of any length; set only when the host does not know lengths.
    # Such a step may count its few decodes as prefills. A padding sequence has seq_len 0.
    num_prefills: int
    query_start_loc: torch.Tensor  # [sequences + 1] index of each sequence's first new position
    seq_lens: torch.Tensor  # [sequences] positions once the new ones are stored
    positions: torch.Tensor  # [tokens] position in its sequence
    slot_mapping: torch.Tensor  # [tokens] slot of the KV cache: block * block_size + offset
    block_tables: torch.Tensor  # [sequences, blocks] padded with any block, which is masked
    block_size: int
    # Blocks further back than this may belong to other sequences by now. They may be read, but what
    # they hold must not matter, not even if it is not a number. None: all blocks are there.
    window: int | None = None
    host_query_lens: tuple[int, ...] = ()  # new positions of each sequence
    host_seq_lens: tuple[int, ...] = ()

    @classmethod
    def from_host(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
        window: int | None = None,
    ) -> AttentionMetadata:
        """Build the layout of a step whose lengths the host knows, without token ids."""
        _, (metadata,) = build_step_tensors(
            (), query_lens, seq_lens, [block_tables], block_size, device, [window]
        )
        return metadata

    @classmethod
    def from_single_positions(
        cls,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        window: int | None = None,
    ) -> AttentionMetadata:
        """Build the layout of a step in which each token is a sequence of its own.

        positions and slot_mapping are [tokens], block_tables is [tokens, blocks].
        """
        num_tokens = len(positions)
        device = positions.device
        seq_lens = positions + 1
        host_query_lens: tuple[int, ...] = ()
        host_seq_lens: tuple[int, ...] = ()
        if device.type == "cpu":  # elsewhere the host would have to wait for the lengths
            host_query_lens = (1,) * num_tokens
            host_seq_lens = tuple(seq_lens.tolist())
        return cls(
            num_decodes=num_tokens,
            num_prefills=0,
            query_start_loc=torch.arange(num_tokens + 1, dtype=positions.dtype, device=device),
            seq_lens=seq_lens,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            block_size=block_size,
            window=window,
            host_query_lens=host_query_lens,
            host_seq_lens=host_seq_lens,
        )


@dataclass(frozen=True)
class BackendCapabilities:
    """What a backend supports beyond host-built steps; the worker selects its step path by it."""

    # Serves steps with prefill chunks whose lengths only the device knows.
    device_side_metadata: bool = False
    # All of its operations can be recorded into a CPU trace.
    cpu_traceable: bool = False
    # Reads a float16 KV cache at full speed while it computes in float32.
    float16_kv_cache: bool = False


class AttentionBackend(Protocol):
    """Attention over the paged KV cache. A backend knows no requests, rows or sampling."""

    def capabilities(self) -> BackendCapabilities: ...

    def unsupported_reason(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Say why this backend cannot serve such a layer; None if it can."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Compute, once per step, the inputs of `attend` that do not depend on the layer."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spec: AttentionSpec,
        plan: Any,
        sinks: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, head dim] -> [tokens, heads * head dim].

        Each token attends to the cached positions of its sequence up to its own. `plan` is the
        result of `prepare` for this step. With spec.sinks, `sinks` [heads] in float32 are the
        logits that join each softmax. With spec.gate, the result is gated by `gate`
        [tokens, heads * head dim], or [tokens, heads] with one factor per head, before its
        activation.
        """
        ...


class AttentionStep(NamedTuple):
    """What the layers of one block table need in a step."""

    slot_mapping: torch.Tensor  # [tokens]: where the new keys and values go in the KV cache
    plan: Any  # the backend's


def plan_attention(
    backend: AttentionBackend, layouts: Sequence[AttentionMetadata]
) -> tuple[AttentionStep, ...]:
    """Prepare a step for the layers of each block table."""
    return tuple(AttentionStep(layout.slot_mapping, backend.prepare(layout)) for layout in layouts)


def upload(
    values: Sequence[object] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy host numbers to the device without waiting for it.

    The copy goes through pinned memory: a copy from pageable memory waits for all queued work.
    """
    to_gpu = device.type == "cuda"
    if isinstance(values, torch.Tensor):
        host = values.to(dtype)
        if to_gpu:
            host = host.pin_memory()
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=to_gpu)
    return host.to(device, non_blocking=True) if to_gpu else host


def download(values: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host; it is complete once the work queued so far has ended.

    Steps that are queued later neither delay the copy nor change it, even if they overwrite the
    values.
    """
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)


def build_step_tensors(
    token_ids: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[Sequence[int]]],
    block_size: int,
    device: torch.device,
    windows: Sequence[int | None] = (None,),
) -> tuple[torch.Tensor, tuple[AttentionMetadata, ...]]:
    """Build the tensors of a step that the host lays out, and send them in one copy.

    Sequences with one new position come first. `block_tables` has, for each block table of the
    model, the tables of all sequences; `windows` has the window of each. Returns token ids [tokens]
    and one layout per block table. Uses numpy, because torch would wake its thread pool for these
    few numbers.
    """
    num_tokens = sum(query_lens)
    query_start_loc = [0, *accumulate(query_lens)]
    sequence_of_token = np.repeat(np.arange(len(query_lens)), query_lens)
    first_positions = np.array(seq_lens) - np.array(query_start_loc[1:])
    positions = np.arange(num_tokens) + first_positions[sequence_of_token]
    shared_parts = (np.array(token_ids, np.int64), positions, query_start_loc, seq_lens)
    table_parts: list[np.ndarray] = []
    for tables in block_tables:
        padded_tables = pad_tables(tables)
        blocks = padded_tables[sequence_of_token, positions // block_size]
        slot_mapping = blocks * block_size + positions % block_size
        table_parts += [slot_mapping, padded_tables.ravel()]
    parts = (*shared_parts, *table_parts)
    packed = torch.from_numpy(np.concatenate(parts))
    on_device = upload(packed, device, index_dtype(device))
    tensors = on_device.split([len(part) for part in parts])
    num_decodes = query_lens.count(1)
    host_query_lens = tuple(query_lens)
    host_seq_lens = tuple(seq_lens)
    layouts = tuple(
        AttentionMetadata(
            num_decodes=num_decodes,
            num_prefills=0,
            query_start_loc=tensors[2],
            seq_lens=tensors[3],
            positions=tensors[1],
            slot_mapping=tensors[4 + 2 * index],
            block_tables=tensors[5 + 2 * index].view(len(query_lens), -1),
            block_size=block_size,
            window=window,
            host_query_lens=host_query_lens,
            host_seq_lens=host_seq_lens,
        )
        for index, window in enumerate(windows)
    )
    return tensors[0], layouts


def pad_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Return block tables [sequences, blocks], padded with block 0."""
    num_blocks = max(len(table) for table in tables)
    padded = [[*table, *[0] * (num_blocks - len(table))] for table in tables]
    # np.fromiter is three times as fast here as np.array of nested lists.
    entries = np.fromiter(chain.from_iterable(padded), np.int64, len(padded) * num_blocks)
    return entries.reshape(len(padded), num_blocks)


def index_dtype(device: torch.device) -> torch.dtype:
    """Return the integer type of step tensors: torch indexes by int64, GPU kernels read int32."""
    return torch.int64 if device.type == "cpu" else torch.int32


def softmax_scale(spec: AttentionSpec) -> float:
    """Return the factor that scales q . k before the softmax."""
    return spec.head_dim**-0.5 if spec.scale is None else spec.scale


def local_alibi_slopes(spec: AttentionSpec, alibi: AlibiSpec) -> torch.Tensor:
    """Return the ALiBi slopes [heads], float32, of this tensor parallel rank's heads."""
    all_slopes = alibi_slopes(alibi.total_heads or spec.num_heads, alibi.max_bias) * alibi.scale
    return all_slopes[alibi.first_head : alibi.first_head + spec.num_heads]


def kv_cache_shape(spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of one layer's KV cache: [2, slots, kv heads, head dim]."""
    return (2, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)

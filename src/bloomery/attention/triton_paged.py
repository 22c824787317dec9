"""Paged attention in Triton: the GPU path, for host-built steps and for steps in CUDA graphs.

Decodes go through kernels/paged_decode, prefills through kernels/paged_prefill. A long prefill
chunk may instead go to the attention library (cuDNN, called through torch), which is faster for it
but does not support block tables. Decodes are bound by memory and prefills by arithmetic, so a step
with both runs them concurrently on two streams. Nothing here waits for the device.

A captured step has no host copy of lengths. It has decodes only, or decodes followed by a fixed
number of prefill slots; each slot may be as long as the step, or a single position, or padding.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F

from bloomery.attention.base import (
    AttentionMetadata,
    BackendCapabilities,
    local_alibi_slopes,
    softmax_scale,
)
from bloomery.kernels import launch, paged_decode, paged_prefill
from bloomery.kernels.merge_attention import merge_attention_states
from bloomery.kernels.output_gate import OutputGate, apply_output_gate
from bloomery.kernels.paged_decode import AttentionScoring
from bloomery.kernels.quantized_kv_cache import read_kv_cache
from bloomery.spec import AlibiSpec, AttentionSpec

MAX_HEAD_DIM = 512
# Counters of finished splits, for each of the two kernels.
NUM_SPLIT_COUNTERS = 1 << 14
# New positions from which on the library is used when nothing was measured.
DEFAULT_LIBRARY_MIN_LEN = 2048
# The library prepares itself anew for each length, so lengths are rounded up to a multiple of this.
LIBRARY_LEN_MULTIPLE = 256


@dataclass(frozen=True)
class PrefillGroup:
    """Adjacent prefills that one kernel launch serves, or one long prefill for the library."""

    first_sequence: int
    num_sequences: int
    max_query_len: int
    tokens: slice  # of the step
    long: bool  # a single sequence, with enough new positions for the library
    num_cached: int  # positions of a long prefill that are already in the KV cache


@dataclass(frozen=True)
class TritonAttentionPlan:
    """The attention plan of a step, which all layers share."""

    metadata: AttentionMetadata
    prefill_groups: tuple[PrefillGroup, ...]
    # Zero between launches. The first half belongs to decodes and the second to prefills, because
    # both run at the same time.
    split_counters: torch.Tensor


class SideStream:
    """A second CUDA stream that starts where the current one stands.

    Call `join` before memory of either stream is reused.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.context = torch.cuda.stream(self.stream)
        self.forked = torch.cuda.Event()
        self.done = torch.cuda.Event()

    def __enter__(self) -> None:
        self.forked.record()
        self.stream.wait_event(self.forked)
        self.context.__enter__()

    def __exit__(self, *raised: object) -> None:
        self.done.record()
        self.context.__exit__(*raised)

    def join(self) -> None:
        """Make the current stream wait for this one."""
        torch.cuda.current_stream().wait_event(self.done)


class TritonPagedAttention:
    """The attention backend for GPUs.

    early_decode: in a captured step, decode attention reads the KV cache before its predecessor has
        ended. The step's layout must then be written before the graph, or by a kernel that no other
        kernel overtakes.
    library_min_len: new positions from which on a prefill goes to the library; None: never.
    decode_tiling, prefill_tiling: fixed tilings for measurements; chosen by shape if None.
    concurrent_streams: decodes and prefills of a step run at the same time.
    """

    def __init__(
        self,
        early_decode: bool = False,
        library_min_len: int | None = DEFAULT_LIBRARY_MIN_LEN,
        decode_tiling: paged_decode.PagedDecodeTiling | None = None,
        prefill_tiling: paged_prefill.PagedPrefillTiling | None = None,
        concurrent_streams: bool = True,
    ):
        self.early_decode = early_decode
        self.library_min_len = library_min_len
        self.decode_tiling = decode_tiling
        self.prefill_tiling = prefill_tiling
        self.concurrent_streams = concurrent_streams
        self.side_stream: SideStream | None = None
        self.alibi_slopes: dict[tuple[int, AlibiSpec], torch.Tensor] = {}
        self.split_counters: torch.Tensor | None = None

    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(device_side_metadata=True)

    def unsupported_reason(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        if launch.triton is None:
            return "triton is not installed"
        if device.type != "cuda" and not launch.triton_interpreted():
            return "it needs a CUDA device"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or more"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"it supports float32, float16 and bfloat16, not {dtype}"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"a head dimension of {spec.head_dim} is larger than {MAX_HEAD_DIM}"
        return None

    def prepare(self, metadata: AttentionMetadata) -> TritonAttentionPlan:
        if self.split_counters is None:
            device = metadata.seq_lens.device
            self.split_counters = torch.zeros(
                2 * NUM_SPLIT_COUNTERS, dtype=torch.int32, device=device
            )
        groups: tuple[PrefillGroup, ...] = ()
        if metadata.num_prefills:
            num_tokens = len(metadata.positions)
            group = PrefillGroup(
                first_sequence=metadata.num_decodes,
                num_sequences=metadata.num_prefills,
                max_query_len=num_tokens,
                tokens=slice(0, num_tokens),
                long=False,
                num_cached=0,
            )
            groups = (group,)
        elif len(metadata.host_query_lens) > metadata.num_decodes:
            groups = self._group_prefills(metadata)
        return TritonAttentionPlan(metadata, groups, self.split_counters)

    def _group_prefills(self, metadata: AttentionMetadata) -> tuple[PrefillGroup, ...]:
        """Put adjacent short prefills into one group; each long one is its own group."""
        query_lens = metadata.host_query_lens
        seq_lens = metadata.host_seq_lens
        starts = [0, *accumulate(query_lens)]
        prefills = range(metadata.num_decodes, len(query_lens))
        groups = []
        for long, adjacent in groupby(
            prefills, lambda i: self._is_long(query_lens[i], seq_lens[i])
        ):
            members = list(adjacent)
            launches = [[i] for i in members] if long else [members]
            for sequences in launches:
                first = sequences[0]
                group = PrefillGroup(
                    first_sequence=first,
                    num_sequences=len(sequences),
                    max_query_len=max(query_lens[i] for i in sequences),
                    tokens=slice(starts[first], starts[sequences[-1] + 1]),
                    long=long,
                    num_cached=seq_lens[first] - query_lens[first],
                )
                groups.append(group)
        return tuple(groups)

    def _is_long(self, query_len: int, seq_len: int) -> bool:
        """Whether the library may take this prefill."""
        if self.library_min_len is None or query_len < self.library_min_len:
            return False
        return (seq_len - query_len) % LIBRARY_LEN_MULTIPLE == 0

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spec: AttentionSpec,
        plan: TritonAttentionPlan,
        sinks: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        metadata = plan.metadata
        groups = plan.prefill_groups
        scoring = self.scoring(spec, q.device, sinks)
        output_gate = None
        if spec.gate is not None and gate is not None:
            output_gate = OutputGate(gate, spec.gate.activation)
        only_one_prefill = len(groups) == 1 and not metadata.num_decodes
        if only_one_prefill and uses_library(groups[0], spec, q.dtype):
            return self._attend_by_library(q, cache, spec, groups[0], metadata, output_gate)
        q = q.contiguous()
        out = torch.empty_like(q)
        library_groups = [group for group in groups if uses_library(group, spec, q.dtype)]
        kernel_groups = [group for group in groups if group not in library_groups]
        side_stream = None
        if metadata.num_decodes and kernel_groups:
            side_stream = self._get_side_stream(q.device)
        with side_stream or nullcontext():
            for group in kernel_groups:
                self._attend_prefills(q, cache, out, spec, scoring, group, plan, output_gate)
        if metadata.num_decodes:
            self._attend_decodes(q, cache, out, spec, scoring, plan, output_gate)
        for group in library_groups:
            result = self._attend_by_library(
                q[group.tokens], cache, spec, group, metadata, output_gate
            )
            out[group.tokens] = result.view(-1, spec.num_heads, spec.head_dim)
        if side_stream is not None:
            side_stream.join()
        return out.flatten(1)

    def _get_side_stream(self, device: torch.device) -> SideStream | None:
        if self.concurrent_streams and self.side_stream is None and device.type == "cuda":
            self.side_stream = SideStream(device)
        return self.side_stream

    def _attend_prefills(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        spec: AttentionSpec,
        scoring: AttentionScoring,
        group: PrefillGroup,
        plan: TritonAttentionPlan,
        gate: OutputGate | None,
    ) -> None:
        metadata = plan.metadata
        heads_per_kv_head = spec.num_heads // spec.num_kv_heads
        num_tokens = group.tokens.stop - group.tokens.start
        tiling = self.prefill_tiling
        if tiling is None:
            tiling = paged_prefill.select_prefill_tiling(
                group.max_query_len * heads_per_kv_head,
                num_tokens * heads_per_kv_head,
                spec.head_dim,
                q.element_size(),
                spec.num_kv_heads,
                launch.num_multiprocessors(q.device),
            )
        paged_prefill.paged_prefill(
            q,
            cache,
            out,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            group.first_sequence,
            group.num_sequences,
            group.max_query_len,
            num_tokens,
            metadata.block_size,
            scoring,
            tiling,
            plan.split_counters[NUM_SPLIT_COUNTERS:],
            gate,
        )

    def _attend_decodes(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        spec: AttentionSpec,
        scoring: AttentionScoring,
        plan: TritonAttentionPlan,
        gate: OutputGate | None,
    ) -> None:
        metadata = plan.metadata
        max_positions = min(
            metadata.block_tables.shape[1] * metadata.block_size,
            visible_positions(spec),
        )
        tiling = self.decode_tiling
        if tiling is None:
            tiling = paged_decode.select_decode_tiling(
                metadata.num_decodes,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                q.element_size(),
                max_positions,
                launch.num_multiprocessors(q.device),
            )
        captured = not metadata.host_query_lens
        early = self.early_decode and captured and not metadata.num_prefills
        paged_decode.paged_decode(
            q,
            cache,
            out,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.slot_mapping,
            metadata.num_decodes,
            metadata.block_size,
            scoring,
            tiling,
            plan.split_counters[:NUM_SPLIT_COUNTERS],
            early,
            gate,
        )

    def scoring(
        self, spec: AttentionSpec, device: torch.device, sinks: torch.Tensor | None = None
    ) -> AttentionScoring:
        """Return how the kernels change q . k before the softmax."""
        slopes = None
        if isinstance(spec.position, AlibiSpec):
            key = spec.num_heads, spec.position
            if key not in self.alibi_slopes:
                self.alibi_slopes[key] = local_alibi_slopes(spec, spec.position).to(device)
            slopes = self.alibi_slopes[key]
        return AttentionScoring(
            softmax_scale(spec), spec.window, spec.softcap, slopes, spec.chunk, sinks
        )

    def _attend_by_library(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spec: AttentionSpec,
        group: PrefillGroup,
        metadata: AttentionMetadata,
        gate: OutputGate | None,
    ) -> torch.Tensor:
        """Attend for one long prefill: q [tokens, heads, dim] -> [tokens, heads * dim].

        The new positions attend to themselves and, in a second call, to what was in the KV cache
        before; the two results are merged. Padding after the last position is removed again. `gate`
        has the tokens of the whole step.
        """
        slots = metadata.slot_mapping[group.tokens]
        num_cached = group.num_cached
        num_tokens = len(slots)
        padding = -num_tokens % LIBRARY_LEN_MULTIPLE
        if padding:
            q = F.pad(q, (0, 0, 0, 0, 0, padding))
            slots = torch.cat((slots, slots[-1:].expand(padding)))
        if num_cached:
            slots = torch.cat((cached_slots(group, metadata), slots))
        stored = read_kv_cache(cache, slots, q.dtype)
        keys, values = (half.transpose(0, 1)[None] for half in stored)
        queries = q.transpose(0, 1)[None]
        out, log_sums = library_attention(
            queries,
            keys[:, :, num_cached:],
            values[:, :, num_cached:],
            softmax_scale(spec),
            causal=True,
            with_log_sums=num_cached > 0,
        )
        if num_cached:
            cached_out, cached_log_sums = library_attention(
                queries,
                keys[:, :, :num_cached],
                values[:, :, :num_cached],
                softmax_scale(spec),
                causal=False,
                with_log_sums=True,
            )
            out = merge_attention_states(out, cached_out, log_sums, cached_log_sums)
        out = out[:num_tokens]
        if gate is not None:
            out = apply_output_gate(out, gate.values[group.tokens], gate.activation)
        return out.flatten(1)


def cached_slots(group: PrefillGroup, metadata: AttentionMetadata) -> torch.Tensor:
    """Return the KV cache slots [num_cached] of the positions before a prefill's new ones."""
    block_size = metadata.block_size
    num_blocks = -(-group.num_cached // block_size)
    first_slots = metadata.block_tables[group.first_sequence, :num_blocks, None] * block_size
    offsets = torch.arange(block_size, device=first_slots.device, dtype=first_slots.dtype)
    return (first_slots + offsets).flatten()[: group.num_cached]


def uses_library(group: PrefillGroup, spec: AttentionSpec, dtype: torch.dtype) -> bool:
    """Whether the library serves this prefill; it supports no sliding window and no chunk."""
    seq_len = group.num_cached + group.max_query_len
    return group.long and seq_len <= visible_positions(spec) and library_supports(spec, dtype)


def visible_positions(spec: AttentionSpec) -> int:
    """Return the most positions that a query sees: any number without window and chunk."""
    return min(spec.window or sys.maxsize, spec.chunk or sys.maxsize)


def library_supports(spec: AttentionSpec, dtype: torch.dtype) -> bool:
    """Whether the library computes such attention, apart from a sliding window or a chunk."""
    plain_scores = (
        spec.softcap is None and not spec.sinks and not isinstance(spec.position, AlibiSpec)
    )
    return plain_scores and dtype.itemsize == 2 and spec.head_dim in (64, 128)


def library_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    with_log_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cuDNN: q, k, v [1, heads, n, dim] -> [n, heads, dim] and log-sum-exp [heads, n].

    Without `with_log_sums` the second result has no meaning, and the library is much faster.
    """
    if not q.is_cuda:
        return library_attention_reference(q, k, v, scale, causal)
    out, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, with_log_sums, 0.0, causal, scale=scale
    )
    if with_log_sums:
        log_sums = log_sums[0].view(out.shape[1], -1)
    return out[0].transpose(0, 1), log_sums


def library_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the library's result in torch, for tests without a GPU."""
    heads_per_kv_head = q.shape[1] // k.shape[1]
    keys, values = (half[0].repeat_interleave(heads_per_kv_head, 0).float() for half in (k, v))
    scores = q[0].float() @ keys.transpose(1, 2) * scale
    if causal:
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
    out = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out, scores.logsumexp(-1)

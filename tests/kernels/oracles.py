"""Comparisons of kernels with their references, shared by tests (interpreter) and benchmarks (GPU).

Each `check_*` function builds random inputs, runs a Triton kernel and its torch reference, and
returns the relative error. Kernels write into memory filled with NaN, and the KV cache holds NaN
wherever no sequence has a position, so reading a wrong element or not writing one is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch

from bloomery.attention.base import AttentionMetadata
from bloomery.attention.triton_paged import TritonAttentionPlan, TritonPagedAttention
from bloomery.fusion import ActivationEpilogue, NormPrologue, QkTransform
from bloomery.kernels import activation, norm, output_gate, rope_cache
from bloomery.kernels.output_gate import OutputGate
from bloomery.kernels.paged_decode import paged_attention_reference
from bloomery.layout import gate_size
from bloomery.spec import AttentionSpec

Result = TypeVar("Result")

# The largest relative error a kernel may have, by the type of its inputs.
ERROR_LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; infinite if anything is not finite."""
    actual = actual.double()
    expected = expected.double()
    if not bool(actual.isfinite().all()):
        return float("inf")
    return ((actual - expected).norm() / expected.norm()).item()


def run_in_poisoned_memory(call: Callable[[], Result]) -> Result:
    """Return the result of a call whose fresh tensors are full of NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class AttentionCase:
    """A step over a KV cache that holds NaN wherever no sequence has a position."""

    q: torch.Tensor  # [tokens, heads, head dim]
    cache: torch.Tensor  # [2, slots, kv heads, head dim]
    metadata: AttentionMetadata
    spec: AttentionSpec
    sinks: torch.Tensor | None = None  # [heads]
    gate: torch.Tensor | None = None  # [tokens, heads * head dim], or [tokens, heads]

    def expected(self) -> torch.Tensor:
        """The reference's result [tokens, heads * head dim]."""
        metadata = self.metadata
        scoring = TritonPagedAttention().scoring(self.spec, self.q.device, self.sinks)
        gate = None
        if self.gate is not None and self.spec.gate is not None:
            gate = OutputGate(self.gate, self.spec.gate.activation)
        # The reference reads positions that no query sees, where a weight of zero hides no NaN.
        return paged_attention_reference(
            self.q,
            self.cache.nan_to_num() if self.cache.dtype.itemsize > 1 else self.cache,
            metadata.query_start_loc.tolist(),
            metadata.seq_lens.tolist(),
            metadata.block_tables,
            metadata.block_size,
            scoring,
            gate,
        ).flatten(1)

    def attend(self, backend: TritonPagedAttention, plan: TritonAttentionPlan) -> torch.Tensor:
        """The backend's result [tokens, heads * head dim]."""
        return backend.attend(self.q, self.cache, self.spec, plan, self.sinks, self.gate)

    def without_host_lengths(self) -> AttentionCase:
        """The same step as a CUDA graph sees it: only the device knows its lengths."""
        metadata = replace(self.metadata, host_query_lens=(), host_seq_lens=())
        return replace(self, metadata=metadata)


def make_attention_case(
    spec: AttentionSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: str,
    extra_blocks: int = 0,
) -> AttentionCase:
    """Build sequences of `seq_lens` positions, of which the last `query_lens` are new.

    Blocks of the KV cache are assigned at random. Block tables are `extra_blocks` wider than
    needed.
    """
    index_dtype = torch.int64 if device == "cpu" else torch.int32
    num_seqs = len(seq_lens)
    table_width = max(-(-length // block_size) for length in seq_lens) + extra_blocks
    num_blocks = num_seqs * table_width + 3
    shuffled = torch.randperm(num_blocks)[: num_seqs * table_width]
    block_tables = shuffled.view(num_seqs, table_width)
    cache_shape = (2, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.full(cache_shape, torch.nan, dtype=dtype, device=device)
    positions = []
    slots = []
    for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens):
        position = torch.arange(seq_len)
        slot = table[position // block_size] * block_size + position % block_size
        keys_and_values = torch.randn(2, seq_len, *cache.shape[2:], device=device)
        # Positions that no new query sees stay NaN: their blocks may belong to another sequence.
        visible = position >= first_visible_position(spec, seq_len - query_len)
        visible_slots = slot[visible].to(device)
        cache[:, visible_slots] = keys_and_values[:, visible.to(device)].to(dtype)
        positions.append(position[seq_len - query_len :])
        slots.append(slot[seq_len - query_len :])

    def to_device(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, index_dtype)

    metadata = AttentionMetadata(
        num_decodes=list(query_lens).count(1),
        num_prefills=0,
        query_start_loc=to_device(torch.tensor([0, *accumulate(query_lens)])),
        seq_lens=to_device(torch.tensor(seq_lens)),
        positions=to_device(torch.cat(positions)),
        slot_mapping=to_device(torch.cat(slots)),
        block_tables=to_device(block_tables),
        block_size=block_size,
        host_query_lens=tuple(query_lens),
        host_seq_lens=tuple(seq_lens),
    )
    num_tokens = sum(query_lens)
    q = torch.randn(num_tokens, spec.num_heads, spec.head_dim, device=device).to(dtype)
    sinks = torch.randn(spec.num_heads, device=device) if spec.sinks else None
    gate = None
    if spec.gate is not None:
        gate = torch.randn(num_tokens, gate_size(spec), device=device).to(dtype)
    return AttentionCase(q, cache, metadata, spec, sinks, gate)


def first_visible_position(spec: AttentionSpec, position: int) -> int:
    """The first position that a query at `position` sees."""
    first = 0
    if spec.window is not None:
        first = max(first, position - spec.window + 1)
    if spec.chunk is not None:
        first = max(first, position // spec.chunk * spec.chunk)
    return first


def check_attention(case: AttentionCase, backend: TritonPagedAttention) -> float:
    """Run attention twice, because a launch must leave its counters ready for the next one."""
    plan = backend.prepare(case.metadata)
    expected = case.expected()
    errors = []
    for _ in range(2):
        actual = run_in_poisoned_memory(lambda: case.attend(backend, plan))
        errors.append(relative_error(actual, expected))
    return max(errors)


def check_norm(width: int, options: str, dtype: torch.dtype, device: str) -> float:
    """Compare a norm.

    options: "rms" or "layer", with any of: bias, bare (no weight), strided.
    """
    x = torch.randn(5, width + 64, device=device).to(dtype)[:, :width]
    if "strided" not in options:
        x = x.contiguous()
    weight = None if "bare" in options else torch.randn(width, device=device)
    bias = torch.randn(width, device=device) if "bias" in options else None
    if options.startswith("rms"):
        _, actual = run_in_poisoned_memory(
            lambda: norm.norm_triton(x, weight, None, 1e-5, centered=False)
        )
        return relative_error(actual, norm.rms_norm_reference(x, weight, 1e-5))
    _, actual = run_in_poisoned_memory(
        lambda: norm.norm_triton(x, weight, bias, 1e-5, centered=True)
    )
    return relative_error(actual, norm.layer_norm_reference(x, weight, bias, 1e-5))


ALL_ACTIVATIONS = (
    *(
        ActivationEpilogue(name, gated)
        for name in activation.ACTIVATIONS
        for gated in (True, False)
    ),
    ActivationEpilogue(activation.CLAMPED_SWIGLU, True, (1.2, 1.7, 1.0)),
    ActivationEpilogue("xielu", False, activation.xielu_params(0.2, -0.4)),
    ActivationEpilogue("xielu", True, activation.xielu_params(-1.0, 0.3)),
)


def check_activation(
    width: int, epilogue: ActivationEpilogue, dtype: torch.dtype, device: str
) -> float:
    """Compare an activation, or activation(gate) * up."""
    x = torch.randn(5, 2 * width if epilogue.gated else width, device=device)
    x = (x * torch.logspace(-4, 0.5, x.shape[1], device=device)).to(dtype)
    actual = run_in_poisoned_memory(lambda: activation.activation_triton(x, epilogue))
    return relative_error(actual, activation.activation_reference(x, epilogue))


def check_rope_and_cache(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rope_dim: int,
    options: str,
    dtype: torch.dtype,
    device: str,
) -> float:
    """Compare rope plus KV cache write: q, and the keys and values the cache then holds.

    options: any of interleaved, tables (cos and sin indexed by position), rms, layer, each (every
    head has its own norm weights), bare (no norm weights), clip, after (norm after rope), value
    (norm of values), shared (keys are values), scaled (queries by position), gate, narrow-gate (one
    column per head).
    """
    num_tokens = 6
    table_len = 40 if "tables" in options else num_tokens
    angles = torch.rand(table_len, rope_dim // 2, device=device) * 6
    q_weight_shape = [head_dim]
    k_weight_shape = [head_dim]
    if "each" in options:
        q_weight_shape = [heads, head_dim]
        k_weight_shape = [kv_heads, head_dim]
    q_weight = torch.rand(q_weight_shape, device=device) + 0.5
    k_weight = torch.rand(k_weight_shape, device=device) + 0.5
    norm_kind = next((kind for kind in ("rms", "layer") if kind in options), None)
    positions = None
    if "tables" in options:
        positions = torch.randint(table_len, (num_tokens,), device=device)
    weights = None
    if norm_kind is not None and "bare" not in options:
        weights = (q_weight, k_weight)
    cos_sin = None
    if rope_dim:
        cos_sin = (angles.cos(), angles.sin())
    transform = QkTransform(
        cos_sin,
        positions,
        "interleaved" in options,
        norm_kind,
        weights,
        1e-5,
        0.7 if "clip" in options else None,
        norm_after_rope="after" in options,
        v_norm=make_value_norm(head_dim, options, device),
        keys_as_values="shared" in options,
        query_scales=torch.rand(table_len, device=device) + 1 if "scaled" in options else None,
    )
    qkv_width = (heads + (1 if transform.keys_as_values else 2) * kv_heads) * head_dim
    gate_width = 0
    if "gate" in options:
        gate_width = heads if "narrow-gate" in options else heads * head_dim
    qkv = torch.randn(num_tokens, qkv_width + gate_width, device=device).to(dtype)
    gate = None
    if gate_width:
        gate = torch.full((num_tokens, gate_width), torch.nan, dtype=dtype, device=device)
    expected_gate = None if gate is None else gate.clone()
    slot_mapping = torch.randperm(50, device=device)[:num_tokens]
    cache = torch.zeros(2, 50, kv_heads, head_dim, dtype=dtype, device=device)
    expected_cache = cache.clone()
    q = run_in_poisoned_memory(
        lambda: rope_cache.apply_rope_and_cache_triton(qkv, cache, slot_mapping, transform, gate)
    )
    expected_q = rope_cache.apply_rope_and_cache_reference(
        qkv, expected_cache, slot_mapping, transform, expected_gate
    )
    if gate is not None and expected_gate is not None:
        assert torch.equal(gate, expected_gate)
    return max(
        relative_error(q, expected_q),
        relative_error(cache[0], expected_cache[0]),
        relative_error(cache[1], expected_cache[1]),
    )


def make_value_norm(head_dim: int, options: str, device: str) -> NormPrologue | None:
    """A norm of values for `check_rope_and_cache`; without weights if keys have none either."""
    if "value" not in options:
        return None
    weight = None if "bare" in options else torch.rand(head_dim, device=device) + 0.5
    return NormPrologue("layer" if "layer" in options else "rms", weight, None, 1e-3)


def check_output_gate(
    heads: int, head_dim: int, per_head: bool, kind: str, dtype: torch.dtype, device: str
) -> float:
    """Compare the gate on attention's output, whose rows may be apart."""
    x = torch.randn(5, heads, head_dim, device=device).to(dtype)
    width = heads if per_head else heads * head_dim
    gate = (3 * torch.randn(5, width + 8, device=device)).to(dtype)[:, :width]
    actual = run_in_poisoned_memory(lambda: output_gate.apply_output_gate_triton(x, gate, kind))
    return relative_error(actual, output_gate.apply_output_gate_reference(x, gate, kind))

"""Measures the memory that steps take besides weights and KV cache, by running the largest step.

The step is the largest in every respect. It has max_num_batched_tokens positions, in prompts of
max_model_len. One chunk ends the longest sequence. Logits of max_num_seqs positions are computed.
Tensors that live as long as the worker are allocated here too, so that they are counted; the
sampler's kernels need nothing besides its tables. The inputs are zeros and the results are
discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from bloomery.attention.base import AttentionBackend, AttentionMetadata, plan_attention
from bloomery.config import EnginePlan
from bloomery.layout import gate_size
from bloomery.models.decoder import Decoder
from bloomery.runtime.kv_cache import scratch_states, single_table_cache
from bloomery.runtime.sampler import Sampler
from bloomery.spec import AttentionSpec

LOGITS_CHUNK = 64  # prompt positions whose logits are held at once
SHORT_PROMPT = 128  # positions
CHUNK_MULTIPLE = 256  # positions; a chunk of a long prompt starts at a multiple of this


class ActivationMemory(NamedTuple):
    """Bytes that steps take besides weights and KV cache. Graphs have their own memory."""

    step: int
    graphs: int


@torch.inference_mode()
def measure_activation_memory(
    decoder: Decoder,
    backend: AttentionBackend,
    plan: EnginePlan,
    kv_cache_dtype: torch.dtype,
    captured_tokens: int = 0,
) -> ActivationMemory:
    """Measure the largest step, and the largest CUDA graph: one of `captured_tokens` positions."""
    memory = LargestStep(decoder, backend, plan, kv_cache_dtype).measure(captured_tokens)
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # returns the memory of the measurement's own KV cache
    return memory


class LargestStep:
    """The largest step that the plan allows, over a KV cache of its own, with one block table."""

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        plan: EnginePlan,
        kv_cache_dtype: torch.dtype,
    ):
        self.decoder = decoder
        self.backend = backend
        self.plan = plan
        self.device = decoder.device
        self.num_tokens = min(plan.max_num_batched_tokens, plan.max_num_seqs * plan.max_model_len)
        prompt_lens = self.split_into_prompts(self.num_tokens)
        self.num_blocks = sum(-(-prompt_len // plan.block_size) for prompt_len in prompt_lens)
        cache = single_table_cache(decoder.spec, plan.block_size, kv_cache_dtype)
        self.caches = cache.allocate(self.num_blocks, self.device)

    def measure(self, captured_tokens: int) -> ActivationMemory:
        """Measure the largest step, with a long context, and the largest CUDA graph."""
        graph_bytes = 0
        if captured_tokens:
            graph_bytes = self.peak_bytes(
                self.run_captured_step, min(captured_tokens, self.num_tokens)
            )
        step_bytes = self.peak_bytes(self.run_step, self.num_tokens)
        return ActivationMemory(step_bytes + self.measure_context(), graph_bytes)

    def split_into_prompts(self, num_tokens: int) -> list[int]:
        """Split a number of tokens into as few prompts as possible; the shortest comes first."""
        num_longest, remainder = divmod(num_tokens, self.plan.max_model_len)
        longest = [self.plan.max_model_len] * num_longest
        return [remainder, *longest] if remainder else longest

    def list_works(self, captured_tokens: int) -> Iterator[Callable[[], object]]:
        """Yield work that launches the kernels of `measure`; it can be captured in a CUDA graph."""
        for num_tokens in {min(captured_tokens, self.num_tokens), self.num_tokens}:
            metadata = self.build_metadata(self.split_into_prompts(num_tokens))
            yield partial(self.run_model, metadata)
        chunk_len = self.context_chunk_len()
        steps = [
            self.build_metadata([chunk_len], seq_len)
            for seq_len in (chunk_len, self.plan.max_model_len)
        ]
        # Attention divides short prompts in another way than long ones.
        prompt_len = min(SHORT_PROMPT, self.plan.max_model_len)
        num_prompts = min(self.num_tokens // prompt_len, self.plan.max_num_seqs)
        if num_prompts > 1:
            steps.append(self.build_metadata([prompt_len] * num_prompts))
        for metadata in steps:
            for spec, cache in self.cache_by_spec().items():
                yield partial(self.run_attention, spec, cache, metadata)

    def cache_by_spec(self) -> dict[AttentionSpec, torch.Tensor]:
        """Return one layer's KV cache for each kind of attention."""
        layers = zip(self.decoder.spec.layers, self.caches, strict=True)
        return {
            layer.attention: cache
            for layer, cache in layers
            if layer.attention is not None and cache is not None
        }

    def context_chunk_len(self) -> int:
        """Return the length of the chunk that ends the longest sequence."""
        max_len = self.plan.max_model_len
        chunk_len = min(self.num_tokens, max(max_len // 2, 1))
        return chunk_len + (max_len - chunk_len) % CHUNK_MULTIPLE

    def measure_context(self) -> int:
        """Return how many more bytes a chunk takes at the end of the longest sequence."""
        chunk_len = self.context_chunk_len()
        if not self.cache_by_spec():
            return 0  # a pipeline stage without attention

        def max_peak(seq_len: int) -> int:
            metadata = self.build_metadata([chunk_len], seq_len)
            return max(
                self.peak_bytes(self.run_attention, spec, cache, metadata)
                for spec, cache in self.cache_by_spec().items()
            )

        at_start = max_peak(chunk_len)
        at_end = max_peak(self.plan.max_model_len)
        return max(at_end - at_start, 0)

    def peak_bytes(self, work: Callable[..., object], *arguments: Any) -> int:
        """Return the bytes that the allocator reserves on the GPU for this work; 0 on a CPU."""
        if self.device.type == "cpu":
            work(*arguments)
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        work(*arguments)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        return peak

    def build_metadata(
        self, query_lens: list[int], seq_len: int | None = None
    ) -> AttentionMetadata:
        """Lay out chunks of `query_lens` that end at `seq_len`; without it they are whole prompts.

        Block tables of sequences longer than the KV cache repeat its blocks.
        """
        block_size = self.plan.block_size
        seq_lens = [seq_len or query_len for query_len in query_lens]
        blocks_per_seq = [-(-length // block_size) for length in seq_lens]
        first_blocks = [0, *accumulate(blocks_per_seq)]
        table_width = max(blocks_per_seq)
        block_tables = [
            [(first + i) % self.num_blocks for i in range(table_width)]
            for first in first_blocks[:-1]
        ]
        return AttentionMetadata.from_host(
            query_lens, seq_lens, block_tables, block_size, self.device
        )

    def run_attention(
        self, spec: AttentionSpec, cache: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Run one layer's attention over a chunk."""
        query_len = len(metadata.positions)
        shape = query_len, spec.num_heads, spec.head_dim
        q = torch.zeros(shape, dtype=self.decoder.dtype, device=self.device)
        sinks = torch.zeros(spec.num_heads, device=self.device) if spec.sinks else None
        gate = None
        if spec.gate is not None:
            gate = torch.zeros(
                query_len, gate_size(spec), dtype=self.decoder.dtype, device=self.device
            )
        plan = self.backend.prepare(metadata)
        self.backend.attend(q, cache, spec, plan, sinks, gate)

    def run_model(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the hidden states of all positions of a step."""
        decoder = self.decoder
        num_tokens = len(metadata.positions)
        token_ids = metadata.positions % decoder.spec.vocab
        received = None
        if not decoder.is_first_stage:
            shape = decoder.count_received_rows(num_tokens), decoder.spec.hidden
            received = torch.zeros(shape, dtype=decoder.dtype, device=self.device)
        return decoder(
            token_ids,
            metadata.positions,
            self.caches,
            self.backend,
            plan_attention(self.backend, [metadata]),
            None,
            received,
            states=scratch_states(decoder.spec, list(metadata.host_query_lens), self.device),
        )

    def run_captured_step(self, num_tokens: int) -> None:
        """Run a captured step without its fused sampling, which takes no more memory."""
        hidden = self.run_model(self.build_metadata(self.split_into_prompts(num_tokens)))
        if self.decoder.is_last_stage:
            self.decoder.logits(hidden[: self.plan.max_num_seqs])

    def run_step(self, num_tokens: int) -> tuple[object, ...]:
        """Run a step with an embedding and with as many logits as a step may have.

        Returns the tensors that must stay alive until the step ends.
        """
        metadata = self.build_metadata(self.split_into_prompts(num_tokens))
        if not self.decoder.is_last_stage:
            return (self.run_model(metadata),)
        max_num_seqs = self.plan.max_num_seqs
        vocab_size = self.decoder.spec.vocab
        captured_logits = torch.zeros(
            max_num_seqs, vocab_size, dtype=torch.float32, device=self.device
        )
        sampler = Sampler(max_num_seqs + 1, vocab_size, self.device)
        hidden = self.run_model(metadata)
        hidden.float().sum(0)  # an embedding
        num_logits = max(max_num_seqs, LOGITS_CHUNK)
        indices = torch.arange(num_logits, device=self.device) % len(hidden)
        logits = self.decoder.logits(hidden[indices], as_float32=self.device.type == "cpu")
        return hidden, captured_logits, sampler, logits

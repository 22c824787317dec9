"""Finds the kernels that a worker will need, so that they can be compiled on all cores at once.

Otherwise each would be compiled when the start first needs it, one after another. The steps are
captured into CUDA graphs that never run (kernels/launch.py), over a KV cache of a few blocks and
with only as many layers as differ. What this misses is compiled when it is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from bloomery.attention.autotune import unmeasured_prefills
from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.cache_groups import count_pages
from bloomery.config import EnginePlan
from bloomery.kernels.launch import MissingKernels, start_compiling
from bloomery.kernels.packed_wgmma import partial_sum_flags
from bloomery.models.decoder import Decoder
from bloomery.runtime.activation_memory import LargestStep
from bloomery.runtime.kv_cache import StageCache
from bloomery.runtime.rows import RequestRows
from bloomery.runtime.runner import GraphPool, ModelForward, ModelRunner
from bloomery.runtime.sampler import Sampler
from bloomery.runtime.step_batch import NUM_PREFILL_SLOTS, decode_shape

NUM_BLOCKS = 16  # of the KV cache of the captured steps
# Tokens of the steps that run once, beyond the captured ones. The matrix library loads a kernel
# when it is first used, and chooses kernels by size.
WARMED_TOKENS = (2304, 3072, 4096, 6144)


@torch.inference_mode()
def compile_step_kernels(
    decoder: Decoder, cache: StageCache, plan: EnginePlan, captured_tokens: int, pool: GraphPool
) -> Callable[[], None]:
    """Compile the kernels of the largest step, of attention measurements and of captured steps.

    Those of captured steps that nothing else uses are still being compiled afterwards; the returned
    function waits for them.
    `captured_tokens`: positions of the largest captured step. `pool` is not used for graphs; only
    its stream is, so that libraries need no workspace for another one.
    """
    discovery = KernelDiscovery(pool.stream)
    backend = TritonPagedAttention(library_min_len=None)
    layers = select_distinct_layers(decoder)
    small_decoder = keep_layers(decoder, layers)
    small_cache = replace(
        cache, model=small_decoder.spec, places=tuple([cache.places[layer] for layer in layers])
    )
    step = LargestStep(small_decoder, backend, plan, cache.dtype)
    discovery.prepare(small_decoder, backend, step)
    discovery.capture_all(step.list_works(captured_tokens))
    specs = decoder.spec.attentions
    discovery.capture_all(unmeasured_prefills(specs, decoder.dtype, cache.dtype, decoder.device))
    wait_for_step = discovery.start_compiling()
    runner = build_small_runner(small_decoder, small_cache, plan, backend, discovery.pool)
    shapes = runner.list_captured_shapes(
        with_masked=False, with_adapters=decoder.adapter_memory is not None
    )
    for shape in (*shapes, decode_shape(1, is_masked=True)):
        runner.capture(shape, discovery.missing)
    wait_for_captured = discovery.start_compiling()
    wait_for_step()
    for num_tokens in WARMED_TOKENS:
        if captured_tokens < num_tokens < step.num_tokens:
            step.run_model(step.build_metadata(step.split_into_prompts(num_tokens)))
    torch.cuda.synchronize(decoder.device)
    discovery.release_graphs(runner)
    return wait_for_captured


class KernelDiscovery:
    """Collects the kernels that are missing for some work, by capturing the work."""

    def __init__(self, stream: torch.cuda.Stream):
        self.pool = GraphPool(stream)
        self.graphs: list[torch.cuda.CUDAGraph] = []  # they keep the pool's memory
        self.missing: MissingKernels = {}
        self.started = set[str]()  # specializations that are being compiled
        # Something that every capture does, because torch warns of empty graphs.
        self.marker = torch.zeros(1, device=stream.device)

    def prepare(self, decoder: Decoder, backend: TritonPagedAttention, step: LargestStep) -> None:
        """Create what exists once per process or backend, which a capture would not fill."""
        with torch.cuda.stream(self.pool.stream):
            x = torch.zeros(256, decoder.spec.hidden, dtype=decoder.dtype, device=decoder.device)
            x @ x.T  # initializes the matrix library
        partial_sum_flags(x.device)
        backend.prepare(step.build_metadata([1]))
        for spec in decoder.spec.attentions:
            backend.scoring(spec, x.device)
        torch.cuda.synchronize(x.device)

    def capture_all(self, works: Iterable[Callable[[], object]]) -> None:
        for work in works:
            self.graphs.append(self.pool.capture(partial(self._run_marked, work), self.missing))

    def _run_marked(self, work: Callable[[], object]) -> None:
        self.marker.zero_()
        work()

    def release_graphs(self, runner: ModelRunner) -> None:
        """Destroy all graphs now. The garbage collector would do so at any time."""
        self.graphs.clear()
        self.pool.incomplete.clear()
        self.pool.pending.clear()
        if runner.graph_runner is not None:
            runner.graph_runner.graphs.clear()

    def start_compiling(self) -> Callable[[], None]:
        """Start to compile what was not missing before; the returned function waits for it."""
        new = {
            specialization: kernel
            for specialization, kernel in self.missing.items()
            if specialization not in self.started
        }
        self.started |= new.keys()
        return start_compiling(new)


def build_small_runner(
    decoder: Decoder,
    cache: StageCache,
    plan: EnginePlan,
    backend: TritonPagedAttention,
    pool: GraphPool,
) -> ModelRunner:
    """A runner like the worker's, over a KV cache of a few blocks."""
    device = decoder.device
    forward = ModelForward(
        decoder,
        backend,
        cache.allocate(NUM_BLOCKS + 1, device),
        layer_tables=cache.layer_tables,
    )
    num_pages = count_pages(plan.max_model_len, plan.block_size)
    rows = RequestRows(
        plan.max_num_seqs,
        num_pages * cache.layout.blocks_per_page,
        NUM_BLOCKS,
        device,
        None,
        cache.layout.tables,
    )
    vocab_size = decoder.spec.vocab
    return ModelRunner(
        forward,
        rows,
        cache.kernel_block_size,
        Sampler(plan.max_num_seqs + 1, vocab_size, device, NUM_PREFILL_SLOTS),
        vocab_size,
        plan.max_num_batched_tokens,
        graph_pool=pool,
        logits_dtype=decoder.dtype,
    )


# ---- layers that differ --------------------------------------------------------------------------


def select_distinct_layers(decoder: Decoder) -> list[int]:
    """Return layers that together launch the kernels of all layers.

    They are two of each structure, because a layer's first kernel also ends the layer before it,
    and the last layer, which computes fewer positions.
    """
    indices: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(decoder.layers):
        indices.setdefault(describe_structure(layer), []).append(index)
    chosen = {index for same in indices.values() for index in same[:2]}
    return sorted(chosen | {len(decoder.layers) - 1})


def describe_structure(value: Any) -> Hashable:
    """Return what kernels depend on: types, shapes and constants, not the contents of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple([describe_structure(entry) for entry in value])
    if is_dataclass(value):
        entries = [describe_structure(getattr(value, field.name)) for field in fields(value)]
        return type(value).__name__, tuple(entries)
    if value is None or isinstance(value, int | float | str | Enum):
        return value
    return type(value).__name__


def keep_layers(decoder: Decoder, layers: list[int]) -> Decoder:
    """Return a decoder that shares its weights with `decoder` and has only these layers."""
    small = copy.copy(decoder)
    small.layers = [decoder.layers[index] for index in layers]
    small.spec = replace(
        decoder.spec, layers=tuple([decoder.spec.layers[index] for index in layers])
    )
    return small

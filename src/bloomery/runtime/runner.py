"""Runs the model over a step's batch: by replaying a CUDA graph if there is one, else eagerly.

`ModelForward` is one forward pass. `EagerRunner`, `CudaGraphRunner` and `CpuTraceRunner` run work
over static buffers: operation by operation, or captured once per shape and replayed.
`ModelRunner` puts them together: decode, mixed and prefill steps all go through it.

On a GPU a replay costs the host one launch instead of hundreds. A shape that was not captured at
the start is captured after its second run, while the device is busy with it: a shape that occurred
twice is likely to occur again. All graphs share one memory pool, because no two run at the same
time and their results lie in buffers outside of it.

This file must not know sampling parameters, stop conditions or scheduling.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from bloomery.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    plan_attention,
)
from bloomery.kernels.launch import MissingKernels, defer_compilations
from bloomery.kernels.rows import advance_rows
from bloomery.kernels.sampling_rows import SampleOutputs
from bloomery.kernels.state_cache import LayerStates, RecurrentMetadata
from bloomery.models.adapter_memory import AdapterMemory
from bloomery.models.decoder import Decoder
from bloomery.native.thread_pool import OpTrace, ThreadPool, TraceArena
from bloomery.native.trace import UnsupportedOperation, record_trace
from bloomery.parallel.groups import StagePipe
from bloomery.runtime.rows import BatchOrder, PlacedRequest, RequestRows
from bloomery.runtime.step_batch import (
    MAX_MIXED_TOKENS,
    NUM_PREFILL_SLOTS,
    CaptureSizes,
    StepBatch,
    StepBuffers,
    StepShape,
    decode_shape,
    sampling_shape,
)

# Bytes of a trace arena besides the logits; pages that are never touched take no memory.
TRACE_ARENA_BYTES = 256 << 20
# Bytes of a trace arena for each logit of a full batch: three copies in float32.
TRACE_BYTES_PER_LOGIT = 12

# logits [n, vocab], rows [n], positions of the new tokens [n], whether grammars have set masks
# -> tokens [n] and log-probabilities
SampleTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], SampleOutputs]
StepWork = Callable[[], None]


class ForwardPass(Protocol):
    """A forward pass of the model; knows no requests, rows or sampling."""

    @property
    def tile_size(self) -> int:
        """Captured decode steps have a multiple of this many batch slots."""
        ...

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        layouts: Sequence[AttentionMetadata],
        output_indices: torch.Tensor | None = None,
        states: Sequence[RecurrentMetadata] = (),
        adapter_slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids [tokens] -> hidden states [tokens, hidden], or only those at the indices.

        `layouts` has the step's layout for each block table of the model, `states` for each table
        of recurrent states. `adapter_slots` has the device slot of each token's LoRA adapter, if
        any token has one.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor, as_float32: bool = True) -> torch.Tensor:
        """hidden [n, hidden] -> logits [n, vocab], always in float32 if `as_float32`."""
        ...


@dataclass(frozen=True)
class ModelForward:
    """All positions of a step in one pass."""

    decoder: Decoder
    backend: AttentionBackend
    caches: Sequence[torch.Tensor | None]
    # Pipeline parallel: receives hidden states from the previous stage, sends them to the next.
    pipe: StagePipe | None = None
    layer_tables: Sequence[int] = ()  # the block table of each layer; empty: all use the first
    tile_size: int = 1
    # The memory of each layer's states and its table of states; None: it has no state.
    states: Sequence[tuple[torch.Tensor, int] | None] = ()

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        layouts: Sequence[AttentionMetadata],
        output_indices: torch.Tensor | None = None,
        states: Sequence[RecurrentMetadata] = (),
        adapter_slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layer_states = [
            None if place is None else LayerStates(place[0], states[place[1]])
            for place in self.states
        ]
        steps = plan_attention(self.backend, layouts)
        received = None
        if self.pipe is not None:
            received = self.pipe.receive(self.decoder.count_received_rows(len(token_ids)))
        hidden = self.decoder(
            token_ids,
            layouts[0].positions,
            self.caches,
            self.backend,
            steps,
            output_indices,
            received,
            self.layer_tables,
            layer_states,
            adapter_slots,
        )
        if self.pipe is not None:
            self.pipe.send(hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, as_float32: bool = True) -> torch.Tensor:
        return self.decoder.logits(hidden, as_float32)


class WorkRunner(Protocol):
    """Runs the work of a step, which reads and writes static buffers only."""

    def run(self, shape: StepShape, work: StepWork) -> None: ...
    def forget_outer(self) -> None:
        """Drop captured steps with adapters that change layers outside of the decoder layers.

        They are captured anew when they recur.
        """
        ...


class EagerRunner:
    """Runs the work operation by operation."""

    def run(self, shape: StepShape, work: StepWork) -> None:
        work()

    def forget_outer(self) -> None:
        pass


class CpuTraceRunner:
    """Replays traces of CPU kernels; a shape is traced at its first step."""

    def __init__(self, pool: ThreadPool, arena: TraceArena):
        self.pool = pool
        self.arena = arena
        self.traces = dict[StepShape, OpTrace]()

    def trace(self, shape: StepShape, work: StepWork) -> None:
        """Record a trace of the work; raises UnsupportedOperation if that is impossible."""
        self.traces[shape] = record_trace(self.pool, work, self.arena)

    def forget_outer(self) -> None:
        self.traces = {shape: t for shape, t in self.traces.items() if not shape.changes_outer}

    def run(self, shape: StepShape, work: StepWork) -> None:
        if shape not in self.traces:
            self.trace(shape, work)
        self.traces[shape].replay()


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector inside the block.

    It might destroy another CUDA graph, which invalidates a capture of the same thread.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphPool:
    """Captures CUDA graphs into one shared memory pool.

    The largest graph should be captured first: the others then fit into its memory.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = stream or torch.cuda.Stream()
        self.pending: list[tuple[CudaGraphRunner, StepShape, StepWork]] = []
        # Graphs that lack kernels. Without any graph the memory pool could not be used again.
        self.incomplete: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: StepWork, missing: MissingKernels) -> torch.cuda.CUDAGraph:
        """Capture the work without running it and without waiting for the device.

        Kernels that are not compiled yet are added to `missing`. The graph lacks them. If there are
        no others, torch warns of an empty graph.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(self.stream),
            defer_compilations(missing),
            garbage_collection_paused(),
        ):
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                work()
            finally:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                    graph.capture_end()
        return graph

    def capture_pending(self) -> None:
        """Capture the shapes that occurred twice; call it once the second run is queued."""
        while self.pending:
            runner, shape, work = self.pending.pop()
            runner.capture(shape, work, {})


class CudaGraphRunner:
    """Replays CUDA graphs; a shape without one runs eagerly and is captured if it recurs."""

    def __init__(self, pool: GraphPool):
        self.pool = pool
        self.seen_shapes = set[StepShape]()
        self.graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}

    def run(self, shape: StepShape, work: StepWork) -> None:
        graph = self.graphs.get(shape)
        if graph is not None:
            graph.replay()
            return
        work()
        if shape in self.seen_shapes:
            self.pool.pending.append((self, shape, work))
        self.seen_shapes.add(shape)

    def forget_outer(self) -> None:
        self.graphs = {shape: g for shape, g in self.graphs.items() if not shape.changes_outer}

    def capture(self, shape: StepShape, work: StepWork, missing: MissingKernels) -> bool:
        """Capture the work; if it needs kernels that are not compiled yet, collect those instead.

        Returns whether there is a graph of that shape now.
        """
        if shape not in self.graphs:
            own_missing: MissingKernels = {}
            graph = self.pool.capture(work, own_missing)
            if own_missing:
                self.pool.incomplete.append(graph)
                missing.update(own_missing)
                return False
            self.graphs[shape] = graph
        return True


class MixedStep(NamedTuple):
    """Which batch slots of a mixed step have results."""

    num_decodes: int
    first_chunk: int  # batch slot of the first chunk
    sampled_chunks: tuple[PlacedRequest, ...]  # chunks that sample, in the order of their slots


class ModelRunner:
    """Runs steps of every kind.

    samples: this rank has the last pipeline stage, so it samples. If another stage samples, its
        tokens arrive before the step that needs them.
    mixed_steps: steps with prefill chunks may read their decode inputs from the device.
    logits_dtype: of the model's logits, as far as nothing converts them.
    adapter_memory: the device slots of LoRA adapters, if the model takes them.
    """

    def __init__(
        self,
        model: ForwardPass,
        rows: RequestRows,
        block_size: int,
        sample_tokens: SampleTokens,
        vocab_size: int,
        max_num_batched_tokens: int = MAX_MIXED_TOKENS,
        samples: bool = True,
        mixed_steps: bool = True,
        graph_pool: GraphPool | None = None,
        logits_dtype: torch.dtype = torch.float32,
        adapter_memory: AdapterMemory | None = None,
    ):
        self.model = model
        self.adapter_memory = adapter_memory
        self.rows = rows
        self.sample_tokens = sample_tokens
        self.samples = samples
        self.mixed_steps = mixed_steps
        self.max_mixed_tokens = min(max_num_batched_tokens, MAX_MIXED_TOKENS)
        self.buffers = StepBuffers(rows, block_size, self.max_mixed_tokens)
        device = rows.last_tokens.device
        max_slots = rows.max_num_seqs
        # What steps that sample apart leave for their sampling, by batch slot.
        num_slots = max_slots + NUM_PREFILL_SLOTS
        self.logits = torch.zeros(num_slots, vocab_size, dtype=logits_dtype, device=device)
        self.slot_rows = torch.full(
            (num_slots,), rows.padding_row, dtype=torch.int32, device=device
        )
        self.slot_seq_lens = torch.zeros(num_slots, dtype=rows.positions.dtype, device=device)
        self.num_unsampled_slots = 0  # of the last step that samples apart
        self.num_padding = 0  # padding positions of the last step
        self.sizes = CaptureSizes()
        self.work_runner: WorkRunner = EagerRunner()
        self.graph_runner: CudaGraphRunner | None = None  # the work runner, if it is one
        # What the buffers hold: the batch order, shape and work of the last decode step.
        self.resident_order: BatchOrder | None = None
        self.resident_shape = decode_shape(0)
        self.resident_work: StepWork = partial(self._compute, self.resident_shape)
        if graph_pool is not None:
            self.use_cuda_graphs(CudaGraphRunner(graph_pool))

    def use_cuda_graphs(self, graph_runner: CudaGraphRunner) -> None:
        """Replay steps from CUDA graphs from now on."""
        self.work_runner = graph_runner
        self.graph_runner = graph_runner
        self.sizes = CaptureSizes.for_graphs(
            self.rows.max_num_seqs, self.max_mixed_tokens, self.model.tile_size
        )

    def use_cpu_traces(self, with_adapters: bool = False) -> str | None:
        """Replay decode steps from CPU traces from now on; if impossible, return the reason."""
        pool = self.rows.pool
        if pool is None:
            return "the native CPU kernels do not run"
        max_slots, vocab_size = self.logits.shape
        arena = TraceArena(TRACE_ARENA_BYTES + TRACE_BYTES_PER_LOGIT * max_slots * vocab_size)
        trace_runner = CpuTraceRunner(pool, arena)
        try:
            shapes = [decode_shape(1, is_masked) for is_masked in (False, True)]
            if with_adapters:
                shapes.append(decode_shape(1, has_adapters=True))
            for shape in shapes:
                trace_runner.trace(shape, partial(self._compute, shape))
        except UnsupportedOperation as reason:
            return str(reason)
        self.work_runner = trace_runner
        return None

    def list_captured_shapes(
        self, with_masked: bool = True, with_adapters: bool = False
    ) -> list[StepShape]:
        """The steps to capture before the first request; the largest comes first.

        `with_masked`: also decode steps that end with logits, for requests with grammars.
        `with_adapters`: also steps of requests with LoRA adapters.
        """
        if self.graph_runner is None:
            return []
        shapes = self.sizes.decode_shapes()
        if self.mixed_steps:
            largest, *smaller = self.sizes.mixed_shapes()
            shapes = [largest, *shapes, *smaller]
        if with_masked:
            shapes += self.sizes.decode_shapes(is_masked=True)
        shapes += self.sizes.sampling_shapes(with_masked, self.mixed_steps)
        if with_adapters:
            shapes += self._list_adapter_shapes()
        return shapes

    def _list_adapter_shapes(self) -> list[StepShape]:
        shapes = self.sizes.decode_shapes(has_adapters=True)
        mixed = self.sizes.mixed_shapes() if self.mixed_steps else []
        return shapes + [shape._replace(has_adapters=True) for shape in mixed]

    def list_outer_shapes(self) -> list[StepShape]:
        """The steps with adapters that change layers outside of the decoder layers."""
        if self.graph_runner is None:
            return []
        return [shape._replace(changes_outer=True) for shape in self._list_adapter_shapes()]

    def release_incomplete_graphs(self) -> None:
        """Free the graphs that lack kernels, once there are complete ones."""
        if self.graph_runner is not None:
            self.graph_runner.pool.incomplete.clear()

    def capture(self, shape: StepShape, missing: MissingKernels) -> bool:
        """Capture the CUDA graph of a step, unless kernels are missing; returns whether it exists.

        The step has only padding in it, so that no request is changed.
        """
        assert self.graph_runner is not None
        self.buffers.write_padding(shape)
        self.resident_order = None
        return self.graph_runner.capture(shape, partial(self._compute, shape), missing)

    def run_decodes(self, order: BatchOrder, is_masked: bool) -> None:
        """Queue a step in which each of these rows computes one position.

        Afterwards the sampler's outputs have the result of each batch slot. If the step is masked,
        they have it after `sample_apart`.
        """
        self.rows.upload_new_blocks()
        is_resident = self.resident_shape.samples_apart == is_masked
        if order is not self.resident_order or not is_resident:
            slots = order.adapter_slots
            shape = self.sizes.pad_decode(len(order.rows), is_masked, slots is not None)
            shape = self._note_outer(shape, slots)
            self.buffers.write_decodes(order.row_indices, shape)
            if slots is not None:
                self.buffers.write_adapters(slots, shape)
            self.resident_order = order
            self.resident_shape = shape
            self.resident_work = partial(self._compute, shape)
        self.num_padding = self.resident_shape.num_decodes - len(order.rows)
        self.num_unsampled_slots = self.resident_shape.num_sequences
        self.work_runner.run(self.resident_shape, self.resident_work)

    def accepts_mixed(self, order: BatchOrder, chunks: Sequence[PlacedRequest]) -> bool:
        """Whether a mixed step can serve these decodes and chunks.

        The step must be small enough, and its chunks must be of prompts without drafts.
        """
        if not self.mixed_steps or len(chunks) >= NUM_PREFILL_SLOTS:
            return False
        num_tokens = len(order.rows) + sum(scheduled.count for scheduled, _ in chunks)
        if num_tokens > self.max_mixed_tokens:
            return False
        return all(
            row.wants_only_tokens and not scheduled.drafts and row.host_knows_token(scheduled.start)
            for scheduled, row in chunks
        )

    def run_mixed(
        self,
        order: BatchOrder,
        chunks: Sequence[PlacedRequest],
        max_position: int,
    ) -> MixedStep:
        """Queue a step of decodes, at positions up to `max_position`, and prefill chunks.

        After `sample_apart` the sampler's outputs have the result of each batch slot: those of the
        decodes first, and from `first_chunk` on those of the chunks that sample.
        """
        # Chunks that sample come first, so that their results are adjacent.
        chunks = sorted(chunks, key=lambda pair: not pair[0].samples)
        self.rows.upload_new_blocks()
        num_decodes = len(order.rows)
        num_tokens = num_decodes + sum(scheduled.count for scheduled, _ in chunks)
        slots = list_adapter_slots(order, chunks)
        shape = self.sizes.pad_mixed(num_decodes, num_tokens, max_position, slots is not None)
        shape = self._note_outer(shape, slots)
        self.num_padding = shape.num_tokens - num_tokens
        self.num_unsampled_slots = shape.num_sequences
        self.buffers.write_mixed(order.row_indices, chunks, shape)
        if slots is not None:
            self.buffers.write_adapters(slots, shape)
        self.work_runner.run(shape, partial(self._compute, shape))
        sampled = tuple([pair for pair in chunks if pair[0].samples])
        return MixedStep(num_decodes, shape.num_decodes, sampled)

    def sample_apart(self) -> None:
        """Queue the sampling of the last step, once its masks have been sent if it has any."""
        shape = sampling_shape(self.num_unsampled_slots)
        self.work_runner.run(shape, partial(self._compute, shape))

    def _note_outer(self, shape: StepShape, slots: np.ndarray | None) -> StepShape:
        """Note in the shape whether one of the slots changes more than the decoder layers."""
        if slots is None or self.adapter_memory is None:
            return shape
        changes_outer = not self.adapter_memory.outer_slots.isdisjoint(slots.tolist())
        return shape._replace(changes_outer=changes_outer)

    def run_host_batch(self, batch: StepBatch) -> torch.Tensor:
        """Queue a step that the host laid out; returns hidden states at its output indices."""
        self.num_padding = 0
        if self.adapter_memory is not None:
            self.adapter_memory.batch.changes_outer = True
        return self._hidden_states(batch)

    def _hidden_states(self, batch: StepBatch) -> torch.Tensor:
        return self.model.hidden_states(
            batch.token_ids,
            batch.layouts,
            batch.output_indices,
            batch.states,
            batch.adapter_slots,
        )

    def _compute(self, shape: StepShape) -> None:
        """The device work of a self-feeding step; reads and writes static buffers only."""
        num_slots = shape.num_sequences
        if shape.num_tokens == 0:
            rows = self.slot_rows[:num_slots]
            self._sample(self.logits[:num_slots], rows, self.slot_seq_lens[:num_slots], True)
            return
        batch = self.buffers.gather(shape)
        if self.adapter_memory is not None:
            self.adapter_memory.batch.changes_outer = shape.changes_outer
        hidden = self._hidden_states(batch)
        if not self.samples:
            return
        logits = self.model.compute_logits(hidden, as_float32=False)
        batch_rows = batch.sampling_rows
        assert batch_rows is not None
        seq_lens = batch.layouts[0].seq_lens
        if not shape.samples_apart:
            self._sample(logits, batch_rows, seq_lens, False)
            return
        self.logits[:num_slots] = logits
        self.slot_rows[:num_slots] = batch_rows
        self.slot_seq_lens[:num_slots] = seq_lens

    def _sample(
        self, logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, is_masked: bool
    ) -> None:
        """Sample the next token of each batch slot, which makes its row ready for the next step."""
        tokens = self.sample_tokens(logits, rows, seq_lens, is_masked).tokens
        state = self.rows
        advance_rows(rows, tokens, seq_lens, state.last_tokens, state.positions, state.pool)


def list_adapter_slots(order: BatchOrder, chunks: Sequence[PlacedRequest]) -> np.ndarray | None:
    """Return the adapter slot of each token of a mixed step; None if no token has one."""
    decodes = order.adapter_slots
    if decodes is None:
        if all(row.adapter_slot < 0 for _, row in chunks):
            return None
        decodes = np.full(len(order.rows), -1, np.int32)
    slots = np.array([row.adapter_slot for _, row in chunks], np.int32)
    counts = [scheduled.count for scheduled, _ in chunks]
    return np.concatenate((decodes, slots.repeat(counts)))

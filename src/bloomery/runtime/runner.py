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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from bloomery.attention.base import AttentionBackend, AttentionMetadata, upload
from bloomery.kernels.rows import advance_rows
from bloomery.kernels.token_mask import TokenMasks, mask_logits
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
)

# Bytes of a trace arena besides the logits; pages that are never touched take no memory.
TRACE_ARENA_BYTES = 256 << 20
# Bytes of a trace arena for each logit of a full batch: three copies in float32.
TRACE_BYTES_PER_LOGIT = 12

# logits [n, vocab], rows [n], positions of the new tokens [n] -> tokens [n]
SampleTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
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
        metadata: AttentionMetadata,
        output_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids [tokens] -> hidden states [tokens, hidden], or only those at the indices."""
        ...

    def compute_logits(self, hidden: torch.Tensor, as_float32: bool = True) -> torch.Tensor:
        """hidden [n, hidden] -> logits [n, vocab], always in float32 if `as_float32`."""
        ...


@dataclass(frozen=True)
class ModelForward:
    """All positions of a step in one pass."""

    decoder: Decoder
    backend: AttentionBackend
    caches: Sequence[torch.Tensor]
    # Pipeline parallel: receives hidden states from the previous stage, sends them to the next.
    pipe: StagePipe | None = None
    tile_size: int = 1

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        output_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = self.backend.prepare(metadata)
        received = None
        if self.pipe is not None:
            received = self.pipe.receive(len(token_ids))
        hidden = self.decoder(
            token_ids,
            metadata.positions,
            metadata.slot_mapping,
            self.caches,
            self.backend,
            plan,
            output_indices,
            received,
        )
        if self.pipe is not None:
            self.pipe.send(hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, as_float32: bool = True) -> torch.Tensor:
        return self.decoder.logits(hidden, as_float32)


class WorkRunner(Protocol):
    """Runs the work of a step, which reads and writes static buffers only."""

    def run(self, shape: StepShape, work: StepWork) -> None: ...


class EagerRunner:
    """Runs the work operation by operation."""

    def run(self, shape: StepShape, work: StepWork) -> None:
        work()


class CpuTraceRunner:
    """Replays traces of CPU kernels; a shape is traced at its first step."""

    def __init__(self, pool: ThreadPool, arena: TraceArena):
        self.pool = pool
        self.arena = arena
        self.traces = dict[StepShape, OpTrace]()

    def trace(self, shape: StepShape, work: StepWork) -> None:
        """Record a trace of the work; raises UnsupportedOperation if that is impossible."""
        self.traces[shape] = record_trace(self.pool, work, self.arena)

    def run(self, shape: StepShape, work: StepWork) -> None:
        if shape not in self.traces:
            self.trace(shape, work)
        self.traces[shape].replay()


class GraphPool:
    """Captures CUDA graphs into one shared memory pool.

    The largest graph should be captured first: the others then fit into its memory.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.pending: list[tuple[CudaGraphRunner, StepShape, StepWork]] = []

    def capture(self, work: StepWork) -> torch.cuda.CUDAGraph:
        """Capture the work without running it and without waiting for the device.

        The work must have run before: compilation and permanent allocations may not become part of
        the graph.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def capture_pending(self) -> None:
        """Capture the shapes that occurred twice; call it once the second run is queued."""
        while self.pending:
            runner, shape, work = self.pending.pop()
            runner.graphs[shape] = self.capture(work)


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

    def capture(self, shape: StepShape, work: StepWork) -> None:
        """Run the work once, over padding, and capture it."""
        if shape not in self.graphs:
            work()
            self.graphs[shape] = self.pool.capture(work)


class MixedStep(NamedTuple):
    """Which batch slots of a mixed step have results."""

    num_decodes: int
    first_chunk: int  # batch slot of the first chunk
    sampled_chunks: tuple[PlacedRequest, ...]  # chunks that sample, in the order of their slots


class MaskUpload:
    """Copies masks to the device through pinned buffers that are allocated once.

    Masks are large, and allocating pinned memory for every step would stall the host for
    milliseconds. There are two buffers: while one is being copied, the other can be filled.
    """

    def __init__(self, max_masks: int, device: torch.device):
        self.max_masks = max_masks
        self.device = device
        self.hosts: list[torch.Tensor] = []  # pinned, allocated by the first masks
        self.copied: list[torch.cuda.Event] = []  # when each of them may be filled again
        self.target = torch.empty(0)
        self.turn = 0

    def copy(self, bits: np.ndarray) -> torch.Tensor:
        """Return masks [masks, words] int32 on the device; queues the copy without waiting."""
        source = torch.from_numpy(bits)
        if self.device.type != "cuda":
            return source
        num_masks, num_words = bits.shape
        if not self.hosts:
            shape = (self.max_masks, num_words)
            self.target = torch.empty(shape, dtype=torch.int32, device=self.device)
            for _ in range(2):
                self.hosts.append(torch.empty(shape, dtype=torch.int32, pin_memory=True))
                self.copied.append(torch.cuda.Event())
        self.turn = 1 - self.turn
        host = self.hosts[self.turn][:num_masks]
        self.copied[self.turn].synchronize()
        host.copy_(source)
        target = self.target[:num_masks]
        target.copy_(host, non_blocking=True)
        self.copied[self.turn].record()
        return target


class ModelRunner:
    """Runs steps of every kind.

    samples: this rank has the last pipeline stage, so it samples. If another stage samples, its
        tokens arrive before the step that needs them.
    mixed_steps: steps with prefill chunks may read their decode inputs from the device.
    logits_dtype: of the model's logits, as far as nothing converts them.
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
    ):
        self.model = model
        self.rows = rows
        self.sample_tokens = sample_tokens
        self.samples = samples
        self.mixed_steps = mixed_steps
        self.max_mixed_tokens = min(max_num_batched_tokens, MAX_MIXED_TOKENS)
        self.buffers = StepBuffers(rows, block_size, self.max_mixed_tokens)
        device = rows.last_tokens.device
        max_slots = rows.max_num_seqs
        # Results of self-feeding steps, by batch slot.
        num_slots = max_slots + NUM_PREFILL_SLOTS
        self.logits = torch.zeros(num_slots, vocab_size, dtype=logits_dtype, device=device)
        self.tokens = torch.zeros(max_slots + NUM_PREFILL_SLOTS, dtype=torch.int64, device=device)
        self.mask_upload = MaskUpload(num_slots, device)
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

    def use_cpu_traces(self) -> str | None:
        """Replay decode steps from CPU traces from now on; if impossible, return the reason."""
        pool = self.rows.pool
        if pool is None:
            return "the native CPU kernels do not run"
        max_slots, vocab_size = self.logits.shape
        arena = TraceArena(TRACE_ARENA_BYTES + TRACE_BYTES_PER_LOGIT * max_slots * vocab_size)
        trace_runner = CpuTraceRunner(pool, arena)
        try:
            for fused_sampling in (True, False):
                shape = decode_shape(1, fused_sampling)
                trace_runner.trace(shape, partial(self._compute, shape))
        except UnsupportedOperation as reason:
            return str(reason)
        self.work_runner = trace_runner
        return None

    def capture_graphs(self, with_masked: bool = True) -> Iterator[int]:
        """Capture one graph at a time; yields how many are left, and ends with the last one.

        The largest step comes first. Decode steps follow, the smallest first, because the batch of
        a server grows from small to large; then mixed steps. `with_masked`: decode steps that end
        with logits come last, for requests with grammars. Other steps may run in between, eagerly
        if their graph does not exist yet.
        """
        graph_runner = self.graph_runner
        if graph_runner is None:
            return
        shapes = self.sizes.decode_shapes()
        if self.mixed_steps:
            largest, *smaller = self.sizes.mixed_shapes()
            shapes = [largest, *shapes, *smaller]
        if with_masked:
            shapes += self.sizes.decode_shapes(fused_sampling=False)
        num_left = len(shapes)
        for shape in shapes:
            self.buffers.write_padding(shape)
            self.resident_order = None
            graph_runner.capture(shape, partial(self._compute, shape))
            num_left -= 1
            if num_left:  # the generator ends with the last graph, so that it is freed
                yield num_left

    def run_decodes(self, order: BatchOrder, fused_sampling: bool) -> None:
        """Queue a step in which each of these rows computes one position.

        Afterwards `tokens` or, without fused sampling, `logits` has the result of each batch slot.
        """
        self.rows.upload_new_blocks()
        is_resident = self.resident_shape.fused_sampling == fused_sampling
        if order is not self.resident_order or not is_resident:
            shape = self.sizes.pad_decode(len(order.rows), fused_sampling)
            self.buffers.write_decodes(order.row_indices, shape)
            self.resident_order = order
            self.resident_shape = shape
            self.resident_work = partial(self._compute, shape)
        self.num_padding = self.resident_shape.num_decodes - len(order.rows)
        self.work_runner.run(self.resident_shape, self.resident_work)

    def accepts_mixed(self, order: BatchOrder, chunks: Sequence[PlacedRequest]) -> bool:
        """Whether a mixed step can serve these decodes and chunks.

        The step must be small enough. Its chunks must be of prompts without drafts, and fused
        sampling must support all of their requests.
        """
        if not self.mixed_steps or not order.fused_sampling or len(chunks) >= NUM_PREFILL_SLOTS:
            return False
        num_tokens = len(order.rows) + sum(scheduled.count for scheduled, _ in chunks)
        if num_tokens > self.max_mixed_tokens:
            return False
        return all(
            row.fused_sampling
            and row.wants_only_tokens
            and not scheduled.drafts
            and row.host_knows_token(scheduled.start)
            for scheduled, row in chunks
        )

    def run_mixed(
        self,
        order: BatchOrder,
        chunks: Sequence[PlacedRequest],
        max_position: int,
        fused_sampling: bool = True,
    ) -> MixedStep:
        """Queue a step of decodes, at positions up to `max_position`, and prefill chunks.

        Afterwards `tokens` or, without fused sampling, `logits` has the result of each batch slot:
        those of the decodes first, and from `first_chunk` on those of the chunks that sample.
        """
        # Chunks that sample come first, so that their tokens are adjacent in `tokens`.
        chunks = sorted(chunks, key=lambda pair: not pair[0].samples)
        self.rows.upload_new_blocks()
        num_decodes = len(order.rows)
        num_tokens = num_decodes + sum(scheduled.count for scheduled, _ in chunks)
        shape = self.sizes.pad_mixed(num_decodes, num_tokens, max_position, fused_sampling)
        self.num_padding = shape.num_tokens - num_tokens
        self.buffers.write_mixed(order.row_indices, chunks, shape)
        self.work_runner.run(shape, partial(self._compute, shape))
        sampled = tuple([pair for pair in chunks if pair[0].samples])
        return MixedStep(num_decodes, shape.num_decodes, sampled)

    def collect_mixed_tokens(self, mixed: MixedStep) -> torch.Tensor:
        """Return the tokens of the decodes, then one for each chunk that samples."""
        if not mixed.sampled_chunks:
            return self.tokens[: mixed.num_decodes]
        last_chunk = mixed.first_chunk + len(mixed.sampled_chunks)
        tokens_of_chunks = self.tokens[mixed.first_chunk : last_chunk]
        return torch.cat((self.tokens[: mixed.num_decodes], tokens_of_chunks))

    def sample_masked(
        self, rows: np.ndarray, positions: np.ndarray, bits: np.ndarray, slots: Sequence[int]
    ) -> None:
        """Sample for a self-feeding step that ended with logits, now that its masks are known.

        rows and positions [slots]: the row of each batch slot, perhaps the padding row, and the
        position of its new token. bits [masks, words] are the masks of the batch slots `slots`.
        Afterwards `tokens` has the result of each batch slot.
        """
        state = self.rows
        num_slots = len(rows)
        # One copy for all of these: each costs the host as much as a kernel launch.
        packed = torch.from_numpy(np.concatenate((rows, positions, slots)))
        uploaded = upload(packed, state.positions.device, state.positions.dtype)
        slot_rows = uploaded[:num_slots].to(torch.int32)
        seq_lens = uploaded[num_slots : 2 * num_slots]
        device_masks = TokenMasks(self.mask_upload.copy(bits), uploaded[2 * num_slots :])
        logits = self.logits[:num_slots]
        mask_logits(logits, device_masks, state.pool)
        tokens = self.sample_tokens(logits, slot_rows, seq_lens)
        self.tokens[:num_slots] = tokens
        advance_rows(slot_rows, tokens, seq_lens, state.last_tokens, state.positions, state.pool)

    def run_host_batch(self, batch: StepBatch) -> torch.Tensor:
        """Queue a step that the host laid out; returns hidden states at its output indices."""
        self.num_padding = 0
        return self.model.hidden_states(batch.token_ids, batch.metadata, batch.output_indices)

    def _compute(self, shape: StepShape) -> None:
        """The device work of a self-feeding step; reads and writes static buffers only."""
        batch = self.buffers.gather(shape)
        hidden = self.model.hidden_states(batch.token_ids, batch.metadata, batch.output_indices)
        if not self.samples:
            return
        if not shape.fused_sampling:
            logits = self.model.compute_logits(hidden, as_float32=False)
            self.logits[: shape.num_sequences] = logits
            return
        rows = batch.sampling_rows
        assert rows is not None
        seq_lens = batch.metadata.seq_lens
        logits = self.model.compute_logits(hidden, as_float32=False)
        tokens = self.sample_tokens(logits, rows, seq_lens)
        self.tokens[: shape.num_sequences] = tokens
        state = self.rows
        advance_rows(rows, tokens, seq_lens, state.last_tokens, state.positions, state.pool)

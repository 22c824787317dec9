"""A worker runs one device's part, or one rank's part, of every step.

It takes scheduled requests and returns sampled tokens. There are three step paths. A step of
decodes only reads its inputs from the request rows on the device, and so does a mixed step with a
few small prefill chunks on a GPU. The host lays out all other steps. Every path updates the rows on
the device for the next step, so no step waits for the result of another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bloomery.artifacts.locate import ModelArtifact
from bloomery.attention.base import AttentionBackend, download, upload
from bloomery.attention.select import select_backend, tune_backend
from bloomery.cache_groups import count_pages
from bloomery.config import EnginePlan
from bloomery.errors import InvalidRequest
from bloomery.hardware import detect_hardware
from bloomery.kernels.launch import MissingKernels, compile_kernels
from bloomery.kernels.select_rows import select_rows
from bloomery.messages import (
    AdapterInfo,
    EngineCapacity,
    SampledTokens,
    ScheduledStep,
    StepOutput,
    TokenLogprob,
)
from bloomery.models.adapter_memory import AdapterMemory, ConvertedAdapter
from bloomery.models.checkpoint import ProgressReport
from bloomery.models.load import LoadedModel, load_model
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.parallel.groups import DeviceMesh
from bloomery.roofline import Roofline, StepAdapter
from bloomery.runtime.activation_memory import LOGITS_CHUNK, measure_activation_memory
from bloomery.runtime.batch_invariant import check_deterministic_mode, find_batch_invariant_tile
from bloomery.runtime.device import check_device
from bloomery.runtime.kernel_discovery import compile_step_kernels
from bloomery.runtime.kv_cache import (
    KvCacheSize,
    fit_kv_cache,
    plan_stage_cache,
    resolve_kv_cache_dtype,
)
from bloomery.runtime.meter import StepMeter, StepReading, build_roofline
from bloomery.runtime.pipeline_balance import select_stage_layers
from bloomery.runtime.pooling import normalize_embedding, pool_hidden_states
from bloomery.runtime.progress import PhaseTimer, progress_bar
from bloomery.runtime.rows import BatchOrder, PlacedRequest, RequestRows
from bloomery.runtime.runner import (
    ForwardPass,
    GraphPool,
    MixedStep,
    ModelForward,
    ModelRunner,
)
from bloomery.runtime.sampler import (
    AcceptedTokens,
    Sampler,
    SamplerOutput,
    count_sampler_bytes,
    read_reports,
)
from bloomery.runtime.step_batch import (
    MAX_MIXED_TOKENS,
    NUM_PREFILL_SLOTS,
    BatchedRequest,
    StepBatch,
    StepShape,
    build_host_batch,
)
from bloomery.runtime.worker_adapters import WorkerAdapters

log = logging.getLogger("bloomery.worker")

# Every eighth shape is tried first, to find the kernels that must be compiled. Neighbouring shapes
# mostly use the same kernels.
TRIED_SHAPE_STRIDE = 8
# An engine is idle if it queues no step for so long while the device has nothing to do. Chosen.
IDLE_SECONDS = 0.2
# Bytes of GPU memory (1.25 GiB) for the driver's part of CUDA graphs and for libraries.
GRAPH_OVERHEAD_BYTES = 5 << 28


class KernelTrial(NamedTuple):
    """Shapes whose kernels are looked for, one after each step, and those that are missing."""

    shapes: list[StepShape]
    missing: MissingKernels


class Worker:
    """Holds a model, or a rank's part of it, its KV cache and its request rows, and runs steps.

    Tensor parallel ranks of the same layers all sample the same tokens.
    """

    def __init__(
        self,
        plan: EnginePlan,
        progress: bool = False,
        report: ProgressReport | None = None,
        mesh: DeviceMesh = DeviceMesh(),  # noqa: B008 (it is frozen)
        pool: ThreadPool | None = None,  # if the mesh already has one
    ):
        self.plan = plan
        self.mesh = mesh
        self.is_last_stage = mesh.is_last_stage
        self.start_timer = PhaseTimer()
        self.device = self._init_device()
        self.start_timer.end("device")
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.kernels_note: str | None = None  # why the native CPU kernels do not run
        self.pool = pool or self._start_thread_pool()
        loaded = self._load_model(progress, report)
        self.decoder = loaded.decoder
        if plan.deterministic:
            check_deterministic_mode(self.decoder.full_spec, self.device)
        self.adapters: WorkerAdapters | None = None
        if loaded.adapter_reader is not None:
            self.adapters = WorkerAdapters(
                loaded.adapter_reader, self._prepare_adapter, plan.lora_folders
            )
        # Whoever queues a step, or allocates what steps with adapters will read.
        self.step_lock = threading.Lock()
        self.kernel_trial: KernelTrial | None = None
        self.start_timer.end("weights")
        self.backend = self._select_attention_backend()
        self.kv_cache_dtype = self._select_kv_cache_dtype()
        self.cache = plan_stage_cache(
            plan,
            self.decoder.full_spec,
            self.decoder.spec,
            self.decoder.layer_range,
            self.kv_cache_dtype,
        )
        self.decoder.build_rope_cache(plan.max_model_len)
        captures = plan.cuda_graphs and mesh.num_stages == 1 and not mesh.shares_device
        self.graph_pool = GraphPool() if captures else None
        self.wait_for_kernels: Callable[[], None] = lambda: None
        self._compile_kernels()
        self.start_timer.end("kernels")
        self._tune_attention_backend()
        self.start_timer.end("attention")
        cache_size = self._allocate_kv_cache()
        self.start_timer.end("KV cache")
        self.rows = RequestRows(
            plan.max_num_seqs,
            self.max_blocks_per_seq,
            cache_size.num_blocks,
            self.device,
            self.pool,
            self.cache.layout.tables,
            self.cache.layout.states,
        )
        self.sampler = Sampler(  # its last row is the padding row, which is greedy
            plan.max_num_seqs + 1,
            self.decoder.spec.vocab,
            self.device,
            NUM_PREFILL_SLOTS,
            self.pool,
        )
        self.model = self._build_forward()
        self.runner = self._build_runner()
        self.cpu_traced = False  # decode steps are replayed from CPU traces
        trace_note = self._trace_decode_steps()
        self.roofline = self._build_roofline(loaded)
        notes = (*loaded.notes, cache_size.note, trace_note)
        self.capacity = self._report_capacity(loaded, cache_size, notes)
        self.meter: StepMeter | None = StepMeter(self.roofline, self.device)

    # ---- start, in the order of the calls --------------------------------------------------------

    def _init_device(self) -> torch.device:
        device = check_device(self.plan.device)
        if device.type == "cpu":
            torch.set_num_threads(self.plan.threads)
        return device

    def _start_thread_pool(self) -> ThreadPool | None:
        """Start the threads of the native CPU kernels, if they are wanted and can be built."""
        if not self.plan.cpu_kernels:
            return None
        try:
            return ThreadPool(self.plan.threads)
        except NativeBuildError as reason:
            self.kernels_note = str(reason)
            return None

    def _load_model(self, progress: bool, report: ProgressReport | None) -> LoadedModel:
        plan = self.plan
        mesh = self.mesh
        artifact = ModelArtifact(
            plan.name, "gguf" if plan.kind == "gguf" else "folder", Path(plan.path), "plan"
        )
        select_layers = None
        if mesh.num_stages > 1:
            select_layers = partial(select_stage_layers, mesh=mesh)
        adapter_memory = None
        if plan.enable_lora:
            adapter_memory = AdapterMemory(
                plan.max_loras, plan.max_lora_rank, self.dtype, self.device
            )
        return load_model(
            artifact,
            plan.load_format,
            self.dtype,
            self.device,
            progress,
            report,
            mesh,
            plan.quantization,
            keep_gguf_blocks=self.pool is not None,
            select_layers=select_layers,
            pool=self.pool,
            adapter_memory=adapter_memory,
        )

    def _select_attention_backend(self) -> AttentionBackend:
        plan = self.plan
        return select_backend(
            self.decoder.spec.attentions,
            self.dtype,
            self.device,
            batch_invariant=plan.deterministic,
            pool=self.pool if plan.kv_cache_dtype != "fp8" else None,
        )

    def _compile_kernels(self) -> None:
        """Compile on all cores what the start and its CUDA graphs would compile one by one.

        Ranks of a tensor parallel model do not: their collectives cannot start with a capture.
        Models with recurrent layers do not either, whose states have a memory of their own.
        """
        plan = self.plan
        is_simple = plan.tensor_parallel_size == 1 and not self.decoder.spec.recurrents
        if self.graph_pool is None or plan.deterministic or not is_simple:
            return
        try:
            self.wait_for_kernels = compile_step_kernels(
                self.decoder, self.cache, plan, self._captured_tokens(), self.graph_pool
            )
        except RuntimeError as error:
            log.warning("kernels are compiled one by one, because capturing failed: %s", error)
        torch.cuda.empty_cache()

    def _tune_attention_backend(self) -> None:
        # Ranks that share a device would disturb each other's measurement.
        if self.mesh.shares_device or self.plan.deterministic:
            return
        specs = self.decoder.spec.attentions
        tune_backend(self.backend, specs, self.dtype, self.kv_cache_dtype, self.device)

    def _select_kv_cache_dtype(self) -> torch.dtype:
        """Weights of few bits are less exact than a float16 KV cache, so that loses nothing.

        Other checkpoints keep the dtype of the activations, also if their weights are quantized.
        """
        plan = self.plan
        is_quantized = plan.kind == "gguf" or plan.quantization != "auto"
        prefer_float16 = is_quantized and self.backend.capabilities().float16_kv_cache
        return resolve_kv_cache_dtype(plan.kv_cache_dtype, self.dtype, prefer_float16)

    def _allocate_kv_cache(self) -> KvCacheSize:
        """Fit the KV cache into memory and allocate it, with one more block: the null block."""
        plan = self.plan
        cache = self.cache
        self.step_bytes = 0  # of memory for the activations of a GPU's largest step
        reserved_bytes = self._measure_reserved_bytes()
        self.start_timer.end("activation memory")
        size = fit_kv_cache(plan, cache, self.device, reserved_bytes, self.mesh)
        if size.max_model_len != plan.max_model_len:
            self.decoder.build_rope_cache(size.max_model_len)
        num_pages = count_pages(size.max_model_len, plan.block_size)
        self.max_blocks_per_seq = num_pages * cache.layout.blocks_per_page  # as kernels count
        self.memory = cache.allocate_memory(size.num_blocks + 1, self.device)
        self.caches = self.memory.keys_values()
        self.state_memories = self.memory.states()
        return size

    def _measure_reserved_bytes(self) -> int:
        """Return the GPU bytes that steps and CUDA graphs may take besides weights and KV cache."""
        if self.device.type == "cpu":
            return 0
        activations = measure_activation_memory(
            self.decoder, self.backend, self.plan, self.kv_cache_dtype, self._captured_tokens()
        )
        self.step_bytes = activations.step
        sampler_bytes = count_sampler_bytes(
            self.plan.max_num_seqs + 1, self.decoder.spec.vocab, NUM_PREFILL_SLOTS
        )
        model_bytes = activations.step + activations.graphs + sampler_bytes
        memory = self.decoder.adapter_memory
        if memory is None:
            return model_bytes + GRAPH_OVERHEAD_BYTES
        # Steps with adapters have graphs of their own.
        adapter_bytes = memory.step_bytes(self.plan.max_num_batched_tokens)
        return model_bytes + adapter_bytes + 2 * GRAPH_OVERHEAD_BYTES

    def _captured_tokens(self) -> int:
        """Positions of the largest CUDA graph."""
        return self.plan.max_num_seqs + MAX_MIXED_TOKENS if self.plan.cuda_graphs else 0

    @torch.inference_mode()
    def _build_forward(self) -> ForwardPass:
        pipe = self.mesh.create_stage_pipe(self.decoder.spec.hidden, self.decoder.dtype)
        forward = ModelForward(
            self.decoder,
            self.backend,
            self.caches,
            pipe,
            self.cache.layer_tables,
            states=self.state_memories,
        )
        if not self.plan.deterministic:
            return forward
        return find_batch_invariant_tile(
            forward,
            self.max_blocks_per_seq,
            self.rows.null_blocks,
            self.cache.kernel_block_size,
            self.mesh,
            self.rows.null_states(),
        )

    def _build_runner(self) -> ModelRunner:
        plan = self.plan
        # Tiles of the batch-invariant forward pass cannot have prefill chunks.
        mixed_steps = (
            self.backend.capabilities().device_side_metadata
            and not plan.deterministic
            and self.mesh.num_stages == 1
        )
        return ModelRunner(
            self.model,
            self.rows,
            self.cache.kernel_block_size,
            self.sampler,
            self.decoder.spec.vocab,
            plan.max_num_batched_tokens,
            samples=self.is_last_stage,
            mixed_steps=mixed_steps,
            graph_pool=self.graph_pool,
            logits_dtype=self._find_logits_dtype(),
            adapter_memory=self.decoder.adapter_memory,
        )

    @torch.inference_mode()
    def _find_logits_dtype(self) -> torch.dtype:
        """The dtype in which steps keep their logits until they sample."""
        if self.device.type != "cuda" or not self.is_last_stage:
            return torch.float32
        hidden = torch.zeros(1, self.decoder.spec.hidden, dtype=self.dtype, device=self.device)
        return self.model.compute_logits(hidden, as_float32=False).dtype

    @torch.inference_mode()
    def _trace_decode_steps(self) -> str | None:
        """Trace the smallest decode step on a CPU; returns a note for the operator, if any."""
        # Tiles of several positions cannot be traced.
        traceable = self.backend.capabilities().cpu_traceable and self.model.tile_size == 1
        with_adapters = self.adapters is not None
        refusal = self.runner.use_cpu_traces(with_adapters) if traceable else None
        # All ranks trace or none does: ranks must use the same order of batch slots.
        self.cpu_traced = bool(self.mesh.min_over_ranks(traceable and refusal is None))
        if self.kernels_note is not None:
            return f"the CPU kernels do not run, torch computes alone: {self.kernels_note}"
        if refusal is not None:
            return f"decode steps are not traced but run operation by operation: {refusal}"
        return None

    def _build_roofline(self, loaded: LoadedModel) -> Roofline:
        """What the hardware allows for a step of all ranks."""
        plan = self.plan
        num_ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
        return build_roofline(
            self.decoder.full_spec,
            detect_hardware(self.device.type),
            loaded.weight_bytes * num_ranks,
            self.dtype,
            self.kv_cache_dtype,
            plan.tensor_parallel_size,
            plan.pipeline_parallel_size,
            loaded.expert_bytes * num_ranks,
        )

    def _report_capacity(
        self, loaded: LoadedModel, cache_size: KvCacheSize, notes: Sequence[str | None]
    ) -> EngineCapacity:
        plan = self.plan
        return EngineCapacity(
            blocks=cache_size.num_blocks,
            block_size=plan.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=cache_size.max_model_len,
            vocab=self.decoder.spec.vocab,
            weights_bytes=loaded.weight_bytes,
            kv_bytes=cache_size.num_bytes,
            device=str(self.device),
            notes=tuple(note for note in notes if note),
            expected_steps=self.roofline.reference_steps(),
            cache_groups=self.cache.layout.groups,
        )

    @torch.inference_mode()
    def capture_graphs(self, progress: bool = False, report: ProgressReport | None = None) -> None:
        """Compile the kernels of all steps and capture their CUDA graphs.

        The first request is then as fast as any later one. `progress` shows a bar in the terminal,
        `report` receives the progress.
        """
        # Several ranks leave out graphs of rarer steps.
        shapes = self.runner.list_captured_shapes(
            with_masked=self.plan.tensor_parallel_size == 1,
            with_adapters=self.adapters is not None,
        )
        if not shapes:
            return
        self.start_timer.end("rows")
        self.wait_for_kernels()
        self.start_timer.end("wait for kernels")
        missing: MissingKernels = {}
        for shape in shapes[::TRIED_SHAPE_STRIDE]:
            self.runner.capture(shape, missing)
        compile_kernels(missing)
        self.start_timer.end(f"{len(missing)} kernels")
        remaining = shapes
        num_captured = 0
        with progress_bar("graphs", len(shapes), progress) as advance:
            while remaining:
                missing.clear()
                incomplete = []
                for shape in remaining:
                    if not self.runner.capture(shape, missing):
                        incomplete.append(shape)
                        continue
                    num_captured += 1
                    advance()
                    if report is not None:
                        report("CUDA graphs", num_captured, len(shapes))
                compile_kernels(missing)
                remaining = incomplete
        self.runner.release_incomplete_graphs()
        self._keep_step_memory()
        self.start_timer.end(f"{len(shapes)} CUDA graphs")
        log.info("the worker started: %s", self.start_timer)

    def _keep_step_memory(self) -> None:
        """Let torch take the memory of steps without a graph from the driver, and keep it.

        Otherwise the first long prompt would wait for that.
        """
        torch.empty(self.step_bytes, dtype=torch.uint8, device=self.device)

    # ---- adapters --------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str) -> Future[AdapterInfo]:
        """Read a LoRA adapter into host memory while steps go on."""
        if self.adapters is None:
            refusal: Future[AdapterInfo] = Future()
            reason = "the server takes no LoRA adapters; start it with --enable-lora"
            refusal.set_exception(InvalidRequest(reason, "model"))
            return refusal
        return self.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Drop the host copy of an adapter."""
        if self.adapters is not None:
            self.adapters.unload(name)

    def _fill_adapter_slots(self, step: ScheduledStep) -> None:
        """Queue the copies of the adapters that the step needs in a device slot."""
        for slot, name in step.lora_loads:
            assert self.adapters is not None
            if self.adapters.fill_slot(slot - 1, name):
                self.runner.work_runner.forget_outer()

    def _prepare_adapter(self, adapter: ConvertedAdapter) -> None:
        """Prepare for the first adapter with an embedding or a head of its own.

        Called on the thread that reads adapters. If there is no memory, only this adapter fails.
        Steps without such adapters keep their graphs. Steps with them launch some kernels for the
        first time. These are compiled here, because running streams would wait for that. The graphs
        are captured like those of other new shapes. Tensor parallel ranks compile and capture in
        the step that needs the adapter, at the same time.
        """
        memory = self.decoder.adapter_memory
        if memory is None:
            return
        with self.step_lock, torch.inference_mode():
            memory.allocate_outer(adapter)
            if self.mesh.group.size > 1 or not memory.note_outer(adapter):
                return
            self.runner.work_runner.forget_outer()
            shapes = self.runner.list_outer_shapes()[::TRIED_SHAPE_STRIDE]
            trial = KernelTrial(shapes, {})
            self.kernel_trial = trial
        while trial.shapes:
            num_shapes = len(trial.shapes)
            is_busy = self._is_device_busy()
            time.sleep(IDLE_SECONDS)
            if not is_busy and len(trial.shapes) == num_shapes:
                break  # no step has run, so no stream would wait for the compiler either
        with self.step_lock:
            self.kernel_trial = None
            self.runner.release_incomplete_graphs()
        if trial.missing:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # of this thread
            compile_kernels(trial.missing)

    def _is_device_busy(self) -> bool:
        """Whether a GPU has not ended the steps that were queued."""
        if self.device.type != "cuda":
            return False
        with self.step_lock:
            return not torch.cuda.current_stream(self.device).query()

    def _try_kernels(self) -> None:
        """Find the missing kernels of one shape, while the device is busy with a step."""
        if self.kernel_trial is not None and self.kernel_trial.shapes:
            self.runner.capture(self.kernel_trial.shapes.pop(), self.kernel_trial.missing)

    def _list_step_adapters(self, step: ScheduledStep) -> list[StepAdapter]:
        """Return the adapters of the step's tokens."""
        if self.adapters is None:
            return []
        order = self.rows.order_decodes(step.decodes, step.decode_positions)
        chunks = [(chunk, self.rows.by_sequence[chunk.sequence]) for chunk in step.chunks]
        return self.adapters.list_step_adapters(order, chunks)

    # ---- steps -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, step: ScheduledStep, sampled: Sequence[tuple[int, int]] = ()) -> LaunchedStep:
        """Queue the work of a step; waits for the device only if drafts must be verified.

        A step with masked sequences queues its forward pass and samples in `provide_masks`.
        sampled: (sequence, last token) pairs, where another pipeline stage has sampled them.
        """
        with self.step_lock:
            return self._launch_step(step, sampled)

    def _launch_step(self, step: ScheduledStep, sampled: Sequence[tuple[int, int]]) -> LaunchedStep:
        if self.meter is not None:
            self.meter.begin(step)
        launched = self._run_step(step, sampled)
        if self.meter is not None:
            self.meter.count_adapters(self._list_step_adapters(step))
            launched.meter = self.meter
            launched.num_padding = self.runner.num_padding
            if launched.is_launched:
                launched.reading = self.meter.end(launched.num_padding)
            else:
                self.meter.end_forward()
        if self.graph_pool is not None:
            self.graph_pool.capture_pending()
        self._try_kernels()
        return launched

    def _run_step(self, step: ScheduledStep, sampled: Sequence[tuple[int, int]]) -> LaunchedStep:
        self._fill_adapter_slots(step)
        chunks = self._update_rows(step)
        if step.block_copies:
            self.memory.copy_blocks(step.block_copies)
        if sampled:
            self._receive_tokens(step, sampled)
        on_one_gpu = self.device.type == "cuda" and self.mesh.num_stages == 1
        if not chunks and (on_one_gpu or self.cpu_traced):
            return self._run_decodes(step)
        order = self.rows.order_decodes(step.decodes, step.decode_positions)
        if self.runner.accepts_mixed(order, chunks):
            return self._run_mixed(step, order, chunks)
        decodes = self.rows.place_decodes(step.decodes, step.decode_positions)
        placed = [*decodes, *chunks]
        batch = build_host_batch(placed, self.rows, self.cache.kernel_block_size)
        return self._run_host_batch(batch, step.masked)

    def _update_rows(self, step: ScheduledStep) -> list[PlacedRequest]:
        """Release finished requests, admit new ones, extend block tables; returns placed chunks."""
        for sequence in step.finished:
            self.sampler.release(self.rows.release(sequence).index)
        for sequence, blocks in step.new_blocks:
            self.rows.append_blocks(sequence, blocks)
        chunks = []
        for chunk in step.chunks:
            if chunk.new_request is not None:
                row = self.rows.add(chunk.sequence, chunk.new_request)
                self.sampler.admit(row.index, chunk.new_request)
            chunks.append((chunk, self.rows.append_blocks(chunk.sequence, chunk.blocks)))
        return chunks

    def _receive_tokens(self, step: ScheduledStep, sampled: Sequence[tuple[int, int]]) -> None:
        """Write tokens that the last pipeline stage has sampled into the rows."""
        position_of = dict(zip(step.decodes, step.decode_positions, strict=True))
        position_of |= {chunk.sequence: chunk.start for chunk in step.chunks}
        entries = [
            (self.rows.by_sequence[sequence].index, token, position_of[sequence])
            for sequence, token in sampled
        ]
        rows, tokens, positions = upload(entries, self.device).unbind(1)
        self.rows.set_last_tokens(rows, tokens, positions)

    def _run_decodes(self, step: ScheduledStep) -> LaunchedStep:
        """Run a step in which every sequence computes one position, fed from the device."""
        order = self.rows.order_decodes(step.decodes, step.decode_positions)
        self.sampler.upload_new_requests()
        self.runner.run_decodes(order, bool(step.masked))
        num_decodes = len(order.rows)
        if not self.is_last_stage:
            return LaunchedStep([], None)
        mixed = MixedStep(num_decodes, num_decodes, ())
        if step.masked:
            return self._finish_masked(step, order, mixed)
        return LaunchedStep([], self._read_outputs(order, mixed), decode_indices=order.step_indices)

    def _run_mixed(
        self, step: ScheduledStep, order: BatchOrder, chunks: list[PlacedRequest]
    ) -> LaunchedStep:
        """Run a step of decodes and a few prefill chunks, fed from the device."""
        self.sampler.upload_new_requests()
        max_position = max(step.decode_positions, default=0)
        mixed = self.runner.run_mixed(order, chunks, max_position)
        if step.masked:
            return self._finish_masked(step, order, mixed)
        self._sample_apart()
        sequences = [scheduled.sequence for scheduled, _ in mixed.sampled_chunks]
        output = self._read_outputs(order, mixed)
        return LaunchedStep(sequences, output, decode_indices=order.step_indices)

    def _read_outputs(self, order: BatchOrder, mixed: MixedStep) -> SamplerOutput | None:
        """Return what the sampler wrote: for the decodes, then for each chunk that samples."""
        outputs = self.sampler.outputs
        first_chunk = mixed.first_chunk
        num_chunks = len(mixed.sampled_chunks)
        if not mixed.num_decodes and not num_chunks:
            return None
        chunk_counts = [row.request.sampling.logprobs for _, row in mixed.sampled_chunks]
        wants_logprobs = order.num_logprobs or any(count is not None for count in chunk_counts)

        def select(values: torch.Tensor) -> torch.Tensor:
            decodes = values[: mixed.num_decodes]
            if not num_chunks:
                return decodes
            return torch.cat((decodes, values[first_chunk : first_chunk + num_chunks]))

        if not wants_logprobs:
            return SamplerOutput(select(outputs.tokens), ())
        decode_counts = order.num_logprobs or (None,) * mixed.num_decodes
        return SamplerOutput(
            select(outputs.tokens), (), select(outputs.reports), (*decode_counts, *chunk_counts)
        )

    def _finish_masked(
        self, step: ScheduledStep, order: BatchOrder, mixed: MixedStep
    ) -> LaunchedStep:
        """Return a self-feeding step that samples once it has its masks."""
        sequences = [chunk.sequence for chunk, _ in mixed.sampled_chunks]
        masked_rows = [self.rows.by_sequence[sequence].index for sequence in step.masked]

        def sample(masks: np.ndarray) -> SamplerOutput | None:
            self.sampler.send_masks(masked_rows, masks)
            self._sample_apart()
            return self._read_outputs(order, mixed)

        return LaunchedStep(sequences, None, decode_indices=order.step_indices, sample=sample)

    def _sample_apart(self) -> None:
        self.runner.sample_apart()
        self.sampler.mask_upload.mark_taken()

    def _launch_sampling(
        self,
        requests: Sequence[BatchedRequest],
        logits: torch.Tensor,
        masked: Sequence[int],
        prompt_reports: dict[int, PromptReports],
        embeddings: dict[int, torch.Tensor],
    ) -> LaunchedStep:
        """Sample from logits [n, vocab] of a step that the host laid out, now or with the masks."""
        sequences = [request.scheduled.sequence for request in requests]
        if not masked:
            output = self._sample(requests, logits)
            return LaunchedStep(sequences, output, prompt_reports, embeddings)
        masked_rows = [self.rows.by_sequence[sequence].index for sequence in masked]

        def sample(bits: np.ndarray) -> SamplerOutput:
            self.sampler.upload_new_requests()
            self.sampler.send_masks(masked_rows, bits)
            self.sampler.apply_masks(len(masked_rows))
            self.sampler.mask_upload.mark_taken()
            return self._sample(requests, logits)

        return LaunchedStep(sequences, None, prompt_reports, embeddings, sample=sample)

    def _run_host_batch(self, batch: StepBatch, masked: Sequence[int]) -> LaunchedStep:
        """Run a step that the host laid out; it may be of any kind."""
        hidden = self.runner.run_host_batch(batch)
        if not self.is_last_stage:
            return LaunchedStep([], None)
        prompt_reports = {}
        for request in batch.requests:
            reports = self._score_prompt(request, hidden)
            if reports is not None:
                prompt_reports[request.scheduled.sequence] = reports
        embeddings = self._pool_embeddings(batch, hidden)
        sampled = batch.sampled_requests
        if not sampled:
            return LaunchedStep([], None, prompt_reports, embeddings)
        indices = batch.sample_indices
        rows = None
        if indices is not None and len(indices) != len(hidden):
            rows = indices
        logits = self._compute_logits(hidden, rows)
        return self._launch_sampling(sampled, logits, masked, prompt_reports, embeddings)

    def _compute_logits(
        self, hidden: torch.Tensor, rows: torch.Tensor | slice | None = None
    ) -> torch.Tensor:
        """Compute the logits of these rows of a forward pass; None: of all of them.

        On a GPU in the dtype of captured steps, so that sampling kernels are compiled once.
        """
        as_float32 = self.device.type == "cpu"
        if rows is None:
            return self.model.compute_logits(hidden, as_float32)
        selected = select_rows(hidden, rows, self.pool)
        if self.decoder.adapter_memory is None:
            return self.model.compute_logits(selected, as_float32)
        batch = self.decoder.adapter_memory.batch
        slots = batch.slots
        batch.select(rows)
        logits = self.model.compute_logits(selected, as_float32)
        batch.begin(slots)
        return logits

    def _pool_embeddings(self, batch: StepBatch, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the embeddings of the prompts that end in this step, by sequence."""
        embeddings = {}
        for request in batch.requests:
            if request.row.request.pooling is None:
                continue
            state = pool_hidden_states(request, hidden)
            if state is not None:
                embedding = normalize_embedding(self.decoder.project_features(state))
                embeddings[request.scheduled.sequence] = embedding
        return embeddings

    def _sample(self, requests: Sequence[BatchedRequest], logits: torch.Tensor) -> SamplerOutput:
        """Sample from logits [n, vocab]; stores each last token in its row for the next step."""
        if self.meter is not None:
            self.meter.begin_sampling()
        sampling_jobs = [
            (
                request.row.index,
                request.scheduled.start + request.scheduled.count,
                request.scheduled.drafts,
            )
            for request in requests
        ]
        with single_torch_thread(self.pool is not None):
            output = self.sampler.sample(logits, sampling_jobs)
        entries = [(row, position) for row, position, _ in sampling_jobs]
        rows, positions = upload(entries, self.device).unbind(1)
        tokens = output.tokens
        if len(logits) != len(requests):
            # A sequence with drafts has no other step in flight, so waiting for the result is fine.
            accepted = [request_tokens for request_tokens, _ in output.collect()]
            last_tokens = [request_tokens[-1] for request_tokens in accepted]
            num_drafts = [len(request_tokens) - 1 for request_tokens in accepted]
            tokens = upload(last_tokens, self.device)
            positions = positions + upload(num_drafts, self.device)
        self.rows.set_last_tokens(rows, tokens, positions)
        return output

    def _score_prompt(self, request: BatchedRequest, hidden: torch.Tensor) -> PromptReports | None:
        """Score the prompt tokens that this step's positions predict, if they are wanted."""
        scheduled = request.scheduled
        new_request = request.row.request
        num_top = new_request.sampling.prompt_logprobs
        start = scheduled.start
        end = min(start + scheduled.count, new_request.prompt_len - 1)
        if num_top is None or start >= end:
            return None
        offset = request.first_token - start  # from a position to its index in the batch
        reports = []
        for first in range(start, end, LOGITS_CHUNK):
            stop = min(first + LOGITS_CHUNK, end)
            logits = self._compute_logits(hidden, slice(offset + first, offset + stop))
            next_tokens = new_request.tokens[first + 1 : stop + 1]
            reports.append(self.sampler.score_tokens(logits, next_tokens, num_top))
        return PromptReports(
            new_request.tokens[start + 1 : end + 1], download(torch.cat(reports)), num_top
        )


class PromptReports(NamedTuple):
    """The log-probabilities of prompt tokens, on their way to the host."""

    tokens: tuple[int, ...]
    reports: torch.Tensor  # [tokens, ...], see SampleOutputs
    num_top: int

    def read(self) -> tuple[TokenLogprob, ...]:
        """Convert to messages."""
        entries = read_reports(self.reports, self.tokens, [self.num_top] * len(self.tokens))
        return tuple([entry for entry in entries if entry is not None])


class LaunchedStep:
    """A queued step, whose result may still be on its way from the device.

    The whole result is downloaded together, so steps that are queued later do not delay it.

    sequences: the sequence of each entry of the sampler's output.
    decode_indices: if given, the output begins with the tokens of the decodes, and this is each
        decode's index in the step.
    sample: the rest of a step with masked sequences; it takes their masks.
    """

    def __init__(
        self,
        sequences: list[int],
        output: SamplerOutput | None,
        prompt_reports: dict[int, PromptReports] | None = None,
        embeddings: dict[int, torch.Tensor] | None = None,
        decode_indices: Sequence[int] | None = None,
        sample: Callable[[np.ndarray], SamplerOutput | None] | None = None,
    ):
        self.sequences = sequences
        self.prompt_reports = prompt_reports or {}
        self.decode_indices = decode_indices
        self.embeddings = {
            sequence: download(vector) for sequence, vector in (embeddings or {}).items()
        }
        self.output: SamplerOutput | None = None
        self.finished: torch.cuda.Event | None = None
        self.meter: StepMeter | None = None
        self.reading: StepReading | None = None
        self.num_padding = 0
        self.sample = sample
        if sample is None:
            self._finish_launch(output)

    @property
    def is_launched(self) -> bool:
        """Whether all work is queued. Otherwise the step waits for its masks."""
        return self.sample is None

    @torch.inference_mode()
    def provide_masks(self, masks: np.ndarray) -> None:
        """Queue the sampling of a step with masked sequences; masks [sequences, words] int32."""
        sample = self.sample
        if sample is None:
            return  # another pipeline stage samples
        self.sample = None
        if self.meter is not None:
            self.meter.begin_sampling()
        self._finish_launch(sample(masks))
        if self.meter is not None:
            self.reading = self.meter.end(self.num_padding)

    def _finish_launch(self, output: SamplerOutput | None) -> None:
        """Start to copy the results to the host."""
        self.output = None if output is None else output.copy_to_host()
        if torch.cuda.is_initialized():
            # A prefill chunk alone has no result, but the engine must not run ahead of it.
            self.finished = torch.cuda.Event()
            self.finished.record()

    def result(self) -> StepOutput:
        """Wait for the device and return the step's output."""
        if self.finished is not None:
            self.finished.synchronize()
        decode_tokens, decode_logprobs, accepted = self._split_tokens()
        prompt_logprobs = {
            sequence: reports.read() for sequence, reports in self.prompt_reports.items()
        }
        samples = [
            SampledTokens(sequence, tokens, logprobs, prompt_logprobs.pop(sequence, ()))
            for sequence, (tokens, logprobs) in zip(self.sequences, accepted, strict=True)
        ]
        samples += [
            SampledTokens(sequence, prompt_logprobs=logprobs)
            for sequence, logprobs in prompt_logprobs.items()
        ]
        samples += [
            SampledTokens(sequence, embedding=tuple(vector.tolist()))
            for sequence, vector in self.embeddings.items()
        ]
        timing = None
        if self.meter is not None and self.reading is not None:
            timing = self.meter.collect(self.reading)
        return StepOutput(tuple(samples), timing, tuple(decode_tokens), tuple(decode_logprobs))

    def _split_tokens(
        self,
    ) -> tuple[list[int], list[TokenLogprob | None], list[AcceptedTokens]]:
        """Return the tokens of decodes in the step's order, and what each of `sequences` gained.

        In between are the log-probabilities of the decodes, if any of them wants these.
        """
        if self.output is None:
            return [], [], []
        if self.decode_indices is None:
            return [], [], self.output.collect()
        sampled, logprobs = self.output.read()
        num_decodes = len(self.decode_indices)
        decode_tokens = [0] * num_decodes
        decode_logprobs: list[TokenLogprob | None] = []
        for index, token in zip(self.decode_indices, sampled):
            decode_tokens[index] = token
        if not logprobs:
            return decode_tokens, [], [((token,), ()) for token in sampled[num_decodes:]]
        decode_logprobs = [None] * num_decodes
        for index, entry in zip(self.decode_indices, logprobs):
            decode_logprobs[index] = entry
        accepted: list[AcceptedTokens] = [
            ((token,), () if entry is None else (entry,))
            for token, entry in zip(sampled[num_decodes:], logprobs[num_decodes:])
        ]
        return decode_tokens, decode_logprobs, accepted


@contextmanager
def single_torch_thread(active: bool) -> Iterator[None]:
    """Let torch use only one thread inside the block, if `active`.

    Torch's threads spin for milliseconds after their work, on cores that the CPU kernels need next.
    They also wait for each other when another program takes a core. One thread is faster for small
    work.
    """
    num_threads = torch.get_num_threads()
    if not active or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)

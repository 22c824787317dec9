"""Estimates for `bloomery plan`: fewest devices, their best layout, and step times.

roofline.py computes the time of one step. This module evaluates it for the batches, contexts,
devices and layouts that the report shows. Arithmetic only: no torch, no printing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from bloomery.adapter_sizes import AdapterSizes, pad_rank
from bloomery.cache_groups import (
    CacheLayout,
    StateLayout,
    count_held_blocks,
    count_state_blocks,
    local_kv_heads,
    plan_cache_groups,
)
from bloomery.config import default_batch_limits, default_block_size
from bloomery.errors import ConfigError
from bloomery.hardware import HARDWARE_SPECS, HardwareSpec
from bloomery.layout import TensorParallelLayout, supports_tensor_parallel
from bloomery.roofline import (
    LIBRARY_PRECISIONS,
    PRECISIONS,
    Roofline,
    StepAdapter,
    WeightPrecision,
    activation_bytes,
    count_parameters,
    kv_bytes,
    kv_bytes_per_token,
    peak_bytes,
    scores_bytes,
    state_bytes,
    weights_bytes,
)
from bloomery.spec import ModelSpec
from bloomery.tools.plan.model_source import ModelSource

READING_SPEED = 10.0  # tokens per second that a person reads
MEMORY_UTILIZATION = 0.9  # share of a device's memory: the default of --gpu-memory-utilization
CUDA_GRAPH_BYTES = 1 << 30  # memory that a GPU reserves for CUDA graphs
DEVICES_PER_NODE = 8  # devices joined by fast links; tensor parallel ranks stay within a node
PREFILL_CHUNK = 8192  # tokens
BATCH_SIZES = (1, 8, 64)
DEVICE_COUNTS = (1, 2, 4, 8, 16, 32)
ALIKE_THROUGHPUT = 0.95  # layouts within 5 % of the best count as equal: estimates are no finer
PROMPT_LENGTHS = (16_000, 100_000)  # tokens for which the memory of attention is shown
CPU_PRECISIONS = ("bf16", "int8", "int4")
GPU_PRECISIONS = ("bf16", "fp8", "int8", "int4", "nf4")


@dataclass(frozen=True)
class DeviceLayout:
    """How devices are used: tensor parallel ranks x pipeline stages x replicas."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.replicas

    def __str__(self) -> str:
        parts = []
        if self.tp > 1:
            parts.append(f"TP {self.tp}")
        if self.pp > 1:
            parts.append(f"PP {self.pp}")
        replica = " x ".join(parts) or "one device"
        return f"{self.replicas} replicas of {replica}" if self.replicas > 1 else replica


@dataclass(frozen=True)
class AdapterLimits:
    """The LoRA adapters of a server."""

    max_loras: int  # device slots
    max_rank: int
    max_cpu_loras: int  # in host memory


class PlacedAdapters:
    """The LoRA adapters of a model on some devices. All sizes are those of the largest rank."""

    def __init__(
        self, model: ModelSpec, limits: AdapterLimits, hardware: HardwareSpec, layout: DeviceLayout
    ):
        self.limits = limits
        self.stages = layout.pp
        ranks = [
            AdapterSizes(model, TensorParallelLayout(rank, layout.tp)) for rank in range(layout.tp)
        ]
        padded_rank = pad_rank(limits.max_rank, "cpu" if hardware.is_cpu else "cuda")
        value_bytes = 4 if hardware.is_cpu else 2
        # Of an adapter on each device, in a slot and in host memory alike.
        self.adapter_bytes = value_bytes * max(rank.slot_values(padded_rank) for rank in ranks)
        self.adapter_bytes = ceil(self.adapter_bytes / self.stages)
        num_tokens, _ = default_batch_limits(hardware.is_cpu)
        self.step_bytes = max(
            rank.step_bytes(num_tokens, padded_rank, value_bytes) for rank in ranks
        )
        values = ranks[0].adapter_values(limits.max_rank)
        self.values = values._replace(
            matrices=ceil(values.matrices / self.stages), experts=ceil(values.experts / self.stages)
        )

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots of a device."""
        return self.limits.max_loras * self.adapter_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all adapters that the process of a device holds in host memory."""
        return self.limits.max_cpu_loras * self.adapter_bytes

    def spread(self, tokens: float, sampled: float) -> list[StepAdapter]:
        """The adapters of a step in which every sequence has another one, as far as slots go."""
        num_adapters = min(ceil(sampled) or 1, self.limits.max_loras)
        share = StepAdapter(self.values, tokens / num_adapters, sampled / num_adapters)
        return [share] * num_adapters


@dataclass(frozen=True)
class BatchEstimate:
    """One row of the report: decode steps of one batch size and context."""

    batch: int  # sequences of one replica
    context: int
    floor_ms: float
    expected_ms: float
    tokens_per_second: float  # of all replicas, as expected
    fits: bool
    bound: str  # the largest part of the floor: computing, cache or weights
    cost: float | None = None  # of a million tokens


def largest_step(model: ModelSpec, hardware: HardwareSpec) -> tuple[int, float]:
    """Tokens of the largest step with default settings, and the bytes of its activations."""
    max_tokens, max_seqs = default_batch_limits(hardware.is_cpu)
    num_tokens = min(max_tokens, model.context)
    bits = 32 if hardware.is_cpu else 16
    return num_tokens, activation_bytes(model, num_tokens, max_seqs, bits)


def loaded_precision(precision: WeightPrecision, hardware: HardwareSpec) -> WeightPrecision:
    """The precision in which the engine holds weights.

    On a CPU, codes of 4 bits have a scale of 16 bits for each 32. Formats for which it has no
    kernel are held in such blocks of 8-bit values.
    """
    if not hardware.is_cpu:
        return precision
    if precision.expert_bits:
        return replace(precision, expert_bits=4.5)
    if precision.name == "fp4" or precision.compute_format == "fp8":
        return replace(precision, bits=8.5, compute_format="int8")
    if precision.compute_format == "nf4":
        return replace(precision, bits=4.5, compute_format="int4")
    return precision


class PlacedModel:
    """A model at a precision on some devices: its free memory and its step times."""

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        precision: WeightPrecision,
        kv_bits: float,
        layout: DeviceLayout,
        adapter_limits: AdapterLimits | None = None,
    ):
        self.model = model
        self.hardware = hardware
        self.precision = precision
        self.kv_bits = kv_bits
        self.layout = layout
        self.adapters: PlacedAdapters | None = None
        if adapter_limits is not None:
            self.adapters = PlacedAdapters(model, adapter_limits, hardware, layout)
        self.roofline = Roofline(model, hardware, precision, kv_bits, layout.tp, layout.pp)

    @cached_property
    def free_kv_bytes(self) -> float:
        """Bytes left on each device for the KV cache."""
        usable = self.hardware.memory_bytes * MEMORY_UTILIZATION
        num_ranks = self.layout.tp * self.layout.pp
        weights = weights_bytes(self.model, self.precision, self.layout.pp) / num_ranks
        activations = largest_step(self.model, self.hardware)[1] / self.layout.tp
        cuda_graphs = 0 if self.hardware.is_cpu else CUDA_GRAPH_BYTES
        adapters = 0
        if self.adapters is not None:
            adapters = self.adapters.slots_bytes + self.adapters.step_bytes
            # Steps with adapters have graphs of their own. A CPU's memory is the host's, too.
            adapters += self.adapters.host_bytes if self.hardware.is_cpu else CUDA_GRAPH_BYTES
        return usable - weights - activations - cuda_graphs - adapters

    @property
    def kv_head_share(self) -> float:
        """Share of the KV heads on each rank. Heads that cannot be split are on every rank."""
        own_values = 0
        all_values = 0
        for attention in self.model.attentions:
            heads = attention.num_kv_heads
            own_values += ceil(heads / self.layout.tp) * attention.head_dim
            all_values += heads * attention.head_dim
        return own_values / all_values if all_values else 1.0

    @property
    def page_size(self) -> int:
        """Positions of a page of the KV cache, with default settings."""
        return default_block_size(self.hardware.is_cpu)

    @cached_property
    def cache_layout(self) -> CacheLayout:
        """The cache groups of the model, with default settings."""
        scales = self.kv_bits not in (16, 32)
        return plan_cache_groups(
            self.model,
            self.model.context,
            self.page_size,
            self.layout.tp,
            scales,
            self.value_bytes,
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of a stored key or value, without its scale."""
        return max(int(self.kv_bits // 8), 1)

    @cached_property
    def kv_block_bytes(self) -> float:
        """Bytes of one block of the KV cache on each device."""
        position_bytes = [
            2 * local_kv_heads(attention, self.layout.tp) * attention.head_dim
            for attention in self.model.attentions
        ]
        states = self.cache_layout.states
        if states is not None:
            return self._state_block_bytes(states)
        if len(self.cache_layout.groups) == 1:
            values = sum(position_bytes) * self.page_size
        else:
            # A block has room for the layers of one table of any group.
            values = max(
                -(-group.num_layers // group.num_tables)
                * position_bytes[self.cache_layout.layer_groups.index(index)]
                * (self.page_size // group.blocks_per_page)
                for index, group in enumerate(self.cache_layout.groups)
            )
        return values * self.kv_bits / 8 / self.layout.pp

    def _state_block_bytes(self, states: StateLayout) -> float:
        """Bytes of a block that may also hold a part of a recurrent state."""
        num_slots = max(
            -(-group.num_layers // (states.num_tables if group.state_blocks else group.num_tables))
            for group in self.cache_layout.groups
        )
        scale_share = self.kv_bits / (8 * self.value_bytes) if self.model.attentions else 1.0
        return num_slots * states.slot_bytes * scale_share / self.layout.pp

    @property
    def state_bytes_per_sequence(self) -> float:
        """Bytes of a sequence's recurrent state on each device; a checkpoint takes as many."""
        return self.kv_block_bytes * count_state_blocks(self.cache_layout.groups)

    def count_checkpoints(self, num_users: int, context: int) -> int:
        """Checkpoints of states that fit beside so many sequences of this context."""
        rest = self.free_kv_bytes - num_users * self.kv_bytes_per_sequence(context)
        return max(0, int(rest // self.state_bytes_per_sequence))

    def _held_bytes(self, context: int, step_tokens: int) -> float:
        groups = self.cache_layout.groups
        return self.kv_block_bytes * count_held_blocks(groups, context, self.page_size, step_tokens)

    def kv_bytes_per_sequence(self, context: int) -> float:
        """KV cache bytes of one sequence on each device while it decodes.

        Layers with a sliding window keep the blocks of their window only, recurrent layers their
        state.
        """
        if self.keeps_all_positions:
            all_heads = context * kv_bytes_per_token(self.model, self.kv_bits)
            return all_heads * self.kv_head_share / self.layout.pp
        return self._held_bytes(context, 1)

    @property
    def keeps_all_positions(self) -> bool:
        """Whether all layers keep the keys and values of all positions, and nothing else."""
        groups = self.cache_layout.groups
        return all(group.window is None and not group.state_blocks for group in groups)

    def prefill_kv_bytes(self, context: int) -> float:
        """KV cache bytes that the sequence in prefill holds beyond the others.

        Layers with a sliding window also keep the positions of the step that is computed.
        """
        step_tokens, _ = default_batch_limits(self.hardware.is_cpu)
        return self._held_bytes(context, step_tokens) - self._held_bytes(context, 1)

    def max_batch_size(self, context: int) -> int:
        """Sequences of this context that fit on one replica, one of them in prefill."""
        free_bytes = self.free_kv_bytes - self.prefill_kv_bytes(context)
        return max(0, int(free_bytes // self.kv_bytes_per_sequence(context)))

    def max_context(self) -> int:
        """Tokens of the longest sequence that fits, at most the model's own context."""
        lengths = range(1, self.model.context + 1)
        return bisect(lengths, False, key=lambda length: not self.max_batch_size(length))

    def decode_seconds(self, batch: int, context: int) -> float:
        """Expected seconds per token of each sequence.

        A pipeline splits the batch into as many groups as there are stages.
        """
        group = ceil(batch / self.layout.pp)
        expected = self.roofline.expected_seconds(group, group * context, group)
        return expected + self.adapter_seconds(group, group)

    def adapter_seconds(self, tokens: int, sampled: int) -> float:
        """Seconds that LoRA adapters add to a step, if there are any."""
        if self.adapters is None:
            return 0.0
        return self.roofline.adapter_seconds(self.adapters.spread(tokens, sampled))

    def estimate_batch(self, batch: int, context: int, price: float | None = None) -> BatchEstimate:
        """Estimate decode steps; `price` is that of one device for one hour."""
        group = ceil(batch / self.layout.pp)
        floor = self.roofline.step_floor(group, group * context, group)
        adapter_seconds = self.adapter_seconds(group, group)
        expected = self.decode_seconds(batch, context)
        tokens_per_second = batch / expected * self.layout.replicas
        cache_bytes = group * kv_bytes(self.model, context, self.kv_bits) * self.kv_head_share
        cache_bytes += group * 2 * state_bytes(self.model)  # read and written
        cache_seconds = cache_bytes / self.hardware.bandwidth
        floor_parts = {
            "computing": floor.operations / self.roofline.rate,
            "cache": cache_seconds,
            "weights": floor.bytes / self.roofline.bandwidth - cache_seconds,
            "adapters": adapter_seconds,
        }
        cost = None
        if price is not None:
            cost = price * self.layout.devices / (tokens_per_second * 3600) * 1e6
        return BatchEstimate(
            batch=batch,
            context=context,
            floor_ms=floor.ms + adapter_seconds * 1e3,
            expected_ms=expected * 1e3,
            tokens_per_second=tokens_per_second,
            fits=batch <= self.max_batch_size(context),
            bound=max(floor_parts, key=lambda part: floor_parts[part]),
            cost=cost,
        )

    def max_users(self, context: int) -> int:
        """Sequences of all replicas that each get READING_SPEED tokens per second."""
        batches = range(1, self.max_batch_size(context) + 1)
        per_replica = bisect(
            batches, 1 / READING_SPEED, key=lambda batch: self.decode_seconds(batch, context)
        )
        return self.layout.replicas * per_replica

    def prefill_seconds(self, length: int) -> tuple[float, float]:
        """Floor and expected seconds of the chunked prefill of one prompt."""
        floor = 0.0
        expected = 0.0
        for start in range(0, length, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, length)
            pairs = (end * (end + 1) - start * (start + 1)) // 2
            sampled = int(end == length)
            floor += self.roofline.floor_seconds(end - start, end, sampled, pairs)
            expected += self.roofline.expected_seconds(end - start, end, sampled, pairs)
            adapter_seconds = self.adapter_seconds(end - start, sampled)
            floor += adapter_seconds
            expected += adapter_seconds
        return floor, expected


def device_layouts(model: ModelSpec, devices: int) -> Iterator[DeviceLayout]:
    """Yield the layouts that use exactly this number of devices.

    Tensor parallel ranks must divide the heads evenly and stay within a node. Each pipeline stage
    needs at least one layer.
    """
    for tp in _divisors(devices):
        if tp > DEVICES_PER_NODE or not supports_tensor_parallel(model, tp):
            continue
        for pp in _divisors(devices // tp):
            if pp <= len(model.layers):
                yield DeviceLayout(tp, pp, devices // tp // pp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class PlanOptions:
    """The user's options: hardware, precision, goal and layout."""

    hardware: HardwareSpec
    precision: WeightPrecision
    kv_bits: float = 16
    context: int = 1024
    goal: str = "latency"
    devices: int | None = None
    layout: DeviceLayout | None = None
    price: float | None = None
    adapters: AdapterLimits | None = None


class PlanEstimate:
    """Everything the command reports, computed once."""

    def __init__(self, source: ModelSource, options: PlanOptions):
        self.source = source
        self.options = options
        self.model = source.model
        self.context = min(options.context, self.model.context)
        self.min_devices = self.devices_for(options.hardware, options.precision)
        count = options.devices or self.min_devices or DEVICE_COUNTS[-1]
        if options.layout:
            count = options.layout.devices
        self.candidates = [self.place(layout) for layout in device_layouts(self.model, count)]
        self.fitting = [placed for placed in self.candidates if placed.max_batch_size(self.context)]
        if options.layout:
            self._check_layout(options.layout)
            self.chosen = self.place(options.layout)
        elif self.fitting:
            self.chosen = self.best(options.goal)
        else:
            self.chosen = self.candidates[-1]

    def _check_layout(self, layout: DeviceLayout) -> None:
        if layout in [placed.layout for placed in self.candidates]:
            return
        heads = max((attention.num_heads for attention in self.model.attentions), default=0)
        layers = len(self.model.layers)
        known = "; ".join(str(placed.layout) for placed in self.candidates)
        raise ConfigError(
            f"{layout}: {heads} heads and {layers} layers cannot be divided this way. "
            f"Possible with {layout.devices} devices: {known}"
        )

    def place(
        self,
        layout: DeviceLayout,
        hardware: HardwareSpec | None = None,
        precision: WeightPrecision | None = None,
    ) -> PlacedModel:
        hardware = hardware or self.options.hardware
        precision = loaded_precision(precision or self.options.precision, hardware)
        options = self.options
        return PlacedModel(
            self.model, hardware, precision, options.kv_bits, layout, options.adapters
        )

    def devices_for(self, hardware: HardwareSpec, precision: WeightPrecision) -> int | None:
        """The fewest devices on which one sequence of the context fits."""
        for count in DEVICE_COUNTS:
            for layout in device_layouts(self.model, count):
                placed = self.place(layout, hardware, precision)
                if placed.max_batch_size(self.context):
                    return count
        return None

    def best(self, goal: str) -> PlacedModel:
        """The layout for "latency" or "throughput", of those that fit."""

        def latency_order(placed: PlacedModel) -> tuple[float, int]:
            return placed.decode_seconds(1, self.context), placed.layout.pp

        def replica_size_order(placed: PlacedModel) -> tuple[int, float]:
            return placed.layout.tp * placed.layout.pp, -self.throughput(placed)

        if goal == "latency":
            return min(self.fitting, key=latency_order)
        threshold = ALIKE_THROUGHPUT * max(map(self.throughput, self.fitting))
        alike = [placed for placed in self.fitting if self.throughput(placed) >= threshold]
        # The smallest replicas are best: a crash stops only the devices of its own replica.
        return min(alike, key=replica_size_order)

    def throughput(self, placed: PlacedModel) -> float:
        """Tokens per second of all replicas at the largest batch.

        Requests are half prompt and half output. Pipeline stages prefill the next prompts while
        others decode.
        """
        half = max(self.context // 2, 1)
        batch = max(placed.max_batch_size(self.context), 1)
        prefill_seconds = placed.prefill_seconds(half)[1] / placed.layout.pp
        decode_seconds = half * placed.decode_seconds(batch, self.context) / batch
        return placed.layout.replicas * half / (prefill_seconds + decode_seconds)

    def batch_estimates(self, contexts: Sequence[int]) -> list[BatchEstimate]:
        estimates = []
        for context in sorted(set(contexts)):
            if context > self.model.context:
                continue
            batches = {*BATCH_SIZES, self.chosen.max_batch_size(context)} - {0}
            estimates += [
                self.chosen.estimate_batch(batch, context, self.options.price)
                for batch in sorted(batches)
            ]
        return estimates

    def sequence_kv_bytes(self) -> float:
        """KV cache bytes of one sequence of the plan's context, on all devices of a replica."""
        chosen = self.chosen
        if chosen.keeps_all_positions:
            return self.context * kv_bytes_per_token(self.model, self.options.kv_bits)
        num_ranks = chosen.layout.tp * chosen.layout.pp
        return chosen.kv_bytes_per_sequence(self.context) * num_ranks

    def adapter_memory(self) -> dict[str, int] | None:
        """Bytes of LoRA adapters on each device and in its host's memory; None without them."""
        adapters = self.chosen.adapters
        if adapters is None:
            return None
        return {
            "adapter_bytes": adapters.adapter_bytes,
            "slots_bytes": adapters.slots_bytes,
            "step_bytes": adapters.step_bytes,
            "host_bytes": adapters.host_bytes,
        }

    def prompt_memory(self) -> list[dict[str, int]]:
        """Bytes a prompt takes besides weights and KV cache.

        `scores_bytes`: with the full score matrix of a layer. `tiled_bytes`: with tiled attention.
        """
        heads = max((attention.num_heads for attention in self.model.attentions), default=0)
        return [
            {
                "tokens": tokens,
                "scores_bytes": round(scores_bytes(heads, tokens)),
                "tiled_bytes": round(activation_bytes(self.model, tokens, 1)),
            }
            for tokens in sorted({self.context, *PROMPT_LENGTHS})
        ]

    def compared_precisions(self) -> list[WeightPrecision]:
        """The precisions the report compares: the chosen one, and the usual ones."""
        names = CPU_PRECISIONS if self.options.hardware.is_cpu else GPU_PRECISIONS
        precisions = [PRECISIONS[name] for name in names]
        if self.options.precision in precisions:
            return precisions
        return [self.options.precision, *precisions]

    def as_json(self) -> dict[str, Any]:
        options = self.options
        chosen = self.chosen
        model = self.model
        precisions = self.compared_precisions()
        hardware = asdict(replace(options.hardware, rates=dict(options.hardware.rates)))
        prefill_floor, prefill_expected = chosen.prefill_seconds(self.context)
        heads = max((attention.num_heads for attention in model.attentions), default=0)
        contexts = (256, 1024, 8192, self.context)
        return {
            "model": self.source.name,
            "text_part_only": self.source.text_part_only,
            "parameters": count_parameters(model).total,
            "precision": options.precision.name,
            "weights_bytes": round(weights_bytes(model, options.precision)),
            "weights_bytes_by_precision": {
                precision.name: round(weights_bytes(model, precision)) for precision in precisions
            },
            "kv_bytes_per_token": round(kv_bytes_per_token(model, options.kv_bits)),
            "kv_bytes_per_sequence": round(self.sequence_kv_bytes()),
            "state_bytes_per_sequence": round(chosen.state_bytes_per_sequence),
            "checkpoints_beside_one_user": chosen.count_checkpoints(1, self.context)
            if chosen.cache_layout.states
            else 0,
            "cache_groups": [asdict(group) for group in chosen.cache_layout.groups],
            "activation_bytes": round(largest_step(model, options.hardware)[1]),
            "adapters": self.adapter_memory(),
            "scores_bytes": round(scores_bytes(heads, self.context)),
            "prompt_memory": self.prompt_memory(),
            "library_peak_bytes": {
                name: round(peak_bytes(model, precision))
                for name, precision in LIBRARY_PRECISIONS.items()
            },
            "machine": hardware,
            "devices": chosen.layout.devices,
            "layout": asdict(chosen.layout),
            "context": self.context,
            "longest_context": chosen.max_context(),
            "largest_batch": chosen.max_batch_size(self.context),
            "users": chosen.max_users(self.context),
            "prefill": {
                "tokens": self.context,
                "floor_ms": prefill_floor * 1e3,
                "expected_ms": prefill_expected * 1e3,
            },
            "communication_ms": chosen.roofline.communication_seconds(1, 1) * 1e3,
            "rows": [asdict(estimate) for estimate in self.batch_estimates(contexts)],
            "fits": {
                name: {
                    precision.name: self.devices_for(hardware_spec, precision)
                    for precision in precisions
                }
                for name, hardware_spec in HARDWARE_SPECS.items()
            },
            "options": [
                {
                    **asdict(placed.layout),
                    "latency_ms": placed.decode_seconds(1, self.context) * 1e3,
                    "tokens_per_second": self.throughput(placed),
                }
                for placed in self.fitting
            ],
        }

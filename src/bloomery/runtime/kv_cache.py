"""The memory of the KV cache: how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from bloomery.attention.base import index_dtype, kv_cache_shape, upload
from bloomery.cache_groups import (
    CacheLayout,
    LayerPlace,
    count_held_blocks,
    count_pages,
    count_useful_blocks,
    longest_sequence,
    plan_cache_groups,
    single_group,
)
from bloomery.config import EnginePlan
from bloomery.errors import ConfigError
from bloomery.kernels.quantized_kv_cache import (
    is_quantized_dtype,
    kv_cache_nbytes,
    view_kv_cache,
)
from bloomery.kernels.state_cache import LayerStates, RecurrentMetadata, count_part_blocks
from bloomery.parallel.groups import DeviceMesh
from bloomery.runtime.device import free_memory
from bloomery.spec import ModelSpec, state_parts

# Limits of the KV cache on a CPU, unless the user sets its size: a laptop has other work to do.
CPU_MEMORY_FRACTION = 0.25  # of free memory
CPU_MAX_BYTES = 4 << 30
CPU_MIN_POSITIONS = 8192  # the cache holds these or the longest sequence, whichever is more
MIN_PAGES = 4  # with fewer, lowering max_model_len is no help


@dataclass(frozen=True)
class KvCacheSize:
    """The size of the KV cache, and the sequence length it allows."""

    num_blocks: int
    max_model_len: int
    num_bytes: int
    note: str | None = None  # for the operator


def resolve_kv_cache_dtype(
    option: str, dtype: torch.dtype, prefer_float16: bool = False
) -> torch.dtype:
    """Return the type that keys and values are stored in, given the value of --kv-cache-dtype."""
    if option == "auto" and prefer_float16:
        return torch.float16
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(option, dtype)


@dataclass(frozen=True)
class StageCache:
    """The KV cache of a rank's layers, apart from its number of blocks.

    Layers of different block tables may share a layer slot, and so the memory of a block.
    """

    model: ModelSpec  # the part that this rank has
    layout: CacheLayout  # of the whole model: the same on all ranks
    places: tuple[LayerPlace | None, ...]  # of each layer's keys and values
    page_size: int
    dtype: torch.dtype
    state_places: tuple[LayerPlace | None, ...] = ()  # of each layer's states

    @property
    def layer_tables(self) -> tuple[int, ...]:
        """The block table of each layer; any table for layers without attention."""
        return tuple(0 if place is None else place.table for place in self.places)

    @property
    def kernel_block_size(self) -> int:
        """Positions of a block as the kernels count blocks, in every table."""
        return self.page_size // self.layout.blocks_per_page

    def layer_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's KV cache: [2, slots, kv heads, head dim]."""
        place = self.places[layer]
        attention = self.model.layers[layer].attention
        assert place is not None and attention is not None
        block_size = self.page_size // self.layout.tables[place.table].blocks_per_page
        return kv_cache_shape(attention, num_blocks, block_size)

    def slot_bytes(self, num_blocks: int) -> dict[int, int]:
        """Return the bytes of each layer slot. Layers that share a slot take equally many."""
        sizes: dict[int, int] = {}
        for place in self.state_places:
            if place is not None and self.layout.states is not None:
                sizes[place.slot] = num_blocks * self.layout.states.slot_bytes
        for layer, place in enumerate(self.places):
            if place is not None:
                shape = self.layer_shape(layer, num_blocks)
                sizes[place.slot] = kv_cache_nbytes(shape, self.dtype)
        return sizes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block on this rank."""
        return sum(self.slot_bytes(1).values())

    def allocate_memory(self, num_blocks: int, device: torch.device) -> CacheMemory:
        """Allocate the memory of all blocks.

        Zeros make the values that masked positions read finite.
        """
        slots = {
            slot: zero_bytes(num_bytes, device)
            for slot, num_bytes in self.slot_bytes(num_blocks).items()
        }
        return CacheMemory(self, slots, num_blocks)

    def allocate(self, num_blocks: int, device: torch.device) -> list[torch.Tensor | None]:
        """Allocate the KV cache of each layer; None for layers without attention."""
        return self.allocate_memory(num_blocks, device).keys_values()


@dataclass(frozen=True)
class CacheMemory:
    """The memory of a rank's blocks: one tensor of bytes per layer slot.

    A block is in two places of each slot: among the first halves of all blocks, which hold keys or
    parts of states, and among the second halves. Scales of quantized values are behind both.
    """

    cache: StageCache
    slots: Mapping[int, torch.Tensor]
    num_blocks: int

    def keys_values(self) -> list[torch.Tensor | None]:
        """The KV cache of each layer; those of layers that share a slot share memory."""
        caches: list[torch.Tensor | None] = []
        for layer, place in enumerate(self.cache.places):
            if place is None:
                caches.append(None)
                continue
            shape = self.cache.layer_shape(layer, self.num_blocks)
            caches.append(view_kv_cache(self.slots[place.slot], shape, self.cache.dtype))
        return caches

    def states(self) -> list[tuple[torch.Tensor, int] | None]:
        """The memory of each layer's states [pieces, values], and its table of pieces."""
        layout = self.cache.layout.states
        states: list[tuple[torch.Tensor, int] | None] = []
        for place in self.cache.state_places:
            if place is None or layout is None:
                states.append(None)
                continue
            # A slot whose keys and values take more bytes has larger pieces.
            values = self._halves(self.slots[place.slot])[0].view(torch.float32)
            num_pieces = 2 * self.num_blocks * layout.pieces_per_half
            states.append((values.view(num_pieces, -1), place.table))
        return states

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination); all sources are read before anything is written."""
        for memory in self.slots.values():
            sources, destinations = upload(copies, memory.device).long().unbind(1)
            for halves in self._halves(memory):
                halves[:, destinations] = halves[:, sources]

    def _halves(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The values of a slot, and its scales if it has some: [2, blocks, bytes of a half]."""
        num_bytes = len(memory)
        if is_quantized_dtype(self.cache.dtype):
            for layer, place in enumerate(self.cache.places):
                if place is not None and self.slots[place.slot] is memory:
                    num_bytes = prod(self.cache.layer_shape(layer, self.num_blocks))
        parts = [memory[:num_bytes], memory[num_bytes:]]
        halves = [part.view(2, self.num_blocks, -1) for part in parts if len(part)]
        # Words are copied faster than bytes.
        return [half.view(torch.int64) if half.shape[-1] % 8 == 0 else half for half in halves]


def plan_stage_cache(
    plan: EnginePlan, model: ModelSpec, local_model: ModelSpec, layers: range, dtype: torch.dtype
) -> StageCache:
    """Divide the KV cache of `model` into groups, for a rank that has these layers."""
    layout = plan_cache_groups(
        model,
        plan.max_model_len,
        plan.block_size,
        plan.tensor_parallel_size,
        is_quantized_dtype(dtype),
        dtype.itemsize,
    )
    return StageCache(
        local_model,
        layout,
        layout.place_layers(layers),
        plan.block_size,
        dtype,
        layout.place_states(layers),
    )


def single_table_cache(model: ModelSpec, block_size: int, dtype: torch.dtype) -> StageCache:
    """A KV cache in which all layers use one block table; it has no states."""
    layout = single_group(model)
    places = layout.place_layers(range(len(model.layers)))
    return StageCache(model, layout, places, block_size, dtype)


SCRATCH_ROWS = 64  # of a state, in a block of `scratch_states`


def scratch_states(
    model: ModelSpec, query_lens: Sequence[int], device: torch.device
) -> list[LayerStates | None]:
    """States of whole sequences for layers that run outside of a worker.

    Nothing reads what such a step leaves, so all layers share the same memory.
    """
    if not model.recurrents:
        return [None] * len(model.layers)
    parts = [part for spec in model.recurrents for part in state_parts(spec)]
    block_values = SCRATCH_ROWS * max(part.width for part in parts)
    blocks_per_state = max(
        sum(count_part_blocks(part, block_values) for part in state_parts(spec))
        for spec in model.recurrents
    )
    num_sequences = len(query_lens)
    dtype = index_dtype(device)
    num_blocks = num_sequences * blocks_per_state
    memory = torch.zeros(num_blocks, block_values, device=device)
    metadata = RecurrentMetadata(
        num_decodes=list(query_lens).count(1),
        query_start_loc=upload([0, *accumulate(query_lens)], device, dtype),
        seq_lens=upload(list(query_lens), device, dtype),
        state_pieces=torch.arange(num_blocks, dtype=dtype, device=device).view(num_sequences, -1),
        host_query_lens=tuple(query_lens),
        host_seq_lens=tuple(query_lens),
    )
    states = LayerStates(memory, metadata)
    return [states if layer.recurrent is not None else None for layer in model.layers]


def fit_kv_cache(
    plan: EnginePlan,
    cache: StageCache,
    device: torch.device,
    reserved_bytes: int = 0,
    mesh: DeviceMesh = DeviceMesh(),  # noqa: B008 (it is frozen)
) -> KvCacheSize:
    """Take as many blocks as memory allows and the batch can use.

    If the longest sequence does not fit, max_model_len is lowered, unless the user has set it.
    `reserved_bytes` is what the largest step takes besides weights and KV cache. All ranks have the
    same number of blocks, each for its own layers and heads.
    """
    groups = cache.layout.groups
    step_tokens = plan.max_num_batched_tokens
    block_bytes = cache.block_bytes
    budget = kv_cache_budget(plan, cache, device, reserved_bytes, mesh)
    blocks_per_seq = count_held_blocks(groups, plan.max_model_len, plan.block_size, step_tokens)
    useful = count_useful_blocks(
        groups, plan.max_model_len, plan.block_size, step_tokens, plan.max_num_seqs
    )
    # The layers of a pipeline stage may have nothing to cache.
    affordable = max(budget, 0) // block_bytes if block_bytes else useful
    num_blocks = mesh.min_over_ranks(min(affordable, useful))
    max_len = longest_sequence(groups, num_blocks, plan.block_size, step_tokens, plan.max_model_len)
    num_bytes = num_blocks * block_bytes
    if max_len >= plan.max_model_len:
        return KvCacheSize(num_blocks, plan.max_model_len, num_bytes)
    needed_gib = blocks_per_seq * block_bytes * mesh.world_size / 2**30
    available_gib = budget * mesh.world_size / 2**30
    page_blocks = sum(group.page_blocks for group in groups)
    if plan.max_model_len_is_fixed or num_blocks < MIN_PAGES * page_blocks:
        raise ConfigError(
            f"one sequence of {plan.max_model_len} tokens needs {needed_gib:.2f} GiB of KV cache, "
            f"and {available_gib:.2f} are available: lower max_model_len to {max_len} or "
            f"raise kv_cache_gib to {needed_gib:.2f}"
        )
    note = (
        f"the KV cache holds {max_len} of the model's {plan.max_model_len} positions; "
        f"raise kv_cache_gib to {needed_gib:.2f} for all of them"
    )
    return KvCacheSize(num_blocks, max_len, num_bytes, note)


def kv_cache_budget(
    plan: EnginePlan,
    cache: StageCache,
    device: torch.device,
    reserved_bytes: int,
    mesh: DeviceMesh,
) -> int:
    """Bytes that the KV cache of this rank may take; negative if memory is already short."""
    if plan.kv_cache_bytes is not None:
        return plan.kv_cache_bytes // mesh.world_size
    if device.type == "cpu":
        groups = cache.layout.groups
        # Several short sequences hold all their positions, whatever the windows are.
        short_blocks = count_pages(CPU_MIN_POSITIONS, plan.block_size) * sum(
            group.page_blocks for group in groups
        )
        long_blocks = count_held_blocks(
            groups, plan.max_model_len, plan.block_size, plan.max_num_batched_tokens
        )
        enough = max(short_blocks, long_blocks) * cache.block_bytes * mesh.world_size
        affordable = int(free_memory(device) * CPU_MEMORY_FRACTION)
        return min(affordable, CPU_MAX_BYTES, enough) // mesh.world_size
    total_bytes = torch.cuda.mem_get_info(device)[1]
    unusable_bytes = int(total_bytes * (1 - plan.gpu_memory_utilization))
    budget = free_memory(device) - unusable_bytes - reserved_bytes
    return budget // mesh.world_size if mesh.shares_device else budget


def zero_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory as uint8.

    On a CPU, pages are mapped when they are first touched. torch.zeros would write them all at
    once. numpy would use huge pages: the first position of each layer would take two megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    mapping = mmap.mmap(-1, max(num_bytes, 1), access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]

"""The memory of the KV cache: how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from bloomery.attention.base import kv_cache_shape
from bloomery.cache_groups import (
    CacheLayout,
    LayerPlace,
    count_held_blocks,
    count_pages,
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
from bloomery.parallel.groups import DeviceMesh
from bloomery.runtime.device import free_memory
from bloomery.spec import ModelSpec

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
    places: tuple[LayerPlace, ...]  # of each layer, in a model whose layers all have attention
    page_size: int
    dtype: torch.dtype

    @property
    def layer_tables(self) -> tuple[int, ...]:
        """The block table of each layer."""
        return tuple(place.table for place in self.places)

    @property
    def kernel_block_size(self) -> int:
        """Positions of a block as the kernels count blocks, in every table."""
        return self.page_size // self.layout.blocks_per_page

    def layer_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's KV cache: [2, slots, kv heads, head dim]."""
        table = self.layout.tables[self.places[layer].table]
        block_size = self.page_size // table.blocks_per_page
        attention = self.model.layers[layer].attention
        assert attention is not None
        return kv_cache_shape(attention, num_blocks, block_size)

    def slot_bytes(self, num_blocks: int) -> dict[int, int]:
        """Return the bytes of each layer slot. Layers that share a slot take equally many."""
        return {
            place.slot: kv_cache_nbytes(self.layer_shape(layer, num_blocks), self.dtype)
            for layer, place in enumerate(self.places)
        }

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block on this rank."""
        return sum(self.slot_bytes(1).values())

    def allocate(self, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
        """Allocate a tensor for each layer; those of layers that share a slot share memory.

        Zeros make the values that masked positions read finite.
        """
        memories = {
            slot: zero_bytes(num_bytes, device)
            for slot, num_bytes in self.slot_bytes(num_blocks).items()
        }
        return [
            view_kv_cache(memories[place.slot], self.layer_shape(layer, num_blocks), self.dtype)
            for layer, place in enumerate(self.places)
        ]


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
    )
    return StageCache(local_model, layout, place_all(layout, layers), plan.block_size, dtype)


def single_table_cache(model: ModelSpec, block_size: int, dtype: torch.dtype) -> StageCache:
    """A KV cache in which all layers use one block table."""
    layout = single_group(model)
    places = place_all(layout, range(len(model.layers)))
    return StageCache(model, layout, places, block_size, dtype)


def place_all(layout: CacheLayout, layers: range) -> tuple[LayerPlace, ...]:
    """The places of layers that all have attention."""
    return tuple(place for place in layout.place_layers(layers) if place is not None)


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
    affordable = max(budget, 0) // block_bytes
    num_blocks = mesh.min_over_ranks(min(affordable, blocks_per_seq * plan.max_num_seqs))
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

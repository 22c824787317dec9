"""The memory of the KV cache: how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from bloomery.attention.base import kv_cache_shape
from bloomery.config import EnginePlan
from bloomery.errors import ConfigError
from bloomery.kernels.quantized_kv_cache import kv_cache_nbytes, view_kv_cache
from bloomery.parallel.groups import DeviceMesh
from bloomery.runtime.device import free_memory
from bloomery.spec import ModelSpec

# Limits of the KV cache on a CPU, unless the user sets its size: a laptop has other work to do.
CPU_MEMORY_FRACTION = 0.25  # of free memory
CPU_MAX_BYTES = 4 << 30
CPU_MIN_POSITIONS = 8192  # the cache holds these or the longest sequence, whichever is more
MIN_BLOCKS = 4  # with fewer, lowering max_model_len is no help


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


def kv_block_bytes(model: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers."""
    shapes = [kv_cache_shape(layer.attention, 1, block_size) for layer in model.layers]
    return sum(kv_cache_nbytes(shape, dtype) for shape in shapes)


def fit_kv_cache(
    plan: EnginePlan,
    model: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    reserved_bytes: int = 0,
    mesh: DeviceMesh = DeviceMesh(),  # noqa: B008 (it is frozen)
) -> KvCacheSize:
    """Take as many blocks as memory allows and the batch can use.

    If the longest sequence does not fit, max_model_len is lowered, unless the user has set it.
    `reserved_bytes` is what the largest step takes besides weights and KV cache. `model` is the
    part that this rank has. All ranks have the same number of blocks, each for its own layers and
    heads.
    """
    block_bytes = kv_block_bytes(model, plan.block_size, dtype)
    budget = kv_cache_budget(plan, block_bytes, device, reserved_bytes, mesh)
    blocks_per_seq = -(-plan.max_model_len // plan.block_size)
    affordable = max(budget, 0) // block_bytes
    num_blocks = mesh.min_over_ranks(min(affordable, blocks_per_seq * plan.max_num_seqs))
    num_positions = num_blocks * plan.block_size
    num_bytes = num_blocks * block_bytes
    if num_positions >= plan.max_model_len:
        return KvCacheSize(num_blocks, plan.max_model_len, num_bytes)
    needed_gib = blocks_per_seq * block_bytes * mesh.world_size / 2**30
    available_gib = budget * mesh.world_size / 2**30
    if plan.max_model_len_is_fixed or num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"one sequence of {plan.max_model_len} tokens needs {needed_gib:.2f} GiB of KV cache, "
            f"and {available_gib:.2f} are available: lower max_model_len to {num_positions} or "
            f"raise kv_cache_gib to {needed_gib:.2f}"
        )
    note = (
        f"the KV cache holds {num_positions} of the model's {plan.max_model_len} positions; "
        f"raise kv_cache_gib to {needed_gib:.2f} for all of them"
    )
    return KvCacheSize(num_blocks, num_positions, num_bytes, note)


def kv_cache_budget(
    plan: EnginePlan, block_bytes: int, device: torch.device, reserved_bytes: int, mesh: DeviceMesh
) -> int:
    """Bytes that the KV cache of this rank may take; negative if memory is already short."""
    if plan.kv_cache_bytes is not None:
        return plan.kv_cache_bytes // mesh.world_size
    if device.type == "cpu":
        num_positions = max(plan.max_model_len, CPU_MIN_POSITIONS)
        enough = -(-num_positions // plan.block_size) * block_bytes * mesh.world_size
        affordable = int(free_memory(device) * CPU_MEMORY_FRACTION)
        return min(affordable, CPU_MAX_BYTES, enough) // mesh.world_size
    total_bytes = torch.cuda.mem_get_info(device)[1]
    unusable_bytes = int(total_bytes * (1 - plan.gpu_memory_utilization))
    budget = free_memory(device) - unusable_bytes - reserved_bytes
    return budget // mesh.world_size if mesh.shares_device else budget


def allocate_kv_cache(
    model: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Allocate one tensor per layer. Zeros make the values that masked positions read finite."""
    caches = []
    for layer in model.layers:
        shape = kv_cache_shape(layer.attention, num_blocks, block_size)
        memory = zero_bytes(kv_cache_nbytes(shape, dtype), device)
        caches.append(view_kv_cache(memory, shape, dtype))
    return caches


def zero_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory as uint8.

    On a CPU, pages are mapped when they are first touched. torch.zeros would write them all at
    once. numpy would use huge pages: the first position of each layer would take two megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    mapping = mmap.mmap(-1, max(num_bytes, 1), access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]

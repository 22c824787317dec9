"""Memory for keys and values: how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from bloomery.attention.base import cache_shape
from bloomery.config import Plan
from bloomery.errors import ConfigError
from bloomery.kernels.rounded_cache import cache_bytes, of_memory
from bloomery.parallel.mesh import Mesh
from bloomery.runtime.device import free_memory
from bloomery.spec import Model

# of free memory; bytes
CPU_SHARE = 0.25
CPU_MOST = 4 << 30
CPU_POSITIONS = 8192  # a laptop has other things to do: no more than these or the longest sequence, unless asked to


@dataclass(frozen=True)
class Size:
    blocks: int
    max_length: int
    bytes: int
    note: str | None = None


def kv_cache_dtype(wish: str, dtype: torch.dtype, rounds: bool = False) -> torch.dtype:
    """What keys and values are kept in. `rounds`: products round their inputs to 8 bits, so that 16 are plenty here."""
    if wish == "auto" and rounds:
        return torch.float16
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(wish, dtype)


def block_bytes(model: Model, block_size: int, dtype: torch.dtype) -> int:
    return sum(
        cache_bytes(cache_shape(layer.attention, 1, block_size), dtype) for layer in model.layers
    )


def fit(
    plan: Plan,
    model: Model,
    dtype: torch.dtype,
    device: torch.device,
    reserve: int = 0,
    mesh: Mesh = Mesh(),  # frozen
) -> Size:
    """As many blocks as memory allows and the batch can use; a length nobody asked for gives way to memory.

    `reserve` is what the largest step takes beside weights and cache. `model` is what this rank of the mesh has; all
    ranks have the same blocks, each its own layers and heads of them.
    """
    each = block_bytes(model, plan.block_size, dtype)
    if plan.kv_bytes is not None:
        budget = plan.kv_bytes // mesh.size
    elif device.type == "cpu":
        enough = -(-max(plan.max_length, CPU_POSITIONS) // plan.block_size) * each * mesh.size
        budget = min(int(free_memory(device) * CPU_SHARE), CPU_MOST, enough) // mesh.size
    else:
        total = torch.cuda.mem_get_info(device)[1]
        budget = free_memory(device) - int(total * (1 - plan.memory)) - reserve
        budget = budget // mesh.size if mesh.shared else budget
    longest = -(-plan.max_length // plan.block_size)
    blocks = mesh.least(min(max(budget, 0) // each, longest * plan.max_num_seqs))
    room = blocks * plan.block_size
    if room >= plan.max_length:
        return Size(blocks, plan.max_length, blocks * each)
    need = longest * each * mesh.size / 2**30
    budget = budget * mesh.size
    if plan.length_is_wish or room < plan.block_size * 4:
        raise ConfigError(
            f"one sequence of {plan.max_length} tokens needs {need:.2f} GiB for keys and values, and "
            f"{budget / 2**30:.2f} are there: lower max_model_len to {max(room, 0)} or raise kv_cache_gib to {need:.2f}"
        )
    note = f"the cache holds {room} of the model's {plan.max_length} positions; raise kv_cache_gib to {need:.2f} for all"
    return Size(blocks, room, blocks * each, note)


def allocate(
    model: Model, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One tensor a layer. Zeros, so that what masked positions read is finite."""
    shapes = [cache_shape(layer.attention, blocks, block_size) for layer in model.layers]
    return [of_memory(zeros(cache_bytes(shape, dtype), device), shape, dtype) for shape in shapes]


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """Bytes. On a CPU they come page by page, when first touched: neither written at once, as torch's are, nor in large
    pages, as numpy's, where the first position of every layer would take two megabytes."""
    if device.type == "cpu":
        return torch.frombuffer(
            mmap.mmap(-1, max(count, 1), access=mmap.ACCESS_COPY), dtype=torch.uint8
        )[:count]
    return torch.zeros(count, dtype=torch.uint8, device=device)

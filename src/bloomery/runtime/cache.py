"""Memory for keys and values: how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from bloomery.attention.base import cache_shape
from bloomery.config import Plan
from bloomery.errors import ConfigError
from bloomery.runtime.device import free_memory
from bloomery.spec import Model

CPU_SHARE, CPU_MOST = 0.25, 4 << 30


@dataclass(frozen=True)
class Size:
    blocks: int
    max_length: int
    bytes: int
    note: str | None = None


def block_bytes(model: Model, block_size: int, dtype: torch.dtype) -> int:
    return sum(prod(cache_shape(layer.attention, 1, block_size)) for layer in model.layers) * dtype.itemsize


def fit(plan: Plan, model: Model, dtype: torch.dtype, device: torch.device, reserve: int = 0) -> Size:
    """As many blocks as memory allows and the batch can use; a length nobody asked for gives way to memory.

    `reserve` is what the largest step takes beside weights and cache.
    """
    each = block_bytes(model, plan.block_size, dtype)
    if plan.kv_bytes is not None:
        budget = plan.kv_bytes
    elif device.type == "cpu":
        budget = min(int(free_memory(device) * CPU_SHARE), CPU_MOST)
    else:
        total = torch.cuda.mem_get_info(device)[1]
        budget = free_memory(device) - int(total * (1 - plan.memory)) - reserve
    longest = -(-plan.max_length // plan.block_size)
    blocks = min(max(budget, 0) // each, longest * plan.max_sequences)
    room = blocks * plan.block_size
    if room >= plan.max_length:
        return Size(blocks, plan.max_length, blocks * each)
    need = longest * each / 2**30
    if plan.length_is_wish or room < plan.block_size * 4:
        raise ConfigError(
            f"one sequence of {plan.max_length} tokens needs {need:.2f} GiB for keys and values, and "
            f"{budget / 2**30:.2f} are there: lower max_model_len to {max(room, 0)} or raise kv_cache_gib to {need:.2f}"
        )
    note = (
        f"the cache holds {room} of the model's {plan.max_length} positions; raise kv_cache_gib to {need:.2f} for all"
    )
    return Size(blocks, room, blocks * each, note)


def allocate(
    model: Model, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One tensor a layer. Zeros, so that what masked positions read is finite."""
    shapes = [cache_shape(layer.attention, blocks, block_size) for layer in model.layers]
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    # numpy's zeros come from the operating system page by page, when first touched; torch's are written at once.
    return [torch.from_numpy(np.zeros((*shape, dtype.itemsize), np.uint8)).view(dtype).squeeze(-1) for shape in shapes]

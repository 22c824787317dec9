"""Builds an engine around a started executor: KV cache block pool, policy, scheduler and loop.

Offline use, the engine process and the simulator all build their engine here. This module does not
know which executor it gets, and imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bloomery.config import EnginePlan
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop, MaskSource
from bloomery.engine.policy import create_policy
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.state_pool import StatePool
from bloomery.messages import EngineCapacity, ScheduledStep


def build_engine(
    plan: EnginePlan,
    executor: Executor,
    capacity: EngineCapacity,
    clock: Callable[[], float] = time.monotonic,
    on_submit: Callable[[ScheduledStep], None] | None = None,
    load_vocabulary: Callable[[], Future[Any]] | None = None,
    on_adapter_load: Callable[[list[str]], None] | None = None,
) -> EngineLoop:
    """Build the engine loop for `executor`, which has loaded `plan` and reported `capacity`.

    `clock` returns seconds. `on_submit` is called with every step before the executor gets it.
    `load_vocabulary` returns what grammars need. It is called when they are prepared or the first
    request with a grammar arrives; without it the engine takes no such request.
    `on_adapter_load` is called with the ids of requests right before their LoRA adapter is read.
    """

    def create_mask_builder() -> MaskSource:
        # llguidance is loaded by the first request with a grammar, if not by the vocabulary.
        from bloomery.structured.matcher import MaskBuilder

        assert load_vocabulary is not None
        return MaskBuilder(load_vocabulary(), capacity.vocab)

    scheduler = Scheduler(
        create_block_pool(plan, capacity),
        capacity.max_num_batched_tokens,
        capacity.max_num_seqs,
        create_policy(plan, capacity),
        capacity.stages,
        plan.max_loras if plan.enable_lora else 0,
    )
    loop = EngineLoop(
        scheduler,
        executor,
        plan.steps_in_flight,
        clock,
        on_submit,
        None if load_vocabulary is None else create_mask_builder,
        plan.max_cpu_loras if plan.enable_lora else 0,
    )
    if loop.adapter_store is not None:
        loop.adapter_store.on_load = on_adapter_load
    return loop


def create_block_pool(plan: EnginePlan, capacity: EngineCapacity) -> BlockPool | StatePool:
    """Create the block pool that the model's cache groups need."""
    has_states = any(group.state_blocks for group in capacity.cache_groups)
    kind = StatePool if has_states else BlockPool
    return kind(capacity.blocks, capacity.block_size, plan.prefix_cache, capacity.cache_groups)

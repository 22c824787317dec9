"""Builds engine loops around executors of one or several ranks, for the tests of this folder."""

from __future__ import annotations

from bloomery.config import EnginePlan
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineCapacity


def start_engine_loop(
    executor: Executor, plan: EnginePlan, num_pages: int | None = None
) -> tuple[EngineLoop, EngineCapacity]:
    """Load `plan` and build a loop with the fcfs policy; `num_pages` limits the KV cache."""
    capacity = executor.start(plan)
    groups = capacity.cache_groups
    num_blocks = capacity.blocks
    if num_pages is not None:
        num_blocks = min(num_blocks, num_pages * sum(group.page_blocks for group in groups))
    block_pool = BlockPool(num_blocks, capacity.block_size, plan.prefix_cache, groups)
    scheduler = Scheduler(
        block_pool,
        capacity.max_num_batched_tokens,
        capacity.max_num_seqs,
        stages=capacity.stages,
    )
    return EngineLoop(scheduler, executor, plan.steps_in_flight), capacity

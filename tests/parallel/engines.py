"""Builds engine loops around executors of one or several ranks, for the tests of this folder."""

from __future__ import annotations

from bloomery.config import EnginePlan
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineCapacity


def start_engine_loop(
    executor: Executor, plan: EnginePlan, num_blocks: int | None = None
) -> tuple[EngineLoop, EngineCapacity]:
    """Load `plan` and build a loop with the fcfs policy; `num_blocks` limits the KV cache."""
    capacity = executor.start(plan)
    block_pool = BlockPool(num_blocks or capacity.blocks, capacity.block_size, plan.prefix_cache)
    scheduler = Scheduler(
        block_pool,
        capacity.max_num_batched_tokens,
        capacity.max_num_seqs,
        stages=capacity.stages,
    )
    return EngineLoop(scheduler, executor, plan.steps_in_flight), capacity

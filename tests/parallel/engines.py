"""Builds engine loops around executors of one or several ranks, for the tests of this folder."""

from __future__ import annotations

from bloomery.config import EnginePlan
from bloomery.engine.build import create_block_pool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineCapacity
from tests.parity.serve import limit_blocks


def start_engine_loop(
    executor: Executor, plan: EnginePlan, num_pages: int | None = None
) -> tuple[EngineLoop, EngineCapacity]:
    """Load `plan` and build a loop with the fcfs policy; `num_pages` limits the KV cache."""
    capacity = limit_blocks(executor.start(plan), num_pages)
    scheduler = Scheduler(
        create_block_pool(plan, capacity),
        capacity.max_num_batched_tokens,
        capacity.max_num_seqs,
        stages=capacity.stages,
    )
    return EngineLoop(scheduler, executor, plan.steps_in_flight), capacity

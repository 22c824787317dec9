"""Builds an engine around a started executor: KV cache block pool, policy, scheduler and loop.

Offline use, the engine process and the simulator all build their engine here. This module does not
know which executor it gets, and imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bloomery.config import EnginePlan
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.policy import create_policy
from bloomery.engine.scheduler import Scheduler
from bloomery.messages import EngineCapacity, ScheduledStep


def build_engine(
    plan: EnginePlan,
    executor: Executor,
    capacity: EngineCapacity,
    clock: Callable[[], float] = time.monotonic,
    on_submit: Callable[[ScheduledStep], None] | None = None,
) -> EngineLoop:
    """Build the engine loop for `executor`, which has loaded `plan` and reported `capacity`.

    `clock` returns seconds. `on_submit` is called with every step before the executor gets it.
    """
    scheduler = Scheduler(
        BlockPool(capacity.blocks, capacity.block_size, plan.prefix_cache),
        capacity.max_num_batched_tokens,
        capacity.max_num_seqs,
        create_policy(plan, capacity),
        capacity.stages,
    )
    return EngineLoop(scheduler, executor, plan.steps_in_flight, clock, on_submit)

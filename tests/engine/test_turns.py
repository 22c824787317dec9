"""Tasks of a TurnQueue go on in order, a few in each iteration of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from bloomery.engine.turns import TurnQueue


def run_tasks(tasks_of: list[Coroutine[Any, Any, None]], cancelled: int | None = None) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(task) for task in tasks_of]
        await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())


def test_tasks_go_on_in_order_and_let_others_run_between_batches() -> None:
    queue = TurnQueue(2)
    order: list[int | str] = []

    async def take_turn(number: int) -> None:
        await queue.wait()
        order.append(number)

    async def do_other_work() -> None:
        while 4 not in order:
            order.append("other")
            await asyncio.sleep(0)

    run_tasks([*map(take_turn, range(5)), do_other_work()])
    numbers = [entry for entry in order if entry != "other"]
    assert numbers == [0, 1, 2, 3, 4]
    for first, last in ((1, 2), (3, 4)):  # neighbours in different batches
        assert "other" in order[order.index(first) : order.index(last)]


def test_a_cancelled_task_does_not_hold_up_those_behind_it() -> None:
    queue = TurnQueue(1)
    done: list[int] = []

    async def take_turn(number: int) -> None:
        await queue.wait()
        done.append(number)

    run_tasks([take_turn(number) for number in range(4)], cancelled=1)
    assert done == [0, 2, 3]

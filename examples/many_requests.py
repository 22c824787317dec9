"""Many requests at once: the server computes them together, so they cost little more than one."""

from __future__ import annotations

import asyncio
import os
import time

from openai import AsyncOpenAI

URL = os.environ.get("URL", "http://127.0.0.1:8000")
NUM_REQUESTS = 16


async def answer(client: AsyncOpenAI, number: int) -> float:
    """Ask one question and return the seconds it took."""
    start = time.perf_counter()
    await client.completions.create(
        model="default",
        prompt=f"{number} is an interesting number because",
        max_tokens=24,
        extra_body={"ignore_eos": True},
    )
    return time.perf_counter() - start


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))
    await answer(client, 0)
    alone = await answer(client, 1)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(client, number)) for number in range(NUM_REQUESTS)]
    total = time.perf_counter() - start
    slowest = max(task.result() for task in tasks)
    print(f"one request: {alone:.2f} s, {24 / alone:.0f} tokens/s")
    print(f"{NUM_REQUESTS} at once: {slowest:.2f} s, {24 * NUM_REQUESTS / total:.0f} tokens/s")


asyncio.run(main())

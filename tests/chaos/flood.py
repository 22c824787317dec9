"""Requests that cost far more to answer than to send, without end: `python -m tests.chaos.flood PORT SECONDS LINES`.

So many connections, each of which sends the next as soon as it has an answer; in a process of its own, because whoever
measures what others notice of it must not be delayed by making it. The last line printed is how often each status
came; 0: the line was cut.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from itertools import count
from typing import Any

from tests.chaos.http import Line

MEGABYTE = "Iron, ash and slag! " * 50_000


def bodies() -> list[tuple[str, bytes]]:
    hi = [{"role": "user", "content": "hi"}]
    made: list[tuple[str, Any]] = [
        ("/tokenize", {"inputs": MEGABYTE}),
        ("/v1/completions", {"prompt": MEGABYTE}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MEGABYTE}]}),
        ("/v1/chat/completions", {"messages": hi * 4000, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "guided_regex": "(a+)+b", "stop": ["x" * 1000] * 1000}),
        (
            "/v1/chat/completions",
            {"messages": hi, "response_format": {"type": "json_schema", "json_schema": nested()}},
        ),
        ("/v1/completions", {"prompt": ["a"] * 4000, "n": 100}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(4000)}}),
        ("/v1/embeddings", {"input": ["Iron and slag"] * 3000}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in made] + [
        ("/generate", b"[" * 1_000_000)
    ]


def nested(depth: int = 200) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": "(.{1000}){1000}"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


async def flood(port: int, seconds: float, lines: int) -> Counter[int]:
    seen = Counter[int]()
    kinds = bodies()
    turns = count()
    end = time.monotonic() + seconds

    async def one() -> None:
        line = Line(port)
        while time.monotonic() < end:
            path, data = kinds[next(turns) % len(kinds)]
            try:
                seen[(await line.ask(path, data)).status] += 1
            except (
                ConnectionError,
                asyncio.IncompleteReadError,
            ):  # refused, and the line cut, before all was sent
                seen[0] += 1
                line.close()
        line.close()

    await asyncio.gather(*(one() for _ in range(lines)))
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))))

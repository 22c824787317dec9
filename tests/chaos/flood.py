"""Requests without a pause that cost far more to answer than to send.

    python -m tests.chaos.flood PORT SECONDS CONNECTIONS

Each connection sends its next request as soon as it has the response to the last one. The flood
runs in a process of its own, so it does not delay the clock of the process that measures its
effect. The last line of output is a JSON object: how often each status came. Status 0 means that
the connection was cut.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from itertools import cycle
from typing import Any

from tests.chaos.http import KeepAliveConnection

MEGABYTE_OF_TEXT = "Iron, ash and slag! " * 50_000
GREETING = {"role": "user", "content": "hi"}


def expensive_requests() -> list[tuple[str, bytes]]:
    """Return pairs of a path and a body."""
    schema_format = {"type": "json_schema", "json_schema": nested_schema()}
    bodies: list[tuple[str, Any]] = [
        ("/tokenize", {"inputs": MEGABYTE_OF_TEXT}),
        ("/v1/completions", {"prompt": MEGABYTE_OF_TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MEGABYTE_OF_TEXT}]}),
        ("/v1/chat/completions", {"messages": [GREETING] * 4000, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "guided_regex": "(a+)+b", "stop": ["x" * 1000] * 1000}),
        ("/v1/chat/completions", {"messages": [GREETING], "response_format": schema_format}),
        ("/v1/completions", {"prompt": ["a"] * 4000, "n": 100}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(4000)}}),
        ("/v1/embeddings", {"input": ["Iron and slag"] * 3000}),
    ]
    requests = [(path, json.dumps(body).encode()) for path, body in bodies]
    requests.append(("/generate", b"[" * 1_000_000))
    return requests


def nested_schema(depth: int = 200) -> dict[str, Any]:
    """Return a JSON schema of nested objects around an expensive pattern."""
    schema: dict[str, Any] = {"type": "string", "pattern": "(.{1000}){1000}"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


async def flood(port: int, seconds: float, num_connections: int) -> Counter[int]:
    """Send expensive requests over all connections; return how often each status came."""
    statuses = Counter[int]()
    requests = cycle(expensive_requests())
    end = time.monotonic() + seconds

    async def run_connection() -> None:
        connection = KeepAliveConnection(port)
        while time.monotonic() < end:
            path, data = next(requests)
            try:
                response = await connection.post(path, data)
                statuses[response.status] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                # The server refused the request and closed the connection before all was sent.
                statuses[0] += 1
                connection.close()
        connection.close()

    await asyncio.gather(*(run_connection() for _ in range(num_connections)))
    return statuses


def main(port: int, seconds: float, num_connections: int) -> None:
    statuses = asyncio.run(flood(port, seconds, num_connections))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))

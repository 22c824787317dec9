"""The rule that sends a request to one of several engines, by prefix affinity and load.

An engine that has computed the beginning of a prompt may still hold it in its prefix cache, and
the LoRA adapter of that prompt in a device slot. A request therefore goes to the engine that knows
most of its prompt, unless other engines have much less to do. The rule knows token ids and loads,
but no engines. The server's replicas and the simulator use the same rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Protocol

from bloomery.messages import EngineRequest

PREFIX_CHUNK_TOKENS = 32  # tokens of a prompt that are hashed as one
MAX_REMEMBERED_CHUNKS = 1 << 16  # prefix chunks that one engine is assumed to hold
# The engine that knows a prompt may have this many open requests more than twice the least load.
AFFINITY_SLACK_REQUESTS = 4


class RequestRouter(Protocol):
    """Chooses the engine for each request."""

    def choose(self, request: EngineRequest, loads: Mapping[int, int]) -> int:
        """Return the engine for `request`. `loads` maps available engines to open requests."""
        ...

    def forget(self, engine: int) -> None:
        """Note that the prefix cache of `engine` is empty again."""
        ...


class PrefixAffinityRouter:
    """Chooses the engine that knows the longest prefix of a prompt, else the least loaded one."""

    def __init__(self, num_engines: int):
        # For each engine the hashes of known prefix chunks, least recently used first.
        self.known_chunks: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_engines)
        ]

    def choose(self, request: EngineRequest, loads: Mapping[int, int]) -> int:
        chunks = list(hash_prefix_chunks(request))
        known = {engine: self._count_known(engine, chunks) for engine in loads}
        least_loaded = min(loads, key=lambda engine: (loads[engine], -known[engine]))
        best_match = max(loads, key=lambda engine: (known[engine], -loads[engine]))
        load_limit = 2 * loads[least_loaded] + AFFINITY_SLACK_REQUESTS
        if known[best_match] and loads[best_match] <= load_limit:
            engine = best_match
        else:
            engine = least_loaded
        self._remember(engine, chunks)
        return engine

    def forget(self, engine: int) -> None:
        self.known_chunks[engine].clear()

    def _count_known(self, engine: int, chunks: list[int]) -> int:
        """Count the leading chunks that the engine knows."""
        known_chunks = self.known_chunks[engine]
        for count, chunk in enumerate(chunks):
            if chunk not in known_chunks:
                return count
        return len(chunks)

    def _remember(self, engine: int, chunks: list[int]) -> None:
        known_chunks = self.known_chunks[engine]
        for chunk in reversed(chunks):  # so that the beginning of a prompt is forgotten last
            known_chunks[chunk] = None
            known_chunks.move_to_end(chunk)
        while len(known_chunks) > MAX_REMEMBERED_CHUNKS:
            known_chunks.popitem(last=False)


def hash_prefix_chunks(request: EngineRequest) -> Iterator[int]:
    """Yield a hash for every full chunk of the prompt. It covers all chunks up to that one."""
    prefix_hash = hash((request.cache_salt, request.lora))
    last_start = len(request.prompt) - PREFIX_CHUNK_TOKENS
    for start in range(0, last_start + 1, PREFIX_CHUNK_TOKENS):
        chunk = request.prompt[start : start + PREFIX_CHUNK_TOKENS]
        prefix_hash = hash((prefix_hash, chunk))
        yield prefix_hash

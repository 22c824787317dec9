"""The KV cache as the engine sees it: numbered blocks, who holds them, and which prefix each full one contains.

Published blocks form a trie. A key is (serial of the parent block, the block's own tokens as bytes): Python's
dictionary compares both on a hit, so two prefixes can never be confused, and bytes are hashed with a per-process
secret, so nobody outside can aim at collisions. Each salt has a root of its own.

A block is published as soon as the step that fills it is scheduled: steps run in order, and within a step a layer
writes all keys and values before any sequence attends, so whoever finds the block later finds it filled.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from bloomery.engine.sequence import Sequence

Key = tuple[int, bytes]


class Blocks:
    def __init__(self, count: int, size: int, prefix_cache: bool = True):
        self.size = size
        self.count = count
        self.prefix_cache = prefix_cache
        self.refs = [0] * count
        self.free: OrderedDict[int, None] = OrderedDict(
            (i, None) for i in range(count)
        )  # least recently used first
        self.published: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.serial_of: dict[int, int] = {}
        self.roots: dict[str, int] = {}
        self.serials = 0

    @property
    def available(self) -> int:
        return len(self.free)

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix, never of the whole sequence: its last token must be computed."""
        found: list[int] = []
        request = sequence.request
        every = (
            request.sampling.prompt_logprobs is not None or request.pooling == "mean"
        )  # position must be computed
        if not self.prefix_cache or every:
            return found
        parent = self._root(sequence.request.salt)
        for tokens in self._full(sequence, 0, len(sequence.tokens) - 1):
            block = self.published.get((parent, tokens))
            if block is None:
                break
            found.append(block)
            parent = self.serial_of[block]
        return found

    def extend(self, sequence: Sequence, length: int, shared: list[int]) -> list[int] | None:
        """Grow `sequence` to hold `length` positions, on top of `shared`; the new blocks, or None and no change."""
        need = -(-length // self.size) - len(sequence.blocks) - len(shared)
        if need > len(self.free) - sum(self.refs[block] == 0 for block in shared):
            return None
        for block in shared:
            self.free.pop(block, None)
            self.refs[block] += 1
        sequence.chain += [self.serial_of[block] for block in shared]
        grown = [*shared, *(self._take() for _ in range(need))]
        sequence.blocks += grown
        return grown

    def publish(self, sequence: Sequence) -> None:
        """Make findable what is full, computed (or about to be) and made of reported tokens."""
        if not self.prefix_cache:
            return
        done = len(sequence.chain)
        upto = min(sequence.computed, len(sequence.tokens))
        if upto // self.size <= done:
            return
        parent = sequence.chain[-1] if done else self._root(sequence.request.salt)
        for index, tokens in enumerate(self._full(sequence, done, upto), done):
            key = (parent, tokens)
            block = sequence.blocks[index]
            known = self.published.get(key)
            if known is None:
                self.published[key], self.key_of[block], self.serial_of[block] = (
                    block,
                    key,
                    self._serial(),
                )
                known = block
            parent = self.serial_of[known]  # a twin's serial if the same prefix was computed twice
            sequence.chain.append(parent)

    def release(self, sequence: Sequence) -> None:
        """Tails become evictable before heads, so a published block never outlives its parent."""
        for block in reversed(sequence.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
        sequence.blocks.clear()
        sequence.chain.clear()

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.published[key], self.serial_of[block]
        self.refs[block] = 1
        return block

    def _full(self, sequence: Sequence, first: int, upto: int) -> Iterator[bytes]:
        """Contents of the full blocks from block `first` to position `upto`."""
        for end in range((first + 1) * self.size, upto + 1, self.size):
            yield array("I", sequence.tokens[end - self.size : end]).tobytes()

    def _root(self, salt: str) -> int:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = self._serial()
        return root

    def _serial(self) -> int:
        self.serials += 1
        return self.serials

"""The KV cache as the scheduler sees it: a pool of numbered blocks with a prefix cache on top.

The prefix cache is a tree of full blocks. The key of a block is (serial of its parent block, its
own tokens as bytes). A Python dictionary compares the whole key on a hit, so two different prefixes
are never confused. Python hashes bytes with a secret of the process, so a client cannot construct
collisions. Each cache salt has a root of its own.

A block is published when the step that fills it is scheduled, before that step has run. This is
safe: steps run in order, and within a step each layer writes all keys and values before any
sequence attends to them. A later prefix hit therefore always reads a filled block.

This module knows block numbers only. It must not know tensors, devices or scheduling policies.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from bloomery.engine.sequence import Sequence

BlockKey = tuple[int, bytes]  # serial of the parent block, token ids of the block


class BlockPool:
    """Allocates blocks for sequences, counts references, and finds cached prefixes."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.ref_counts = [0] * num_blocks
        # Blocks without references, least recently used first. They may still be in the prefix
        # cache; taking one evicts it.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.published: dict[BlockKey, int] = {}  # the prefix cache: key -> block
        self.key_of: dict[int, BlockKey] = {}  # block -> key, for published blocks
        # Serial numbers of published blocks. A block gets a new one each time it is published.
        self.serial_of: dict[int, int] = {}
        self.salt_roots: dict[str, int] = {}  # cache salt -> serial of its root
        self.last_serial = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks no sequence holds. Blocks that only the prefix cache holds are free."""
        return len(self.free_blocks)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix of `sequence`.

        The prefix never covers the last token, because that token must be computed to sample the
        next one. Requests that need the output of every prompt position get no prefix hit.
        """
        prefix_blocks: list[int] = []
        request = sequence.request
        needs_every_position = (
            request.sampling.prompt_logprobs is not None or request.pooling == "mean"
        )
        if not self.prefix_cache or needs_every_position:
            return prefix_blocks
        parent = self._root_serial(request.cache_salt)
        for block_tokens in self._full_blocks(sequence, 0, len(sequence.tokens) - 1):
            block = self.published.get((parent, block_tokens))
            if block is None:
                break
            prefix_blocks.append(block)
            parent = self.serial_of[block]
        return prefix_blocks

    def count_unreferenced(self, blocks: list[int]) -> int:
        """Count the blocks that are free until a sequence shares them."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def extend(self, sequence: Sequence, length: int, prefix_blocks: list[int]) -> list[int] | None:
        """Grow the block table to hold `length` positions, beginning with `prefix_blocks`.

        Returns the blocks that were added, prefix blocks included. Returns None and changes
        nothing if the pool has too few free blocks.
        """
        num_needed = -(-length // self.block_size)
        num_new = num_needed - len(sequence.block_table) - len(prefix_blocks)
        if num_new > len(self.free_blocks) - self.count_unreferenced(prefix_blocks):
            return None
        for block in prefix_blocks:
            self.free_blocks.pop(block, None)
            self.ref_counts[block] += 1
        sequence.block_serials += [self.serial_of[block] for block in prefix_blocks]
        new_blocks = [self._take_free_block() for _ in range(num_new)]
        added = [*prefix_blocks, *new_blocks]
        sequence.block_table += added
        return added

    def publish(self, sequence: Sequence) -> None:
        """Put the full blocks of `sequence` into the prefix cache.

        A block qualifies when all its positions are computed or scheduled and all its tokens are
        known to the scheduler.
        """
        if not self.prefix_cache:
            return
        num_published = len(sequence.block_serials)
        end = min(sequence.num_computed, len(sequence.tokens))
        if end // self.block_size <= num_published:
            return
        if num_published:
            parent = sequence.block_serials[-1]
        else:
            parent = self._root_serial(sequence.request.cache_salt)
        full_blocks = self._full_blocks(sequence, num_published, end)
        for index, block_tokens in enumerate(full_blocks, num_published):
            key = (parent, block_tokens)
            block = self.published.get(key)
            if block is None:
                block = sequence.block_table[index]
                self.published[key] = block
                self.key_of[block] = key
                self.serial_of[block] = self._new_serial()
            # If another sequence has published the same prefix, this sequence uses its serial.
            parent = self.serial_of[block]
            sequence.block_serials.append(parent)

    def release(self, sequence: Sequence) -> None:
        """Return all blocks of `sequence` to the pool. Published ones stay in the prefix cache.

        The last block is freed first and so evicted first: a published block never outlives its
        parent.
        """
        for block in reversed(sequence.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None
        sequence.block_table.clear()
        sequence.block_serials.clear()

    def _take_free_block(self) -> int:
        """Take the least recently used free block and evict it from the prefix cache."""
        block, _ = self.free_blocks.popitem(last=False)
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.published[key]
            del self.serial_of[block]
        self.ref_counts[block] = 1
        return block

    def _full_blocks(self, sequence: Sequence, first: int, end: int) -> Iterator[bytes]:
        """Yield the tokens of each full block, from block `first` up to position `end`."""
        size = self.block_size
        for block_end in range((first + 1) * size, end + 1, size):
            yield array("I", sequence.tokens[block_end - size : block_end]).tobytes()

    def _root_serial(self, cache_salt: str) -> int:
        root = self.salt_roots.get(cache_salt)
        if root is None:
            root = self._new_serial()
            self.salt_roots[cache_salt] = root
        return root

    def _new_serial(self) -> int:
        self.last_serial += 1
        return self.last_serial

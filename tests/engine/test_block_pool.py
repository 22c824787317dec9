"""The block pool: allocation, reference counts, prefix hits and the order of eviction."""

from __future__ import annotations

from bloomery.engine.block_pool import BlockPool
from bloomery.engine.sequence import Sequence
from bloomery.messages import EngineRequest, ResolvedSampling
from tests.engine.random_engine import check_block_pool

BLOCK_SIZE = 4


def make_sequence(id: int, prompt: tuple[int, ...], cache_salt: str = "") -> Sequence:
    request = EngineRequest(str(id), prompt, ResolvedSampling(), 4, cache_salt=cache_salt)
    return Sequence.from_request(id, request)


def compute(pool: BlockPool, sequence: Sequence) -> list[int]:
    """Allocate all tokens of a sequence and publish them. Returns the prefix hit."""
    prefix_blocks = pool.find_prefix(sequence)
    assert pool.extend(sequence, len(sequence.tokens), prefix_blocks) is not None
    sequence.num_computed = len(sequence.tokens)
    pool.publish(sequence)
    check_block_pool(pool)
    return prefix_blocks


def test_extend_changes_nothing_if_blocks_are_missing() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    sequence = make_sequence(0, tuple(range(20)))
    assert pool.extend(sequence, 13, []) is None
    assert pool.num_free_blocks == 3 and not sequence.block_table
    assert pool.extend(sequence, 12, []) == [0, 1, 2]
    assert pool.num_free_blocks == 0


def test_a_prefix_hit_shares_full_blocks_but_never_the_last_token() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    first = make_sequence(0, tuple(range(8)))
    assert compute(pool, first) == []
    equal = make_sequence(1, tuple(range(8)))
    assert compute(pool, equal) == first.block_table[:1]
    longer = make_sequence(2, tuple(range(9)))
    assert compute(pool, longer) == first.block_table
    assert pool.ref_counts[first.block_table[0]] == 3


def test_blocks_with_equal_tokens_behind_different_prefixes_are_not_shared() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    compute(pool, make_sequence(0, (1, 1, 1, 1, 5, 5, 5, 5, 0)))
    assert compute(pool, make_sequence(1, (2, 2, 2, 2, 5, 5, 5, 5, 0))) == []


def test_different_salts_are_not_shared() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    compute(pool, make_sequence(0, tuple(range(9)), "a"))
    assert compute(pool, make_sequence(1, tuple(range(9)), "b")) == []


def test_a_pool_without_prefix_cache_publishes_nothing() -> None:
    pool = BlockPool(10, BLOCK_SIZE, prefix_cache=False)
    compute(pool, make_sequence(0, tuple(range(9))))
    assert compute(pool, make_sequence(1, tuple(range(9)))) == []
    assert not pool.published


def test_released_blocks_stay_cached_until_the_pool_needs_them() -> None:
    """The end of a prefix is evicted before its beginning."""
    pool = BlockPool(4, BLOCK_SIZE)
    first = make_sequence(0, tuple(range(16)))
    compute(pool, first)
    first_blocks = list(first.block_table)
    pool.release(first)
    check_block_pool(pool)
    assert pool.num_free_blocks == 4
    other = make_sequence(1, (9, 9, 9, 9, 9))
    compute(pool, other)
    assert set(other.block_table) == set(first_blocks[2:])
    again = make_sequence(2, tuple(range(16)))
    assert pool.find_prefix(again) == first_blocks[:2]
    assert pool.count_unreferenced(first_blocks[:2]) == 2

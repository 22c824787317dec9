"""The block pool: allocation, references, prefix hits, windows and the order of eviction."""

from __future__ import annotations

from bloomery.engine.block_pool import BlockPool, PrefixHit
from bloomery.engine.sequence import Sequence
from bloomery.messages import NULL_BLOCK, CacheGroup, EngineRequest, ResolvedSampling
from tests.engine.random_engine import check_block_pool

PAGE_SIZE = 4
FULL = CacheGroup()
WINDOW = CacheGroup(6)  # the next position reads 5 earlier ones: parts of two or three pages


def make_sequence(id: int, prompt: tuple[int, ...], cache_salt: str = "") -> Sequence:
    request = EngineRequest(str(id), prompt, ResolvedSampling(), 4, cache_salt=cache_salt)
    return Sequence.from_request(id, request)


def compute(pool: BlockPool, sequence: Sequence) -> PrefixHit:
    """Allocate all tokens of a sequence, publish and settle them. Returns the prefix hit."""
    hit = pool.find_prefix(sequence)
    assert pool.extend(sequence, len(sequence.tokens), hit) is not None
    sequence.num_computed = sequence.initial_length = len(sequence.tokens)
    pool.publish(sequence)
    pool.free_passed_pages(sequence, sequence.num_computed)
    check_block_pool(pool)
    return hit


def table_of(sequence: Sequence, group: int = 0) -> list[int | None]:
    """The block table of a group with one table; None where a page was given back."""
    return [None if page is None else page.blocks[0] for page in sequence.pages[group]]


def hit_blocks(hit: PrefixHit, group: int = 0) -> list[int | None]:
    return [None if page is None else page.blocks[0] for page in hit.pages[group]]


# ---- one group -----------------------------------------------------------------------------------


def test_extend_changes_nothing_if_blocks_are_missing() -> None:
    pool = BlockPool(3, PAGE_SIZE)
    sequence = make_sequence(0, tuple(range(20)))
    assert pool.extend(sequence, 13) is None
    assert pool.num_free_blocks == 3 and not sequence.pages
    assert pool.extend(sequence, 12) == (0, 1, 2)
    assert pool.num_free_blocks == 0 and pool.used_by_group == [3]


def test_a_prefix_hit_shares_full_pages_but_never_the_last_token() -> None:
    pool = BlockPool(10, PAGE_SIZE)
    first = make_sequence(0, tuple(range(8)))
    assert compute(pool, first).num_pages == 0
    equal = make_sequence(1, tuple(range(8)))
    assert hit_blocks(pool.find_prefix(equal)) == table_of(first)[:1]
    longer = make_sequence(2, tuple(range(9)))
    hit = pool.find_prefix(longer)
    assert hit_blocks(hit) == table_of(first)
    assert pool.extend(longer, 9, hit) == (0, 1, 2)
    page = first.pages[0][0]
    assert page is not None and page.ref_count == 2


def test_pages_with_equal_tokens_behind_different_prefixes_are_not_shared() -> None:
    pool = BlockPool(10, PAGE_SIZE)
    compute(pool, make_sequence(0, (1, 1, 1, 1, 5, 5, 5, 5, 0)))
    assert pool.find_prefix(make_sequence(1, (2, 2, 2, 2, 5, 5, 5, 5, 0))).num_pages == 0


def test_different_salts_are_not_shared() -> None:
    pool = BlockPool(10, PAGE_SIZE)
    compute(pool, make_sequence(0, tuple(range(9)), "a"))
    assert pool.find_prefix(make_sequence(1, tuple(range(9)), "b")).num_pages == 0
    assert pool.find_prefix(make_sequence(1, tuple(range(9)), "a")).num_pages == 2


def test_a_pool_without_prefix_cache_publishes_nothing() -> None:
    pool = BlockPool(10, PAGE_SIZE, prefix_cache=False)
    compute(pool, make_sequence(0, tuple(range(9))))
    assert pool.find_prefix(make_sequence(1, tuple(range(9)))).num_pages == 0
    assert pool.published == [{}]


def test_released_pages_stay_cached_until_the_pool_needs_them() -> None:
    """The end of a prefix is evicted before its beginning."""
    pool = BlockPool(4, PAGE_SIZE)
    first = make_sequence(0, tuple(range(16)))
    compute(pool, first)
    first_blocks = table_of(first)
    pool.release(first)
    check_block_pool(pool)
    assert pool.num_free_blocks == 4
    other = make_sequence(1, (9, 9, 9, 9, 9))
    compute(pool, other)
    assert set(table_of(other)) == set(first_blocks[2:])
    hit = pool.find_prefix(make_sequence(2, tuple(range(16))))
    assert hit_blocks(hit) == first_blocks[:2]
    assert pool.count_unreferenced(hit) == 2


# ---- windows -------------------------------------------------------------------------------------


def test_a_window_group_gives_back_what_the_next_position_cannot_see() -> None:
    pool = BlockPool(40, PAGE_SIZE, groups=(FULL, WINDOW))
    sequence = make_sequence(0, tuple(range(24)))
    assert pool.extend(sequence, 24) is not None
    sequence.num_computed = sequence.initial_length = 24
    for position in range(25):
        pool.free_passed_pages(sequence, position)
        first = next(i for i, page in enumerate(sequence.pages[1]) if page is not None)
        # Position p sees p - 5 and later ones.
        assert first == max(position - 5, 0) // PAGE_SIZE
    assert None not in table_of(sequence, 0)
    assert pool.used_by_group == [6, 2]
    pool.release(sequence)
    check_block_pool(pool)
    assert pool.num_free_blocks == 40


def test_a_hit_needs_only_the_last_window_of_a_window_group() -> None:
    pool = BlockPool(40, PAGE_SIZE, groups=(FULL, WINDOW))
    first = make_sequence(0, tuple(range(24)))
    compute(pool, first)
    window_table = table_of(first, 1)
    pool.release(first)
    # Evict what the end of the prompt does not need: these pages left the window.
    evict_passed_pages(pool)
    again = make_sequence(1, tuple(range(25)))
    hit = pool.find_prefix(again)
    assert hit.num_pages == 6
    assert hit_blocks(hit, 1) == [None] * 4 + window_table[4:]
    added = pool.extend(again, 25, hit)
    assert added is not None and added[1:8:2] == (NULL_BLOCK,) * 4
    # Elsewhere the window is not whole, so a shorter prompt cannot resume at all.
    shorter = pool.find_prefix(make_sequence(2, tuple(range(17))))
    assert shorter.num_pages == 0 and shorter.num_matched == 4


def evict_passed_pages(pool: BlockPool) -> None:
    """Take free blocks until no passed page is left in the prefix cache."""
    taken = []
    while pool.passed_pages:
        taken += pool._take_blocks(1)
    pool.free_blocks += taken


def test_passed_pages_are_evicted_first_and_then_the_oldest() -> None:
    groups = (FULL, WINDOW)
    pool = BlockPool(24, PAGE_SIZE, groups=groups)
    old = make_sequence(0, tuple(range(8)))
    compute(pool, old)
    pool.release(old)
    long = make_sequence(1, tuple(range(100, 124)))
    compute(pool, long)
    assert len(pool.passed_pages) == 3  # the prompt's end needs the last two and a part
    evict_passed_pages(pool)
    assert pool.find_prefix(make_sequence(2, tuple(range(9)))).num_pages == 2
    check_block_pool(pool, [long])


def test_pages_at_a_shared_end_are_kept_longer_than_others() -> None:
    """Two requests with one system prompt: its end stays resumable while both go on."""
    pool = BlockPool(60, PAGE_SIZE, groups=(FULL, WINDOW))
    system = tuple(range(16))
    first = make_sequence(0, (*system, *range(100, 116)))
    compute(pool, first)
    evict_passed_pages(pool)
    second = make_sequence(1, (*system, *range(200, 216)))
    hit = compute(pool, second)
    # The window at the system prompt's end is gone, but pages of the full group match up to it.
    assert hit.num_pages == 0 and hit.num_matched == 4
    evict_passed_pages(pool)
    third = make_sequence(2, (*system, *range(300, 316)))
    assert compute(pool, third).num_pages == 4
    evict_passed_pages(pool)
    assert pool.find_prefix(make_sequence(3, (*system, 1))).num_pages == 4


def test_a_page_of_a_group_with_several_tables_takes_a_block_in_each() -> None:
    groups = (FULL, CacheGroup(6, num_tables=3, blocks_per_page=2))
    pool = BlockPool(21, PAGE_SIZE, groups=groups)
    sequence = make_sequence(0, tuple(range(12)))
    added = pool.extend(sequence, 12)
    assert added is not None and len(added) == 3 * 7 and len(set(added)) == 21
    assert pool.num_free_blocks == 0 and pool.used_by_group == [3, 18]
    assert pool.extend(sequence, 13) is None
    pool.free_passed_pages(sequence, 12)
    assert pool.num_free_blocks == 6
    assert pool.extend(sequence, 13) is None  # a page needs seven

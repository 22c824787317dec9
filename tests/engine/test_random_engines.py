"""Random engines must produce the reference tokens. `--engines N` tries N of them.

The engines themselves are tested, too: each of several faults in the block pool must be noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bloomery.engine import block_pool, page_digests
from bloomery.engine.adapter_slots import AdapterSlot, AdapterSlots
from bloomery.engine.adapter_store import AdapterStore
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.pages import PageBlocks, PrefixNode
from bloomery.engine.prefix_cache import BlockCopies, PrefixCache
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.sequence import Sequence
from bloomery.engine.state_pool import StatePool
from bloomery.messages import CacheGroup
from tests.engine.random_engine import RandomEngine

ENGINES_PER_TEST = 500
EVENTS = (
    "prefix hits",
    "prefix hits with windows",
    "blocks given back",
    "preemptions",
    "preemptions with windows",
    "partial chunks",
    "accepted drafts",
    "aborts",
    "deadlines",
    "masks",
    "adapter loads",
    "adapters that lost their slot",
    "adapters read again",
    "slots drained",
    "places drained",
    "resumed at a checkpoint: prompt",
    "resumed at a checkpoint: answer",
    "resumed at a checkpoint: fork",
    "resumed at a checkpoint: preempted",
    "resumed at a checkpoint: aborted",
    "resumed at a tail",
    "resumed with windows",
    "resumed without attention",
    "checkpoints saved",
    "checkpoints evicted",
    "checkpoints moved",
    "checkpoints awaited",
    "resume nodes evicted",
    "saves cancelled",
    "states handed over",
    "states not handed over",
    "fallbacks to a shorter prefix",
    "pages replaced",
    "preemptions with states",
    "aborts with states",
    "stages with states",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" not in metafunc.fixturenames:
        return
    num_engines = metafunc.config.getoption("--engines")
    metafunc.parametrize(
        "first_seed",
        range(0, num_engines, ENGINES_PER_TEST),
        ids=lambda seed: f"seeds {seed}..{seed + ENGINES_PER_TEST - 1}",
    )


def test_engines_produce_the_reference_tokens(first_seed: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + ENGINES_PER_TEST):
        try:
            events += RandomEngine(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # Every event must have occurred, or the engines would not test it.
    for event in EVENTS:
        assert events[event] > 0, f"no {event} in {ENGINES_PER_TEST} engines"


# ---- faults that must be noticed -----------------------------------------------------------------

MAX_FAULTY_ENGINES = 250


def frees_one_position_early(group: CacheGroup, position: int, page_size: int) -> int:
    if group.window is None:
        return 0
    return max(position - group.window + 2, 0) // page_size


def frees_what_steps_in_flight_read(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.block_pool.free_passed_pages(sequence, sequence.num_computed)


def ignores_missing_windows(pool: BlockPool, digests: list[bytes], num_pages: int) -> int:
    """Resume wherever the last page of each window group is there."""
    while num_pages and any(
        digests[num_pages - 1] not in pool.published[index] for index, _ in pool.windows
    ):
        num_pages -= 1
    return num_pages


def shares_without_a_reference(pool: BlockPool, page: PageBlocks) -> None:
    pool.passed_pages.pop(page, None)


def forgets_to_unpublish(pool: BlockPool, count: int) -> tuple[int, ...]:
    while len(pool.free_blocks) < count:
        page, _ = (pool.passed_pages or pool.cached_pages).popitem(last=False)
        pool.num_evictable -= len(page.blocks)
        pool.free_blocks += page.blocks
    return tuple([pool.free_blocks.pop() for _ in range(count)])


def publishes_pages_that_are_not_full(pool: BlockPool, sequence: Sequence) -> None:
    sequence.num_computed += 1
    original_publish(pool, sequence)
    sequence.num_computed -= 1


def forgets_the_prefix(pool: BlockPool, sequence: Sequence, num_pages: int) -> list[bytes]:
    size = pool.page_size
    return [bytes(sequence.tokens[page * size : (page + 1) * size]) for page in range(num_pages)]


def leaks_window_pages(pool: BlockPool, sequence: Sequence) -> None:
    if len(sequence.pages) > 1:
        sequence.pages[-1] = [None] * sequence.num_pages
    original_release(pool, sequence)


def shares_prefixes_of_other_adapters(sequence: Sequence) -> bytes:
    return sequence.request.cache_salt.encode()


def ends_the_use_of_a_slot_early(slots: AdapterSlots[Any], adapter: str) -> None:
    slots.by_adapter[adapter].num_users -= 2


def thinks_that_slots_are_loaded(slots: AdapterSlots[Any], *arguments: Any) -> bool:
    original_use(slots, *arguments)
    return False


def mixes_up_slots(slots: AdapterSlots[Any], adapter: str) -> AdapterSlot | None:
    slot = original_find(slots, adapter)
    return slot and slots.slots[slot.number % len(slots.slots)]


def never_ends_the_use_of_host_memory(store: AdapterStore, name: str) -> None:
    pass


def drops_adapters_that_are_in_use(slots: AdapterSlots[Any]) -> AdapterSlot:
    return min(slots.slots, key=lambda slot: slot.last_use)


original_use = AdapterSlots.use
original_find = AdapterSlots.find


def resumes_before_the_copy(cache: PrefixCache, node: PrefixNode) -> bool:
    return bool(node.checkpoint)


def copies_before_the_step(cache: PrefixCache) -> BlockCopies:
    """Save the states of this step's chunks with the copies of this step."""
    cache.due_saves |= cache.new_saves
    cache.new_saves.clear()
    return original_take_copies(cache)


def forgets_copies(cache: PrefixCache) -> BlockCopies:
    original_take_copies(cache)
    return ()


def copies_one_block_less(cache: PrefixCache) -> BlockCopies:
    return original_take_copies(cache)[1:]


def counts_the_sampled_token(pool: StatePool, sequence: Sequence) -> None:
    sequence.num_computed += 1
    original_hand_over(pool, sequence)
    sequence.num_computed -= 1


def keeps_the_save_of_an_evicted_checkpoint(cache: PrefixCache, node: PrefixNode) -> Any:
    saves = dict(cache.new_saves), dict(cache.due_saves)
    blocks = original_take_checkpoint(cache, node)
    cache.new_saves, cache.due_saves = saves
    return blocks


def gives_a_checkpoint_away_twice(cache: PrefixCache, node: PrefixNode) -> Any:
    blocks = original_take_checkpoint(cache, node)
    cache.free_blocks += blocks
    return blocks


def saves_the_state_of_another_position(pool: StatePool, sequence: Sequence) -> None:
    """Take the checkpoint that is due with the chunk before."""
    if sequence.due_checkpoints and sequence.num_computed < sequence.due_checkpoints[-1][0]:
        position = sequence.num_computed // pool.page_size * pool.page_size
        if position:
            node = sequence.path[position // pool.page_size - 1]
            if not node.checkpoint:
                pool.cache.save_checkpoint(node, "prompt", sequence.state, position)
    original_save(pool, sequence)


def takes_over_pages_in_use(pool: StatePool, *args: Any) -> None:
    sequence, page, page_index = args
    if page.ref_count == 2:
        page.ref_count -= 1
        pool.used_by_group[page.group] -= len(page.blocks)
    original_release_page(pool, *args)


original_take_copies = PrefixCache.take_copies
original_take_checkpoint = PrefixCache.take_checkpoint
original_hand_over = StatePool._hand_over
original_save = StatePool.save_due_checkpoint
original_release_page = StatePool._release_page
original_publish = BlockPool.publish
original_release = BlockPool.release
FAULTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (block_pool, "first_visible_page", frees_one_position_early),
    (Scheduler, "_free_passed_pages", frees_what_steps_in_flight_read),
    (BlockPool, "_find_resume_page", ignores_missing_windows),
    (BlockPool, "_reference", shares_without_a_reference),
    (BlockPool, "_take_blocks", forgets_to_unpublish),
    (BlockPool, "publish", publishes_pages_that_are_not_full),
    (BlockPool, "_digests", forgets_the_prefix),
    (BlockPool, "release", leaks_window_pages),
    (PrefixCache, "is_ready", resumes_before_the_copy),
    (PrefixCache, "take_copies", copies_before_the_step),
    (PrefixCache, "take_copies", forgets_copies),
    (PrefixCache, "take_copies", copies_one_block_less),
    (PrefixCache, "take_checkpoint", keeps_the_save_of_an_evicted_checkpoint),
    (PrefixCache, "take_checkpoint", gives_a_checkpoint_away_twice),
    (StatePool, "_hand_over", counts_the_sampled_token),
    (StatePool, "save_due_checkpoint", saves_the_state_of_another_position),
    (StatePool, "_release_page", takes_over_pages_in_use),
    (page_digests, "root_digest", shares_prefixes_of_other_adapters),
    (AdapterSlots, "release", ends_the_use_of_a_slot_early),
    (AdapterSlots, "use", thinks_that_slots_are_loaded),
    (AdapterSlots, "find", mixes_up_slots),
    (AdapterSlots, "_find_free", drops_adapters_that_are_in_use),
    (AdapterStore, "release", never_ends_the_use_of_host_memory),
]


@pytest.mark.parametrize(
    ("owner", "name", "replacement"), FAULTS, ids=[fault[2].__name__ for fault in FAULTS]
)
def test_faults_are_noticed(
    owner: Any, name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(MAX_FAULTY_ENGINES):
            RandomEngine(seed).run()

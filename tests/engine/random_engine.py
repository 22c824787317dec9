"""An engine with random parameters whose outputs are all checked (RandomEngine).

A seed determines sizes, policy, arrivals, drafts, aborts and the number of steps in flight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from bloomery.cache_groups import count_state_blocks
from bloomery.engine.block_pool import BlockPool, PrefixHit
from bloomery.engine.chunk_planner import LatencyTargets
from bloomery.engine.loop import EngineLoop
from bloomery.engine.pages import PageBlocks, PrefixNode
from bloomery.engine.policy import FairPolicy, FcfsPolicy, Policy
from bloomery.engine.scheduler import Scheduler
from bloomery.engine.sequence import Sequence
from bloomery.engine.state_pool import StatePool
from bloomery.messages import CacheGroup, EngineRequest, ResolvedSampling
from tests.engine.fake_executor import (
    VOCAB,
    FakeExecutor,
    FakeMaskSource,
    next_token,
    read_version_at_once,
    reference_tokens,
)


def random_tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_groups(rng: Random, page_size: int) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model. Two in five have recurrent states."""
    groups = random_page_groups(rng, page_size)
    if rng.random() < 0.6:
        return groups
    states = CacheGroup(state_blocks=rng.choice([1, 2, 5, 10]), num_layers=1)
    return (*groups, states) if rng.random() < 0.85 else (states,)


def random_page_groups(rng: Random, page_size: int) -> tuple[CacheGroup, ...]:
    """Return the groups that cache positions: half of the time only one that keeps everything."""
    if rng.random() < 0.5:
        return (CacheGroup(),)
    windows = [CacheGroup(rng.choice([1, 2, 3, 5, 8, 13]), rng.choice([1, 1, 2, 3]))]
    if rng.random() < 0.3:
        windows.append(CacheGroup(rng.choice([4, 7, 20])))
    if page_size > 1 and rng.random() < 0.2:
        windows[0] = replace(windows[0], blocks_per_page=2)
    full = CacheGroup(num_tables=rng.choice([1, 1, 2]))
    return (full, *windows) if rng.random() < 0.8 else tuple(windows)


def random_requests(
    rng: Random,
    block_pool: BlockPool | StatePool,
    max_step_tokens: int,
    num_drafts: int,
    adapters: list[str],
) -> deque[EngineRequest]:
    """Create requests whose prompts share a few prefixes. Some already have an output token.

    Some go on where another one ends, like the next turn of a chat.
    """
    groups = block_pool.groups
    prefixes = [
        random_tokens(rng, rng.randrange(1, block_pool.page_size * 4 + 2)) for _ in range(3)
    ]
    requests: deque[EngineRequest] = deque()
    for number in range(rng.randrange(3, 14)):
        prompt = rng.choice(prefixes) + random_tokens(rng, rng.randrange(0, 6))
        if requests and rng.random() < 0.45:
            previous = reference_tokens(rng.choice(requests), groups)
            prompt = previous[: rng.choice([-1, None, None])] + random_tokens(
                rng, rng.randrange(1, 4)
            )
        prompt_logprobs = rng.choice([None, None, None, None, None, 0])
        request = EngineRequest(
            str(number),
            tuple(prompt),
            ResolvedSampling(min_tokens=rng.choice([0, 0, 4]), prompt_logprobs=prompt_logprobs),
            rng.randrange(2, 12),
            stop_ids=rng.choice([(), (3,), (1, 3)]),
            cache_salt=rng.choice(["", "", "other"]),
            system_length=rng.choice([0, 0, rng.randrange(len(prompt) + 3)]),
            priority=rng.choice([0, 0, -1, 2]),
            tenant=rng.choice(["", "guest"]),
            grammar=rng.choice(["", "", "ab", "c"]),
            lora=rng.choice(adapters),
            deadline=rng.choice([None] * 15 + [0.05]),
        )
        request = replace(request, lora_path=f"/adapters/{request.lora}" if request.lora else "")
        if rng.random() < 0.1:
            first = reference_tokens(request, groups)[len(prompt)]
            has_ended = reference_tokens(request, groups)[len(prompt) + 1 :] == []
            if first not in request.stop_ids and not has_ended:
                request = replace(request, emitted=(first,), cache_salt="")
        length = len(prompt) + request.max_tokens + num_drafts
        if block_pool.count_held_blocks(length, max_step_tokens) <= block_pool.num_blocks:
            requests.append(request)
    return requests


class CountingBlockPool(BlockPool):
    """Counts the blocks that running sequences give back because they have left a window."""

    num_given_back = 0

    def free_passed_pages(self, sequence: Sequence, position: int) -> None:
        used_before = sum(self.used_by_group)
        super().free_passed_pages(sequence, position)
        self.num_given_back += used_before - sum(self.used_by_group)


class CountingStatePool(StatePool):
    """Counts what happens to states."""

    num_given_back = 0

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        prefix_cache: bool,
        groups: tuple[CacheGroup, ...],
    ):
        super().__init__(num_blocks, page_size, prefix_cache, groups)
        self.events: Counter[str] = Counter()

    def free_passed_pages(self, sequence: Sequence, position: int) -> None:
        used_before = sum(self.used_by_group)
        super().free_passed_pages(sequence, position)
        self.num_given_back += used_before - sum(self.used_by_group)

    def extend(
        self, sequence: Sequence, length: int, hit: PrefixHit | None = None
    ) -> tuple[int, ...] | None:
        kind = hit.node.kind if hit is not None and hit.node is not None else None
        blocks = super().extend(sequence, length, hit)
        if blocks is None or hit is None:
            return blocks
        if hit.node is not None:
            self.events[f"resumed at a checkpoint: {kind}"] += 1
            self.events["resumed at a tail"] += hit.node.is_tail
            self.events["checkpoints moved"] += not hit.node.checkpoint
            self.events["resumed with windows"] += bool(self.windows)
            self.events["resumed without attention"] += not self.page_groups
        self.events["fallbacks to a shorter prefix"] += hit.num_matched > hit.num_pages
        return blocks

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        hit = super().find_prefix(sequence)
        self.events["checkpoints awaited"] += hit.is_awaited
        return hit

    def release(self, sequence: Sequence) -> None:
        num_saved = self.cache.checkpoints.num_saved
        has_state = bool(sequence.state)
        super().release(sequence)
        handed_over = self.cache.checkpoints.num_saved - num_saved
        self.events["states handed over"] += handed_over
        self.events["states not handed over"] += has_state and not handed_over

    def count_events(self) -> Counter[str]:
        checkpoints = self.cache.checkpoints
        return self.events + Counter(
            {
                "checkpoints saved": checkpoints.num_saved,
                "checkpoints evicted": checkpoints.num_evicted,
                "pages replaced": self.cache.num_replaced_pages,
                "saves cancelled": self.cache.num_cancelled,
                "resume nodes evicted": self.cache.num_resume_nodes_evicted,
            }
        )


class RandomEngine:
    """An engine with a fake executor, and the requests it must answer correctly."""

    def __init__(self, seed: int):
        rng = Random(seed)
        self.rng = rng
        num_blocks = rng.choice([12, 24, 60])
        page_size = rng.choice([1, 2, 4, 8])
        prefix_cache = rng.random() < 0.9
        groups = random_groups(rng, page_size)
        num_blocks *= sum(group.page_blocks for group in groups)
        num_blocks += count_state_blocks(groups) * rng.choice([1, 2, 4, 10])
        kind = CountingStatePool if count_state_blocks(groups) else CountingBlockPool
        self.block_pool = kind(num_blocks, page_size, prefix_cache, groups)
        max_tokens = rng.choice([3, 8, 40])
        max_num_seqs = rng.choice([1, 3, 8])
        targets = LatencyTargets(short_request_seconds=rng.choice([1e-3, 0.02, 0.1]))
        policies: list[Policy] = [FcfsPolicy(), FairPolicy(max_num_seqs, num_blocks, targets)]
        policy = rng.choice(policies)
        stages = rng.choice([1, 1, 1, 2])
        max_loras = rng.choice([0, 0, 1, 2, 3])
        self.scheduler = Scheduler(
            self.block_pool, max_tokens, max_num_seqs, policy, stages, max_loras
        )
        self.executor = FakeExecutor(page_size, seed % 2 == 0, groups)
        self.executor.reads_at_once = rng.random() < 0.5
        self.time = 0.0
        self.mask_source = FakeMaskSource()
        self.loop = EngineLoop(
            self.scheduler,
            self.executor,
            rng.choice([1, 2, 3]),
            self.clock,
            create_mask_builder=lambda: self.mask_source,
            max_cpu_loras=max_loras and max_loras + rng.choice([0, 1, 3]),
        )
        if self.loop.adapter_store is not None:
            self.loop.adapter_store.read_version = read_version_at_once
            for slots in (self.loop.adapter_store.places, self.scheduler.adapter_slots):
                slots.max_wait_seconds = rng.choice([0.0, 0.05, 1.0])
        self.num_drafts = rng.choice([0, 0, 1, 3])
        self.abort_probability = rng.choice([0.0, 0.0, 0.1])
        adapters = [""]
        if max_loras:
            adapters = rng.choice([["a"], ["", "a", "b"], ["", "a", "b", "c", "d"]])
        self.arrivals = random_requests(rng, self.block_pool, max_tokens, self.num_drafts, adapters)
        self.expected = {request.id: reference_tokens(request, groups) for request in self.arrivals}
        self.received = {
            request.id: [*request.prompt, *request.emitted] for request in self.arrivals
        }
        self.prompt_lens = {request.id: len(request.prompt) for request in self.arrivals}
        self.unfinished: set[str] = set()
        self.aborted: set[str] = set()
        self.events: Counter[str] = Counter()

    def clock(self) -> float:
        self.time += self.rng.choice([0.0, 0.001, 0.02])
        return self.time

    def run(self) -> Counter[str]:
        """Answer all requests and return how often each event occurred."""
        num_idle = 0
        while self.arrivals or self.loop.busy:
            while self.arrivals and self.rng.random() < 0.5:
                request = self.arrivals.popleft()
                self.unfinished.add(request.id)
                self.loop.add(request)
            if self.unfinished and self.rng.random() < self.abort_probability:
                self.abort(self.rng.choice(sorted(self.unfinished)))
            if self.rng.random() < 0.7:
                self.mask_source.finish_compiling()
            if self.rng.random() < 0.5:
                self.executor.finish_reading()
            steps_before = self.executor.num_steps
            self.step()
            has_progress = self.executor.num_steps > steps_before or self.loop.in_flight
            num_idle = 0 if has_progress else num_idle + 1
            assert num_idle < 50, "the engine is stuck"
        self.check_result()
        return self.events

    def step(self) -> None:
        outputs = self.loop.step()
        if self.rng.random() < 0.2:
            self.check_pool(self.sequences_with_pages())
        for output in outputs:
            request_id = output.request
            received = self.received[request_id]
            assert request_id in self.unfinished, "output of a request that has ended"
            num_output = len(received) - self.prompt_lens[request_id]
            assert output.position == num_output, "a gap or a repeat"
            received += output.ids
            self.events["accepted drafts"] += len(output.ids) - 1
            self.events["prefix hits"] += output.cached > 0
            if self.block_pool.windows:
                self.events["prefix hits with windows"] += output.cached > 0
            if output.finish:
                self.unfinished.remove(request_id)
            if output.finish == "deadline":
                self.aborted.add(request_id)
                self.events["deadlines"] += 1
        self.propose_drafts()

    def check_pool(self, sequences: Iterable[Sequence] = ()) -> None:
        if isinstance(self.block_pool, StatePool):
            check_state_pool(self.block_pool, sequences)
        else:
            check_block_pool(self.block_pool, sequences)

    def sequences_with_pages(self) -> set[Sequence]:
        """Return the running sequences, and those that have ended but are in a step in flight."""
        return holders_of_pages(self.scheduler)

    def propose_drafts(self) -> None:
        """Propose drafts. Each token is right with a probability of at least 0.7."""
        for sequence in self.scheduler.running.values():
            if not self.num_drafts or sequence.num_pending or sequence.matcher is not None:
                continue
            tokens = list(sequence.tokens)
            sequence.drafts.clear()
            num_missing = sequence.request.max_tokens - sequence.num_output_tokens
            for _ in range(min(self.num_drafts, num_missing - 1)):
                is_right = self.rng.random() < 0.7
                adapter = sequence.request.lora
                right_token = next_token(tokens, self.block_pool.groups, adapter)
                tokens.append(right_token if is_right else self.rng.randrange(VOCAB))
                sequence.drafts.append(tokens[-1])

    def abort(self, request_id: str) -> None:
        assert self.loop.abort(request_id)
        assert not self.loop.abort(request_id)
        self.unfinished.remove(request_id)
        self.aborted.add(request_id)
        self.events["aborts"] += 1

    def check_result(self) -> None:
        for request_id, expected in self.expected.items():
            received = self.received[request_id]
            if request_id in self.aborted:
                expected = expected[: len(received)]
            assert received == expected, request_id
        self.events["preemptions"] += self.scheduler.num_preemptions
        self.events["blocks given back"] += self.block_pool.num_given_back
        self.events["masks"] += self.mask_source.num_masks
        self.events["partial chunks"] += self.executor.num_partial_chunks
        if self.block_pool.windows:
            self.events["preemptions with windows"] += self.scheduler.num_preemptions
        if isinstance(self.block_pool, CountingStatePool):
            self.events += self.block_pool.count_events()
            self.events["preemptions with states"] += self.scheduler.num_preemptions
            self.events["blocks copied"] += self.executor.num_copies
            self.events["aborts with states"] += len(self.aborted)
            self.events["stages with states"] += self.scheduler.stages > 1
        assert not self.scheduler.in_flight
        assert not self.scheduler.by_request
        self.check_adapters()
        self.check_pool()
        assert self.block_pool.num_free_blocks == self.block_pool.num_blocks, "blocks leaked"

    def check_adapters(self) -> None:
        """Assert that nothing uses an adapter or waits for one when all requests have ended."""
        slots = self.scheduler.adapter_slots
        self.events["adapter loads"] += slots.num_loads
        self.events["adapters that lost their slot"] += slots.num_evictions
        self.events["slots drained"] += slots.num_drains
        self.loop.step()  # releases the adapters of the last requests
        store = self.loop.adapter_store
        assert not slots.waiting
        assert all(slot.is_free for slot in slots.slots)
        if store is not None:
            self.events["adapters read again"] += store.num_evictions
            self.events["places drained"] += store.places.num_drains
            assert all(place.is_free for place in store.places.slots)
            assert self.executor.host_adapters == store.adapters.keys()


def holders_of_pages(scheduler: Scheduler) -> set[Sequence]:
    """Return the running sequences, and those that have ended but are in a step in flight."""
    ended = {
        sequence
        for step in scheduler.in_flight
        for sequence in (*step.decodes, *step.chunk_sequences)
    }
    return {*scheduler.running.values(), *ended}


def check_state_pool(pool: StatePool, sequences: Iterable[Sequence]) -> None:
    """Assert the invariants of a pool with states. `sequences` are all that hold blocks."""
    cache = pool.cache
    holders = [sequence for sequence in sequences if sequence.state]
    ref_counts: Counter[PageBlocks] = Counter()
    num_live: Counter[PrefixNode] = Counter()
    num_resuming: Counter[PrefixNode] = Counter()
    for sequence in holders:
        ref_counts.update(page for pages in sequence.pages for page in pages if page is not None)
        num_live.update(sequence.path)
        num_resuming.update([sequence.resume_node] if sequence.resume_node is not None else [])
    nodes = list(cache.tree)
    owned = [page for node in nodes for page in node.pages if page is not None]
    checkpoints = [node for node in nodes if node.checkpoint]
    for node in nodes:
        check_node(pool, node)
        assert node.num_live == num_live[node]
        assert node.num_resuming == num_resuming[node]
    assert all(page.ref_count == ref_counts[page] for page in {*owned, *ref_counts})
    assert set(cache.checkpoints.queue) == set(checkpoints)
    num_due = sum(len(sequence.due_checkpoints) for sequence in holders)
    assert pool.expected_checkpoints.total() == num_due
    pending = {*cache.due_saves, *cache.new_saves}
    assert all(node.checkpoint for node in pending), "a save of a checkpoint that is gone"
    unheld = [block for page in owned if not page.ref_count for block in page.blocks]
    unheld += [block for node in checkpoints for block in node.checkpoint]
    assert cache.num_evictable == len(unheld)
    assert cache.num_checkpoint_blocks == sum(len(node.checkpoint) for node in checkpoints)
    held = [block for page in ref_counts for block in page.blocks]
    held += [block for sequence in holders for block in sequence.state]
    assert sum(pool.used_by_group) == len(held)
    everything = sorted([*held, *unheld, *cache.free_blocks])
    assert everything == list(range(pool.num_blocks)), "a block is lost or counted twice"


def check_node(pool: StatePool, node: PrefixNode) -> None:
    """Assert what holds for each page of the prefix tree."""
    assert node.parent is not None and not node.parent.is_tail and not node.is_dropped
    assert node.checkpoint == () or len(node.checkpoint) == pool.state_blocks
    assert 0 < node.end - node.start <= pool.page_size
    for index, (group, page) in enumerate(zip(pool.page_groups, node.pages, strict=True)):
        assert group.window is not None or page is not None, "a page that must be there is not"
        assert page is None or (page.digest == node.digest and page.group == index)
        has_holder = page is None or page.ref_count or group.window is not None
        assert has_holder or not node.num_live, "nobody holds a page that a sequence needs"


def check_block_pool(pool: BlockPool, sequences: Iterable[Sequence] = ()) -> None:
    """Assert the invariants of a block pool, which hold at any moment.

    `sequences` are those that hold pages; without them, references are not checked.
    """
    evictable = [*pool.passed_pages, *pool.cached_pages]
    published = [page for pages in pool.published for page in pages.values()]
    assert len(set(evictable)) == len(evictable), "a page is in both queues"
    assert set(evictable) == {page for page in published if page.ref_count == 0}
    assert pool.num_evictable == sum(len(page.blocks) for page in evictable)
    assert all(page.ref_count >= 0 for page in published)
    for group, pages in enumerate(pool.published):
        for digest, page in pages.items():
            assert page.digest == digest and page.group == group
    num_used = sum(pool.used_by_group)
    assert num_used + pool.num_free_blocks == pool.num_blocks, "a block is lost or counted twice"
    unheld = [*pool.free_blocks, *(block for page in evictable for block in page.blocks)]
    assert len(set(unheld)) == len(unheld), "a block is free twice"
    ref_counts: Counter[PageBlocks] = Counter()
    for sequence in sequences:
        ref_counts.update(page for pages in sequence.pages for page in pages if page is not None)
    if ref_counts:
        assert all(page.ref_count == count for page, count in ref_counts.items())
        held = [block for page in ref_counts for block in page.blocks]
        assert sorted([*held, *unheld]) == list(range(pool.num_blocks))

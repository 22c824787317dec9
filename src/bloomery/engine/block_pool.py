"""The KV cache as the scheduler sees it: a pool of numbered blocks with a prefix cache on top.

Sequences are cut into pages. In each cache group (cache_groups.py) a page has its own blocks, which
are taken, published and given back together (PageBlocks). All groups take blocks from one pool.

The prefix cache finds a page by its digest, which covers all tokens up to the page's end, the cache
salt, and the LoRA adapter with the version of its weights (engine/page_digests.py).

Each group has its own pages, because they are given back at different times. A sequence can resume
at the end of a page where every group can: a group that keeps all positions needs every page before
it, and a window group needs the pages that the next position reads.

A page is published when the step that fills it is scheduled, before that step has run. This is
safe: steps run in order, and within a step each layer writes all keys and values before any
sequence attends to them. A later prefix hit therefore always reads filled blocks.

A window group gives back pages that have left the window of a running sequence. They stay findable,
but are evicted first. Exceptions are pages near a position at which a later sequence is likely to
resume: where this one resumed, where another one parted from it, and the end of its prompt.

This module knows block numbers only. It must not know tensors, devices or scheduling policies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bloomery.cache_groups import count_held_blocks, count_pages, first_visible_page
from bloomery.engine.page_digests import page_digests
from bloomery.engine.pages import PageBlocks, PrefixNode
from bloomery.engine.sequence import Sequence
from bloomery.messages import NULL_BLOCK, CacheGroup, EngineRequest


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The pages that a sequence can share instead of computing them."""

    position: int = 0  # at which the sequence resumes
    num_pages: int = 0
    pages: tuple[list[PageBlocks | None], ...] = ()  # by group; None: not needed
    # Pages that only groups that keep all positions still have. Another sequence went this far.
    num_matched: int = 0
    # In a model with recurrent state (engine/state_pool.py): the nodes of the pages, the node whose
    # checkpoint the sequence resumes from, and the end of the pages it shares with a sequence that
    # went on differently. 0: there is none, or it resumes there.
    path: tuple[PrefixNode, ...] = ()
    node: PrefixNode | None = None
    fork: int = 0
    # A running sequence is about to save a checkpoint from which this one could resume later on.
    is_awaited: bool = False

    @property
    def shared_pages(self) -> Iterator[PageBlocks]:
        """The pages in all cache groups."""
        return (page for pages in self.pages for page in pages if page is not None)


class BlockPool:
    """Allocates blocks for sequences, counts references, and finds cached prefixes."""

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        prefix_cache: bool = True,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
    ):
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.groups = groups
        self.page_blocks = sum(group.page_blocks for group in groups)  # of one page, in all groups
        self.windows = [(i, group) for i, group in enumerate(groups) if group.window is not None]
        self.free_blocks = list(reversed(range(num_blocks)))  # neither held nor cached
        # The prefix cache by group: digest -> page.
        self.published: list[dict[bytes, PageBlocks]] = [{} for _ in groups]
        # Cached pages that no sequence holds. Passed pages have left the window of the sequence
        # that held them last, and are evicted first; the others are the least recently used first.
        self.passed_pages: OrderedDict[PageBlocks, None] = OrderedDict()
        self.cached_pages: OrderedDict[PageBlocks, None] = OrderedDict()
        self.num_evictable = 0  # blocks of both
        self.used_by_group = [0] * len(groups)  # blocks that sequences hold

    @property
    def num_free_blocks(self) -> int:
        """Blocks no sequence holds. Blocks that only the prefix cache holds are free."""
        return len(self.free_blocks) + self.num_evictable

    # ---- prefix hits -----------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """Return the longest cached prefix at whose end `sequence` can resume.

        The prefix never covers the last token, because that token must be computed to sample the
        next one. Requests that need the output of every prompt position get no prefix hit.
        """
        num_pages = (len(sequence.tokens) - 1) // self.page_size
        if not self.prefix_cache or needs_every_position(sequence.request) or not num_pages:
            return PrefixHit()
        digests = self._digests(sequence, num_pages)
        for group, published in zip(self.groups, self.published, strict=True):
            if group.window is None:
                num_pages = count_leading(digests[:num_pages], published)
        num_matched = num_pages
        if self.windows:
            num_pages = self._find_resume_page(digests, num_pages)
        pages = []
        for group, published in zip(self.groups, self.published, strict=True):
            first = first_visible_page(group, num_pages * self.page_size, self.page_size)
            visible_pages = [published[digest] for digest in digests[first:num_pages]]
            pages.append([*[None] * first, *visible_pages])
        return PrefixHit(num_pages * self.page_size, num_pages, tuple(pages), num_matched)

    def _find_resume_page(self, digests: list[bytes], num_pages: int) -> int:
        """Return the largest number of pages, at most `num_pages`, behind which windows are whole.

        A window group must have the pages that the next position reads.
        """
        while num_pages:
            missing = -1  # the last page that a window group needs and does not have
            for index, group in self.windows:
                published = self.published[index]
                first = first_visible_page(group, num_pages * self.page_size, self.page_size)
                for page in range(num_pages - 1, max(first, missing + 1) - 1, -1):
                    if digests[page] not in published:
                        missing = page
                        break
            if missing < 0:
                break
            # No prefix that ends right behind the missing page can be resumed.
            num_pages = missing
        return num_pages

    def count_unreferenced(self, hit: PrefixHit) -> int:
        """Count the blocks of a prefix hit that are free until a sequence shares them."""
        return sum(len(page.blocks) for page in hit.shared_pages if page.ref_count == 0)

    # ---- the blocks of a sequence ----------------------------------------------------------------

    def count_held_blocks(self, length: int, step_tokens: int) -> int:
        """The most blocks that a sequence of `length` positions ever holds."""
        return count_held_blocks(self.groups, length, self.page_size, step_tokens)

    def extend(
        self, sequence: Sequence, length: int, hit: PrefixHit | None = None
    ) -> tuple[int, ...] | None:
        """Grow the block tables to hold `length` positions; a new sequence begins with a hit.

        Returns the blocks that were added, those of the hit included, page after page. Returns
        None and changes nothing if the pool has too few free blocks.
        """
        num_shared = 0
        num_reserved = 0
        if hit is not None and hit.num_pages:
            num_shared = hit.num_pages
            num_reserved = self.count_unreferenced(hit)
        num_new = count_pages(length, self.page_size) - sequence.num_pages - num_shared
        if num_new * self.page_blocks > self.num_free_blocks - num_reserved:
            return None
        if not sequence.pages:
            sequence.pages = [[] for _ in self.groups]
            sequence.num_kept_from = [0] * len(self.groups)
        added: list[int] = []
        if hit is not None:
            self._share(sequence, hit, added)
        for _ in range(num_new):
            for index, group in enumerate(self.groups):
                page = PageBlocks(index, self._take_blocks(group.page_blocks))
                self.used_by_group[index] += group.page_blocks
                sequence.pages[index].append(page)
                added += page.blocks
        sequence.num_pages += max(num_new, 0)
        return tuple(added)

    def _share(self, sequence: Sequence, hit: PrefixHit, added: list[int]) -> None:
        """Give the pages of a prefix hit to a sequence that holds none."""
        sequence.num_pages = hit.num_pages
        sequence.num_published = hit.num_pages
        sequence.resume_pages = [hit.num_pages, hit.num_matched]
        for index, pages in enumerate(hit.pages):
            for page in pages:
                if page is not None:
                    self._reference(page)
            sequence.pages[index] += pages
            sequence.num_kept_from[index] = pages.count(None)
        for page_index in range(hit.num_pages):
            for group, pages in zip(self.groups, hit.pages, strict=True):
                page = pages[page_index]
                added += page.blocks if page is not None else (NULL_BLOCK,) * group.page_blocks

    def free_passed_pages(self, sequence: Sequence, position: int) -> None:
        """Give back the pages that no query from `position` on reads.

        All earlier positions must have been computed: their steps have ended.
        """
        for index, group in self.windows:
            pages = sequence.pages[index]
            first = sequence.num_kept_from[index]
            end = min(first_visible_page(group, position, self.page_size), len(pages))
            if first >= end:
                continue
            resumable = self._resumable_pages(sequence, group)
            for page_index in range(first, end):
                page = pages[page_index]
                assert page is not None
                self._release_page(page, any(page_index in span for span in resumable))
                pages[page_index] = None
            sequence.num_kept_from[index] = end

    def _resumable_pages(self, sequence: Sequence, group: CacheGroup) -> list[range]:
        """Pages of a window group that other sequences need to resume where this one may part.

        These are the position at which it resumed itself, the end of what it had in common with
        another one, and the end of its prompt.
        """
        prompt_end = (sequence.initial_length - 1) // self.page_size
        return [
            range(first_visible_page(group, end * self.page_size, self.page_size), end)
            for end in {*sequence.resume_pages, prompt_end}
        ]

    def publish(self, sequence: Sequence) -> None:
        """Put the full pages of `sequence` into the prefix cache.

        A page qualifies when all its positions are computed or scheduled and all its tokens are
        known to the scheduler. If another sequence has published the same page, this one keeps its
        own blocks to itself.
        """
        num_full = min(sequence.num_computed, len(sequence.tokens)) // self.page_size
        first = sequence.num_published
        if num_full <= first:
            return
        sequence.num_published = num_full
        if not self.prefix_cache:
            return
        digests = self._digests(sequence, num_full)
        for pages, published in zip(sequence.pages, self.published, strict=True):
            for index in range(first, num_full):
                page = pages[index]
                digest = digests[index]
                if page is not None and digest not in published:
                    published[digest] = page
                    page.digest = digest

    def release(self, sequence: Sequence) -> None:
        """Return all blocks of `sequence` to the pool. Published ones stay in the prefix cache.

        The last page is freed first and so evicted first: a sequence can resume behind the
        pages that are left.
        """
        for page_index in range(sequence.num_pages - 1, -1, -1):
            for pages in sequence.pages:
                page = pages[page_index]
                if page is not None:
                    self._release_page(page, True)
        sequence.pages = []
        sequence.num_pages = 0
        sequence.num_published = 0

    # ---- references and eviction -----------------------------------------------------------------

    def _reference(self, page: PageBlocks) -> None:
        page.ref_count += 1
        if page.ref_count == 1:
            self.passed_pages.pop(page, None)
            self.cached_pages.pop(page, None)
            self.num_evictable -= len(page.blocks)
            self.used_by_group[page.group] += len(page.blocks)

    def _release_page(self, page: PageBlocks, is_resumable: bool) -> None:
        page.ref_count -= 1
        if page.ref_count:
            return
        self.used_by_group[page.group] -= len(page.blocks)
        if page.digest is None:
            self.free_blocks += page.blocks
            return
        self.num_evictable += len(page.blocks)
        if is_resumable:
            self.cached_pages[page] = None
        else:
            self.passed_pages[page] = None

    def _take_blocks(self, count: int) -> tuple[int, ...]:
        """Take free blocks; evicts pages from the prefix cache if there are too few."""
        free_blocks = self.free_blocks
        if count == 1 and free_blocks:
            return (free_blocks.pop(),)
        while len(free_blocks) < count:
            queue = self.passed_pages or self.cached_pages
            page, _ = queue.popitem(last=False)
            assert page.digest is not None
            del self.published[page.group][page.digest]
            self.num_evictable -= len(page.blocks)
            free_blocks += page.blocks
        return tuple([free_blocks.pop() for _ in range(count)])

    def _digests(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        return page_digests(sequence, num_pages, self.page_size)


def needs_every_position(request: EngineRequest) -> bool:
    """Whether the output of every prompt position is needed, so that no prefix can be skipped."""
    return request.sampling.prompt_logprobs is not None or request.pooling == "mean"


def count_leading(digests: Iterable[bytes], published: dict[bytes, PageBlocks]) -> int:
    """Count the digests before the first that is not published."""
    count = 0
    for digest in digests:
        if digest not in published:
            break
        count += 1
    return count

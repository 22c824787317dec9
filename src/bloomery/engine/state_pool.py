"""The block pool of a model with recurrent state: states, checkpoints, and prefixes to resume at.

The scheduler uses it like a BlockPool. What differs is where a sequence can resume. A state is
updated in place and cannot be cut back, so it is at the longest position where a checkpoint of the
state is cached together with the pages that the next position reads. Checkpoints are taken
  - at the end of a system message: at its last page end, because other chats begin with it;
  - at the end of a prompt: at the last page end before its last token, because that token must be
    computed in any case, and chat templates end a prompt with tokens the next turn does not repeat;
  - at the end of an answer: the live state's own blocks become the checkpoint, and the page begun
    becomes a tail of the prefix tree. This needs no copy and no memory. The same happens when a
    sequence is preempted or aborted;
  - where two prefixes part: a sequence that resumes before the end of the pages it shares saves its
    state there. So does the second sequence with the same document, for the third.

The first two cost a step more, so they are taken only if they are expected to save a page.

A sequence that resumes at a checkpoint gets a copy of it as its live state. It gets the checkpoint
itself, which is then gone, if a copy would push out something of more value. Whole pages are shared
without a copy, the page of a tail is copied.

Pages behind the checkpoint at which a sequence resumes are computed again into blocks of its own.
The tree takes them over if nobody holds its own ones any more.

This module knows block numbers only. It must not know tensors, devices or scheduling policies.
"""

from __future__ import annotations

from collections import Counter

from bloomery.cache_groups import (
    count_held_blocks,
    count_pages,
    count_state_blocks,
    first_visible_page,
)
from bloomery.engine.block_pool import PrefixHit, needs_every_position
from bloomery.engine.page_digests import extend_digest, page_digests, root_digest
from bloomery.engine.pages import CheckpointKind, PageBlocks, PrefixNode
from bloomery.engine.prefix_cache import BlockCopies, PrefixCache
from bloomery.engine.prefix_tree import MAX_TAILS
from bloomery.engine.sequence import Sequence
from bloomery.messages import NULL_BLOCK, CacheGroup


class StatePool:
    """Allocates blocks and states for sequences, and finds where they can resume."""

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        prefix_cache: bool = True,
        groups: tuple[CacheGroup, ...] = (CacheGroup(state_blocks=1),),
    ):
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.groups = groups
        self.page_groups = tuple(group for group in groups if not group.state_blocks)
        self.page_blocks = sum(group.page_blocks for group in groups)  # of one page, in all groups
        self.state_blocks = count_state_blocks(groups)  # of one sequence
        self.cache = PrefixCache(num_blocks, page_size, self.page_groups)
        self.windows = self.cache.windows
        self.used_by_group = [0] * len(groups)  # blocks that sequences hold
        # Prefixes at whose end running sequences will save their state.
        self.expected_checkpoints: Counter[bytes] = Counter()

    @property
    def num_free_blocks(self) -> int:
        """Blocks no sequence holds. Blocks of the prefix cache and of checkpoints are free."""
        return len(self.cache.free_blocks) + self.cache.num_evictable

    def begin_step(self, now: float) -> None:
        """Tell the time, in seconds, by which checkpoints grow old."""
        self.cache.checkpoints.now = now

    def take_copies(self) -> BlockCopies:
        """Return the block copies of the step that has been built."""
        return self.cache.take_copies()

    # ---- prefix hits -----------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """Return the longest cached prefix at whose end `sequence` can resume. Changes nothing."""
        limit = len(sequence.tokens) - 1  # the last token must be computed
        if not self.prefix_cache or needs_every_position(sequence.request) or not limit:
            return PrefixHit()
        cache = self.cache
        num_pages = limit // self.page_size
        digests = page_digests(sequence, num_pages, self.page_size)[:num_pages]
        root = root_digest(sequence)
        path = cache.tree.find_path(root, digests)
        nodes = [*path[::-1], cache.tree.roots.get(root)]
        for node in nodes:
            if node is None:
                continue
            for candidate in (*cache.tree.find_tails(node, sequence.tokens, limit), node):
                if cache.is_ready(candidate) and cache.has_windows(candidate):
                    return self._make_hit(path, candidate, digests)
        return self._make_hit(path, None, digests)

    def _make_hit(
        self, path: list[PrefixNode], node: PrefixNode | None, digests: list[bytes]
    ) -> PrefixHit:
        """Resume at the end of `node`, or at position 0."""
        position = 0 if node is None else node.end
        num_pages = position // self.page_size
        pages: list[list[PageBlocks | None]] = []
        for index, group in enumerate(self.page_groups):
            first = min(first_visible_page(group, position, self.page_size), num_pages)
            visible = [path_node.pages[index] for path_node in path[first:num_pages]]
            pages.append([*[None] * first, *visible])
        # Another sequence went on differently behind the last page that both have.
        fork = 0
        if path and path[-1].end > position and (path[-1].children or path[-1].tails):
            fork = path[-1].end
        is_awaited = any(
            path_node.checkpoint and not self.cache.is_ready(path_node)
            for path_node in path[num_pages:]
        )
        if self.expected_checkpoints and not is_awaited:
            is_awaited = any(digest in self.expected_checkpoints for digest in digests[num_pages:])
        shared = tuple(path[:num_pages])
        return PrefixHit(
            position, num_pages, tuple(pages), len(path), shared, node, fork, is_awaited
        )

    def count_unreferenced(self, hit: PrefixHit) -> int:
        """Count the blocks of a prefix hit that are free until a sequence shares them."""
        return sum(len(page.blocks) for page in hit.shared_pages if page.ref_count == 0)

    # ---- where chunks must end -------------------------------------------------------------------

    def limit_first_chunk(self, sequence: Sequence, hit: PrefixHit, count: int) -> int:
        """Let the first chunk end where the first checkpoint is due."""
        due = self._due_checkpoints(sequence, hit)
        return min(count, due[-1][0] - hit.position) if due else count

    def limit_chunk(self, sequence: Sequence, count: int) -> int:
        """Let a chunk end where the next checkpoint is due."""
        due = sequence.due_checkpoints
        return min(count, due[-1][0] - sequence.num_computed) if due else count

    def _due_checkpoints(
        self, sequence: Sequence, hit: PrefixHit
    ) -> list[tuple[int, CheckpointKind]]:
        """Positions at which the sequence shall save its state, the last one first."""
        request = sequence.request
        if not self.prefix_cache or request.pooling is not None:
            return []
        kinds: dict[int, CheckpointKind] = {hit.fork: "fork"}
        ends: dict[CheckpointKind, int] = {
            "system": min(request.system_length, len(request.prompt) - 1),
            "prompt": len(request.prompt) - 1,
        }
        for kind, length in ends.items():
            end = length // self.page_size * self.page_size
            # The chunk that ends there costs a step more. It must be expected to save a page.
            odds = self.cache.checkpoints.estimate_odds(kind, 0)
            if odds * (end - hit.position) >= self.page_size:
                kinds.setdefault(end, kind)
        positions = sorted((end for end in kinds if end > hit.position), reverse=True)
        return [(end, kinds[end]) for end in positions]

    # ---- the blocks of a sequence ----------------------------------------------------------------

    def count_held_blocks(self, length: int, step_tokens: int) -> int:
        """The most blocks that a sequence of `length` positions ever holds."""
        return count_held_blocks(self.groups, length, self.page_size, step_tokens)

    def extend(
        self, sequence: Sequence, length: int, hit: PrefixHit | None = None
    ) -> tuple[int, ...] | None:
        """Grow the block tables to hold `length` positions; a new sequence begins with a hit.

        Returns the blocks that were added, those of the hit included, page after page. Returns
        None and changes nothing if the pool has too few free blocks. A new sequence also gets the
        blocks of its state.
        """
        num_shared = 0 if hit is None else hit.num_pages
        num_new = count_pages(length, self.page_size) - sequence.num_pages - num_shared
        num_needed = max(num_new, 0) * self.page_blocks
        num_reserved = 0
        if hit is not None:
            num_needed += self.state_blocks
            num_reserved = self.count_unreferenced(hit)
        if num_needed > self.num_free_blocks - num_reserved:
            return None
        added: list[int] = []
        tail_pages: list[PageBlocks | None] = []
        if hit is not None:
            if hit.node is not None and hit.node.is_tail:
                tail_pages = list(hit.node.pages)
            self._start(sequence, hit, num_needed, added)
        for _ in range(num_new):
            for index, group in enumerate(self.page_groups):
                page = PageBlocks(index, self.cache.take_blocks(group.page_blocks))
                self.used_by_group[index] += group.page_blocks
                sequence.pages[index].append(page)
                added += page.blocks
                if tail_pages and (tail_page := tail_pages[index]) is not None:
                    self.cache.copies += zip(tail_page.blocks, page.blocks, strict=True)
            tail_pages = []
        sequence.num_pages += max(num_new, 0)
        return tuple(added)

    def _start(self, sequence: Sequence, hit: PrefixHit, num_needed: int, added: list[int]) -> None:
        """Give a new sequence the pages of a prefix hit, and a state."""
        sequence.num_pages = hit.num_pages
        sequence.num_published = hit.num_pages
        sequence.path = list(hit.path)
        sequence.pages = [list(pages) for pages in hit.pages] or [[] for _ in self.page_groups]
        sequence.num_kept_from = [pages.count(None) for pages in sequence.pages]
        sequence.due_checkpoints = self._due_checkpoints(sequence, hit)
        self._expect_checkpoints(sequence, 1)
        for node in hit.path:
            node.num_live += 1
        for page in hit.shared_pages:
            page.ref_count += 1
            if page.ref_count == 1:
                self.cache.num_evictable -= len(page.blocks)
                self.used_by_group[page.group] += len(page.blocks)
        for page_index in range(hit.num_pages):
            for group, pages in zip(self.page_groups, hit.pages, strict=True):
                page_or_none = pages[page_index]
                no_blocks = (NULL_BLOCK,) * group.page_blocks
                added += no_blocks if page_or_none is None else page_or_none.blocks
        self._load_state(sequence, hit.node, num_needed)

    def _expect_checkpoints(self, sequence: Sequence, change: int) -> None:
        """Add to, or take from, the checkpoints that running sequences are about to save."""
        for position, _ in sequence.due_checkpoints:
            num_pages = position // self.page_size
            digest = page_digests(sequence, num_pages, self.page_size)[num_pages - 1]
            self.expected_checkpoints[digest] += change
            if not self.expected_checkpoints[digest]:
                del self.expected_checkpoints[digest]

    def _load_state(self, sequence: Sequence, node: PrefixNode | None, num_needed: int) -> None:
        """Give a sequence its live state: that of a checkpoint, or one that begins with zeros.

        `num_needed`: blocks that must be free for all of the sequence. A source that is evicted
        for this very step may still be copied: all sources are read before anything is written.
        """
        if node is not None and self._shall_move(node, num_needed):
            self.cache.checkpoints.count_use(node)
            sequence.state = self.cache.take_checkpoint(node)
        else:
            source = () if node is None else node.checkpoint
            if node is not None:
                self.cache.checkpoints.count_use(node)
                self._set_resume_node(sequence, node)
            sequence.state = self.cache.take_blocks(self.state_blocks)
            if source:
                self.cache.copies += zip(source, sequence.state, strict=True)
        self.used_by_group[-1] += self.state_blocks

    def _shall_move(self, node: PrefixNode, num_needed: int) -> bool:
        """Whether the checkpoint itself becomes the live state.

        It does if a copy would push out something that is worth more than this checkpoint will be.
        """
        if node.num_resuming or self.cache.has_free_room(num_needed):
            return False
        checkpoints = self.cache.checkpoints
        worst = checkpoints.find_least_valuable()
        if worst is None or worst is node:
            return True
        value = checkpoints.estimate_value(node, node.num_uses + 1)
        return value < checkpoints.estimate_value(worst)

    def _set_resume_node(self, sequence: Sequence, node: PrefixNode | None) -> None:
        """Note where the sequence would resume if it were preempted."""
        if sequence.resume_node is not None:
            sequence.resume_node.num_resuming -= 1
        sequence.resume_node = node
        if node is not None:
            node.num_resuming += 1

    def free_passed_pages(self, sequence: Sequence, position: int) -> None:
        """Give back the window pages that no query from `position` on reads.

        All earlier positions must have been computed: their steps have ended.
        """
        for index, group in self.windows:
            pages = sequence.pages[index]
            first = sequence.num_kept_from[index]
            end = min(first_visible_page(group, position, self.page_size), len(pages))
            for page_index in range(first, end):
                page = pages[page_index]
                assert page is not None
                self._release_page(sequence, page, page_index)
                pages[page_index] = None
            sequence.num_kept_from[index] = max(first, end)

    # ---- publishing ------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Put the full pages of `sequence` into the prefix tree.

        A page qualifies when all its positions are computed or scheduled and all its tokens are
        known to the scheduler: steps run in order, so who finds it later finds it filled.
        """
        num_full = min(sequence.num_computed, len(sequence.tokens)) // self.page_size
        first = sequence.num_published
        if num_full <= first:
            return
        sequence.num_published = num_full
        if not self.prefix_cache:
            return
        digests = page_digests(sequence, num_full, self.page_size)
        for page_index in range(first, num_full):
            parent = self._end_of_page(sequence, page_index)
            node = self.cache.tree.get_child(parent, digests[page_index], self.page_size)
            node.num_live += 1
            sequence.path.append(node)
            self._give_pages(sequence, node, page_index)

    def _end_of_page(self, sequence: Sequence, num_pages: int) -> PrefixNode:
        """The node at whose end so many pages of the sequence end."""
        if num_pages:
            return sequence.path[num_pages - 1]
        return self.cache.tree.get_root(root_digest(sequence))

    def _give_pages(self, sequence: Sequence, node: PrefixNode, page_index: int) -> None:
        """Give a node the pages that it lacks, or that nobody holds any more."""
        for index, group in enumerate(self.page_groups):
            page = sequence.pages[index][page_index]
            known = node.pages[index]
            if page is None or known is page:
                continue
            if known is None or known.ref_count == 0:
                self.cache.own_page(node, index, page)
            elif group.window is None:
                node.duplicates[sequence.id] = sequence.pages

    def save_due_checkpoint(self, sequence: Sequence) -> None:
        """Save the state at the end of the chunk that was just scheduled, if that is due."""
        due = sequence.due_checkpoints
        if not due or sequence.num_computed < due[-1][0]:
            return
        self._expect_checkpoints(sequence, -1)
        position, kind = due.pop()
        self._expect_checkpoints(sequence, 1)
        node = self._end_of_page(sequence, position // self.page_size)
        assert node.end == position == sequence.num_computed
        if node.checkpoint or not self.cache.has_windows(node):
            return
        num_tokens = position - self._resume_position(sequence)
        if self.cache.save_checkpoint(node, kind, sequence.state, num_tokens):
            self._set_resume_node(sequence, node)

    def _resume_position(self, sequence: Sequence) -> int:
        node = sequence.resume_node
        return node.end if node is not None and node.checkpoint else 0

    # ---- the end of a sequence -------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Return all blocks of `sequence` to the pool. No step in flight may contain it.

        Its state becomes a checkpoint, and its pages stay in the prefix tree.
        """
        if not sequence.state:
            return
        self.publish(sequence)
        if self.prefix_cache:
            self._hand_over(sequence)
        self.cache.free_blocks += sequence.state
        self.used_by_group[-1] -= self.state_blocks
        for page_index in range(sequence.num_pages - 1, -1, -1):
            for pages in sequence.pages:
                page = pages[page_index]
                if page is not None:
                    self._release_page(sequence, page, page_index)
        for node in reversed(sequence.path):
            node.num_live -= 1
            node.duplicates.pop(sequence.id, None)
            self.cache.offer(node)
        self._set_resume_node(sequence, None)
        self._expect_checkpoints(sequence, -1)
        sequence.due_checkpoints = []
        sequence.state = ()
        sequence.path = []
        sequence.pages = []
        sequence.num_pages = 0
        sequence.num_published = 0

    def _hand_over(self, sequence: Sequence) -> None:
        """Turn the live state into a checkpoint, and the page begun into a tail.

        The last sampled token is in neither. If the state has run past the end of the answer,
        nobody can use it.
        """
        position = sequence.num_computed
        is_known = self._resume_position(sequence) < position <= len(sequence.tokens)
        if not is_known or sequence.request.pooling is not None:
            return
        node = self._end_of_page(sequence, position // self.page_size)
        if position % self.page_size:
            tail = self._add_tail(sequence, node, position)
            if tail is None:
                return
            node = tail
        if not node.checkpoint and self.cache.has_windows(node):
            self.cache.add_checkpoint(node, handover_kind(sequence), sequence.state)
            # Its blocks are held as long as the sequence counts them as used.
            sequence.state = ()
        self.cache.offer(node)

    def _add_tail(self, sequence: Sequence, parent: PrefixNode, position: int) -> PrefixNode | None:
        """Add a tail with the page begun. Returns None if the tree has it or has no room."""
        digest = extend_digest(parent.digest, sequence.tokens[parent.end : position])
        if digest in parent.tails:
            return None
        if len(parent.tails) >= MAX_TAILS:
            oldest = min(parent.tails.values(), key=lambda tail: tail.last_use)
            if oldest.checkpoint:
                self.cache.free_blocks += self.cache.take_checkpoint(oldest)
            self.cache.drop(oldest)
        tail = self.cache.tree.add_tail(parent, digest, position)
        for index, pages in enumerate(sequence.pages):
            page = pages[position // self.page_size]
            if page is not None:
                self.cache.own_page(tail, index, page)
        return tail

    def _release_page(self, sequence: Sequence, page: PageBlocks, page_index: int) -> None:
        """Give back one page of a sequence."""
        page.ref_count -= 1
        if page.ref_count:
            return
        self.used_by_group[page.group] -= len(page.blocks)
        if page.digest is None:
            self.cache.free_blocks += page.blocks
            return
        self.cache.num_evictable += len(page.blocks)
        if page_index >= len(sequence.path):
            return  # it has just become a tail
        node = sequence.path[page_index]
        others = [pages for other, pages in node.duplicates.items() if other != sequence.id]
        if self.page_groups[page.group].window is not None:
            self.cache.offer_window_page(node, page.group)
        elif others:
            # Another sequence runs on with a copy, which the tree keeps instead.
            own_page = others[0][page.group][page_index]
            assert own_page is not None
            self.cache.own_page(node, page.group, own_page)


def handover_kind(sequence: Sequence) -> CheckpointKind:
    """The kind of checkpoint that the end of a sequence leaves."""
    if sequence.finish_reason is None:
        return "preempted"
    return "answer" if sequence.finish_reason in ("stop", "length") else "aborted"

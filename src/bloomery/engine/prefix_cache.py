"""Blocks that nobody holds but somebody may want again, in a model with recurrent state.

All blocks that no running sequence holds are free, or belong to the prefix tree and can be evicted:
pages, and the checkpoints of states. Evicted is first what is worth nothing: window pages that no
checkpoint needs, and pages behind the last checkpoint, where nobody can resume. Then the checkpoint
of the least value (engine/checkpoints.py). The checkpoints at which running sequences would resume
go last, but before any sequence must give way.

A checkpoint is saved by copying the live state of a sequence. The copy belongs to the next step: it
is done before that step computes anything, so it reads the state that the step before it has left.
Until that step is built, nobody can resume from the checkpoint, and its eviction cancels the copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import inf

from bloomery.cache_groups import first_visible_page
from bloomery.engine.checkpoints import CheckpointIndex
from bloomery.engine.pages import CheckpointKind, PageBlocks, PrefixNode
from bloomery.engine.prefix_tree import PrefixTree
from bloomery.messages import CacheGroup

WHOLE_NODE = -1  # in place of a cache group
BlockCopies = tuple[tuple[int, int], ...]  # (source, destination)


class PrefixCache:
    """The free blocks, the prefix tree and its checkpoints."""

    def __init__(self, num_blocks: int, page_size: int, groups: tuple[CacheGroup, ...]):
        """`groups` are those that cache positions."""
        self.page_size = page_size
        self.windows = [(i, group) for i, group in enumerate(groups) if group.window is not None]
        self.free_blocks = list(reversed(range(num_blocks)))
        self.num_evictable = 0  # blocks of the tree that no sequence holds
        self.num_checkpoint_blocks = 0  # of these, blocks of states
        self.tree = PrefixTree(len(groups))
        self.checkpoints = CheckpointIndex()
        # Worth nothing: a page of one window group, or a leaf without a checkpoint.
        self.useless: OrderedDict[tuple[PrefixNode, int], None] = OrderedDict()
        # Copies of the step that is being built, and checkpoints that are saved with the next step
        # and with the one after it.
        self.copies: list[tuple[int, int]] = []
        self.due_saves: dict[PrefixNode, BlockCopies] = {}
        self.new_saves: dict[PrefixNode, BlockCopies] = {}
        self.num_replaced_pages = 0  # pages that the tree took over from a running sequence
        self.num_cancelled = 0  # saves
        self.num_resume_nodes_evicted = 0

    # ---- copies ----------------------------------------------------------------------------------

    def take_copies(self) -> BlockCopies:
        """Return the block copies of the step that has been built."""
        copies = list(self.copies)
        for pairs in self.due_saves.values():
            copies += pairs
        self.copies.clear()
        self.due_saves = self.new_saves
        self.new_saves = {}
        return tuple(copies)

    def is_ready(self, node: PrefixNode) -> bool:
        """Whether a sequence of the next step can resume from the checkpoint of `node`."""
        return bool(node.checkpoint) and node not in self.due_saves and node not in self.new_saves

    # ---- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(
        self, node: PrefixNode, kind: CheckpointKind, state: tuple[int, ...], min_gain: int
    ) -> bool:
        """Copy a live state into a checkpoint; it saves `min_gain` tokens if it is used.

        It pushes out what is worth less than itself, and nothing else.
        """
        rate = self.checkpoints.estimate_rate(kind, 0, 0.0)
        if not self._make_room(len(state), min_gain * rate / len(state)):
            return False
        blocks = self.take_blocks(len(state))
        self.add_checkpoint(node, kind, blocks)
        self.new_saves[node] = tuple(zip(state, blocks, strict=True))
        return True

    def add_checkpoint(
        self, node: PrefixNode, kind: CheckpointKind, blocks: tuple[int, ...]
    ) -> None:
        """Give a node a checkpoint, whose blocks no sequence holds any more."""
        node.checkpoint = blocks
        self.num_evictable += len(blocks)
        self.num_checkpoint_blocks += len(blocks)
        self.checkpoints.add(node, kind)
        for index, group in self.windows:
            for page_node in self.visible_nodes(node, group):
                page_node.num_window_users[index] += 1

    def take_checkpoint(self, node: PrefixNode) -> tuple[int, ...]:
        """Take the checkpoint out of the tree; its blocks belong to the caller."""
        if not self.is_ready(node):
            self.due_saves.pop(node, None)
            self.new_saves.pop(node, None)
            self.num_cancelled += 1
        blocks = node.checkpoint
        node.checkpoint = ()
        self.num_evictable -= len(blocks)
        self.num_checkpoint_blocks -= len(blocks)
        self.checkpoints.remove(node)
        for index, group in self.windows:
            for page_node in self.visible_nodes(node, group):
                page_node.num_window_users[index] -= 1
                self.offer_window_page(page_node, index)
        self.offer(node)
        return blocks

    def has_windows(self, node: PrefixNode) -> bool:
        """Whether every window group has what the position at the end of `node` reads."""
        return all(
            page_node.pages[index] is not None
            for index, group in self.windows
            for page_node in self.visible_nodes(node, group)
        )

    def visible_nodes(self, node: PrefixNode, group: CacheGroup) -> Iterator[PrefixNode]:
        """The nodes whose window pages the position at the end of `node` reads."""
        first = first_visible_page(group, node.end, self.page_size) * self.page_size
        page_node: PrefixNode | None = node
        while page_node is not None and page_node.parent is not None and page_node.end > first:
            yield page_node
            page_node = page_node.parent

    # ---- pages -----------------------------------------------------------------------------------

    def own_page(self, node: PrefixNode, index: int, page: PageBlocks) -> None:
        """Give a node the page of a cache group, instead of the one it has, which nobody holds."""
        self.num_replaced_pages += node.pages[index] is not None
        self.disown_page(node, index)
        node.pages[index] = page
        page.digest = node.digest

    def disown_page(self, node: PrefixNode, index: int) -> None:
        """Free the page that a node has in a cache group and that nobody holds."""
        page = node.pages[index]
        if page is None:
            return
        assert page.ref_count == 0
        node.pages[index] = None
        page.digest = None
        self.num_evictable -= len(page.blocks)
        self.free_blocks += page.blocks

    def offer(self, node: PrefixNode) -> None:
        """Let a node be evicted if nothing needs it: nobody can resume at its end or behind it."""
        if node.is_leaf and not node.checkpoint and node.parent is not None and not node.is_dropped:
            self.useless[node, WHOLE_NODE] = None

    def offer_window_page(self, node: PrefixNode, index: int) -> None:
        """Let the page of a window group be evicted if nothing needs it."""
        if self._is_unused_window_page(node, index):
            self.useless[node, index] = None

    def _is_unused_window_page(self, node: PrefixNode, index: int) -> bool:
        page = node.pages[index]
        return page is not None and page.ref_count == 0 and not node.num_window_users[index]

    # ---- eviction --------------------------------------------------------------------------------

    def take_blocks(self, count: int) -> tuple[int, ...]:
        """Take free blocks; evicts if there are too few. There must be enough to evict."""
        if len(self.free_blocks) < count and not self._make_room(count):
            self._make_room(count, with_resume_nodes=True)
        return tuple([self.free_blocks.pop() for _ in range(count)])

    def has_free_room(self, count: int) -> bool:
        """Whether so many blocks are free, or can be without evicting anything of worth."""
        return len(self.free_blocks) >= count or bool(self.useless)

    def _make_room(
        self, count: int, max_value: float = inf, with_resume_nodes: bool = False
    ) -> bool:
        """Evict until `count` blocks are free. Only what is worth less than `max_value` goes."""
        while len(self.free_blocks) < count:
            if self._evict_useless():
                continue
            node = self.checkpoints.find_least_valuable(with_resume_nodes)
            if node is None or (
                max_value < inf and self.checkpoints.estimate_value(node) >= max_value
            ):
                return False
            self.num_resume_nodes_evicted += node.num_resuming > 0
            self.checkpoints.num_evicted += 1
            self.free_blocks += self.take_checkpoint(node)
        return True

    def _evict_useless(self) -> bool:
        """Evict a page or a node that is worth nothing. Returns False if there is none."""
        while self.useless:
            (node, index), _ = self.useless.popitem(last=False)
            if node.is_dropped:
                continue
            if index != WHOLE_NODE:
                if self._is_unused_window_page(node, index):
                    self.disown_page(node, index)
                    return True
            elif node.is_leaf and not node.checkpoint:
                self.drop(node)
                return True
        return False

    def drop(self, node: PrefixNode) -> None:
        """Remove a leaf without a checkpoint and free its pages."""
        for index in range(len(node.pages)):
            self.disown_page(node, index)
        self.tree.remove(node)
        assert node.parent is not None
        self.offer(node.parent)

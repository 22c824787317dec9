"""The prefixes that a model with recurrent state may find again: a tree of pages.

A node is one page of one prefix, found by the digest of all tokens up to its end. It owns the
page's blocks in every cache group that has them. A tail is a node of less than a page: a sequence
ended there, and nothing follows it. A node with a checkpoint also owns the blocks of a recurrent
state, that at the node's end.

The tree knows which sequences run behind a node, because their pages must stay. It does not decide
what is kept: engine/prefix_cache.py does, with the values that engine/checkpoints.py computes.
"""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.engine.page_digests import extend_digest
from bloomery.engine.pages import PageBlocks, PrefixNode

MAX_TAILS = 4  # of a node


class PrefixTree:
    """Finds, adds and removes nodes."""

    def __init__(self, num_groups: int):
        self.num_groups = num_groups
        self.roots: dict[bytes, PrefixNode] = {}  # by the digest of the empty prefix

    def find_path(self, root_digest: bytes, digests: list[bytes]) -> list[PrefixNode]:
        """Return the nodes of the longest known prefix, page after page."""
        path: list[PrefixNode] = []
        node = self.roots.get(root_digest)
        for digest in digests if node is not None else ():
            node = node.children.get(digest) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def get_root(self, digest: bytes) -> PrefixNode:
        """Return the root of this digest; adds it if there is none."""
        root = self.roots.get(digest)
        if root is None:
            root = self.roots[digest] = PrefixNode(None, digest, 0, 0, [])
        return root

    def get_child(self, parent: PrefixNode, digest: bytes, page_size: int) -> PrefixNode:
        """Return the page that follows `parent`; adds it, without blocks, if there is none."""
        child = parent.children.get(digest)
        if child is None:
            child = self._new_node(parent, digest, parent.end + page_size)
            parent.children[digest] = child
        return child

    def add_tail(self, parent: PrefixNode, digest: bytes, end: int) -> PrefixNode:
        """Add a tail without blocks."""
        tail = self._new_node(parent, digest, end)
        tail.is_tail = True
        parent.tails[digest] = tail
        return tail

    def _new_node(self, parent: PrefixNode, digest: bytes, end: int) -> PrefixNode:
        pages: list[PageBlocks | None] = [None] * self.num_groups
        node = PrefixNode(parent, digest, parent.end, end, pages)
        node.num_window_users = [0] * self.num_groups
        return node

    def find_tails(self, node: PrefixNode, tokens: list[int], limit: int) -> list[PrefixNode]:
        """Return the tails of `node` that `tokens` begin with, the longest first.

        None of them ends behind `limit`.
        """
        matching = [
            tail
            for tail in node.tails.values()
            if tail.end <= limit
            and extend_digest(node.digest, tokens[tail.start : tail.end]) == tail.digest
        ]
        return sorted(matching, key=lambda tail: -tail.end)

    def remove(self, node: PrefixNode) -> None:
        """Take a leaf out of the tree; an empty root goes, too."""
        parent = node.parent
        assert node.is_leaf and parent is not None
        node.is_dropped = True
        del (parent.tails if node.is_tail else parent.children)[node.digest]
        if parent.parent is None and parent.is_leaf:
            del self.roots[parent.digest]

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes but the roots. Not for hot paths."""
        todo = list(self.roots.values())
        while todo:
            node = todo.pop()
            todo += [*node.children.values(), *node.tails.values()]
            if node.parent is not None:
                yield node

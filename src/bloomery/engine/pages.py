"""What the engine knows of cached pages: their blocks, and the prefix that each of them ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# Where a checkpoint was taken: at the end of a system message, of a prompt or of an answer, where
# two prefixes part, and where a sequence was preempted or aborted.
CheckpointKind = Literal["system", "prompt", "answer", "fork", "preempted", "aborted"]


@dataclass(eq=False, slots=True)
class PageBlocks:
    """The blocks of one page in one cache group."""

    group: int
    blocks: tuple[int, ...]  # table after table
    ref_count: int = 1  # sequences that hold it
    digest: bytes | None = None  # set while it is in the prefix cache


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One page of one prefix, or a tail."""

    parent: PrefixNode | None  # None: a root, which is the empty prefix
    digest: bytes
    start: int  # positions
    end: int
    pages: list[PageBlocks | None]  # by cache group; None: given back
    is_tail: bool = False
    children: dict[bytes, PrefixNode] = field(default_factory=dict)  # by digest
    tails: dict[bytes, PrefixNode] = field(default_factory=dict)  # by digest
    num_live: int = 0  # running sequences whose prefix contains this page
    # By sequence id: the pages of sequences that have this page in blocks of their own.
    duplicates: dict[int, list[list[PageBlocks | None]]] = field(default_factory=dict)
    is_dropped: bool = False
    # By cache group: checkpoints that need this page's blocks of a window group.
    num_window_users: list[int] = field(default_factory=list)
    # The fields below belong to the checkpoint at the node's end.
    checkpoint: tuple[int, ...] = ()  # its blocks; empty: there is none
    kind: CheckpointKind = "prompt"
    num_uses: int = 0
    last_use: float = 0.0
    num_resuming: int = 0  # running sequences that would resume here if they were preempted

    @property
    def is_leaf(self) -> bool:
        """Whether neither another node nor a running sequence needs this page."""
        return not (self.children or self.tails or self.num_live)

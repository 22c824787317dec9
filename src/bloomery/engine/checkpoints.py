"""Which checkpoints of recurrent states are worth their memory.

A state is as large as the keys and values of thousands of positions, so checkpoints are sparse. The
value of one is the tokens that it is expected to save, for each block that only it keeps:

    tokens from the checkpoint before it x odds of another use x recency / blocks

The odds are learned: how often checkpoints of the same kind, used as often, were used once more.
The recency is 1 / (1 + age / usual time between two uses). Nothing of this is configured.

A search looks at a few checkpoints from the old end of a queue only, so its work is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from bloomery.engine.pages import CheckpointKind, PrefixNode
from bloomery.engine.prefix_tree import exclusive_pages

# Checkpoints that one search looks at, and pages that one score looks back. Chosen: with more, the
# figures of benchmarks/cache_groups.py --chats did not change.
MAX_CANDIDATES = 32
MAX_PAGES = 64
# Checkpoints less likely to be used again enter the queue at its old end. Chosen on one trace.
RARE_ODDS = 0.1
GAP_WEIGHT = 0.1  # of the newest in the moving average of the time between two uses
MANY_USES = 2  # checkpoints used as often or more share their odds


class CheckpointIndex:
    """The checkpoints of a prefix tree, and what has been learned about their use."""

    def __init__(self) -> None:
        self.queue: OrderedDict[PrefixNode, None] = OrderedDict()  # least recently used first
        self.now = 0.0  # seconds, on the clock of the scheduler's caller
        self.mean_gap = 1.0  # seconds between two uses of a checkpoint
        # By kind and number of uses: checkpoints that were used so often, and those of them that
        # were used once more.
        self.num_made: Counter[tuple[CheckpointKind, int]] = Counter()
        self.num_reused: Counter[tuple[CheckpointKind, int]] = Counter()
        self.num_saved = 0  # since the start, by a copy or by handover
        self.num_hits = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, node: PrefixNode, kind: CheckpointKind) -> None:
        """Note that a node has got a checkpoint."""
        node.kind = kind
        node.num_uses = 0
        node.last_use = self.now
        self.queue[node] = None
        self.num_made[kind, 0] += 1
        self.num_saved += 1
        self._requeue(node)

    def remove(self, node: PrefixNode) -> None:
        del self.queue[node]

    def count_use(self, node: PrefixNode) -> None:
        """Note that a sequence has resumed from a checkpoint."""
        self.num_hits += 1
        self.mean_gap += GAP_WEIGHT * (self.now - node.last_use - self.mean_gap)
        self.num_reused[node.kind, min(node.num_uses, MANY_USES)] += 1
        node.num_uses += 1
        node.last_use = self.now
        self.num_made[node.kind, min(node.num_uses, MANY_USES)] += 1
        self._requeue(node)

    def _requeue(self, node: PrefixNode) -> None:
        """Put a checkpoint at the recent end, or at the old end if it is rarely used again.

        A fork is spared: the first sequence with a new system prompt cannot know how many follow.
        """
        is_rare = self.estimate_odds(node.kind, node.num_uses) < RARE_ODDS
        self.queue.move_to_end(node, last=not is_rare or node.kind == "fork")

    def estimate_odds(self, kind: CheckpointKind, num_uses: int) -> float:
        """The probability that a checkpoint is used once more."""
        key = kind, min(num_uses, MANY_USES)
        return (self.num_reused[key] + 1) / (self.num_made[key] + 2)

    def estimate_value(self, node: PrefixNode, num_uses: int | None = None) -> float:
        """Expected tokens saved by each block. `num_uses`: as if it had been used so often."""
        start, exclusive = exclusive_pages(node, MAX_PAGES)
        num_blocks = len(node.checkpoint)
        for page_node in exclusive:
            num_blocks += sum(len(page.blocks) for page in page_node.pages if page is not None)
        uses = node.num_uses if num_uses is None else num_uses
        recency = 1 / (1 + (self.now - node.last_use) / max(self.mean_gap, 1e-9))
        odds = self.estimate_odds(node.kind, uses)
        return (node.end - start) * odds * recency / max(num_blocks, 1)

    def find_least_valuable(self, with_anchors: bool = False) -> PrefixNode | None:
        """Return the checkpoint of the least value of some of the oldest.

        `with_anchors`: also one at which a running sequence would resume after a preemption. What
        is passed over for that goes to the recent end, so the next search does not meet it again.
        """
        candidates: list[PrefixNode] = []
        for _ in range(min(len(self.queue), 2 * MAX_CANDIDATES)):
            node = next(iter(self.queue))
            self.queue.move_to_end(node)
            if with_anchors or not node.num_anchors:
                candidates.append(node)
            if len(candidates) == MAX_CANDIDATES:
                break
        for node in reversed(candidates):
            self.queue.move_to_end(node, last=False)
        return min(candidates, key=self.estimate_value, default=None)

"""Which checkpoints of recurrent states are worth their memory.

A state is as large as the keys and values of thousands of positions, so checkpoints are sparse. The
value of one is the number of tokens that it is expected to save per second, for each block that
only it keeps:

    tokens from the checkpoint before it x rate of use at its age / blocks

The rate is learned for each kind of checkpoint and number of uses: a share of them is used once
more, after a typical time. The older a checkpoint is, the more likely it is one of the others.
Nothing of this is configured.

A search looks at a few checkpoints from the old end of a queue only, so its work is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from math import exp

from bloomery.engine.pages import CheckpointKind, PrefixNode

# Checkpoints that one search looks at, and pages that one value looks back. Chosen: with 256
# checkpoints the figures of benchmarks/cache_groups.py --chats changed by less than 0.3 %.
MAX_CANDIDATES = 32
MAX_PAGES = 64
# Checkpoints less likely to be used again enter the queue at its old end. Chosen on one trace.
RARE_ODDS = 0.1
# A checkpoint counts as a fallback for another one if it is at least so much as likely to be used.
# One that is less likely is evicted first, and then the other one saves all tokens. Chosen.
FALLBACK_ODDS = 0.5
GAP_WEIGHT = 0.1  # of the newest in the moving average of the time between two uses
MIN_GAP_SECONDS = 1e-3
MAX_AGE_GAPS = 50.0  # older checkpoints are alike; keeps numbers above zero
MANY_USES = 2  # checkpoints used as often or more are judged together

CheckpointClass = tuple[CheckpointKind, int]  # kind and number of uses


class CheckpointIndex:
    """The checkpoints of a prefix tree, and what has been learned about their use."""

    def __init__(self) -> None:
        self.queue: OrderedDict[PrefixNode, None] = OrderedDict()  # least recently used first
        self.now = 0.0  # seconds, on the clock of the scheduler's caller
        # By class: checkpoints that were used so often, those of them that were used once more, and
        # the seconds that this usually took.
        self.num_made: Counter[CheckpointClass] = Counter()
        self.num_reused: Counter[CheckpointClass] = Counter()
        self.mean_gaps: dict[CheckpointClass, float] = {}
        self.mean_gap = 30.0  # of all classes; the first is a guess
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
        used_class = classify(node.kind, node.num_uses)
        gap = self.now - node.last_use
        class_gap = self.mean_gaps.get(used_class, gap)
        self.mean_gaps[used_class] = class_gap + GAP_WEIGHT * (gap - class_gap)
        self.mean_gap += GAP_WEIGHT * (gap - self.mean_gap)
        self.num_reused[used_class] += 1
        node.num_uses += 1
        node.last_use = self.now
        self.num_made[classify(node.kind, node.num_uses)] += 1
        self._requeue(node)

    def _requeue(self, node: PrefixNode) -> None:
        """Put a checkpoint at the recent end, or at the old end if it is rarely used again.

        A fork is spared: the sequence that takes it cannot know how many others share the prefix.
        The end of a system message is not: how often those are used is learned as for a prompt.
        """
        is_rare = self.estimate_odds(node.kind, node.num_uses) < RARE_ODDS
        self.queue.move_to_end(node, last=not is_rare or node.kind == "fork")

    # ---- values ----------------------------------------------------------------------------------

    def estimate_odds(self, kind: CheckpointKind, num_uses: int) -> float:
        """The share of a class that is used once more."""
        known = classify(kind, num_uses)
        return (self.num_reused[known] + 1) / (self.num_made[known] + 2)

    def estimate_rate(self, kind: CheckpointKind, num_uses: int, age: float) -> float:
        """Expected uses per second of a checkpoint that was last used `age` seconds ago.

        Those that are used again are so after a time with an exponential distribution.
        """
        odds = self.estimate_odds(kind, num_uses)
        gap = max(self.mean_gaps.get(classify(kind, num_uses), self.mean_gap), MIN_GAP_SECONDS)
        still_to_be_used = odds * exp(-min(age / gap, MAX_AGE_GAPS))
        return still_to_be_used / (still_to_be_used + 1 - odds) / gap

    def estimate_value(self, node: PrefixNode, num_uses: int | None = None) -> float:
        """Tokens saved per second by each block. `num_uses`: as if it had been used so often."""
        uses = node.num_uses if num_uses is None else num_uses
        least_odds = FALLBACK_ODDS * self.estimate_odds(node.kind, uses)
        start, exclusive = self._find_exclusive_pages(node, least_odds)
        num_blocks = len(node.checkpoint)
        for page_node in exclusive:
            num_blocks += sum(len(page.blocks) for page in page_node.pages if page is not None)
        rate = self.estimate_rate(node.kind, uses, self.now - node.last_use)
        return (node.end - start) * rate / max(num_blocks, 1)

    def _find_exclusive_pages(
        self, node: PrefixNode, least_odds: float
    ) -> tuple[int, list[PrefixNode]]:
        """What is lost with the checkpoint of `node`.

        Returns the position from which a sequence would have to compute again, and the nodes that
        nothing else needs. Checkpoints with lower odds than `least_odds` are no fallback.
        """
        exclusive = []
        is_exclusive = node.is_leaf
        page = node
        for _ in range(MAX_PAGES):
            if is_exclusive:
                exclusive.append(page)
            before = page.parent
            if before is None or before.parent is None:
                break
            if before.checkpoint and self.estimate_odds(before.kind, before.num_uses) >= least_odds:
                break
            has_one_branch = len(before.children) + len(before.tails) == 1
            is_exclusive = is_exclusive and has_one_branch and not before.num_live
            page = before
        return page.start, exclusive

    def find_least_valuable(self, with_resume_nodes: bool = False) -> PrefixNode | None:
        """Return the checkpoint of the least value of some of the oldest.

        `with_resume_nodes`: also one at which a running sequence would resume after a preemption.
        What is passed over for that goes to the recent end, so the next search does not meet it
        again.
        """
        candidates: list[PrefixNode] = []
        for _ in range(min(len(self.queue), 2 * MAX_CANDIDATES)):
            node = next(iter(self.queue))
            self.queue.move_to_end(node)
            if with_resume_nodes or not node.num_resuming:
                candidates.append(node)
            if len(candidates) == MAX_CANDIDATES:
                break
        for node in reversed(candidates):
            self.queue.move_to_end(node, last=False)
        return min(candidates, key=self.estimate_value, default=None)


def classify(kind: CheckpointKind, num_uses: int) -> CheckpointClass:
    """The class of checkpoints that are judged together."""
    return kind, min(num_uses, MANY_USES)

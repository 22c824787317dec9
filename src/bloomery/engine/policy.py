"""Scheduling policies: queue order, admission, the budget of each step, and preemption victims.

The scheduler leaves these decisions to a Policy. There are two policies: FcfsPolicy (first come,
first served) and FairPolicy.

FairPolicy protects short requests from long ones. A request is short if the step-time model
predicts that it takes little time alone. A short request gets a deadline: a small multiple of its
time alone. Short requests are admitted first, into rows that are reserved for them while some have
arrived recently. If no row is free, a long request may be preempted. engine/chunk_planner.py splits
scheduling rounds into steps so that deadlines are met. The time that long requests lose by this is
the scheduling overhead. The policy counts and bounds it.

The queue is ordered by arrival time plus a multiple of the time alone. This key is fixed at
arrival, so every waiting request is eventually first and no request starves. The tenant (API key)
that was served the fewest seconds comes first. A tenant that already holds its share of the rows
leaves some free rows to the others: rows become free in bursts, and a tenant with few requests
would otherwise wait for the next burst.

All times are seconds on the clock of the scheduler's caller. No clock, no I/O, no torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import exp
from typing import Protocol

from bloomery.config import EnginePlan
from bloomery.engine.chunk_planner import (
    BatchStats,
    ChunkPlanner,
    LatencyTargets,
    PrefillBacklog,
    RequestDeadline,
    collect_batch_stats,
)
from bloomery.engine.sequence import Sequence
from bloomery.engine.step_time import StepFeatures, StepTimeModel
from bloomery.messages import EngineCapacity

# Seconds of waiting that one degree of priority is worth. Chosen.
PRIORITY_SECONDS = 10.0
# Measured steps after which predictions are reliable enough to delay a step by them. Chosen.
MIN_OBSERVED_STEPS = 64
# Seconds. Rows stay reserved for short requests this long after the last one arrived, and a tenant
# counts as present this long after its last request. Chosen; no record of why.
PRESENCE_SECONDS = 30.0
# Seconds over which the overhead is averaged, with exponential decay. Chosen.
OVERHEAD_WINDOW_SECONDS = 30.0
# One in this many rows is reserved for short requests, and long requests leave one in this many
# blocks free. Chosen: 3 % of the capacity.
RESERVED_FRACTION = 32
# Requests of a tenant whose prompts are added up to estimate the queue's prompt tokens. Chosen.
QUEUE_SAMPLE = 8


@dataclass(frozen=True, slots=True)
class SchedulerBudget:
    """What the next step may contain."""

    sequences: Iterable[Sequence]  # running sequences that take part, in order
    prefill_tokens: int  # prompt tokens of all requests together
    # Prefill tokens among these that only short requests may use: running or just admitted.
    reserved_for_short: int = 0
    overhead_seconds: float = 0.0  # expected loss of long requests for the sake of short ones
    # False: a short step of a round. If it turns out empty, the scheduler plans another step.
    includes_streams: bool = True

    def compute_prefill_limit(self, sequence: Sequence, remaining_tokens: int) -> int:
        """Return how many of the remaining prefill tokens a running sequence may use."""
        if sequence.is_short:
            return remaining_tokens
        return remaining_tokens - self.reserved_for_short


class Policy(Protocol):
    """The decisions of the scheduler. A policy holds the queue and knows no block tables."""

    @property
    def overhead_seconds(self) -> float:
        """Seconds that long requests have lost for the sake of short ones, since the start."""
        ...

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Add a sequence that has arrived or was preempted to the queue."""
        ...

    def select_next(self, free_rows: int) -> Sequence | None:
        """Return the sequence to admit next, or None.

        If no row is free, this is a sequence that others should be preempted for.
        """
        ...

    def admit(
        self, sequence: Sequence, free_blocks: int, growth_blocks: int, is_alone: bool
    ) -> bool:
        """Return whether the selected sequence may start to run.

        `free_blocks` would remain after its current tokens are stored. It may later need
        `growth_blocks` more. `is_alone`: nothing else is running.
        """
        ...

    def plan_step(
        self, running: Mapping[int, Sequence], max_tokens: int, now: float
    ) -> SchedulerBudget:
        """Return the budget of the next step, which computes at most `max_tokens` tokens."""
        ...

    def select_victim(
        self, running: Collection[Sequence], claimant: Sequence, now: float
    ) -> Sequence | None:
        """Return the sequence to preempt for the claimant. None: the claimant waits.

        `running` is not empty and in order of admission.
        """
        ...

    def observe_step(self, budget: SchedulerBudget, features: StepFeatures, seconds: float) -> None:
        """Learn how long a step took."""
        ...

    def predict_step_seconds(self, features: StepFeatures) -> float:
        """Return how long a step will take, or 0 if that is not known yet."""
        ...


class FcfsPolicy:
    """First come, first served. The sequence admitted last is preempted first."""

    overhead_seconds = 0.0

    def __init__(self) -> None:
        # (id, number of the push, sequence): a sequence that waits again may be there twice, until
        # the earlier entry is dropped.
        self.queue: list[tuple[int, int, Sequence]] = []
        self.push_numbers = count()

    def enqueue(self, sequence: Sequence, now: float) -> None:
        # Ids count arrivals, so a preempted sequence returns to the front.
        heapq.heappush(self.queue, (sequence.id, next(self.push_numbers), sequence))

    def select_next(self, free_rows: int) -> Sequence | None:
        while self.queue and not self.queue[0][-1].is_waiting:
            heapq.heappop(self.queue)
        if not self.queue or free_rows <= 0:
            return None
        return self.queue[0][-1]

    def admit(
        self, sequence: Sequence, free_blocks: int, growth_blocks: int, is_alone: bool
    ) -> bool:
        return True

    def plan_step(
        self, running: Mapping[int, Sequence], max_tokens: int, now: float
    ) -> SchedulerBudget:
        return SchedulerBudget(list(running.values()), max_tokens)

    def select_victim(
        self, running: Collection[Sequence], claimant: Sequence, now: float
    ) -> Sequence | None:
        if claimant.is_waiting:
            return None
        *_, admitted_last = running
        return admitted_last

    def observe_step(self, budget: SchedulerBudget, features: StepFeatures, seconds: float) -> None:
        pass

    def predict_step_seconds(self, features: StepFeatures) -> float:
        return 0.0


class TenantQueue:
    """Waiting sequences: one heap per tenant, ordered by queue key.

    The tenant that was served the fewest seconds comes first.
    """

    def __init__(self) -> None:
        # (queue key, id, number of the push, sequence). A sequence that waits again may be there
        # twice, until the earlier entry is dropped.
        self.heaps: dict[str, list[tuple[float, int, int, Sequence]]] = {}
        self.push_numbers = count()

    def __contains__(self, tenant: str) -> bool:
        return tenant in self.heaps

    def push(self, sequence: Sequence) -> None:
        heap = self.heaps.setdefault(sequence.request.tenant, [])
        number = next(self.push_numbers)
        heapq.heappush(heap, (sequence.queue_key, sequence.id, number, sequence))

    def estimate_prompt_tokens(self) -> int:
        """Estimate the tokens of all prompts from the first few of each tenant."""
        total = 0
        for heap in self.heaps.values():
            entries = heap[:QUEUE_SAMPLE]
            sample = [len(entry[-1].tokens) for entry in entries if entry[-1].is_waiting]
            total += sum(sample) * len(heap) // max(len(sample), 1)
        return total

    def peek(
        self, served_seconds: Mapping[str, float], excluded_tenants: Collection[str] = ()
    ) -> Sequence | None:
        """Return the sequence to admit next. Entries that no longer wait are dropped."""
        selected: Sequence | None = None
        selected_rank = (0.0, 0.0)
        for tenant, heap in list(self.heaps.items()):
            while heap and not heap[0][-1].is_waiting:
                heapq.heappop(heap)
            if not heap:
                del self.heaps[tenant]
                continue
            if tenant in excluded_tenants:
                continue
            queue_key, _, _, sequence = heap[0]
            rank = (served_seconds.get(tenant, 0.0), queue_key)
            if selected is None or rank < selected_rank:
                selected = sequence
                selected_rank = rank
        return selected


class OverheadBudget:
    """Bounds the time long requests lose for short ones, as a share of all recent time."""

    def __init__(self, max_share: float):
        self.max_share = max_share
        self.recent_overhead = 0.0  # seconds, with exponential decay
        self.recent_seconds = 0.0  # seconds of all steps, with the same decay
        self.total_overhead = 0.0  # seconds since the start

    def charge(self, overhead_seconds: float, step_seconds: float) -> None:
        """Add the overhead of a step and the seconds that the step took."""
        decay = exp(-step_seconds / OVERHEAD_WINDOW_SECONDS)
        self.recent_overhead = decay * self.recent_overhead + overhead_seconds
        self.recent_seconds = decay * self.recent_seconds + step_seconds
        self.total_overhead += overhead_seconds

    @property
    def allowed_seconds(self) -> float:
        return self.max_share * max(self.recent_seconds, OVERHEAD_WINDOW_SECONDS)

    @property
    def used_share(self) -> float:
        """Recent overhead over the allowed overhead: 1 is the bound."""
        return self.recent_overhead / self.allowed_seconds

    @property
    def remaining_seconds(self) -> float:
        return self.allowed_seconds - self.recent_overhead


class FairPolicy:
    """Keeps deadlines of short requests and equal shares of tenants, at a bounded overhead."""

    def __init__(
        self,
        max_num_seqs: int,
        num_blocks: int,
        targets: LatencyTargets | None = None,
        step_time: StepTimeModel | None = None,
    ):
        self.max_num_seqs = max_num_seqs
        self.targets = targets or LatencyTargets()
        self.step_time = step_time or StepTimeModel()
        self.planner = ChunkPlanner(max_num_seqs, self.targets, self.step_time)
        self.overhead = OverheadBudget(self.targets.max_overhead)
        # Rows for short requests: 0 in batches of up to three rows, otherwise at least one.
        self.reserved_rows = max(max_num_seqs // RESERVED_FRACTION, int(max_num_seqs >= 4))
        # Rows for tenants with few rows. Chosen: about as many requests as arrive at once.
        self.min_tenant_rows = round(max_num_seqs**0.5 / 2)
        self.reserved_blocks = num_blocks // RESERVED_FRACTION
        self.short_queue = TenantQueue()
        self.long_queue = TenantQueue()
        self.served_seconds: dict[str, float] = {}  # by tenant
        # served_seconds of the tenant served last. A tenant that arrives starts there, as in
        # virtual-time fair queueing: it gets no credit for the time it was absent.
        self.virtual_time = 0.0
        self.last_request_time: dict[str, float] = {}  # by tenant, if present
        self.rows_by_tenant: Counter[str] = Counter()  # empty unless several tenants are present
        self.rows_left_free = 0  # rows that tenants with their full share do not take
        self.num_short_running = 0
        self.last_step_time = 0.0
        self.last_short_arrival = -PRESENCE_SECONDS

    @property
    def overhead_seconds(self) -> float:
        return self.overhead.total_overhead

    # ---- queue and admission -------------------------------------------------------------------

    def enqueue(self, sequence: Sequence, now: float) -> None:
        tenant = sequence.request.tenant
        if not sequence.num_preemptions:
            self._classify(sequence)
        if sequence.is_short:
            self.last_short_arrival = now
        self.last_request_time[tenant] = now
        if tenant not in self.short_queue and tenant not in self.long_queue:
            served = self.served_seconds.get(tenant, 0.0)
            self.served_seconds[tenant] = max(served, self.virtual_time)
        queue = self.short_queue if sequence.is_short else self.long_queue
        queue.push(sequence)

    def _classify(self, sequence: Sequence) -> None:
        """Decide whether a new request is short, and set its deadline and place in the queue."""
        solo_seconds = self._predict_solo_seconds(sequence)
        short_limit = self.targets.compute_short_request_limit(self.step_time.batch1_seconds)
        allowed_seconds = self.targets.slowdown_target * solo_seconds
        priority_seconds = PRIORITY_SECONDS * sequence.request.priority
        sequence.is_short = solo_seconds <= short_limit
        sequence.uncharged_seconds = solo_seconds
        sequence.deadline = sequence.arrival_time + allowed_seconds
        sequence.queue_key = sequence.deadline + priority_seconds

    def _predict_solo_seconds(self, sequence: Sequence) -> float:
        """Predict how long the request takes if nothing else runs."""
        predict = self.step_time.predict
        length = len(sequence.tokens)
        num_tokens = max(sequence.request.max_tokens - sequence.num_output_tokens, 1)
        # The model is fitted to full batches and may be wrong about small ones. A deadline must not
        # depend on what fills the batch, so every step is corrected by the error at batch 1.
        correction = self.step_time.batch1_seconds - predict(StepFeatures(1))
        prefill_seconds = predict(StepFeatures(length, 0, length * length / 2))
        decode_seconds = predict(StepFeatures(1, length))
        return prefill_seconds + (num_tokens - 1) * decode_seconds + num_tokens * correction

    def select_next(self, free_rows: int) -> Sequence | None:
        excluded = self._find_excluded_tenants(free_rows)
        next_short = self.short_queue.peek(self.served_seconds, excluded)
        reserved_rows = self._count_reserved_rows()
        short_goes_first = next_short is not None and self.num_short_running < reserved_rows
        if free_rows <= reserved_rows or short_goes_first:
            return next_short
        next_long = self.long_queue.peek(self.served_seconds, excluded)
        if next_short is None or next_long is None:
            return next_short or next_long
        return next_short if next_short.queue_key <= next_long.queue_key else next_long

    def _count_reserved_rows(self) -> int:
        """Count the rows reserved for short requests: 0 if no short request arrived recently."""
        since_short = self.last_step_time - self.last_short_arrival
        return self.reserved_rows if since_short < PRESENCE_SECONDS else 0

    def _count_tenant_rows(self, running: Mapping[int, Sequence], now: float) -> None:
        """Count the rows of each tenant, and the rows that tenants with their share leave free.

        They leave free at least `min_tenant_rows` rows, and at least half of the rows that are free
        now. Otherwise they would take a burst of free rows at once and free them again at once.
        """
        self.last_request_time = {
            tenant: last
            for tenant, last in self.last_request_time.items()
            if now - last < PRESENCE_SECONDS
        }
        self.rows_by_tenant.clear()
        if len(self.last_request_time) > 1:
            self.rows_by_tenant.update([sequence.request.tenant for sequence in running.values()])
            free_rows = self.max_num_seqs - len(running)
            self.rows_left_free = max(self.min_tenant_rows, free_rows // 2)

    def _find_excluded_tenants(self, free_rows: int) -> Collection[str]:
        """Return the tenants that get no free row, because they already hold their share."""
        if not self.rows_by_tenant or free_rows > self.rows_left_free:
            return ()
        share = self.max_num_seqs / len(self.last_request_time)
        return {tenant for tenant, rows in self.rows_by_tenant.items() if rows >= share}

    def admit(
        self, sequence: Sequence, free_blocks: int, growth_blocks: int, is_alone: bool
    ) -> bool:
        """Admit a long request only if it leaves the reserved blocks free.

        A long request that was preempted is admitted again only if all its later growth fits, too.
        """
        needed_blocks = self.reserved_blocks
        if sequence.num_preemptions:
            needed_blocks += growth_blocks
        if not is_alone and not sequence.is_short and free_blocks < needed_blocks:
            return False
        tenant = sequence.request.tenant
        self.num_short_running += sequence.is_short
        self.virtual_time = self.served_seconds[tenant]
        self.served_seconds[tenant] += sequence.uncharged_seconds
        self.rows_by_tenant[tenant] += len(self.last_request_time) > 1
        sequence.uncharged_seconds = 0.0  # not charged again after a preemption
        return True

    # ---- the next step -------------------------------------------------------------------------

    def plan_step(
        self, running: Mapping[int, Sequence], max_tokens: int, now: float
    ) -> SchedulerBudget:
        self.last_step_time = now
        self._count_tenant_rows(running, now)
        batch = collect_batch_stats(running)
        self.num_short_running = len(batch.short_requests)
        free_rows = self.max_num_seqs - len(running)
        excluded = self._find_excluded_tenants(free_rows)
        waiting_short = self.short_queue.peek(self.served_seconds, excluded)
        backlog = self._compute_prefill_backlog(batch, waiting_short, free_rows, excluded)
        with_deadline = batch.short_requests
        if waiting_short is not None:
            with_deadline = [*with_deadline, waiting_short]
        step = self.planner.plan_step(
            batch,
            backlog,
            [compute_remaining_deadline(sequence, now) for sequence in with_deadline],
            overhead_used=self.overhead.used_share,
            has_free_rows=free_rows > 0,
            max_tokens=max_tokens,
        )
        sequences = [*batch.short_requests]
        if step.includes_streams:
            sequences += batch.decode_streams
        if step.includes_long_prefills:
            sequences += batch.long_prefills
        reserved = 0
        if waiting_short is not None:
            # Running prefills get a quarter, so that they advance.
            for_running = max(step.prefill_tokens // 4, 1)
            reserved = max(min(backlog.short_tokens, step.prefill_tokens - for_running), 0)
        return SchedulerBudget(
            sequences,
            step.prefill_tokens,
            reserved,
            step.overhead_seconds,
            step.includes_streams,
        )

    def _compute_prefill_backlog(
        self,
        batch: BatchStats,
        waiting_short: Sequence | None,
        free_rows: int,
        excluded: Collection[str],
    ) -> PrefillBacklog:
        """Add up the prompt tokens of running requests and of requests that may be admitted."""
        short_tokens = batch.short_prefill_tokens
        long_tokens = batch.long_prefill_tokens
        longest = batch.longest_prefill_tokens
        if waiting_short is not None:
            # Without a free row one token stands for the request: a row must be freed for it first.
            waiting_tokens = self.short_queue.estimate_prompt_tokens() if free_rows else 1
            short_tokens += waiting_tokens
            longest = max(longest, len(waiting_short.tokens))
        if free_rows > self._count_reserved_rows():
            waiting_long = self.long_queue.peek(self.served_seconds, excluded)
            if waiting_long is not None:
                long_tokens += self.long_queue.estimate_prompt_tokens()
                longest = max(longest, len(waiting_long.tokens))
        return PrefillBacklog(short_tokens, long_tokens, longest)

    def observe_step(self, budget: SchedulerBudget, features: StepFeatures, seconds: float) -> None:
        self.step_time.observe(features, seconds)
        self.overhead.charge(budget.overhead_seconds, seconds)

    def predict_step_seconds(self, features: StepFeatures) -> float:
        if self.step_time.num_observed < MIN_OBSERVED_STEPS:
            return 0.0
        return self.step_time.predict(features)

    # ---- preemption ----------------------------------------------------------------------------

    def select_victim(
        self, running: Collection[Sequence], claimant: Sequence, now: float
    ) -> Sequence | None:
        """Select the long request of the lowest priority that loses the least.

        A running claimant needs blocks and preempts even short requests if there is no long one.
        A waiting claimant is short and needs a row. Until its deadline has passed, it preempts no
        request while short requests run, because they end soon and free a row, and no request
        whose preemption exceeds the overhead budget. It never preempts a request a second time.
        """
        is_running = not claimant.is_waiting
        candidates = [sequence for sequence in running if not sequence.is_short]
        if not is_running:
            candidates = [sequence for sequence in candidates if not sequence.num_preemptions]
        elif not candidates:
            candidates = list(running)
        if not candidates:
            return None
        victim = min(candidates, key=preemption_rank)
        if is_running:
            return victim
        num_lost = victim.num_computed
        lost_seconds = num_lost * self.step_time.predict_prefill_token_seconds(num_lost // 2)
        is_expensive = lost_seconds > self.overhead.remaining_seconds
        if now < claimant.deadline and (self.num_short_running or is_expensive):
            return None
        self.overhead.charge(lost_seconds, 0.0)
        return victim


def compute_remaining_deadline(sequence: Sequence, now: float) -> RequestDeadline:
    """Return the tokens a short request still needs beyond steps in flight, and the time left."""
    num_done = sequence.num_output_tokens + sequence.num_pending
    num_tokens = max(sequence.request.max_tokens - num_done, 1)
    return RequestDeadline(num_tokens, sequence.deadline - now)


def preemption_rank(sequence: Sequence) -> tuple[int, int, int, int]:
    """Order victims: lowest priority, fewest preemptions, least computed, latest arrival."""
    return (
        -sequence.request.priority,
        sequence.num_preemptions,
        sequence.num_computed,
        -sequence.id,
    )


def create_policy(plan: EnginePlan, capacity: EngineCapacity) -> Policy:
    """Create the policy that the engine's plan names."""
    if plan.policy == "fcfs":
        return FcfsPolicy()
    targets = LatencyTargets(
        inter_token_seconds=plan.target_inter_token_seconds,
        short_request_seconds=plan.short_request_seconds,
    )
    step_time = StepTimeModel(capacity.expected_steps)
    return FairPolicy(capacity.max_num_seqs, capacity.blocks, targets, step_time)

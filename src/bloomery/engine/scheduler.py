"""Which positions of which sequences the next step computes. A pure state machine: no clock, no I/O, no torch.

There is no prefill phase and no decode phase: `computed` catches up with `length`, at most `max_num_batched_tokens`
positions a step. The policy says who of the running sequences takes part and how much of prompts; what is left of that
admits others. Times are those of the caller's clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from bloomery.engine.blocks import Blocks
from bloomery.engine.pace import Work
from bloomery.engine.policy import FcfsPolicy, Policy, Portion
from bloomery.engine.sequence import Sequence
from bloomery.errors import InvalidRequest
from bloomery.messages import (
    FinishReason,
    ScheduledRequest,
    EngineRequest,
    SampledTokens,
    NewRequestData,
    ScheduledStep,
    StepOutput,
    TokenOutput,
)


@dataclass(slots=True)
class Flight:
    """A step from when it is put together until its result is in."""

    portion: Portion
    work: Work = field(default_factory=Work)
    going: list[Sequence] = field(default_factory=list)  # by one position
    grown: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # of them
    chunks: list[ScheduledRequest] = field(default_factory=list)
    owners: list[Sequence] = field(default_factory=list)  # of the chunks

    def go_on(self, sequence: Sequence, turn: int) -> None:
        sequence.computed += 1
        sequence.pending += 1
        sequence.steps += 1
        sequence.turn = turn
        self.going.append(sequence)

    def step(self, finished: Collection[int]) -> ScheduledStep:
        going = tuple([sequence.id for sequence in self.going])
        starts = tuple([sequence.computed - 1 for sequence in self.going])
        chunked = work_of(self.chunks)
        self.work = Work(chunked.tokens + len(going), chunked.attended + sum(starts), chunked.pairs)
        return ScheduledStep(tuple(self.chunks), tuple(finished), going, starts, tuple(self.grown))


class Scheduler:
    def __init__(
        self,
        blocks: Blocks,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: Policy | None = None,
        stages: int = 1,
    ):
        """`stages` of a pipeline are all busy when as many groups of sequences take turns."""
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.stages = stages
        self.policy = policy or FcfsPolicy()
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.by_request: dict[str, Sequence] = {}
        self.retired: list[int] = []
        self.leaving: Sequence | None = None  # gives way as soon as no step in flight holds it
        self.expiring: list[
            tuple[float, int, Sequence]
        ] = []  # those with a deadline, the earliest first
        self.scheduled: deque[Flight] = (
            deque()
        )  # steps whose result is not in, with all they hold, ended or not
        self.next_id = self.turn = 0
        self.preemptions = 0

    # ---- arrivals and departures -----------------------------------------------------------------

    def add(self, request: EngineRequest, now: float = 0.0) -> None:
        length = len(request.prompt) + request.max_tokens
        room = self.blocks.count * self.blocks.size
        if length > room:
            raise InvalidRequest(
                f"prompt and max_tokens need {length} cache positions, there are {room}",
                "max_tokens",
            )
        if request.id in self.by_request:
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        sequence = Sequence.of(self.next_id, request, now)
        self.next_id += 1
        self.by_request[request.id] = sequence
        if request.deadline is not None:
            heapq.heappush(self.expiring, (now + request.deadline, sequence.id, sequence))
        self._queue(sequence, now)

    def _queue(self, sequence: Sequence, now: float) -> None:
        sequence.waiting = True
        self.waiting[sequence.id] = sequence
        self.policy.enqueue(sequence, now)

    def abort(self, request_id: str) -> bool:
        """Forget a request at any moment; its blocks come back as soon as no step in flight writes to them."""
        sequence = self.by_request.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, "abort")
        return True

    def expire(self, now: float) -> list[TokenOutput]:
        """End whom its deadline has overtaken, in the queue or in the middle of its answer."""
        news = []
        while self.expiring and self.expiring[0][0] <= now:
            sequence = heapq.heappop(self.expiring)[2]
            if sequence.finish is None:
                where = "in the queue" if sequence.waiting else f"after {sequence.produced} tokens"
                self._finish(sequence, "deadline")
                why = f"the deadline of {1000 * (sequence.request.deadline or 0):.0f} ms passed {where}"
                news.append(
                    TokenOutput(
                        sequence.request.id, sequence.produced, finish="deadline", error=why
                    )
                )
        return news

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def expected(self) -> float:
        """Seconds that the oldest step in flight should take, if the policy can tell."""
        return self.policy.foretell(self.scheduled[0].work)

    @property
    def steady(self) -> bool:
        """Whether every step in flight holds everybody by one position, and the next can, for no row can change: nobody
        waits, nobody can end but by its limit, and there are blocks enough for nobody to give way."""
        count = len(self.running)
        return (
            not self.waiting
            and count <= self.blocks.available
            and all(len(flight.going) == count and not flight.chunks for flight in self.scheduled)
            and not any(sequence.request.stop_ids for sequence in self.running.values())
        )

    # ---- the next step ---------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed until a result comes in."""
        preemptions = self.preemptions
        self._let_go(now)
        self.turn += 1
        flight = Flight(Portion((), 0, whole=False))
        while not flight.going and not flight.chunks:
            if flight.portion.whole:
                return None
            flight = Flight(self.policy.compose(self.running, self.max_num_batched_tokens, now))
            budget, chunk = self._continue(flight, now)
            if preemptions == self.preemptions:
                self._admit(flight, min(budget, chunk), now)
        step = flight.step(self.retired)
        self.scheduled.append(flight)
        self.retired.clear()
        return step

    def _continue(self, flight: Flight, now: float) -> tuple[int, int]:
        """What is left of the step's positions, and of those for prompts."""
        portion = flight.portion
        go_on = flight.go_on
        turn = self.turn
        budget = self.max_num_batched_tokens
        chunk = portion.chunk
        share = -(-len(self.running) // self.stages)
        taking_turns = self.stages > 1
        for sequence in portion.order:
            if budget <= 0 or share <= 0:
                break
            if (
                taking_turns and sequence.pending
            ):  # its token is at the pipeline's end, and wanted at its beginning
                continue
            if (
                sequence.computed < sequence.clear and not sequence.drafts
            ):  # by far the most frequent
                go_on(sequence, turn)
                budget = budget - 1
                share = share - 1
                continue
            # A sequence with drafts waits for its verdict; one preempted just now is in `running` no more.
            if (
                sequence.ending
                or (sequence.drafts and sequence.steps)
                or sequence.leaving
                or sequence.waiting
            ):
                continue
            behind = sequence.length - sequence.computed
            drafts = sequence.drafts[: budget - 1] if behind == 1 and not sequence.pending else []
            count = min(behind, budget - len(drafts))
            if behind > 1:
                count = min(count, chunk if sequence.short else chunk - portion.kept)
            if count <= 0:
                continue
            grown = self._make_room(sequence, sequence.computed + count + len(drafts), now)
            if grown is None:
                continue
            if behind == 1 and not sequence.drafts and sequence.computed >= sequence.began:
                flight.grown.append((sequence.id, tuple(grown)))
                go_on(sequence, turn)
                self._look_ahead(sequence)
            else:
                self._place(flight, sequence, count, grown, None, drafts)
            budget = budget - count - len(drafts)
            share = share - 1
            if behind > 1:
                chunk -= count
        return budget, chunk

    def _make_room(self, sequence: Sequence, length: int, now: float) -> Collection[int] | None:
        """Blocks for `length` positions, preempting if need be; None if the sequence must sit this step out."""
        if length <= len(sequence.blocks) * self.blocks.size:
            return ()
        while (grown := self.blocks.extend(sequence, length, [])) is None:
            if not self._displace(sequence, now) or sequence.waiting:
                return None
        return grown

    def _displace(self, claimant: Sequence, now: float) -> bool:
        """Make room for it. False if that takes until the pipeline has drained, or nobody shall give way."""
        if self.leaving is not None:
            return False
        victim = self.policy.victim(self.running.values(), claimant, now)
        if victim is None:
            return False
        if victim.steps:
            self.leaving = victim
            victim.leaving = True
            victim.clear = 0
            return False
        self._preempt(victim, now)
        return True

    def _let_go(self, now: float) -> None:
        victim = self.leaving
        if victim is not None and (victim.finish is not None or not victim.steps):
            self.leaving = None
            victim.leaving = False
            if victim.finish is None:
                self._preempt(victim, now)

    def _admit(self, flight: Flight, budget: int, now: float) -> None:
        while self.waiting and budget > 0:
            rows = self.max_num_seqs - len(self.running)
            sequence = self.policy.next(rows)
            if sequence is None:
                return
            shared = self.blocks.match(sequence)
            if rows <= 0 or (grown := self._enter(sequence, shared, budget)) is None:
                if self.running:
                    self._displace(sequence, now)
                return
            hit = len(shared) * self.blocks.size
            count = min(sequence.length - hit, budget)
            del self.waiting[sequence.id]
            sequence.waiting = False
            self.running[sequence.id] = sequence
            sequence.computed = hit
            sequence.began = len(sequence.tokens)
            if sequence.cached is None:
                sequence.cached = hit
            request = sequence.request
            start = NewRequestData(
                tuple(sequence.tokens),
                len(request.prompt),
                request.sampling,
                request.stop_ids,
                request.pooling,
            )
            self._place(flight, sequence, count, grown, start, [])
            budget -= count

    def _enter(self, sequence: Sequence, shared: list[int], budget: int) -> list[int] | None:
        """The blocks of its first chunk on top of the shared ones, if the policy lets it in and they are there."""
        size = self.blocks.size
        length = sequence.length
        request = sequence.request
        hit = len(shared)
        whole = -(-length // size)
        free = (
            self.blocks.available
            - (whole - hit)
            - sum(self.blocks.refs[block] == 0 for block in shared)
        )
        growth = -(-(length + request.max_tokens - sequence.produced) // size) - whole
        if not self.policy.admit(sequence, free, growth, not self.running):
            return None
        return self.blocks.extend(sequence, min(length, hit * size + budget), shared)

    def _place(
        self,
        flight: Flight,
        sequence: Sequence,
        count: int,
        grown: Collection[int],
        first: NewRequestData | None,
        drafts: list[int],
    ) -> None:
        start = sequence.computed
        samples = start + count == sequence.length
        flight.chunks.append(
            ScheduledRequest(sequence.id, start, count, tuple(grown), first, tuple(drafts), samples)
        )
        flight.owners.append(sequence)
        sequence.computed = start + count
        sequence.pending += samples
        sequence.steps += 1
        sequence.turn = self.turn
        self.blocks.publish(sequence)
        if samples:
            self._look_ahead(sequence)

    def _look_ahead(self, sequence: Sequence) -> None:
        """It has drawn a token, so it goes on by one until it needs a block more or has reached its limit."""
        sequence.clear = min(len(sequence.blocks) * self.blocks.size, sequence.limit - 1)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """As if it had never run: on return it is a new request with a longer prompt."""
        del self.running[sequence.id]
        self.blocks.release(sequence)
        sequence.clear = 0
        sequence.drafts.clear()
        sequence.prompt_logprobs.clear()
        self.retired.append(sequence.id)
        self.preemptions += 1
        sequence.losses += 1
        self._queue(sequence, now)

    # ---- a step's result -------------------------------------------------------------------------

    def update(
        self, step: ScheduledStep, output: StepOutput, seconds: float = 0.0
    ) -> list[TokenOutput]:
        """Fold one step's result back in; steps must come back in the order they were scheduled. It took `seconds`
        since the one before, or since it was begun."""
        flight = self.scheduled.popleft()
        self.policy.observe(flight.portion, flight.work, seconds)
        sampled = {entry.sequence: entry for entry in output.samples}
        news: list[TokenOutput] = []
        if output.tokens:
            self._take(flight.going, output.tokens, news)
        else:
            for sequence in flight.going:
                self._fold(sequence, True, sampled.get(sequence.id), news)
        for item, sequence in zip(step.chunks, flight.owners, strict=True):
            self._fold(sequence, item.samples, sampled.get(sequence.id), news)
        return news

    def _take(
        self, going: Iterable[Sequence], drawn: Iterable[int], news: list[TokenOutput]
    ) -> None:
        """A token each for those that went on: what `_fold` does, where nothing but the token is new."""
        size = self.blocks.size if self.blocks.prefix_cache else 0
        for sequence, token in zip(going, drawn, strict=True):
            request = sequence.request
            tokens = sequence.tokens
            length = len(tokens) + 1
            if (
                sequence.finish is not None
                or length >= sequence.limit
                or token in request.stop_ids
                or sequence.drafts
                or (size and length // size > len(sequence.chain))
            ):
                self._fold(sequence, True, SampledTokens(sequence.id, (token,)), news)
                continue
            sequence.steps -= 1
            sequence.pending -= 1
            tokens.append(token)
            news.append(
                TokenOutput(
                    request.id,
                    length - 1 - len(request.prompt),
                    (token,),
                    (),
                    (),
                    sequence.cached or 0,
                )
            )

    def _fold(
        self,
        sequence: Sequence,
        samples: bool,
        entry: SampledTokens | None,
        news: list[TokenOutput],
    ) -> None:
        sequence.steps -= 1
        sequence.pending -= samples
        if sequence.finish is not None:
            if not sequence.steps:
                self.blocks.release(sequence)
        elif entry is not None:
            sequence.prompt_logprobs += entry.prompt_logprobs
            if samples:
                news.append(self._accept(sequence, entry))

    def _accept(self, sequence: Sequence, entry: SampledTokens) -> TokenOutput:
        request = sequence.request
        ids = entry.tokens
        tokens = sequence.tokens
        if request.pooling is not None:
            self._finish(sequence, "stop")
            return TokenOutput(
                request.id, 0, cached=sequence.cached or 0, finish="stop", embedding=entry.embedding
            )
        position = len(tokens) - len(request.prompt)
        sequence.computed += len(ids) - 1  # accepted drafts are already in the cache
        if sequence.drafts:
            sequence.drafts.clear()
        finish: FinishReason | None = None
        for count, token in enumerate(ids, position + 1):
            tokens.append(token)
            if token in request.stop_ids and count > request.sampling.min_tokens:
                finish = "stop"
            elif count >= request.max_tokens:
                finish = "length"
            if finish:
                ids = ids[: count - position]
                break
        prompt_logprobs = (
            tuple(sequence.prompt_logprobs) if position == len(request.emitted) else ()
        )
        self.blocks.publish(sequence)
        if finish:
            self._finish(sequence, finish)
        logprobs = entry.logprobs[: len(ids)]
        return TokenOutput(
            request.id, position, ids, logprobs, prompt_logprobs, sequence.cached or 0, finish
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        del self.by_request[sequence.request.id]
        self.waiting.pop(sequence.id, None)
        sequence.waiting = False
        if self.running.pop(sequence.id, None):
            self.retired.append(sequence.id)
        if not sequence.steps:
            self.blocks.release(sequence)


def work_of(items: Collection[ScheduledRequest]) -> Work:
    tokens = attended = 0
    pairs = 0.0
    for item in items:
        count = item.count
        if count == 1 and not item.drafts:
            tokens += 1
            attended += item.start
        else:
            count += len(item.drafts)
            tokens += count
            pairs += count * (item.start + count / 2)
    return Work(tokens, attended, pairs)

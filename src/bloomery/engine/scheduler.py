"""Decides which positions of which sequences the next step computes: continuous batching.

A pure state machine: no clock, no I/O, no torch. Times are those of the caller's clock.

There is no prefill phase and no decode phase. `num_computed` of each sequence catches up with its
`length`, by at most `max_num_batched_tokens` positions per step over all sequences. The policy says
which running sequences take part in a step and how many prompt tokens it may compute (chunked
prefill). What is left of that budget admits waiting sequences.

Several steps may be in flight. A sequence can be scheduled again before its last token is known,
because the worker keeps that token itself.

A sequence with a LoRA adapter is admitted when the adapter has a device slot. Until then it leaves
the policy's queue, so that it blocks nobody (engine/adapter_slots.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from bloomery.cache_groups import longest_sequence
from bloomery.engine.adapter_slots import AdapterSlots
from bloomery.engine.block_pool import BlockPool, PrefixHit
from bloomery.engine.policy import FcfsPolicy, Policy, SchedulerBudget
from bloomery.engine.sequence import Sequence, TokenMatcher
from bloomery.engine.state_pool import StatePool
from bloomery.engine.step_time import StepFeatures
from bloomery.errors import InvalidRequest
from bloomery.messages import (
    EngineRequest,
    FinishReason,
    NewRequestData,
    SampledTokens,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
    TokenLogprob,
    TokenOutput,
)

# Sequences that wait for a state at the same time. Each is looked up in the prefix cache at each
# step.
MAX_AWAITING_STATE = 16
LORA_IS_OFF = "this engine runs no LoRA adapters: start it with enable_lora (--enable-lora)"


@dataclass(slots=True)
class InFlightStep:
    """A step from the moment it is put together until its result has been processed."""

    budget: SchedulerBudget
    features: StepFeatures = field(default_factory=StepFeatures)
    decodes: list[Sequence] = field(default_factory=list)  # compute one position each
    decode_blocks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # new blocks
    chunks: list[ScheduledRequest] = field(default_factory=list)
    chunk_sequences: list[Sequence] = field(default_factory=list)  # of `chunks`, in order
    masked: list[Sequence] = field(default_factory=list)  # sample a token that a grammar allows
    lora_loads: list[tuple[int, str]] = field(default_factory=list)  # (device slot, adapter)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    def add_decode(self, sequence: Sequence) -> None:
        sequence.num_computed += 1
        sequence.num_pending += 1
        sequence.steps_in_flight += 1
        self.decodes.append(sequence)

    def to_message(
        self, finished: Collection[int], block_copies: tuple[tuple[int, int], ...]
    ) -> ScheduledStep:
        """Build the message for the workers and record the features of the step."""
        ids = tuple([sequence.id for sequence in self.decodes])
        positions = tuple([sequence.num_computed - 1 for sequence in self.decodes])
        chunk_features = compute_step_features(self.chunks)
        self.features = StepFeatures(
            chunk_features.num_tokens + len(ids),
            chunk_features.decode_keys + sum(positions),
            chunk_features.prefill_pairs,
        )
        chunks = tuple(self.chunks)
        self.masked = [sequence for sequence in self.decodes if sequence.matcher is not None]
        for chunk, sequence in zip(chunks, self.chunk_sequences, strict=True):
            if chunk.samples and sequence.matcher is not None:
                self.masked.append(sequence)
        masked_ids = tuple([sequence.id for sequence in self.masked])
        return ScheduledStep(
            chunks,
            tuple(finished),
            ids,
            positions,
            tuple(self.decode_blocks),
            masked_ids,
            block_copies,
            tuple(self.lora_loads),
        )


class Scheduler:
    """Holds all requests of one engine and builds its steps."""

    def __init__(
        self,
        block_pool: BlockPool | StatePool,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: Policy | None = None,
        stages: int = 1,
        max_loras: int = 0,
    ):
        """`stages` pipeline stages stay busy because as many groups of sequences alternate.

        `max_loras` is the number of device slots for LoRA adapters.
        """
        self.block_pool = block_pool
        # The pool, if sequences have recurrent states.
        self.state_pool = block_pool if isinstance(block_pool, StatePool) else None
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.stages = stages
        self.policy = policy or FcfsPolicy()
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}  # in order of admission
        self.by_request: dict[str, Sequence] = {}  # by request id, until the request ends
        self.finished_ids: list[int] = []  # sequences that workers drop with the next step
        # Chosen for preemption, which waits until no step in flight contains the sequence.
        self.pending_victim: Sequence | None = None
        self.deadlines: list[tuple[float, int, Sequence]] = []  # heap, the earliest first
        # Steps without a result yet, with all their sequences, finished or not.
        self.in_flight: deque[InFlightStep] = deque()
        self.next_id = 0
        self.num_preemptions = 0
        self.adapter_slots: AdapterSlots[Sequence] = AdapterSlots(max_loras)
        # Sequences of the last step's queue whose state another sequence computes.
        self.awaiting_state: list[Sequence] = []
        self.ended_adapters: list[str] = []  # of the requests that have ended; the owner clears it

    # ---- arrivals and departures ---------------------------------------------------------------

    def add(
        self,
        request: EngineRequest,
        now: float = 0.0,
        matcher: TokenMatcher | None = None,
        adapter_version: str = "",
    ) -> None:
        """Put a request into the queue. Raises InvalidRequest if it can never run.

        A request with a grammar comes with the grammar's `matcher`. `adapter_version` names the
        weights of its LoRA adapter, which must be in host memory.
        """
        if request.lora and not self.adapter_slots.slots:
            raise InvalidRequest(LORA_IS_OFF, "model")
        self._check_capacity(len(request.prompt) + request.max_tokens)
        if request.id in self.by_request:
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        sequence = Sequence.from_request(self.next_id, request, now, matcher)
        sequence.adapter_version = adapter_version
        self.next_id += 1
        self.by_request[request.id] = sequence
        if request.deadline is not None:
            heapq.heappush(self.deadlines, (now + request.deadline, sequence.id, sequence))
        self._enqueue(sequence, now)

    def _check_capacity(self, length: int) -> None:
        """Raise InvalidRequest if the KV cache cannot hold a sequence of `length` tokens."""
        pool = self.block_pool
        needed_blocks = pool.count_held_blocks(length, self.max_num_batched_tokens)
        if needed_blocks > pool.num_blocks:
            capacity = longest_sequence(
                pool.groups, pool.num_blocks, pool.page_size, self.max_num_batched_tokens, length
            )
            raise InvalidRequest(
                f"prompt and max_tokens need {length} cache positions, there are {capacity}",
                "max_tokens",
            )

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.is_waiting = True
        self.waiting[sequence.id] = sequence
        self.policy.enqueue(sequence, now)

    def abort(self, request_id: str) -> bool:
        """End a request. Returns False if it is unknown or has ended.

        Its blocks return to the pool when no step in flight writes to them.
        """
        sequence = self.by_request.get(request_id)
        if sequence is None:
            return False
        self._finish_sequence(sequence, "abort")
        return True

    def finish_expired(self, now: float) -> list[TokenOutput]:
        """End the requests whose deadline has passed, whether they wait or run."""
        outputs = []
        while self.deadlines and self.deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self.deadlines)
            if sequence.finish_reason is not None:
                continue
            request = sequence.request
            num_tokens = sequence.num_output_tokens
            is_queued = sequence.id in self.waiting
            where = "in the queue" if is_queued else f"after {num_tokens} tokens"
            milliseconds = 1000 * (request.deadline or 0)
            error = f"the deadline of {milliseconds:.0f} ms passed {where}"
            self._finish_sequence(sequence, "deadline")
            outputs.append(TokenOutput(request.id, num_tokens, finish="deadline", error=error))
        return outputs

    def fail_sequence(self, sequence: Sequence, error: str) -> TokenOutput:
        """End a request that cannot go on; others are not affected."""
        self._finish_sequence(sequence, "error")
        request = sequence.request
        return TokenOutput(request.id, sequence.num_output_tokens, finish="error", error=error)

    def stop_sequence(self, sequence: Sequence) -> TokenOutput:
        """End a request whose output is complete."""
        self._finish_sequence(sequence, "stop")
        return TokenOutput(sequence.request.id, sequence.num_output_tokens, finish="stop")

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def predict_oldest_step_seconds(self) -> float:
        """Predict the time of the oldest step in flight. 0: the policy cannot predict it yet."""
        return self.policy.predict_step_seconds(self.in_flight[0].features)

    @property
    def can_queue_ahead(self) -> bool:
        """Whether more steps than usual may be in flight, because the batch cannot change.

        No sequence waits. Every step in flight decodes all running sequences. No sequence can end
        before its maximum length, and none has a grammar. The next step needs no preemption.
        """
        num_running = len(self.running)
        return (
            not self.waiting
            and num_running * self.block_pool.page_blocks <= self.block_pool.num_free_blocks
            and all(len(step.decodes) == num_running and not step.chunks for step in self.in_flight)
            and not any(
                sequence.request.stop_ids or sequence.matcher is not None
                for sequence in self.running.values()
            )
        )

    # ---- the next step -------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> ScheduledStep | None:
        """Build the next step. Returns None if no sequence can run before another result."""
        preemptions_before = self.num_preemptions
        if self.state_pool is not None:
            self.state_pool.begin_step(now)
        self._preempt_pending_victim(now)
        self._resume_waiting_for_state(now)
        if self.adapter_slots.waiting:
            for sequence in self.adapter_slots.grant_slots(now):
                self._enqueue(sequence, now)
        while True:
            budget = self.policy.plan_step(self.running, self.max_num_batched_tokens, now)
            step = InFlightStep(budget)
            step_tokens, prefill_tokens = self._schedule_running(step, now)
            if preemptions_before == self.num_preemptions:
                self._admit_waiting(step, min(step_tokens, prefill_tokens), now)
            if not step.is_empty:
                break
            if budget.includes_streams:
                return None
        block_copies = () if self.state_pool is None else self.state_pool.take_copies()
        message = step.to_message(self.finished_ids, block_copies)
        self.in_flight.append(step)
        self.finished_ids.clear()
        return message

    def _schedule_running(self, step: InFlightStep, now: float) -> tuple[int, int]:
        """Add running sequences to the step.

        Returns the tokens that the step may still compute, and how many of them may be prefill.
        """
        budget = step.budget
        add_decode = step.add_decode
        step_tokens = self.max_num_batched_tokens
        prefill_tokens = budget.prefill_tokens
        # With pipeline stages, a step contains one of `stages` groups of sequences.
        rows_left = -(-len(self.running) // self.stages)
        has_stages = self.stages > 1
        for sequence in budget.sequences:
            if step_tokens <= 0 or rows_left <= 0:
                break
            # The first pipeline stage needs the token that the last stage still computes.
            if has_stages and sequence.num_pending:
                continue
            # By far the most frequent case.
            if sequence.num_computed < sequence.decode_until and not sequence.drafts:
                add_decode(sequence)
                step_tokens -= 1
                rows_left -= 1
                continue
            if self.state_pool is not None:
                sequence.drafts.clear()  # a state cannot be rolled back if a draft is rejected
            # Drafts in flight must be verified first. A sequence may be waiting here because it was
            # preempted for another sequence of this step.
            if (
                sequence.is_last_token_pending
                or (sequence.drafts and sequence.steps_in_flight)
                or sequence.is_pending_victim
                or sequence.is_waiting
            ):
                continue
            remaining = sequence.length - sequence.num_computed
            drafts: list[int] = []
            if remaining == 1 and not sequence.num_pending:
                drafts = sequence.drafts[: step_tokens - 1]
            count = min(remaining, step_tokens - len(drafts))
            if remaining > 1:
                count = min(count, budget.compute_prefill_limit(sequence, prefill_tokens))
                count = self._limit_chunk(sequence, count)
                if self.state_pool is not None:
                    count = self.state_pool.limit_chunk(sequence, count)
            if count <= 0:
                continue
            length = sequence.num_computed + count + len(drafts)
            new_blocks = self._allocate(sequence, length, now)
            if new_blocks is None:
                continue
            # A worker has the token of a decode only if it has sampled that token itself.
            is_sampled_by_worker = sequence.num_computed >= sequence.initial_length
            if remaining == 1 and not sequence.drafts and is_sampled_by_worker:
                step.decode_blocks.append((sequence.id, new_blocks))
                add_decode(sequence)
                self._set_decode_limit(sequence)
            else:
                self._add_chunk(step, sequence, count, new_blocks, None, drafts)
            step_tokens -= count + len(drafts)
            rows_left -= 1
            if remaining > 1:
                prefill_tokens -= count
        return step_tokens, prefill_tokens

    def _limit_chunk(self, sequence: Sequence, count: int) -> int:
        """Shorten a chunk to what free blocks can hold, if blocks return to the pool behind it.

        In a window group a long chunk takes more blocks than the sequence keeps. A shorter chunk
        is better than a preemption.
        """
        pool = self.block_pool
        if not pool.windows:
            return count
        num_free_pages = pool.num_free_blocks // pool.page_blocks
        free_positions = (sequence.num_pages + num_free_pages) * pool.page_size
        fitting = free_positions - sequence.num_computed
        return min(count, fitting) if fitting > 0 else count

    def _allocate(self, sequence: Sequence, length: int, now: float) -> tuple[int, ...] | None:
        """Grow the block tables to `length` positions and return the new blocks.

        Preempts other sequences if the pool is empty. Returns None if the sequence cannot be part
        of this step.
        """
        pool = self.block_pool
        if length <= sequence.num_pages * pool.page_size:
            return ()
        while True:
            new_blocks = pool.extend(sequence, length)
            if new_blocks is not None:
                return new_blocks
            if not self._preempt_for(sequence, now) or sequence.is_waiting:
                return None

    def _preempt_for(self, claimant: Sequence, now: float) -> bool:
        """Preempt a sequence for the claimant. Returns whether its blocks are free now.

        A victim that a step in flight contains is preempted later. The policy may choose no victim.
        """
        if self.pending_victim is not None:
            return False
        victim = self.policy.select_victim(self.running.values(), claimant, now)
        if victim is None:
            return False
        if victim is claimant and victim.steps_in_flight and self.block_pool.windows:
            return False  # the end of these steps may free blocks of its own
        if victim.steps_in_flight:
            self.pending_victim = victim
            victim.is_pending_victim = True
            victim.decode_until = 0
            return False
        self._preempt(victim, now)
        return True

    def _preempt_pending_victim(self, now: float) -> None:
        """Preempt the victim chosen earlier once no step in flight contains it."""
        victim = self.pending_victim
        if victim is None:
            return
        if victim.finish_reason is None and victim.steps_in_flight:
            return
        self.pending_victim = None
        victim.is_pending_victim = False
        if victim.finish_reason is None:
            self._preempt(victim, now)

    def _admit_waiting(self, step: InFlightStep, prefill_tokens: int, now: float) -> None:
        """Start waiting sequences while rows, blocks and prefill tokens last."""
        while self.waiting and prefill_tokens > 0:
            free_rows = self.max_num_seqs - len(self.running)
            sequence = self.policy.select_next(free_rows)
            if sequence is None:
                return
            adapter = sequence.request.lora
            if adapter and self.adapter_slots.find(adapter) is None:
                self._wait_for_slot(sequence, now)
                continue
            hit = self.block_pool.find_prefix(sequence)
            if hit.is_awaited and not step.is_empty:
                if len(self.awaiting_state) == MAX_AWAITING_STATE:
                    return
                self._wait_for_state(sequence)
                continue
            count = min(sequence.length - hit.position, prefill_tokens)
            if self.state_pool is not None:
                count = self.state_pool.limit_first_chunk(sequence, hit, count)
            blocks = None
            if free_rows > 0:
                blocks = self._allocate_first_chunk(sequence, hit, count)
            if blocks is None:
                if self.running:
                    self._preempt_for(sequence, now)
                return
            lora_slot = self._use_adapter(step, sequence) if adapter else 0
            new_request = self._move_to_running(sequence, hit.position, lora_slot)
            self._add_chunk(step, sequence, count, blocks, new_request, [])
            prefill_tokens -= count

    def _wait_for_slot(self, sequence: Sequence, now: float) -> None:
        """Take a waiting sequence out of the policy's queue until its adapter gets a slot."""
        sequence.is_waiting = False
        request = sequence.request
        self.adapter_slots.wait(request.lora, request.id, sequence, now)

    def _wait_for_state(self, sequence: Sequence) -> None:
        """Take a waiting sequence out of the policy's queue until the next step.

        Another sequence computes the state at which it can resume. Those behind it go on.
        """
        sequence.is_waiting = False
        self.awaiting_state.append(sequence)

    def _resume_waiting_for_state(self, now: float) -> None:
        """Put the sequences that waited for a state in the last step back into the queue."""
        for sequence in self.awaiting_state:
            if sequence.finish_reason is None:
                self._enqueue(sequence, now)
        self.awaiting_state.clear()

    def _use_adapter(self, step: InFlightStep, sequence: Sequence) -> int:
        """Return the device slot of the sequence's adapter, which the step loads if need be."""
        request = sequence.request
        slot = self.adapter_slots.find(request.lora)
        assert slot is not None, "a sequence was admitted without a slot for its adapter"
        if self.adapter_slots.use(slot, request.lora, request.id):
            step.lora_loads.append((slot.number, request.lora))
        return slot.number

    def forget_adapter(self, adapter: str) -> None:
        """Empty the device slot of an adapter that is not in host memory any more."""
        self.adapter_slots.forget(adapter)

    def _move_to_running(
        self, sequence: Sequence, num_hit_tokens: int, lora_slot: int
    ) -> NewRequestData:
        """Move a sequence from `waiting` to `running`. Returns what the workers need to know.

        The first `num_hit_tokens` tokens of the sequence are a prefix hit.
        """
        del self.waiting[sequence.id]
        sequence.is_waiting = False
        self.running[sequence.id] = sequence
        sequence.num_computed = num_hit_tokens
        sequence.num_settled = num_hit_tokens
        sequence.initial_length = len(sequence.tokens)
        if sequence.num_cached is None:
            sequence.num_cached = num_hit_tokens
        request = sequence.request
        return NewRequestData(
            tuple(sequence.tokens),
            len(request.prompt),
            request.sampling,
            request.stop_ids,
            request.pooling,
            sequence.state,
            lora_slot,
        )

    def _allocate_first_chunk(
        self, sequence: Sequence, hit: PrefixHit, count: int
    ) -> tuple[int, ...] | None:
        """Allocate blocks for the first chunk, of `count` positions after the prefix hit.

        Returns None if the policy does not admit the sequence or too few blocks are free.
        """
        pool = self.block_pool
        length = sequence.length
        num_hit_blocks = sum(len(page.blocks) for page in hit.shared_pages)
        step_tokens = self.max_num_batched_tokens
        num_blocks = pool.count_held_blocks(length, step_tokens)
        free_blocks = (
            pool.num_free_blocks
            - max(num_blocks - num_hit_blocks, 0)
            - pool.count_unreferenced(hit)
        )
        final_length = length + sequence.request.max_tokens - sequence.num_output_tokens
        growth_blocks = pool.count_held_blocks(final_length, step_tokens) - num_blocks
        if not self.policy.admit(sequence, free_blocks, growth_blocks, not self.running):
            return None
        return pool.extend(sequence, hit.position + count, hit)

    def _add_chunk(
        self,
        step: InFlightStep,
        sequence: Sequence,
        count: int,
        new_blocks: tuple[int, ...],
        new_request: NewRequestData | None,
        drafts: list[int],
    ) -> None:
        """Add `count` positions of a sequence to the step, and its drafts."""
        start = sequence.num_computed
        samples = start + count == sequence.length
        step.chunks.append(
            ScheduledRequest(
                sequence.id, start, count, new_blocks, new_request, tuple(drafts), samples
            )
        )
        step.chunk_sequences.append(sequence)
        sequence.num_computed = start + count
        sequence.num_pending += samples
        sequence.steps_in_flight += 1
        self.block_pool.publish(sequence)
        if self.state_pool is not None:
            self.state_pool.save_due_checkpoint(sequence)
        if samples:
            self._set_decode_limit(sequence)

    def _set_decode_limit(self, sequence: Sequence) -> None:
        """Let the sequence decode until it needs a block or samples its last token."""
        block_positions = sequence.num_pages * self.block_pool.page_size
        sequence.decode_until = min(block_positions, sequence.max_num_tokens - 1)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Stop a sequence, free its blocks and put it back into the queue.

        It will be admitted like a new request whose prompt includes the output so far.
        """
        del self.running[sequence.id]
        self.block_pool.release(sequence)
        if sequence.request.lora:
            self.adapter_slots.release(sequence.request.lora)
        sequence.decode_until = 0
        sequence.drafts.clear()
        sequence.prompt_logprobs.clear()
        self.finished_ids.append(sequence.id)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._enqueue(sequence, now)

    # ---- the result of a step ------------------------------------------------------------------

    def update(
        self, step: ScheduledStep, output: StepOutput, seconds: float = 0.0
    ) -> list[TokenOutput]:
        """Process the result of a step. Results must come in the order of the steps.

        `seconds` is the time since the previous result, or since the step began.
        """
        in_flight = self.in_flight.popleft()
        self.policy.observe_step(in_flight.budget, in_flight.features, seconds)
        sampled = {entry.sequence: entry for entry in output.samples}
        outputs: list[TokenOutput] = []
        if output.tokens:
            self._append_decoded(in_flight.decodes, output.tokens, output.logprobs, outputs)
        else:
            for sequence in in_flight.decodes:
                self._update_sequence(sequence, True, sampled.get(sequence.id), outputs)
        for chunk, sequence in zip(step.chunks, in_flight.chunk_sequences, strict=True):
            sequence.num_settled = chunk.start + chunk.count
            self._update_sequence(sequence, chunk.samples, sampled.get(sequence.id), outputs)
        return outputs

    def _append_decoded(
        self,
        decodes: Iterable[Sequence],
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        outputs: list[TokenOutput],
    ) -> None:
        """Append one token to each decoding sequence; `logprobs` may be empty.

        This is the fast path of `_update_sequence` for the usual case, in which the request does
        not end and no page becomes full.
        """
        entries = logprobs or (None,) * len(tokens)
        for sequence, token, entry in zip(decodes, tokens, entries, strict=True):
            own_logprobs = () if entry is None else (entry,)
            request = sequence.request
            known_tokens = sequence.tokens
            length = len(known_tokens) + 1
            if (
                sequence.finish_reason is not None
                or length >= sequence.max_num_tokens
                or token in request.stop_ids
                or sequence.drafts
                or sequence.matcher is not None
                or length >= sequence.page_end
            ):
                sampled = SampledTokens(sequence.id, (token,), own_logprobs)
                self._update_sequence(sequence, True, sampled, outputs)
                continue
            sequence.steps_in_flight -= 1
            sequence.num_pending -= 1
            known_tokens.append(token)
            outputs.append(
                TokenOutput(
                    request.id,
                    length - 1 - len(request.prompt),
                    (token,),
                    own_logprobs,
                    (),
                    sequence.num_cached or 0,
                )
            )

    def _update_sequence(
        self,
        sequence: Sequence,
        samples: bool,
        entry: SampledTokens | None,
        outputs: list[TokenOutput],
    ) -> None:
        """Process the result of a step for one of its sequences."""
        sequence.steps_in_flight -= 1
        sequence.num_pending -= samples
        if sequence.finish_reason is not None:
            if not sequence.steps_in_flight:
                self.block_pool.release(sequence)
            return
        if entry is not None:
            sequence.prompt_logprobs += entry.prompt_logprobs
            if samples:
                outputs.append(self._accept_tokens(sequence, entry))
                return
        self._free_passed_pages(sequence)

    def _accept_tokens(self, sequence: Sequence, entry: SampledTokens) -> TokenOutput:
        """Append sampled tokens, end the request if it must end, and return its output."""
        request = sequence.request
        num_cached = sequence.num_cached or 0
        if request.pooling is not None:
            self._finish_sequence(sequence, "stop")
            return TokenOutput(
                request.id, 0, cached=num_cached, finish="stop", embedding=entry.embedding
            )
        ids = entry.tokens
        position = sequence.num_output_tokens
        sequence.num_computed += len(ids) - 1  # the KV cache already holds the accepted drafts
        if sequence.drafts:
            sequence.drafts.clear()
        finish: FinishReason | None = None
        for num_output, token in enumerate(ids, position + 1):
            sequence.tokens.append(token)
            # A grammar allows a stop id before min_tokens only if no other token is left.
            may_stop = num_output > request.sampling.min_tokens or sequence.matcher is not None
            if token in request.stop_ids and may_stop:
                finish = "stop"
            else:
                finish = advance_grammar(sequence, token)
                if finish is None and num_output >= request.max_tokens:
                    finish = "length"
            if finish:
                ids = ids[: num_output - position]
                break
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if position == len(request.emitted):
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        self.block_pool.publish(sequence)
        self._set_page_end(sequence)
        self._free_passed_pages(sequence)
        error = None
        if finish:
            self._finish_sequence(sequence, finish)
            if finish == "error" and sequence.matcher is not None:
                error = sequence.matcher.error
        logprobs = entry.logprobs[: len(ids)]
        return TokenOutput(
            request.id, position, ids, logprobs, prompt_logprobs, num_cached, finish, error
        )

    def _set_page_end(self, sequence: Sequence) -> None:
        """Let `_append_decoded` append tokens until a page is full."""
        pool = self.block_pool
        if pool.prefix_cache or pool.windows:
            sequence.page_end = (sequence.num_published + 1) * pool.page_size
        else:
            sequence.page_end = sequence.max_num_tokens

    def _free_passed_pages(self, sequence: Sequence) -> None:
        """Give back blocks that have left all windows.

        Only positions whose steps have ended count: a step in flight may still read a block that
        a later one no longer needs.
        """
        if not self.block_pool.windows:
            return
        num_settled = sequence.num_settled
        if len(sequence.tokens) > sequence.initial_length:
            # A sampled token has come back, so all positions before the last token are computed.
            num_settled = len(sequence.tokens) - 1
        self.block_pool.free_passed_pages(sequence, num_settled)

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request. Its blocks stay until no step in flight writes to them."""
        sequence.finish_reason = reason
        del self.by_request[sequence.request.id]
        self.waiting.pop(sequence.id, None)
        sequence.is_waiting = False
        was_running = self.running.pop(sequence.id, None) is not None
        if was_running:
            self.finished_ids.append(sequence.id)
        if sequence.request.lora:
            self._end_use_of_adapter(sequence.request, was_running)
        if not sequence.steps_in_flight:
            self.block_pool.release(sequence)

    def _end_use_of_adapter(self, request: EngineRequest, was_running: bool) -> None:
        if was_running:
            self.adapter_slots.release(request.lora)
        else:
            self.adapter_slots.cancel(request.lora, request.id)
        self.ended_adapters.append(request.lora)


def advance_grammar(sequence: Sequence, token: int) -> FinishReason | None:
    """Tell the sequence's grammar about a token; returns why the request ends, if it does."""
    matcher = sequence.matcher
    if matcher is None:
        return None
    matcher.accept(token)
    if matcher.error:
        return "error"
    return "stop" if matcher.is_finished else None


def compute_step_features(requests: Iterable[ScheduledRequest]) -> StepFeatures:
    """Add up the quantities of a step that its time depends on."""
    num_tokens = 0
    decode_keys = 0
    prefill_pairs = 0.0
    for request in requests:
        if request.count == 1 and not request.drafts:
            num_tokens += 1
            decode_keys += request.start
        else:
            count = request.count + len(request.drafts)
            num_tokens += count
            prefill_pairs += count * (request.start + count / 2)
    return StepFeatures(num_tokens, decode_keys, prefill_pairs)

"""Which positions of which sequences the next step computes. A pure state machine: no clock, no I/O, no torch.

There is no prefill phase and no decode phase: `computed` catches up with `length`, at most `max_batch_tokens`
positions a step. Running sequences come first, in order of admission; what is left of the budget admits others.
"""

from __future__ import annotations

from collections.abc import Collection

from bloomery.engine.blocks import Blocks
from bloomery.engine.policy import FirstCome, Policy
from bloomery.engine.sequence import Sequence
from bloomery.errors import InvalidRequest
from bloomery.messages import FinishReason, Item, Request, Sampled, Start, Step, StepOutput, Tokens


class Scheduler:
    def __init__(self, blocks: Blocks, max_batch_tokens: int, max_sequences: int, policy: Policy | None = None):
        self.blocks, self.max_batch_tokens, self.max_sequences = blocks, max_batch_tokens, max_sequences
        self.policy = policy or FirstCome()
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.by_request: dict[str, Sequence] = {}
        self.in_flight: dict[int, Sequence] = {}  # held by a step whose result is not in, finished ones too
        self.retired: list[int] = []
        self.next_id = 0
        self.preemptions = 0

    # ---- arrivals and departures -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        length = len(request.prompt) + request.max_tokens
        room = self.blocks.count * self.blocks.size
        if length > room:
            raise InvalidRequest(f"prompt and max_tokens need {length} cache positions, there are {room}", "max_tokens")
        if request.id in self.by_request:
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        sequence = Sequence.of(self.next_id, request)
        self.next_id += 1
        self.waiting[sequence.id] = self.by_request[request.id] = sequence

    def abort(self, request_id: str) -> bool:
        """Forget a request at any moment; its blocks come back as soon as no step in flight writes to them."""
        sequence = self.by_request.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, "abort")
        return True

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- the next step ---------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be computed until a result comes in."""
        items: list[Item] = []
        preemptions = self.preemptions
        budget = self._continue(items, self.max_batch_tokens)
        if preemptions == self.preemptions:
            self._admit(items, budget)
        if not items:
            return None
        step = Step(tuple(items), tuple(self.retired))
        self.retired.clear()
        return step

    def _continue(self, items: list[Item], budget: int) -> int:
        for sequence in list(self.running.values()):
            if budget <= 0:
                break
            # A sequence with drafts waits for its verdict; one preempted just now is in `running` no more.
            if sequence.ending or (sequence.drafts and sequence.steps) or sequence.id not in self.running:
                continue
            behind = sequence.length - sequence.computed
            drafts = sequence.drafts[: budget - 1] if behind == 1 and not sequence.pending else []
            count = min(behind, budget - len(drafts))
            if count <= 0:
                continue
            grown = self._make_room(sequence, sequence.computed + count + len(drafts))
            if grown is None:
                continue
            items.append(self._place(sequence, count, grown, None, drafts))
            budget -= count + len(drafts)
        return budget

    def _make_room(self, sequence: Sequence, length: int) -> Collection[int] | None:
        """Blocks for `length` positions, preempting if need be; None if the sequence must sit this step out."""
        if length <= len(sequence.blocks) * self.blocks.size:
            return ()
        while (grown := self.blocks.extend(sequence, length, [])) is None:
            victim = self.policy.victim(self.running.values())
            if victim.steps:
                return None  # let the pipeline drain, then preempt
            self._preempt(victim)
            if victim is sequence:
                return None
        return grown

    def _admit(self, items: list[Item], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.policy.next(self.waiting.values())
            shared = self.blocks.match(sequence)
            hit = len(shared) * self.blocks.size
            count = min(sequence.length - hit, budget)
            grown = self.blocks.extend(sequence, hit + count, shared)
            if grown is None:
                return
            del self.waiting[sequence.id]
            self.running[sequence.id] = sequence
            sequence.computed = hit
            if sequence.cached is None:
                sequence.cached = hit
            request = sequence.request
            start = Start(tuple(sequence.tokens), len(request.prompt), request.sampling, request.stop_ids)
            items.append(self._place(sequence, count, grown, start, []))
            budget -= count

    def _place(
        self, sequence: Sequence, count: int, grown: Collection[int], first: Start | None, drafts: list[int]
    ) -> Item:
        start = sequence.computed
        samples = start + count == sequence.length
        item = Item(sequence.id, start, count, tuple(grown), first, tuple(drafts), samples)
        sequence.computed = start + count
        sequence.pending += samples
        sequence.steps += 1
        self.in_flight[sequence.id] = sequence
        self.blocks.publish(sequence)
        return item

    def _preempt(self, sequence: Sequence) -> None:
        """As if it had never run: on return it is a new request with a longer prompt, first in the queue."""
        del self.running[sequence.id]
        self.blocks.release(sequence)
        sequence.drafts.clear()
        sequence.prompt_logprobs.clear()
        self.retired.append(sequence.id)
        self.waiting = {sequence.id: sequence, **self.waiting}
        self.preemptions += 1

    # ---- a step's result -------------------------------------------------------------------------

    def update(self, step: Step, output: StepOutput) -> list[Tokens]:
        """Fold one step's result back in; steps must come back in the order they were scheduled."""
        sampled = {entry.sequence: entry for entry in output.samples}
        news: list[Tokens] = []
        for item in step.items:
            sequence = self.in_flight[item.sequence]
            sequence.steps -= 1
            if not sequence.steps:
                del self.in_flight[item.sequence]
            sequence.pending -= item.samples
            if sequence.finish is not None:
                if not sequence.steps:
                    self.blocks.release(sequence)
            elif entry := sampled.get(item.sequence):
                sequence.prompt_logprobs += entry.prompt_logprobs
                if item.samples:
                    news.append(self._accept(sequence, entry))
        return news

    def _accept(self, sequence: Sequence, entry: Sampled) -> Tokens:
        request, ids, tokens = sequence.request, entry.tokens, sequence.tokens
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
        prompt_logprobs = tuple(sequence.prompt_logprobs) if position == len(request.emitted) else ()
        self.blocks.publish(sequence)
        if finish:
            self._finish(sequence, finish)
        logprobs = entry.logprobs[: len(ids)]
        return Tokens(request.id, position, ids, logprobs, prompt_logprobs, sequence.cached or 0, finish)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        del self.by_request[sequence.request.id]
        self.waiting.pop(sequence.id, None)
        if self.running.pop(sequence.id, None):
            self.retired.append(sequence.id)
        if not sequence.steps:
            self.blocks.release(sequence)

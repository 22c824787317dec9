"""A request as the engine sees it: tokens so far, and how far the cache has caught up with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from bloomery.messages import FinishReason, EngineRequest, TokenLogprob


@dataclass(eq=False, slots=True)
class Sequence:
    """`computed` chases `length`; chunks, prefix hits, preemption, drafts and steps in flight are only that."""

    id: int
    request: EngineRequest
    tokens: list[int]  # prompt, then what has been reported back
    limit: int  # tokens it may have
    computed: int = 0  # positions whose keys and values are written, or will be by a step in flight
    pending: int = 0  # tokens sampled by steps in flight and not reported yet
    steps: int = 0  # steps in flight that hold this sequence
    began: int = (
        0  # tokens it entered with: later ones are drawn on the device, and need not be told
    )
    clear: int = (
        0  # as long as `computed` is below, it goes on by one: it has blocks, and no limit is near
    )
    cached: int | None = None  # prompt tokens found in the prefix cache when it first ran
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # serials of its published blocks, see Blocks
    drafts: list[int] = field(default_factory=list)  # guesses for the next tokens
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    arrived: float = 0.0  # on the clock of whoever drives the scheduler, as all times here
    waiting: bool = False  # in the queue
    leaving: bool = False  # to be preempted once no step in flight holds it
    losses: int = 0  # times it was preempted
    turn: int = 0  # the last step it was part of
    # what a policy thinks of it
    short: bool = False
    cost: float = 0.0  # seconds it takes alone, until they are charged
    due: float = 0.0  # when a short one should be done
    promise: float = 0.0  # its place in the queue

    @classmethod
    def of(cls, id: int, request: EngineRequest, now: float = 0.0) -> Sequence:
        limit = len(request.prompt) + request.max_tokens
        return cls(id, request, [*request.prompt, *request.emitted], limit, arrived=now)

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def produced(self) -> int:
        """Output tokens reported so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def ending(self) -> bool:
        """Whether a token in flight is certainly the last."""
        return self.pending > 0 and self.length >= self.limit

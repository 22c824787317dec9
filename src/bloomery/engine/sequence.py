"""A request as the engine sees it: tokens so far, and how far the cache has caught up with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from bloomery.messages import FinishReason, Request, TokenLogprob


@dataclass(eq=False, slots=True)
class Sequence:
    """`computed` chases `length`; chunks, prefix hits, preemption, drafts and steps in flight are only that."""

    id: int
    request: Request
    tokens: list[int]  # prompt, then what has been reported back
    computed: int = 0  # positions whose keys and values are written, or will be by a step in flight
    pending: int = 0  # tokens sampled by steps in flight and not reported yet
    steps: int = 0  # steps in flight that hold this sequence
    cached: int | None = None  # prompt tokens found in the prefix cache when it first ran
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # serials of its published blocks, see Blocks
    drafts: list[int] = field(default_factory=list)  # guesses for the next tokens
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None

    @classmethod
    def of(cls, id: int, request: Request) -> Sequence:
        return cls(id, request, [*request.prompt, *request.emitted])

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
        return (
            self.pending > 0 and len(self.tokens) + self.pending - len(self.request.prompt) >= self.request.max_tokens
        )

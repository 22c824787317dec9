"""The scheduler's view of one request: its tokens, and how many of them the KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bloomery.engine.pages import CheckpointKind, PageBlocks, PrefixNode
from bloomery.messages import EngineRequest, FinishReason, TokenLogprob


class TokenMatcher(Protocol):
    """The grammar state of a request: which tokens may come next."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow the output."""
        ...

    @property
    def error(self) -> str:
        """Why the request must end, if it must."""
        ...

    def accept(self, token: int) -> None:
        """Advance by one token of the output."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """A request inside the engine. `num_computed` catches up with `length`.

    Chunked prefill, prefix hits, preemption, drafts and steps in flight all change only these two
    numbers. There is no separate prefill or decode state.
    """

    id: int  # counts arrivals, so a lower id arrived earlier
    request: EngineRequest
    tokens: list[int]  # the prompt, then every output token reported by a finished step
    max_num_tokens: int  # prompt plus max_tokens
    num_computed: int = 0  # positions in the KV cache, including those a step in flight writes
    num_pending: int = 0  # tokens that steps in flight will sample
    steps_in_flight: int = 0  # steps in flight that contain this sequence
    # len(tokens) at admission. The worker samples later tokens itself and is not sent them.
    initial_length: int = 0
    # While num_computed is below this, each step decodes one position: the block tables are long
    # enough and the sequence cannot reach its maximum length.
    decode_until: int = 0
    num_cached: int | None = None  # prompt tokens that were a prefix hit at the first admission
    num_settled: int = 0  # prompt positions whose steps have ended
    # The length at which the block pool must be told next: a page has become full.
    page_end: int = 0
    # The fields up to `page_digests` belong to the block pool.
    num_pages: int = 0  # of each block table
    pages: list[list[PageBlocks | None]] = field(default_factory=list)  # by cache group
    num_kept_from: list[int] = field(default_factory=list)  # by group: pages before it are freed
    num_published: int = 0  # pages
    resume_pages: list[int] = field(default_factory=list)  # ends of prefixes worth keeping
    page_digests: list[bytes] = field(default_factory=list)
    # In a model with recurrent state, they belong to the block pool, too:
    state: tuple[int, ...] = ()  # the blocks of the live state, table after table
    path: list[PrefixNode] = field(default_factory=list)  # nodes of the published pages
    resume_node: PrefixNode | None = None  # where it would resume if it were preempted
    # Positions at which a checkpoint is to be taken, the last one first. A chunk ends there.
    due_checkpoints: list[tuple[int, CheckpointKind]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # proposed next tokens, to be verified
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrival_time: float = 0.0  # seconds on the clock of the scheduler's caller
    is_waiting: bool = False  # in the queue of the policy
    is_pending_victim: bool = False  # to be preempted when no step in flight contains it
    num_preemptions: int = 0
    matcher: TokenMatcher | None = None  # of a request with a grammar
    adapter_version: str = ""  # of the weights of its LoRA adapter
    # The fields below belong to the policy.
    is_short: bool = False
    uncharged_seconds: float = 0.0  # solo time that its tenant has not been charged for yet
    deadline: float = 0.0  # time by which a short request should have its last token
    queue_key: float = 0.0  # fixed at arrival; the queue admits the lowest key first

    @classmethod
    def from_request(
        cls,
        id: int,
        request: EngineRequest,
        now: float = 0.0,
        matcher: TokenMatcher | None = None,
    ) -> Sequence:
        """Create the sequence of a new request. Tokens a client already has count as output."""
        tokens = [*request.prompt, *request.emitted]
        max_num_tokens = len(request.prompt) + request.max_tokens
        return cls(id, request, tokens, max_num_tokens, arrival_time=now, matcher=matcher)

    @property
    def length(self) -> int:
        """Tokens the sequence has once all steps in flight have ended."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens reported so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_last_token_pending(self) -> bool:
        """Whether a step in flight certainly samples the last token."""
        return self.num_pending > 0 and self.length >= self.max_num_tokens

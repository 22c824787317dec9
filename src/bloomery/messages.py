"""Everything that crosses a process or the bridge between the towers: frozen, small, without behaviour.

A request's life: Request -> (Sequence) -> Item in a Step -> (Row) -> Sampled in a StepOutput -> Tokens.
The nouns in parentheses belong to one side only and never travel. What goes on by one position is an Item and a Sampled
only where somebody spells it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar, dataclass_transform

T = TypeVar("T")

# stop: a stop id, or a stop string found in the text; deadline: the request's own time was up
FinishReason = Literal["stop", "length", "abort", "error", "deadline"]
PoolingType = Literal["mean", "last"]  # over the final hidden states of a prompt
EngineState = Literal["loading", "ready", "stalled", "restarting", "draining", "failed", "closed"]


@dataclass_transform(frozen_default=True)
def light(kind: type[T]) -> type[T]:
    """Frozen to the type checker alone: at run time that costs a microsecond, and of these there are some for every
    sequence of every step."""
    return dataclass(slots=True, unsafe_hash=True)(kind)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """How one sequence turns logits into tokens; every default already resolved."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    seed: int = 0  # effective: randomness is a function of (seed, position) and nothing else
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    min_tokens: int = 0  # stop ids are masked until so many tokens are out
    watermark: tuple[float, float] | None = None  # (gamma, delta)
    logprobs: int | None = None  # None: no log-probabilities; n: the token's own and the n best
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    id: str
    prompt: tuple[int, ...]
    sampling: ResolvedSampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()  # end of sequence and stop token ids
    emitted: tuple[int, ...] = ()  # ids a client already has, when a request is replayed
    salt: str = ""  # prefix-cache blocks are shared among equal salts only
    pooling: PoolingType | None = None  # an embedding of the prompt is wanted, and no token
    priority: int = 0  # lower is earlier
    deadline: float | None = (
        None  # seconds it has left when it is handed over; clocks differ between processes
    )
    tenant: str = ""  # tenants are served in equal shares


@dataclass(frozen=True, slots=True)
class AbortRequest:
    id: str


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """What a worker must know of a sequence; travels with its first step, and again after preemption."""

    tokens: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    stop_ids: tuple[int, ...]
    pooling: PoolingType | None = None


@light
class ScheduledRequest:
    """One sequence's share of a step. A worker that kept its rows needs nothing else."""

    sequence: int
    start: int  # first position to compute
    count: int  # positions to compute, drafts not included
    blocks: tuple[int, ...]  # the table in full on the first step, only the growth later
    new_request: NewRequestData | None
    drafts: tuple[int, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Most of a step are sequences that go on by one position, from the token that was drawn last. There may be
    hundreds in a step and a step in a few milliseconds, so of these no more is said than what is new."""

    chunks: tuple[
        ScheduledRequest, ...
    ]  # of those that begin, are in the midst of a prompt or have drafts
    finished: tuple[int, ...]  # rows the worker may forget; handled before all others
    decodes: tuple[int, ...] = ()  # sequence ids that compute one position each
    decode_positions: tuple[int, ...] = ()  # the position each of them computes
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # blocks that decodes have gained

    @property
    def requests(self) -> tuple[ScheduledRequest, ...]:
        """Every sequence of the step as a ScheduledRequest, decodes first."""
        new_blocks = dict(self.new_blocks)
        decodes = [
            ScheduledRequest(sequence, position, 1, new_blocks.get(sequence, ()), None, (), True)
            for sequence, position in zip(self.decodes, self.decode_positions, strict=True)
        ]
        return (*decodes, *self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, before penalties and temperature."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


@light
class SampledTokens:
    """What a step gave one sequence: accepted drafts plus one, or the log-probabilities of its prompt."""

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the positions after this item's own
    embedding: tuple[float, ...] = ()  # with the last item of a request that asked for one


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of some steps went: sums, in seconds. Of device and idle together the floor cannot be saved."""

    steps: int = 0
    floor: float = 0.0  # what the hardware cannot beat
    expected: float = 0.0  # what our code was planned to take
    device: float = 0.0  # from a step's beginning to its end, on the device
    idle: float = 0.0  # from one step's end to the next one's beginning: the host was late
    host: float = 0.0  # spent on queueing steps, mostly while the device was busy
    sampling: float = 0.0  # of device: choosing tokens, where it is no part of a captured step
    padding: float = 0.0  # of device: lines that only fill up a captured step, at the least
    communication: float = 0.0  # of device: messages between ranks, as the links' rates say


@dataclass(frozen=True, slots=True)
class StepOutput:
    samples: tuple[SampledTokens, ...]
    timing: StepTiming | None = None  # of steps that have ended by now
    tokens: tuple[
        int, ...
    ] = ()  # of all that go on, in the step's order; or none, and `samples` has them


@light
class TokenOutput:
    """News of one request: ids not reported before, and on the last one why it ended."""

    request: str
    position: int  # of the first id, counted in output tokens
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # complete, with the first token
    cached: int = 0  # prompt tokens found in the prefix cache
    finish: FinishReason | None = None
    error: str | None = None
    queued: float = 0.0  # seconds between its arrival and its first step, where a queue is kept
    embedding: tuple[float, ...] = ()  # of length 1, and then all there is to tell


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What an executor can hold once its weights are loaded."""

    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_length: int  # prompt plus output of one sequence
    vocab: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    device: str = "cpu"
    notes: tuple[str, ...] = field(default=())  # what the operator should know, one line each
    stages: int = (
        1  # of a pipeline: so many groups of sequences take turns, none of them twice in flight
    )
    # What steps are expected to take, of which the first is of one position: positions, keys that single ones attend
    # to, pairs of query and key in prompts, seconds. Empty: nobody knows.
    expected: tuple[tuple[int, int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing, and while it loads how far it has come."""

    state: EngineState
    progress: float = 0.0  # 0 to 1
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's figures: those of the moment, and sums since it began."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # blocks held by sequences; what only the prefix cache holds counts as free
    kv_blocks: int = 0
    steps: int = 0  # from here on: sums
    step_seconds: float = 0.0
    tokens_in: int = 0  # of prompts, prefix hits included, replays not
    tokens_out: int = 0
    prefix_queried: int = (
        0  # tokens looked up in the prefix cache when a sequence was admitted, and found there
    )
    prefix_hit: int = 0
    preemptions: int = 0
    sequences: int = 0  # in a step, summed over steps
    positions: int = 0  # computed
    prompt_steps: int = 0  # steps that computed positions of a prompt
    tax_seconds: float = 0.0  # that long requests gave for the sake of short ones
    timing: StepTiming = StepTiming()
    share: float | None = None  # of the limit, over the last seconds: the floor over what it took
    unprepared: int = 0  # captures that are still to be made; until then such steps run without


@dataclass(frozen=True, slots=True)
class AdmittedRequests:
    """Sent before the step that these requests are first part of, so that a crash can be laid at the right door."""

    epoch: int
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step brought, or a sign of life while there is nothing to do."""

    epoch: int  # counts the engines a client has started; news of a former one are void
    stats: EngineStats
    tokens: tuple[TokenOutput, ...] = ()

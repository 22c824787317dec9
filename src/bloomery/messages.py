"""The messages between the processes of an engine: frozen, small dataclasses without behaviour.

The life of a request, in messages: EngineRequest -> NewRequestData and ScheduledRequest in a
ScheduledStep -> SampledTokens in a StepOutput -> TokenOutput in an EngineOutput. The scheduler's
Sequence and the worker's row belong to one side each and are never sent.

Requests that decode one position are sent as plain numbers instead of ScheduledRequest and
SampledTokens, because a step may hold hundreds of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, dataclass_transform

T = TypeVar("T")

# stop: a stop token id, or a stop string in the text. deadline: the request's own time limit.
FinishReason = Literal["stop", "length", "abort", "error", "deadline"]
PoolingType = Literal["mean", "last"]  # over the final hidden states of a prompt
EngineState = Literal["loading", "ready", "stalled", "restarting", "draining", "failed", "closed"]
NULL_BLOCK = -1  # an entry of a block table without a block


@dataclass_transform(frozen_default=True)
def lightweight_message(cls: type[T]) -> type[T]:
    """Make a dataclass that only the type checker treats as frozen.

    Creating a truly frozen dataclass costs a microsecond more. There is one of these messages for
    each request of each step.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """How one sequence turns logits into tokens. All defaults are resolved."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # counts prompt and output
    frequency_penalty: float = 0.0  # counts output
    presence_penalty: float = 0.0  # counts output
    seed: int = 0  # the random numbers depend on the seed and the position only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    min_tokens: int = 0  # stop token ids are masked until there are this many output tokens
    watermark: tuple[float, float] | None = None  # (gamma, delta)
    # n: return the log-probabilities of the sampled token and of the n most likely ones.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every prompt token


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate, or one prompt to embed, as sent to an engine."""

    id: str
    prompt: tuple[int, ...]  # token ids
    sampling: ResolvedSampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()  # end-of-sequence and stop token ids
    emitted: tuple[int, ...] = ()  # output token ids a client already has, in a replayed request
    cache_salt: str = ""  # requests share prefix-cache blocks only if their salts are equal
    # Tokens of the prompt up to the end of its system message, which other prompts are likely to
    # begin with. Only a hint. 0: there is none, or it is not known.
    system_length: int = 0
    pooling: PoolingType | None = None  # set: embed the prompt, generate no token
    priority: int = 0  # lower values are scheduled earlier
    # Seconds left when the request is sent. Not a point in time: processes have different clocks.
    deadline: float | None = None
    tenant: str = ""  # tenants get equal shares of the engine
    grammar: str = ""  # of the output, in llguidance's language; "": any output
    # The LoRA adapter: a name that stands for the same weights for as long as the engine runs, and
    # its folder or file, from which the engine loads it when it needs it. "": the base model.
    lora: str = ""
    lora_path: str = ""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Asks an engine to end a request."""

    id: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Asks an engine or a rank to read a LoRA adapter into host memory.

    The answer is AdapterInfo or AdapterRefusal.
    """

    name: str
    path: str  # a PEFT folder or a GGUF file


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Asks an engine or a rank to forget an adapter. Requests that use it run to their end."""

    name: str


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter in host memory."""

    name: str
    rank: int  # the largest of its layers
    num_bytes: int  # in host memory, on all ranks
    num_targets: int  # linear layers, embeddings and heads that it changes


@dataclass(frozen=True, slots=True)
class AdapterRefusal:
    """An adapter that could not be loaded, and why."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """What a worker must know about a sequence, sent with the first step after each admission."""

    tokens: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    stop_ids: tuple[int, ...]
    pooling: PoolingType | None = None
    # The blocks of its recurrent state: group after group, table after table (cache_groups.py).
    state_blocks: tuple[int, ...] = ()
    lora_slot: int = 0  # the device slot of its LoRA adapter; 0: the base model


@lightweight_message
class ScheduledRequest:
    """The part of a step that belongs to one sequence."""

    sequence: int  # id of the sequence
    start: int  # first position to compute
    count: int  # positions to compute, without drafts
    # In the first step the whole block tables, later only new blocks: page after page, and in each
    # page the blocks of every cache group, table after table (cache_groups.py). NULL_BLOCK stands
    # for a block that no position of this step or a later one reads.
    blocks: tuple[int, ...]
    new_request: NewRequestData | None
    drafts: tuple[int, ...]  # proposed tokens to verify (speculative decoding)
    samples: bool  # whether the step samples a token for this sequence


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step for the workers.

    Most requests of a step decode one position from the token sampled last. A step may hold
    hundreds of them every few milliseconds, so only their ids and positions are sent.
    """

    # Requests that start, that prefill, or that have drafts.
    chunks: tuple[ScheduledRequest, ...]
    finished: tuple[int, ...]  # sequence ids whose rows the worker drops before anything else
    decodes: tuple[int, ...] = ()  # sequence ids that compute one position each
    decode_positions: tuple[int, ...] = ()  # the position each of them computes
    # (sequence id, new blocks) of the decodes whose block table has grown.
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # Sequences whose token must match a grammar. The step samples only when it has gotten their
    # masks, in this order (PendingStep.provide_masks).
    masked: tuple[int, ...] = ()
    # (source, destination): blocks to copy before anything is computed. All sources are read before
    # any destination is written, and no block is a destination twice.
    block_copies: tuple[tuple[int, int], ...] = ()
    # (slot, adapter name): LoRA adapters to copy from host memory into a device slot, before
    # anything is computed.
    lora_loads: tuple[tuple[int, str], ...] = ()

    @property
    def requests(self) -> tuple[ScheduledRequest, ...]:
        """Every sequence of the step as a ScheduledRequest, decodes first. Not for hot paths."""
        new_blocks = dict(self.new_blocks)
        decodes = [
            ScheduledRequest(sequence, position, 1, new_blocks.get(sequence, ()), None, (), True)
            for sequence, position in zip(self.decodes, self.decode_positions, strict=True)
        ]
        return (*decodes, *self.chunks)


@lightweight_message
class TokenLogprob:
    """The log-probability of a token under the model, before penalties and temperature."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely token
    # The most likely tokens: their ids as int32, then their log-probabilities as float64. A batch
    # has thousands of them in each step, and as objects they would cost more than sampling.
    packed_top: bytes = b""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token, logprob) of the most likely tokens, most likely first."""
        count = len(self.packed_top) // 12
        values = struct.unpack(f"={count}i{count}d", self.packed_top)
        return tuple(zip(values[:count], values[count:]))


def pack_top(top: Sequence[tuple[int, float]]) -> bytes:
    """Return `packed_top` of (token, logprob) pairs."""
    tokens = [token for token, _ in top]
    logprobs = [logprob for _, logprob in top]
    return struct.pack(f"={len(top)}i{len(top)}d", *tokens, *logprobs)


@lightweight_message
class SampledTokens:
    """What a step produced for one sequence."""

    sequence: int
    tokens: tuple[int, ...] = ()  # accepted drafts and one sampled token
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens after the computed positions
    embedding: tuple[float, ...] = ()  # with the last chunk of an embedding request


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of some steps went. All fields but `steps` are sums of seconds."""

    steps: int = 0
    floor: float = 0.0  # lower bound of the hardware, for device and idle together
    expected: float = 0.0  # what the plan expects of our code
    device: float = 0.0  # from the start of a step to its end, on the device
    idle: float = 0.0  # from the end of a step to the start of the next: the host was late
    host: float = 0.0  # time the host spent to queue steps, mostly while the device was busy
    sampling: float = 0.0  # part of device: sampling outside of CUDA graphs
    padding: float = 0.0  # part of device: rows that only pad a CUDA graph; a lower bound
    communication: float = 0.0  # part of device: between ranks, estimated from link rates
    masks: float = 0.0  # part of device: waiting for the masks of grammars


def add_timings(left: StepTiming, right: StepTiming) -> StepTiming:
    names = StepTiming.__slots__
    return StepTiming(*(getattr(left, name) + getattr(right, name) for name in names))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step."""

    samples: tuple[SampledTokens, ...]
    timing: StepTiming | None = None  # of the steps that have ended by now
    # The tokens of all decodes, in the order of the step. Empty: `samples` contains them.
    tokens: tuple[int, ...] = ()
    # Their log-probabilities, None where the request wants none. Empty: no request wants them.
    logprobs: tuple[TokenLogprob | None, ...] = ()


@lightweight_message
class TokenOutput:
    """New tokens of one request. The last output of a request says why it ended."""

    request: str  # id of the request
    position: int  # of the first token, counted in output tokens
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # complete, with the first token
    cached: int = 0  # prompt tokens that were a prefix hit
    finish: FinishReason | None = None
    error: str | None = None
    queued: float = 0.0  # seconds from arrival to the first step; set by the client
    embedding: tuple[float, ...] = ()  # of length 1; the only output of an embedding request


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that cache the same positions. A sequence has own block tables in every group.

    All groups take blocks of equal size from one pool. See cache_groups.py.
    """

    window: int | None = None  # positions that a query reads, its own included; None: all
    num_tables: int = 1  # block tables, each for a part of the layers
    blocks_per_page: int = 1  # in each table; a page has `EngineCapacity.block_size` positions
    num_layers: int = 0  # of the whole model; 0: not known
    # Blocks of a sequence's recurrent state. Such a group caches no positions and has no pages.
    # 0: it caches keys and values.
    state_blocks: int = 0

    @property
    def page_blocks(self) -> int:
        """Blocks that hold one page of a sequence, in all tables of the group."""
        if self.state_blocks:
            return 0
        return self.num_tables * self.blocks_per_page


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What an executor can hold once its weights are loaded."""

    blocks: int  # of the KV cache
    block_size: int  # positions in a page: in one block, unless groups differ in their heads
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # prompt plus output of one sequence
    vocab: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    device: str = "cpu"
    notes: tuple[str, ...] = field(default=())  # for the operator, one line each
    # Pipeline stages. As many groups of sequences alternate, so that every stage has a step.
    stages: int = 1
    # Expected times of typical steps: (tokens, keys of decodes, query-key pairs of prefill,
    # seconds). The first is a step of one token. Empty: unknown. See engine/step_time.py.
    expected_steps: tuple[tuple[int, int, int, float], ...] = ()
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine, and its progress while it loads."""

    state: EngineState
    progress: float = 0.0  # 0 to 1
    detail: str = ""  # what is being loaded, or why the engine is in this state


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current figures of an engine, and sums since it started."""

    running: int = 0  # requests
    waiting: int = 0  # requests
    kv_used: int = 0  # blocks that sequences hold; those only in the prefix cache are free
    kv_blocks: int = 0
    # From here on: sums.
    steps: int = 0
    step_seconds: float = 0.0
    tokens_in: int = 0  # prompt tokens, with prefix hits, without replayed requests
    tokens_out: int = 0
    prefix_queried: int = 0  # tokens looked up in the prefix cache at admission
    prefix_hit: int = 0  # tokens of these that were cached
    preemptions: int = 0
    sequences: int = 0  # sequences in a step, summed over steps
    positions: int = 0  # positions computed
    prefill_steps: int = 0  # steps that contained prefill
    scheduling_overhead_seconds: float = 0.0  # time long requests lost for short ones
    timing: StepTiming = StepTiming()
    # The utilization: hardware limit over the time taken, in the last seconds. Not a sum.
    roofline_share: float | None = None
    kv_used_by_group: tuple[int, ...] = ()  # kv_used, by cache group
    # LoRA: the adapter in each device slot, "" in one that is empty. Slots are counted from 1.
    adapter_slots: tuple[str, ...] = ()
    adapters_in_memory: int = 0  # in host memory
    waiting_for_adapters: int = 0  # requests whose adapter has no device slot or is being loaded
    # From here on: sums.
    adapter_slot_loads: int = 0  # from host memory into a device slot
    adapter_file_loads: int = 0  # from disk into host memory
    adapter_evictions: int = 0  # from host memory
    # Recurrent states: checkpoints from which a prompt can go on, and their blocks of the KV cache.
    checkpoints: int = 0
    checkpoint_blocks: int = 0
    # From here on: sums.
    checkpoints_saved: int = 0
    checkpoint_hits: int = 0  # sequences that resumed from one
    checkpoints_evicted: int = 0


@dataclass(frozen=True, slots=True)
class AdmittedRequests:
    """Names requests right before their first step, so that a crash can be attributed to them."""

    epoch: int
    requests: tuple[str, ...]
    # False: they wait for a LoRA adapter, which is read now.
    has_started: bool = True


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The outputs of one step, or a heartbeat while the engine is idle."""

    epoch: int  # counts the engines a client has started; outputs of earlier ones are ignored
    stats: EngineStats
    tokens: tuple[TokenOutput, ...] = ()

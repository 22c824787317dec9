"""Splits a scheduling round into steps and chooses the prefill chunk of each (ChunkPlanner).

Requests in the batch are of three kinds:
  - decode streams: long requests that decode one token at a time;
  - long prefills: long requests whose prompt is not fully computed yet;
  - short requests, each with a deadline: a small multiple of the time it would take alone.

A scheduling round begins with a decode step, in which every decode stream gets its next token.
A step with many rows costs hardly more than one with few, so all streams share that step. The round
may go on with up to MAX_SHORT_STEPS short steps, which contain only short requests and prefill
chunks. Short requests take part in every step of the round:

    | decode step: streams + short + chunk | short step: short + chunk | short step ... | next round

Without an urgent short request the round is one decode step whose chunk fills the round. With
urgent short requests the planner tries every combination of chunk sizes and numbers of short steps.
The step-time model predicts the time of each combination. Among the plans that meet all deadlines
and keep the round short enough for the streams, the planner takes the one with the fastest prefill.

Smaller steps waste more of the device. That loss is the scheduling overhead: the planner estimates
it for each step, and the policy bounds it by relaxing the deadlines.

The planner knows numbers of tokens, steps and seconds only. It has no clock, no queue, no tenants,
no I/O and no torch. Its state is the position in the round and the step-time model it shares with
the policy.

The constants were tuned on an 8B model on an H200, with a load of 40 seconds. Other devices and
durations, in virtual time (`benchmarks/policy.py --devices --seconds S --seed N`, seeds 1 to 5;
a CPU load lasts five times S):

    device              load     short slowdown p99   throughput lost to fcfs   ITL p99 / target
    H200 (tuned)        25 s     3.82 to 3.84         1.0 to 1.6 %              up to 1.64
                        40 s     3.83 to 3.85         5.4 to 6.1 %              up to 1.61
                        120 s    4.08 to 5.14         4.8 to 5.1 %              up to 1.77
    H200, 20 % slower   25 s     3.82 to 3.85         7.5 to 8.5 %              up to 1.76
                        40 s     3.82 to 3.86         4.8 to 5.6 %              up to 1.55
                        120 s    4.54 to 6.25         3.8 to 4.4 %              up to 1.95
    two CPU cores       200 s    3.91 to 4.10         1.6 to 1.7 %              up to 1.55

The slowdown target (3.85) holds on the slower GPU for 40 seconds, but on neither GPU for 120
seconds: the overhead then nears its bound, and the policy relaxes the deadlines. The throughput
lost on a GPU depends on when the load ends, because the long requests start and end in waves;
40 seconds is not the worst case. The CPU figures rest on assumptions
(tests/engine/virtual_device.py): the engine on two real cores had a p99 of 4.99 and lost 9.5 %
(`benchmarks/mixed_latency.py embedded --seconds 60`). tests/engine/test_chunk_planner.py asserts
bounds that were set above these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from bloomery.engine.sequence import Sequence
from bloomery.engine.step_time import StepFeatures, StepTimeModel

# ---- bounds of the latency targets -------------------------------------------------------------

# Seconds. Chosen as bounds of what people perceive: immediate, and too slow. The target ITL
# is never above the first, the limit of a short request never below it.
IMMEDIATE_SECONDS = 0.1
ATTENTION_SECONDS = 10.0
# Seconds: lower bound of the derived target ITL. Chosen; no record of why.
MIN_ITL_TARGET_SECONDS = 0.02
# Batch-1 steps. Chosen: a stream in a full batch may be ten times slower than one alone.
ITL_TARGET_BATCH1_STEPS = 10
# Batch-1 steps. Chosen: a request as long as 64 decode steps alone, or less, counts as short.
SHORT_REQUEST_BATCH1_STEPS = 64

# ---- length of a round -------------------------------------------------------------------------

# Target ITLs that a round reserves for prefill beyond the time of its decodes; rows without a
# stream add up to one more. `benchmarks/mixed_latency.py llama-8b`: long requests lost 7.9 % with
# 0.5 here and 1.25 below (one run), 6.7 and 6.8 % with 0.6 and 1.4 (two runs).
PREFILL_ROUND_TARGETS = 0.6
# Target ITLs that a round may last. Changed and measured together with the constant above.
MAX_ROUND_TARGETS = 1.4
# A round may last this many times its decode step even if that exceeds the bound above. Chosen:
# prefill then gets at least a third of the device when decodes alone exceed the target.
MIN_ROUND_DECODE_STEPS = 1.5
# Batch-1 steps that a round may last while no request decodes, if rounds of IMMEDIATE_SECONDS have
# less than the share below of its prefill speed. Llama-1B in int8 on two cores (62 ms a batch-1
# step), a prompt of 1,500 tokens: 17.4 s in short rounds, 15.8 s with 16 steps, 14.9 s unlimited.
IDLE_ROUND_BATCH1_STEPS = 16
IDLE_PREFILL_SHARE = 0.9
# Seconds that such a round may last on any device, because a request that arrives meanwhile waits
# for its end. Chosen: as long as the 16 steps of the figures above, 0.99 s.
MAX_IDLE_ROUND_SECONDS = 1.0

# ---- candidate plans ---------------------------------------------------------------------------

# Short steps in a round, at most. Chosen: other numbers gave nothing in virtual time.
MAX_SHORT_STEPS = 4
# Deadlines a plan is checked against, the most urgent first. Chosen; no record of why.
MAX_URGENT_DEADLINES = 3
# Step sizes to try, in quarters of the efficient step size. Chosen: few enough to try all pairs.
STEP_SIZE_QUARTERS = (12, 8, 6, 4, 3, 2, 1, 0)
# Tokens. The efficient step size is this times a power of two, up to 64 times.
# Chosen: on a GPU a step of 32 tokens takes hardly longer than one of one token. On a CPU it is
# efficient already, and the planner then uses 8 tokens as its unit.
MIN_EFFICIENT_TOKENS = 32
MAX_EFFICIENT_TOKENS = 64 * MIN_EFFICIENT_TOKENS
# A step is efficient when it takes this many batch-1 steps. Chosen: as much time is then spent
# on arithmetic as on reading weights.
EFFICIENT_STEP_BATCH1_STEPS = 2
# Rounds. If prefill of short requests alone would fill more rounds than this, rounds are not split:
# the deadlines are missed anyway, and small chunks would only delay all requests. Chosen.
MAX_SPLIT_BACKLOG_ROUNDS = 6
# Tokens. The size of an unsplit step is rounded to the first of these multiples that is at most
# half of it, so that few distinct sizes occur and CUDA graphs are reused. Chosen.
STEP_SIZE_MULTIPLES = (512, 256, 128, 64, 32)

# ---- bound on the overhead ---------------------------------------------------------------------

# Shares of the overhead bound. From the first on, deadlines are relaxed in proportion, up to one
# round for every token at RELAX_FROM + 1 / RELAX_SLOPE. From the second on, no deadline counts.
# Chosen: a range of 20 % around the bound, so that plans change gradually.
RELAX_FROM = 0.9
RELAX_SLOPE = 5
IGNORE_FROM = 1.1


@dataclass(frozen=True, kw_only=True)
class LatencyTargets:
    """The latencies that FairPolicy aims for.

    A target that is None is derived from the time of a batch-1 step.
    """

    inter_token_seconds: float | None = None  # the target ITL of decode streams
    short_request_seconds: float | None = None  # a request that takes no longer alone is short
    # A short request may take this many times its time alone. Chosen after runs of
    # `benchmarks/mixed_latency.py llama-8b`: 3.85 gave 3.89 and 3.91 at p99, 3.9 gave
    # 3.95 and 4.01.
    slowdown_target: float = 3.85
    # Share of the device's time that may be lost for the sake of short requests. Chosen.
    max_overhead: float = 0.05

    def compute_inter_token_target(self, batch1_seconds: float) -> float:
        """Return the target ITL in seconds."""
        derived = max(ITL_TARGET_BATCH1_STEPS * batch1_seconds, MIN_ITL_TARGET_SECONDS)
        return self.inter_token_seconds or min(derived, IMMEDIATE_SECONDS)

    def compute_short_request_limit(self, batch1_seconds: float) -> float:
        """Return the longest time alone, in seconds, with which a request is still short."""
        derived = max(SHORT_REQUEST_BATCH1_STEPS * batch1_seconds, IMMEDIATE_SECONDS)
        return self.short_request_seconds or min(derived, ATTENTION_SECONDS)


class BatchStats(NamedTuple):
    """The running requests by kind, and the totals that step times depend on."""

    short_requests: list[Sequence]
    decode_streams: list[Sequence]
    long_prefills: list[Sequence]
    short_keys: int  # keys that decoding short requests attend to
    stream_keys: int  # keys that decode streams attend to
    context_tokens: int  # the most tokens before the next position of any prefill
    longest_prefill_tokens: int  # the most tokens left of any prefill
    short_prefill_tokens: int  # prompt tokens of short requests, not computed yet
    long_prefill_tokens: int  # prompt tokens of long requests, not computed yet


def collect_batch_stats(running: Mapping[int, Sequence]) -> BatchStats:
    """Sort the running requests by kind and add up their sizes. Called once per step."""
    short_requests: list[Sequence] = []
    decode_streams: list[Sequence] = []
    long_prefills: list[Sequence] = []
    short_keys = 0
    stream_keys = 0
    context_tokens = 0
    longest_prefill = 0
    short_prefill = 0
    long_prefill = 0
    for sequence in running.values():
        computed = sequence.num_computed
        remaining = len(sequence.tokens) + sequence.num_pending - computed
        if remaining > 1:
            context_tokens = max(context_tokens, computed)
            longest_prefill = max(longest_prefill, remaining)
        if sequence.is_short:
            short_requests.append(sequence)
            if remaining > 1:
                short_prefill += remaining
            else:
                short_keys += computed
        elif remaining > 1:
            long_prefills.append(sequence)
            long_prefill += remaining
        else:
            decode_streams.append(sequence)
            stream_keys += computed
    return BatchStats(
        short_requests,
        decode_streams,
        long_prefills,
        short_keys,
        stream_keys,
        context_tokens,
        longest_prefill,
        short_prefill,
        long_prefill,
    )


class PrefillBacklog(NamedTuple):
    """Prompt tokens to compute, of running requests and of waiting ones that may be admitted."""

    short_tokens: int
    long_tokens: int
    longest_prompt_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.short_tokens + self.long_tokens


class RequestDeadline(NamedTuple):
    """What a short request still needs, and the time left for it."""

    num_tokens: int
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens


class ChunkPlan(NamedTuple):
    """How a round is split: one decode step, then `num_short_steps` short steps."""

    decode_step_tokens: int  # prefill tokens in the decode step
    short_step_tokens: int = 0  # prefill tokens in each short step
    num_short_steps: int = 0


class StepPlan(NamedTuple):
    """The next step."""

    prefill_tokens: int  # prompt tokens it may compute
    includes_streams: bool  # False: a short step, without decode streams
    includes_long_prefills: bool
    overhead_seconds: float  # time the long requests lose because of how the round is split


class TimedChunk(NamedTuple):
    """A chunk size to try, and the predicted time of the step that contains it."""

    prefill_tokens: int
    step_seconds: float


NO_SHORT_STEP = TimedChunk(0, 0.0)


class RoundInputs(NamedTuple):
    """The values that all decisions about the current round depend on."""

    batch: BatchStats
    backlog: PrefillBacklog
    short_decodes: StepFeatures  # short requests only
    all_decodes: StepFeatures  # short requests and decode streams
    round_seconds: float  # how long the round may last
    full_chunk: int  # prefill tokens of a round that is one step
    efficient_tokens: int  # step size from which on the device is used well
    max_tokens: int  # limit on the tokens of one step

    @property
    def max_prefill_tokens(self) -> int:
        return min(self.backlog.total_tokens, self.max_tokens)

    @property
    def is_flooded(self) -> bool:
        """Whether there are too many short prompts to meet the deadlines."""
        return self.backlog.short_tokens > MAX_SPLIT_BACKLOG_ROUNDS * self.full_chunk


class ChunkPlanner:
    """Plans one step at a time. The caller reports measured times to the step-time model."""

    def __init__(self, max_num_seqs: int, targets: LatencyTargets, step_time: StepTimeModel):
        self.max_num_seqs = max_num_seqs
        self.targets = targets
        self.step_time = step_time
        self.steps_since_streams = 0  # short steps since the last decode step: place in the round

    @property
    def inter_token_target(self) -> float:
        """The target ITL of decode streams, in seconds."""
        return self.targets.compute_inter_token_target(self.step_time.batch1_seconds)

    def plan_step(
        self,
        batch: BatchStats,
        backlog: PrefillBacklog,
        deadlines: Iterable[RequestDeadline],
        *,
        overhead_used: float,
        has_free_rows: bool,
        max_tokens: int,
    ) -> StepPlan:
        """Plan the next step and advance in the round.

        `deadlines` are those of all short requests, running or next to be admitted.
        `overhead_used` is the recent overhead as a share of its bound. `max_tokens` is the limit
        on the tokens of one step.
        """
        inputs = self._collect_round_inputs(batch, backlog, max_tokens)
        urgent = select_urgent_deadlines(deadlines, inputs.round_seconds, overhead_used)
        # A short step needs something to compute.
        can_prefill = inputs.full_chunk and (batch.long_prefills or has_free_rows)
        has_short_work = batch.short_requests or can_prefill
        if urgent and has_short_work and not inputs.is_flooded:
            plan = self._find_best_plan(inputs, urgent)
        else:
            plan = ChunkPlan(inputs.full_chunk)
        return self._advance_round(plan, inputs, bool(urgent))

    def _collect_round_inputs(
        self, batch: BatchStats, backlog: PrefillBacklog, max_tokens: int
    ) -> RoundInputs:
        """Compute the length of the round, its full chunk and the efficient step size."""
        num_short = len(batch.short_requests)
        num_decodes = num_short + len(batch.decode_streams)
        short_decodes = StepFeatures(num_short, batch.short_keys)
        all_decodes = StepFeatures(num_decodes, batch.short_keys + batch.stream_keys)
        round_seconds = self._compute_round_seconds(all_decodes)
        full_chunk = self._compute_full_chunk(
            all_decodes, round_seconds, batch.context_tokens, backlog, max_tokens
        )
        return RoundInputs(
            batch,
            backlog,
            short_decodes,
            all_decodes,
            round_seconds,
            full_chunk,
            self.find_efficient_step_tokens(),
            max_tokens,
        )

    def _compute_round_seconds(self, all_decodes: StepFeatures) -> float:
        """Return how long a round may last: the time from one token of a stream to the next."""
        if not all_decodes.num_tokens:
            return self._compute_idle_round_seconds()
        decode_seconds = self.step_time.predict(all_decodes)
        target = self.inter_token_target
        free_share = 1 - min(all_decodes.num_tokens / self.max_num_seqs, 1.0)
        round_seconds = decode_seconds + (PREFILL_ROUND_TARGETS + free_share) * target
        round_seconds = min(round_seconds, MAX_ROUND_TARGETS * target)
        return max(round_seconds, MIN_ROUND_DECODE_STEPS * decode_seconds)

    def _compute_idle_round_seconds(self) -> float:
        """Return how long a round may last while no request decodes.

        It is too short to be noticed, unless prefill would then be slow: where a batch-1 step takes
        long, each chunk would spend much of its time on reading the weights.
        """
        longest = min(
            IDLE_ROUND_BATCH1_STEPS * self.step_time.batch1_seconds, MAX_IDLE_ROUND_SECONDS
        )
        if longest <= IMMEDIATE_SECONDS:
            return IMMEDIATE_SECONDS
        immediate_speed, best_speed = (
            self.step_time.predict_prefill_tokens_within(StepFeatures(), seconds, 0) / seconds
            for seconds in (IMMEDIATE_SECONDS, longest)
        )
        is_fast = immediate_speed >= IDLE_PREFILL_SHARE * best_speed
        return IMMEDIATE_SECONDS if is_fast else longest

    def _compute_full_chunk(
        self,
        all_decodes: StepFeatures,
        round_seconds: float,
        context_tokens: int,
        backlog: PrefillBacklog,
        max_tokens: int,
    ) -> int:
        """Return the prefill tokens of a round that consists of one step."""
        tokens_within = self.step_time.predict_prefill_tokens_within
        chunk = min(tokens_within(all_decodes, round_seconds, context_tokens), max_tokens)
        # The tokens of one chunk also attend to each other: to half of the chunk on average.
        mean_context = context_tokens + min(chunk, backlog.longest_prompt_tokens) // 2
        chunk = min(tokens_within(all_decodes, round_seconds, mean_context), max_tokens)
        num_decodes = all_decodes.num_tokens
        step_tokens = num_decodes + chunk
        multiple = STEP_SIZE_MULTIPLES[-1]
        for candidate in STEP_SIZE_MULTIPLES:
            if step_tokens >= 2 * candidate:
                multiple = candidate
                break
        rounded = max(round(step_tokens / multiple), 1) * multiple
        chunk = rounded - num_decodes if rounded > num_decodes else multiple
        return min(chunk, max_tokens, backlog.total_tokens)

    def find_efficient_step_tokens(self) -> int:
        """Return the step size, in tokens, from which on the device is used well."""
        size = MIN_EFFICIENT_TOKENS
        enough_seconds = EFFICIENT_STEP_BATCH1_STEPS * self.step_time.batch1_seconds
        while size < MAX_EFFICIENT_TOKENS:
            if self.step_time.predict(StepFeatures(size)) >= enough_seconds:
                break
            size *= 2
        return size

    def _advance_round(self, plan: ChunkPlan, inputs: RoundInputs, has_urgent: bool) -> StepPlan:
        """Return the step of `plan` that comes next, and advance the position in the round."""
        batch = inputs.batch
        backlog = inputs.backlog
        full_chunk = inputs.full_chunk
        includes_streams = self.steps_since_streams >= plan.num_short_steps
        if includes_streams:
            self.steps_since_streams = 0
            prefill_tokens = plan.decode_step_tokens
        else:
            self.steps_since_streams += 1
            prefill_tokens = plan.short_step_tokens
        # Rounds are split for the sake of short requests, so the prompts of short requests are
        # split only beyond an efficient step size.
        short_prompt_tokens = min(backlog.short_tokens, full_chunk)
        if batch.decode_streams and not inputs.is_flooded:
            short_prompt_tokens = min(short_prompt_tokens, inputs.efficient_tokens)
        prefill_tokens = max(prefill_tokens, short_prompt_tokens)
        overhead_seconds = 0.0
        if has_urgent and (batch.decode_streams or backlog.long_tokens):
            overhead_seconds = self._predict_overhead_seconds(
                inputs, prefill_tokens, includes_streams
            )
        is_unsplit = not plan.num_short_steps and plan.decode_step_tokens == full_chunk
        if not prefill_tokens and is_unsplit:
            # There is no prefill yet. A request that arrives now may use the whole step.
            prefill_tokens = inputs.max_tokens
        includes_long_prefills = plan.decode_step_tokens > 0 or not includes_streams
        return StepPlan(prefill_tokens, includes_streams, includes_long_prefills, overhead_seconds)

    def _find_best_plan(self, inputs: RoundInputs, urgent: list[RequestDeadline]) -> ChunkPlan:
        """Return the plan with the fastest prefill among the plans that meet every deadline.

        If no plan does, return the plan that misses a deadline by the fewest seconds. A split round
        that lasts too long counts as a miss, too.
        """
        max_prefill = inputs.max_prefill_tokens
        decode_options, short_options = self._list_chunk_options(inputs)
        best_rank = (inf, 0.0, 0.0)
        best_plan = ChunkPlan(0)
        for decode_chunk, decode_seconds in decode_options:
            for short_chunk, short_seconds in short_options:
                min_steps = 1 if short_seconds else 0
                max_steps = MAX_SHORT_STEPS if short_seconds else 0
                for num_short_steps in range(min_steps, max_steps + 1):
                    before_last = decode_chunk + (num_short_steps - 1) * short_chunk
                    if short_chunk and before_last >= max_prefill:
                        break  # nothing is left for the last step
                    total_seconds = decode_seconds + num_short_steps * short_seconds
                    prefill = min(decode_chunk + num_short_steps * short_chunk, max_prefill)
                    prefill_speed = prefill / max(total_seconds, 1e-9)
                    if not best_rank[0] and -prefill_speed > best_rank[1]:
                        continue  # the best plan meets all deadlines and is faster
                    seconds_late = [
                        self._predict_seconds_until(
                            tokens, num_short_steps, decode_seconds, short_seconds
                        )
                        - seconds_left
                        for tokens, seconds_left in urgent
                    ]
                    excess = total_seconds - inputs.round_seconds if num_short_steps else 0.0
                    missed_seconds = max(*seconds_late, excess, 0.0)
                    rank = (missed_seconds, -prefill_speed, total_seconds)
                    if rank < best_rank:
                        best_rank = rank
                        best_plan = ChunkPlan(decode_chunk, short_chunk, num_short_steps)
        return best_plan

    def _list_chunk_options(self, inputs: RoundInputs) -> tuple[list[TimedChunk], list[TimedChunk]]:
        """Return the chunks to try in the decode step and in each short step, largest first."""
        num_decodes = inputs.all_decodes.num_tokens
        num_short = inputs.short_decodes.num_tokens
        context_tokens = inputs.batch.context_tokens
        quarter = max(inputs.efficient_tokens // 4, 1)
        sizes = [quarter * quarters for quarters in STEP_SIZE_QUARTERS]
        decode_chunks = [
            min(max(size - num_decodes, 0), inputs.max_prefill_tokens) for size in sizes
        ]
        decode_options = self._time_chunks(inputs.all_decodes, decode_chunks, context_tokens)
        if not num_decodes:
            # A step must contain at least one token.
            decode_options = [option for option in decode_options if option.prefill_tokens]
        short_options: list[TimedChunk] = []
        if inputs.batch.decode_streams:
            short_chunks = [max(size - num_short, 0) for size in sizes]
            short_options = self._time_chunks(inputs.short_decodes, short_chunks, context_tokens)
        short_options.append(NO_SHORT_STEP)
        return decode_options, short_options

    def _time_chunks(
        self, decodes: StepFeatures, chunks: list[int], context_tokens: int
    ) -> list[TimedChunk]:
        """Predict a step for each distinct chunk size that joins `decodes`."""
        timed: list[TimedChunk] = []
        for chunk in dict.fromkeys(chunks):
            features = StepFeatures(
                decodes.num_tokens + chunk, decodes.decode_keys, chunk * context_tokens
            )
            timed.append(TimedChunk(chunk, self.step_time.predict(features)))
        return timed

    def _predict_seconds_until(
        self, num_tokens: int, num_short_steps: int, decode_seconds: float, short_seconds: float
    ) -> float:
        """Return the seconds until a short request has `num_tokens` more tokens.

        The current round may have begun. Every later round has one decode step and
        `num_short_steps` short steps.
        """
        steps_left = max(num_short_steps - self.steps_since_streams, 0)
        if num_tokens <= steps_left:
            return num_tokens * short_seconds
        num_rounds, last_round_steps = divmod(num_tokens - steps_left, num_short_steps + 1)
        full_round = decode_seconds + num_short_steps * short_seconds
        seconds = steps_left * short_seconds + num_rounds * full_round
        if last_round_steps:
            seconds += decode_seconds + (last_round_steps - 1) * short_seconds
        return seconds

    def _predict_overhead_seconds(
        self, inputs: RoundInputs, prefill_tokens: int, includes_streams: bool
    ) -> float:
        """Return the seconds that the step takes beyond what the long requests alone would need.

        The long requests alone would need a decode step of the streams, and for their prefill
        tokens a share of a step of the efficient size. Such steps are measured all the time.
        Unsplit rounds would be the better reference but hardly occur while short requests run.
        """
        predict = self.step_time.predict
        batch = inputs.batch
        decodes = inputs.all_decodes if includes_streams else inputs.short_decodes
        step_seconds = predict(
            StepFeatures(decodes.num_tokens + prefill_tokens, decodes.decode_keys)
        )
        streams_seconds = 0.0
        if includes_streams and batch.decode_streams:
            streams = StepFeatures(len(batch.decode_streams), batch.stream_keys)
            streams_seconds = predict(streams)
        long_tokens = min(prefill_tokens, inputs.backlog.long_tokens)
        efficient_seconds = predict(StepFeatures(inputs.efficient_tokens))
        prefill_seconds = long_tokens * efficient_seconds / inputs.efficient_tokens
        return max(step_seconds - streams_seconds - prefill_seconds, 0.0)


def select_urgent_deadlines(
    deadlines: Iterable[RequestDeadline], round_seconds: float, overhead_used: float
) -> list[RequestDeadline]:
    """Return the most urgent deadlines, relaxed when the overhead approaches its bound."""
    if overhead_used >= IGNORE_FROM:
        return []
    extra_per_token = round_seconds * max(RELAX_SLOPE * (overhead_used - RELAX_FROM), 0.0)
    relaxed = [
        RequestDeadline(num_tokens, seconds + num_tokens * extra_per_token)
        for num_tokens, seconds in deadlines
    ]
    relaxed.sort(key=lambda deadline: deadline.seconds_per_token)
    return relaxed[:MAX_URGENT_DEADLINES]

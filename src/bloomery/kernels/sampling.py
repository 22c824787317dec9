"""Sampling on the GPU: from logits to tokens for any parameters, without a sort or the host.

A batch of mixed sampling parameters takes seven launches. The token of a sample is the one with the
highest (score - best) / temperature + Gumbel noise among those that min_p, top_k, top_p and
typical_p keep; the lowest id wins among equals. A greedy sample takes its highest score.

Scores are the logits, changed where the row asks for it (`adjust_scores`). They are computed from
the logits whenever they are needed, and never stored: the logits stay as they are for
log-probabilities, and only rows that ask for a change pay for it.

min_p, top_k and top_p keep a prefix of the order of tokens (score, then lower id), so no sort
is needed. A candidate is kept if it is likely enough for min_p, if fewer than top_k tokens come
before it, and if those hold less than top_p of the mass. The winner without truncation is usually
kept, and then it is the result. Otherwise the winner among the tokens before it is the next
candidate, and so on. Each attempt excludes the last candidate and everything after it, in
expectation half of the excess. typical_p works in the same way with another order.

Each launch has programs for every sample; most have one for each segment of the vocabulary. The
last program of a sample to finish combines the results of its segments.

    ban     finds the tokens that bad words and min_tokens forbid at this position, and begins green
            lists
    green   finds the green lists of watermarks
    scan    finds the winner without truncation, and settles every sample that needs no more
    verify  samples with top_p or typical_p alone: finds the mass before the candidate and the next
            candidate, all segments at the same time. Others: lists the tokens that matter (those
            that can be among the top_k, or that min_p may keep; usually few), then tries candidates
            until one is kept. Three launches: the second and third try the next candidates of the
            few samples that are left, and the third goes on until one is kept.
    report  counts the tokens before the sampled one, and finds the likeliest, under the logits

Masses are sums of integers, exp(z) in units of 2**-40, so the order of additions does not matter.
Scores are float32. The result therefore equals the reference except for near-exact ties: noisy
scores, or masses at the border of top_p, that agree to about 1e-6.

This file must not know requests or where logits come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bloomery.kernels.green_list import draw_swaps, follow_swaps
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    wait_for_previous,
)
from bloomery.kernels.sampling_reference import (
    GREEDY_TEMPERATURE,
    INCREMENT_1,
    MULTIPLIER_1,
    MULTIPLIER_2,
    UNIFORM_SCALE,
)
from bloomery.kernels.sampling_rows import (
    ADJUSTED_FLAGS,
    BAD,
    BANNED,
    BANNED_FLAG,
    BIASED,
    BIASED_FLAG,
    DELTA,
    FIRST_END,
    FLAGS,
    FREQUENCY,
    GREEN,
    GREEN_FLAG,
    LOGPROBS_FLAG,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
    MIN_P,
    NUM_BIT_SETS,
    NUM_FLOATS,
    NUM_GREEN,
    NUM_INTS,
    NUM_RECENT,
    NUM_TOP,
    NUM_WORDS,
    OUTPUT,
    PENALIZED_FLAG,
    PERMITTED,
    PERMITTED_FLAG,
    PRESENCE,
    PROMPT,
    PROMPT_LEN,
    REPETITION,
    SEED_WORDS,
    STOPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    SampleOutputs,
    SamplingRows,
)

TARGET_PROGRAMS = 512  # approximate number of programs of the verify and report launches
MIN_PROGRAMS = 8  # of one sample, in these launches
BINS_PER_SEGMENT = 8  # parts of a segment whose best logits bound the likeliest tokens


@dataclass(frozen=True)
class SamplingScratch:
    """Buffers that one launch passes to the next, allocated once and used by all calls.

    With S segments (a power of two), each sample has

        floats  by segment: S best scores, S masses, S best logits, S masses of the logits,
                8 S best logits of bins, S scores of winners, S masses weighted by z;
                then of the sample: best score, mass, log-sum-exp of the logits, score of the
                candidate, mean z, three unused;
                then the best score of each block
        ints    S winners by segment,
                then of the sample: finished programs, listed tokens, candidate, bound of the list,
                bound of the likeliest tokens, tokens before the sampled one, mode, end of the ids
                that may be among the likeliest with a logit at their bound;
                then the list of tokens and the list of their scores
        masses  the mass before the candidate

    Counters are zero between calls.
    """

    floats: torch.Tensor  # [samples, ...] float32
    ints: torch.Tensor  # [samples, ...] int32
    masses: torch.Tensor  # [samples] int64
    swaps: torch.Tensor  # [samples, vocab] int32
    segment: int  # tokens that one program scans
    block: int  # tokens whose highest score is stored, to estimate where the k-th best lies
    max_listed: int  # tokens that a list holds; on overflow the whole row is searched, slowly

    @classmethod
    def allocate(
        cls,
        num_samples: int,
        vocab_size: int,
        device: torch.device | str,
        segment: int = 2048,
        block: int = 64,
        max_listed: int = 4096,
    ) -> SamplingScratch:
        """Allocate buffers for `num_samples` samples."""
        segments = next_power_of_2(-(-vocab_size // segment))
        num_floats = (6 + BINS_PER_SEGMENT) * segments + 8 + segments * (segment // block)
        num_ints = segments + 8 + 2 * max_listed
        return cls(
            torch.zeros(num_samples, num_floats, dtype=torch.float32, device=device),
            torch.zeros(num_samples, num_ints, dtype=torch.int32, device=device),
            torch.zeros(num_samples, dtype=torch.int64, device=device),
            torch.zeros(num_samples, vocab_size, dtype=torch.int32, device=device),
            segment,
            block,
            max_listed,
        )


def sample_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingRows,
    outputs: SampleOutputs,
    scratch: SamplingScratch,
) -> None:
    """Sample a token for each row of logits [samples, vocab], and update the state of the rows.

    rows [samples] index the state; positions [samples] are those of the tokens to sample.
    """
    num_samples = len(logits)
    ban_kernel[(num_samples,)](
        rows,
        positions,
        state.ints,
        state.bits,
        state.bad_words,
        state.word_tokens,
        state.recent,
        scratch.swaps,
        logits.shape[1],
        state.bits.shape[2],
        TILE=1024,
        WORDS=64,
        num_warps=8,
        **pdl_options(logits.device),
    )
    arguments, options = _shared_arguments(logits, rows, positions, state, outputs, scratch)
    segments = -(-logits.shape[1] // scratch.segment)
    programs = min(segments, max(MIN_PROGRAMS, TARGET_PROGRAMS // num_samples))
    green_kernel[(num_samples, programs)](
        rows,
        state.ints,
        state.bits,
        scratch.swaps,
        logits.shape[1],
        state.bits.shape[2],
        TILE=2048,
        num_warps=8,
        **pdl_options(logits.device),
    )
    scan_kernel[(num_samples, segments)](*arguments, **options, num_warps=4)
    for is_last in (0, 0, 1):
        verify_kernel[(num_samples, programs)](
            *arguments, scratch.masses, is_last, **options, num_warps=8
        )
    _launch_report(logits, rows, state, outputs, scratch)


def score_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingRows,
    outputs: SampleOutputs,
    scratch: SamplingScratch,
) -> None:
    """Report the log-probabilities of given tokens, `outputs.tokens`.

    The rows must be greedy rows that ask for log-probabilities and for nothing else.
    """
    discarded = SampleOutputs(torch.empty_like(outputs.tokens), outputs.reports)
    arguments, options = _shared_arguments(logits, rows, rows, state, discarded, scratch)
    segments = -(-logits.shape[1] // scratch.segment)
    scan_kernel[(len(logits), segments)](*arguments, **options, num_warps=4)
    _launch_report(logits, rows, state, outputs, scratch)


def _shared_arguments(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingRows,
    outputs: SampleOutputs,
    scratch: SamplingScratch,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and options that the scan and verify launches have in common."""
    arguments = (
        logits,
        rows,
        positions,
        state.floats,
        state.ints,
        state.bits,
        state.bias,
        state.counts,
        state.recent,
        outputs.tokens,
        scratch.floats,
        scratch.ints,
        logits.stride(0),
        logits.shape[1],
        state.bits.shape[2],
    )
    segments = -(-logits.shape[1] // scratch.segment)
    options: dict[str, Any] = {
        "SEGMENTS": next_power_of_2(segments),
        "SEGMENT": scratch.segment,
        "BLOCK": scratch.block,
        "MAX_LISTED": scratch.max_listed,
        "GREEDY_TEMPERATURE": GREEDY_TEMPERATURE,
        **pdl_options(logits.device),
    }
    return arguments, options


def _launch_report(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingRows,
    outputs: SampleOutputs,
    scratch: SamplingScratch,
) -> None:
    num_samples = len(logits)
    segments = -(-logits.shape[1] // scratch.segment)
    programs = min(segments, max(MIN_PROGRAMS, TARGET_PROGRAMS // num_samples))
    report_kernel[(num_samples, programs)](
        logits,
        rows,
        state.ints,
        outputs.tokens,
        outputs.reports,
        scratch.floats,
        scratch.ints,
        logits.stride(0),
        logits.shape[1],
        SEGMENTS=next_power_of_2(segments),
        SEGMENT=scratch.segment,
        BLOCK=scratch.block,
        MAX_LISTED=scratch.max_listed,
        num_warps=4,
        **pdl_options(logits.device),
    )


# ---- banned tokens ----


@jit(do_not_specialize=["rows", "positions"])
def ban_kernel(
    rows,  # [samples]
    positions,  # [samples]
    ints,  # of SamplingRows
    bits,  # of SamplingRows
    bad_words,  # of SamplingRows
    word_tokens,  # of SamplingRows
    recent,  # of SamplingRows
    swaps,  # of SamplingScratch
    vocab_size,
    bit_words,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
    BAD: tl.constexpr = BAD,
    BANNED: tl.constexpr = BANNED,
    BANNED_FLAG: tl.constexpr = BANNED_FLAG,
    FIRST_END: tl.constexpr = FIRST_END,
    FLAGS: tl.constexpr = FLAGS,
    GREEN: tl.constexpr = GREEN,
    GREEN_FLAG: tl.constexpr = GREEN_FLAG,
    MAX_BAD_WORDS: tl.constexpr = MAX_BAD_WORDS,
    MAX_BAD_WORD_TOKENS: tl.constexpr = MAX_BAD_WORD_TOKENS,
    NUM_BIT_SETS: tl.constexpr = NUM_BIT_SETS,
    NUM_GREEN: tl.constexpr = NUM_GREEN,
    NUM_INTS: tl.constexpr = NUM_INTS,
    NUM_RECENT: tl.constexpr = NUM_RECENT,
    NUM_WORDS: tl.constexpr = NUM_WORDS,
    PROMPT_LEN: tl.constexpr = PROMPT_LEN,
    STOPS: tl.constexpr = STOPS,
):
    """One program computes the BANNED bits of one sample's row, and begins its green list.

    Banned are the bad words of one token, the last tokens of longer bad words whose other tokens
    end the output, and the stop tokens before min_tokens.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample).to(tl.int64)
    ints += row * NUM_INTS
    bits += row * NUM_BIT_SETS * bit_words
    recent += row * NUM_RECENT
    flags = tl.load(ints + FLAGS)
    position = tl.load(positions + sample).to(tl.int32)
    if (flags & GREEN_FLAG) != 0:
        previous_token = tl.load(recent + ((position - 1) & (NUM_RECENT - 1)))
        num_green = tl.load(ints + NUM_GREEN)
        draw_swaps(previous_token, num_green, vocab_size, swaps + sample * vocab_size)
        for start in range(0, bit_words, TILE):
            i = start + tl.arange(0, TILE)
            tl.store(bits + GREEN * bit_words + i, -1, mask=i < bit_words)
    if (flags & BANNED_FLAG) != 0:
        prompt_len = tl.load(ints + PROMPT_LEN)
        num_words = tl.load(ints + NUM_WORDS)
        banned = bits + BANNED * bit_words
        for start in range(0, bit_words, TILE):
            i = start + tl.arange(0, TILE)
            bad = tl.load(bits + BAD * bit_words + i, mask=i < bit_words, other=0)
            tl.store(banned + i, bad, mask=i < bit_words)
        tl.debug_barrier()
        bad_words += row * MAX_BAD_WORDS * 3
        word_tokens += row * MAX_BAD_WORD_TOKENS
        for start in range(0, num_words, WORDS):
            i = start + tl.arange(0, WORDS)
            exists = i < num_words
            last_token = tl.load(bad_words + 3 * i, mask=exists, other=0)
            first = tl.load(bad_words + 3 * i + 1, mask=exists, other=0)
            length = tl.load(bad_words + 3 * i + 2, mask=exists, other=0)
            matches = exists & (position - length >= prompt_len)
            for back in range(1, tl.max(length, 0) + 1):
                token = tl.load(recent + ((position - back) & (NUM_RECENT - 1)))
                inside = exists & (back <= length)
                expected = tl.load(word_tokens + first + length - back, mask=inside, other=0)
                matches &= (back > length) | (expected == token)
            one = tl.full([WORDS], 1, tl.int32)
            tl.atomic_or(banned + (last_token >> 5), one << (last_token & 31), mask=matches)
        tl.debug_barrier()
        use_words = count_left(bits, vocab_size, bit_words, flags, True, False, TILE) > 0
        wants_stops = position < tl.load(ints + FIRST_END)
        num_left = count_left(bits, vocab_size, bit_words, flags, use_words, True, TILE)
        use_stops = wants_stops & (num_left > 0)
        for start in range(0, bit_words, TILE):
            i = start + tl.arange(0, TILE)
            banned_bits = tl.load(banned + i, mask=i < bit_words, other=0, cache_modifier=".cg")
            stops = tl.load(bits + STOPS * bit_words + i, mask=i < bit_words, other=0)
            banned_bits = tl.where(use_words, banned_bits, 0) | tl.where(use_stops, stops, 0)
            tl.store(banned + i, banned_bits, mask=i < bit_words)


@jit
def count_left(
    bits,
    vocab_size,
    bit_words,
    flags,
    use_words,
    use_stops,
    TILE: tl.constexpr,
    BANNED: tl.constexpr = BANNED,
    PERMITTED: tl.constexpr = PERMITTED,
    PERMITTED_FLAG: tl.constexpr = PERMITTED_FLAG,
    STOPS: tl.constexpr = STOPS,
):
    """Count the words of a row's bits that still have a permitted token."""
    num_left = 0
    for start in range(0, bit_words, TILE):
        i = start + tl.arange(0, TILE)
        inside = i < bit_words
        num_tokens = tl.minimum(tl.maximum(vocab_size - 32 * i, 0), 32)
        one = tl.full([TILE], 1, tl.int32)
        existing = tl.where(num_tokens == 32, -1, (one << (num_tokens & 31)) - 1)
        permitted = tl.load(bits + PERMITTED * bit_words + i, mask=inside, other=0)
        permitted = tl.where((flags & PERMITTED_FLAG) != 0, permitted, -1)
        banned_bits = tl.load(
            bits + BANNED * bit_words + i, mask=inside, other=0, cache_modifier=".cg"
        )
        stops = tl.load(bits + STOPS * bit_words + i, mask=inside, other=0)
        forbidden = tl.where(use_words, banned_bits, 0) | tl.where(use_stops, stops, 0)
        left = inside & ((existing & permitted & ~forbidden) != 0)
        num_left += tl.sum(left.to(tl.int32), 0)
    return num_left


# ---- green lists ----


@jit(do_not_specialize=["rows"])
def green_kernel(
    rows,  # [samples]
    ints,  # of SamplingRows
    bits,  # of SamplingRows
    swaps,  # of SamplingScratch
    vocab_size,
    bit_words,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
    FLAGS: tl.constexpr = FLAGS,
    GREEN: tl.constexpr = GREEN,
    GREEN_FLAG: tl.constexpr = GREEN_FLAG,
    NUM_BIT_SETS: tl.constexpr = NUM_BIT_SETS,
    NUM_GREEN: tl.constexpr = NUM_GREEN,
    NUM_INTS: tl.constexpr = NUM_INTS,
):
    """Take the tokens that a shuffle leaves behind the green ones off a list of all tokens."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample).to(tl.int64)
    ints += row * NUM_INTS
    if (tl.load(ints + FLAGS) & GREEN_FLAG) != 0:
        green = bits + (row * NUM_BIT_SETS + GREEN) * bit_words
        num_green = tl.load(ints + NUM_GREEN)
        first = num_green // 32 * 32 + tl.program_id(1) * TILE
        for start in range(first, vocab_size, tl.num_programs(1) * TILE):
            positions = start + tl.arange(0, TILE)
            valid = (positions >= num_green) & (positions < vocab_size)
            tokens = follow_swaps(swaps + sample * vocab_size, positions, valid)
            bit = tl.full([TILE], 1, tl.int32) << (tokens & 31)
            stays = tokens == positions
            tl.atomic_and(green + (tokens >> 5), ~bit, mask=valid & ~stays, sem="relaxed")
            # The tokens that stay are neighbours: one operation for 32 of them.
            bits_of_word = tl.reshape(tl.where(valid & stays, bit, 0), (TILE // 32, 32))
            word = tl.sum(bits_of_word, 1)
            place = start // 32 + tl.arange(0, TILE // 32)
            tl.atomic_and(green + place, ~word, mask=word != 0, sem="relaxed")


# ---- scores ----


@jit
def has_bit(bit_set, ids, valid):
    """Whether the bit of each token is set."""
    return ((tl.load(bit_set + (ids >> 5), mask=valid, other=0) >> (ids & 31)) & 1) != 0


@jit
def adjust_scores(
    scores,
    ids,
    valid,
    flags,
    floats,
    bits,
    bias,
    counts,
    bit_words,
    BANNED: tl.constexpr = BANNED,
    BANNED_FLAG: tl.constexpr = BANNED_FLAG,
    BIASED: tl.constexpr = BIASED,
    BIASED_FLAG: tl.constexpr = BIASED_FLAG,
    DELTA: tl.constexpr = DELTA,
    FREQUENCY: tl.constexpr = FREQUENCY,
    GREEN: tl.constexpr = GREEN,
    GREEN_FLAG: tl.constexpr = GREEN_FLAG,
    OUTPUT: tl.constexpr = OUTPUT,
    PENALIZED_FLAG: tl.constexpr = PENALIZED_FLAG,
    PERMITTED: tl.constexpr = PERMITTED,
    PERMITTED_FLAG: tl.constexpr = PERMITTED_FLAG,
    PRESENCE: tl.constexpr = PRESENCE,
    PROMPT: tl.constexpr = PROMPT,
    REPETITION: tl.constexpr = REPETITION,
):
    """Return the scores of tokens given their logits; the tables begin at the sample's row."""
    if (flags & PERMITTED_FLAG) != 0:
        permitted = has_bit(bits + PERMITTED * bit_words, ids, valid)
        scores = tl.where(permitted, scores, -float("inf"))
    if (flags & BIASED_FLAG) != 0:
        biased = has_bit(bits + BIASED * bit_words, ids, valid)
        scores += tl.load(bias + ids, mask=valid & biased, other=0.0)
    if (flags & BANNED_FLAG) != 0:
        banned = has_bit(bits + BANNED * bit_words, ids, valid)
        scores = tl.where(banned, -float("inf"), scores)
    if (flags & GREEN_FLAG) != 0:
        green = has_bit(bits + GREEN * bit_words, ids, valid)
        delta = tl.load(floats + DELTA).to(tl.float32)
        scores = tl.where(green, scores + delta, scores)
    if (flags & PENALIZED_FLAG) != 0:
        repetition = tl.load(floats + REPETITION).to(tl.float32)
        frequency = tl.load(floats + FREQUENCY).to(tl.float32)
        presence = tl.load(floats + PRESENCE).to(tl.float32)
        in_output = has_bit(bits + OUTPUT * bit_words, ids, valid)
        occurs = in_output | has_bit(bits + PROMPT * bit_words, ids, valid)
        count = tl.load(counts + ids, mask=valid & in_output, other=0).to(tl.float32)
        divided = tl.div_rn(scores, repetition + tl.zeros_like(scores))
        repeated = tl.where(scores > 0, divided, scores * repetition)
        scores = tl.where(occurs, repeated, scores)
        scores = scores - frequency * count
        scores = scores - tl.where(count > 0, presence, 0.0)
    return scores


@jit
def load_logits(pointers, valid):
    """Load logits as float32; NaN counts as -inf."""
    scores = tl.load(pointers, mask=valid, other=-float("inf")).to(tl.float32)
    return tl.where(scores == scores, scores, -float("inf"))


@jit
def load_scores(
    logits,
    ids,
    valid,
    flags,
    floats,
    bits,
    bias,
    counts,
    bit_words,
    ADJUSTED_FLAGS: tl.constexpr = ADJUSTED_FLAGS,
):
    """Load the scores of tokens; the tables begin at the sample's row."""
    scores = load_logits(logits + ids, valid)
    if (flags & ADJUSTED_FLAGS) != 0:
        scores = adjust_scores(scores, ids, valid, flags, floats, bits, bias, counts, bit_words)
    return scores


@jit
def record_token(
    token,
    position,
    flags,
    bits,
    counts,
    recent,
    bit_words,
    BANNED_FLAG: tl.constexpr = BANNED_FLAG,
    GREEN_FLAG: tl.constexpr = GREEN_FLAG,
    MAX_COUNT: tl.constexpr = MAX_COUNT,
    NUM_RECENT: tl.constexpr = NUM_RECENT,
    OUTPUT: tl.constexpr = OUTPUT,
    PENALIZED_FLAG: tl.constexpr = PENALIZED_FLAG,
):
    """Update the state of a row with its sampled token; the tables begin at that row.

    No other program reads the state any more: all others of the sample have finished.
    """
    if (flags & (BANNED_FLAG | GREEN_FLAG)) != 0:
        tl.store(recent + (position & (NUM_RECENT - 1)), token)
    if (flags & PENALIZED_FLAG) != 0:
        bit = tl.full([], 1, tl.int32) << (token & 31)
        # An atomic operation gives all threads the same value. A load followed by a store would
        # not.
        word = tl.atomic_or(bits + OUTPUT * bit_words + (token >> 5), bit)
        first = (word & bit) == 0
        count = tl.load(counts + token).to(tl.int32)
        tl.debug_barrier()
        count = tl.where(first, 1, tl.minimum(count + 1, MAX_COUNT))
        tl.store(counts + token, count.to(tl.int16))


# ---- scan ----


@jit(do_not_specialize=["rows", "positions", "tokens"])
def scan_kernel(
    logits,  # [samples, vocab]
    rows,  # [samples]
    positions,  # [samples]
    row_floats,  # of SamplingRows, like the next five
    row_ints,
    bits,
    bias,
    counts,
    recent,
    tokens,  # [samples]
    floats,  # of SamplingScratch, like the next
    ints,
    logits_stride,
    vocab_size,
    bit_words,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    GREEDY_TEMPERATURE: tl.constexpr,
    PDL: tl.constexpr,
    BINS: tl.constexpr = BINS_PER_SEGMENT,
    FLAGS: tl.constexpr = FLAGS,
    LOGPROBS_FLAG: tl.constexpr = LOGPROBS_FLAG,
    MIN_P: tl.constexpr = MIN_P,
    NUM_BIT_SETS: tl.constexpr = NUM_BIT_SETS,
    NUM_FLOATS: tl.constexpr = NUM_FLOATS,
    NUM_INTS: tl.constexpr = NUM_INTS,
    NUM_RECENT: tl.constexpr = NUM_RECENT,
    NUM_TOP: tl.constexpr = NUM_TOP,
    TOP_K: tl.constexpr = TOP_K,
    TOP_P: tl.constexpr = TOP_P,
    TYPICAL_P: tl.constexpr = TYPICAL_P,
):
    """One program scans one segment; the last one of a sample finds the sample's winner."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row = tl.load(rows + sample).to(tl.int64)
    position = tl.load(positions + sample)
    row_floats += row * NUM_FLOATS
    row_ints += row * NUM_INTS
    bits += row * NUM_BIT_SETS * bit_words
    bias += row * vocab_size
    counts += row * vocab_size
    temp, key0, key1 = load_temperature_and_keys(row_floats, row_ints, position)
    flags = tl.load(row_ints + FLAGS)
    logits += sample * logits_stride
    floats += sample * ((6 + BINS) * SEGMENTS + 8 + SEGMENTS * (SEGMENT // BLOCK))
    ints += sample * (SEGMENTS + 8 + 2 * MAX_LISTED)
    own_floats = floats + (6 + BINS) * SEGMENTS
    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    valid = ids < vocab_size
    if (flags & LOGPROBS_FLAG) != 0:
        raw = load_logits(logits + ids, valid)
        raw_best = tl.max(raw, 0)
        tl.store(floats + 2 * SEGMENTS + segment, raw_best)
        raw_mass = tl.sum(tl.exp(scaled_difference(raw, raw_best, 1.0)), 0)
        tl.store(floats + 3 * SEGMENTS + segment, raw_mass)
        bin_bests = tl.max(tl.reshape(raw, (BINS, SEGMENT // BINS)), 1)
        tl.store(floats + 4 * SEGMENTS + segment * BINS + tl.arange(0, BINS), bin_bests)
    scores = load_scores(logits, ids, valid, flags, row_floats, bits, bias, counts, bit_words)
    segment_best = tl.max(scores, 0)
    tl.store(floats + segment, segment_best)
    segment_winner, winner_score = find_winner(
        scores, ids, valid, segment_best, temp, key0, key1, GREEDY_TEMPERATURE
    )
    tl.store(ints + segment, segment_winner)
    tl.store(floats + (4 + BINS) * SEGMENTS + segment, winner_score)
    is_typical = tl.load(row_floats + TYPICAL_P) < 1.0
    if temp >= GREEDY_TEMPERATURE:
        mass = tl.sum(tl.exp(scaled_difference(scores, segment_best, temp)), 0)
        tl.store(floats + SEGMENTS + segment, mass)
        block = segment * (SEGMENT // BLOCK) + tl.arange(0, SEGMENT // BLOCK)
        block_best = tl.max(tl.reshape(scores, (SEGMENT // BLOCK, BLOCK)), 1)
        tl.store(own_floats + 8 + block, block_best)
        if is_typical:
            z = scaled_difference(scores, segment_best, temp)
            weighted = tl.sum(tl.where(z > -1.0e30, tl.exp(z) * tl.maximum(z, -1.0e30), 0.0), 0)
            tl.store(floats + (5 + BINS) * SEGMENTS + segment, weighted)
    if is_last_program(ints + SEGMENTS):
        j = tl.arange(0, SEGMENTS)
        exists = j < tl.num_programs(1)
        segment_bests = load_results(floats + j, exists)
        winners = tl.load(ints + j, mask=exists, other=0, cache_modifier=".cg")
        winner_scores = load_results(floats + (4 + BINS) * SEGMENTS + j, exists)
        best = tl.max(segment_bests, 0)
        candidate, candidate_score = find_winner(
            winner_scores, winners, exists, best, temp, key0, key1, GREEDY_TEMPERATURE
        )
        candidate = tl.minimum(candidate, vocab_size - 1)
        tl.store(tokens + sample, candidate)
        if (flags & LOGPROBS_FLAG) != 0:
            raw_bests = load_results(floats + 2 * SEGMENTS + j, exists)
            raw_best = tl.max(raw_bests, 0)
            raw_mass = total_mass(floats + 3 * SEGMENTS + j, raw_bests, exists, raw_best, 1.0)
            tl.store(own_floats + 2, raw_best + tl.log(tl.maximum(raw_mass, 1e-37)))
            num_top = tl.load(row_ints + NUM_TOP)
            if num_top > 0:
                i = tl.arange(0, SEGMENTS * BINS)
                bin_bests = load_results(floats + 4 * SEGMENTS + i, i < tl.num_programs(1) * BINS)
                ordinals = score_to_ordinal(bin_bests)
                top_bound = kth_highest(ordinals, num_top)
                tl.store(ints + SEGMENTS + 4, top_bound.to(tl.int32, bitcast=True))
                # The first num_top bins that reach the bound have that many tokens before any tie
                # in a later bin.
                reaches = ordinals >= top_bound
                num_reaching = tl.cumsum(reaches.to(tl.int32), 0)
                is_end = reaches & (num_reaching == num_top)
                end_bin = tl.min(tl.where(is_end, i, SEGMENTS * BINS), 0)
                tl.store(ints + SEGMENTS + 7, (end_bin + 1) * (SEGMENT // BINS))
        k = tl.load(row_ints + TOP_K)
        min_prob = tl.load(row_floats + MIN_P).to(tl.float32)
        has_top_p = tl.load(row_floats + TOP_P) < 1.0
        truncates = (k > 0) | (min_prob > 0.0) | has_top_p | is_typical
        unsettled = (temp >= GREEDY_TEMPERATURE) & truncates & (best > -float("inf"))
        tl.store(ints + SEGMENTS + 2, tl.where(unsettled, candidate, -1))
        if unsettled:
            mass = total_mass(floats + SEGMENTS + j, segment_bests, exists, best, temp)
            tl.store(own_floats, best)
            tl.store(own_floats + 1, mass)
            tl.store(own_floats + 3, candidate_score)
            # Mode 1: top_p alone. Mode 2: typical_p alone. Mode 0: anything else.
            is_alone = (k == 0) & (min_prob <= 0.0) & (has_top_p != is_typical)
            mode = tl.where(is_typical, 2, 1)
            tl.store(ints + SEGMENTS + 6, tl.where(is_alone, mode, 0))
            if is_typical:
                masses = tl.load(
                    floats + SEGMENTS + j, mask=exists, other=0.0, cache_modifier=".cg"
                )
                weighted = tl.load(
                    floats + (5 + BINS) * SEGMENTS + j,
                    mask=exists,
                    other=0.0,
                    cache_modifier=".cg",
                )
                shift = tl.maximum(scaled_difference(segment_bests, best, temp), -1.0e30)
                weighted = tl.exp(shift) * (weighted + shift * masses)
                tl.store(own_floats + 4, tl.sum(tl.where(exists, weighted, 0.0), 0) / mass)
            bound = relevance_bound(
                candidate_score,
                best,
                temp,
                min_prob,
                k,
                is_typical,
                own_floats + 8,
                SEGMENTS,
                SEGMENT // BLOCK,
            )
            tl.store(ints + SEGMENTS + 3, bound.to(tl.int32, bitcast=True))
        else:
            recent += row * NUM_RECENT
            record_token(candidate, position, flags, bits, counts, recent, bit_words)


@jit
def load_results(pointers, exists):
    """Load what other programs have stored; -inf where there is none."""
    return tl.load(pointers, mask=exists, other=-float("inf"), cache_modifier=".cg")


# ---- verify ----


@jit(do_not_specialize=["rows", "positions", "tokens", "is_last"])
def verify_kernel(
    logits,  # [samples, vocab]
    rows,  # [samples]
    positions,  # [samples]
    row_floats,  # of SamplingRows, like the next five
    row_ints,
    bits,
    bias,
    counts,
    recent,
    tokens,  # [samples]
    floats,  # of SamplingScratch, like the next
    ints,
    logits_stride,
    vocab_size,
    bit_words,
    masses,  # of SamplingScratch
    is_last,  # of the launches
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    GREEDY_TEMPERATURE: tl.constexpr,
    PDL: tl.constexpr,
    BINS: tl.constexpr = BINS_PER_SEGMENT,
    FLAGS: tl.constexpr = FLAGS,
    MIN_P: tl.constexpr = MIN_P,
    NUM_BIT_SETS: tl.constexpr = NUM_BIT_SETS,
    NUM_FLOATS: tl.constexpr = NUM_FLOATS,
    NUM_INTS: tl.constexpr = NUM_INTS,
    NUM_RECENT: tl.constexpr = NUM_RECENT,
    TOP_K: tl.constexpr = TOP_K,
    TOP_P: tl.constexpr = TOP_P,
    TYPICAL_P: tl.constexpr = TYPICAL_P,
):
    """Try the candidate of a sample and find the next, or list the tokens that matter to it.

    The last program of a sample combines the results.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    floats += sample * ((6 + BINS) * SEGMENTS + 8 + SEGMENTS * (SEGMENT // BLOCK))
    ints += sample * (SEGMENTS + 8 + 2 * MAX_LISTED)
    own_floats = floats + (6 + BINS) * SEGMENTS
    candidate = tl.load(ints + SEGMENTS + 2)
    if candidate >= 0:  # no launch before has settled this sample
        row = tl.load(rows + sample).to(tl.int64)
        row_floats += row * NUM_FLOATS
        row_ints += row * NUM_INTS
        bits += row * NUM_BIT_SETS * bit_words
        bias += row * vocab_size
        counts += row * vocab_size
        recent += row * NUM_RECENT
        flags = tl.load(row_ints + FLAGS)
        logits += sample * logits_stride
        position = tl.load(positions + sample)
        temp, key0, key1 = load_temperature_and_keys(row_floats, row_ints, position)
        top_mass = tl.load(row_floats + TOP_P).to(tl.float64)
        typical_mass = tl.load(row_floats + TYPICAL_P).to(tl.float64)
        listed = ints + SEGMENTS + 8
        mode = tl.load(ints + SEGMENTS + 6)
        best = tl.load(own_floats)
        mass = tl.load(own_floats + 1).to(tl.float64)
        center = tl.load(own_floats + 4)
        candidate_score = tl.load(own_floats + 3)
        k = tl.load(row_ints + TOP_K)
        min_prob = tl.load(row_floats + MIN_P).to(tl.float32)
        num_segments = tl.cdiv(vocab_size, SEGMENT)
        if mode == 0:
            bound = tl.load(ints + SEGMENTS + 3).to(tl.uint32, bitcast=True)
            for segment in range(tl.program_id(1), num_segments, tl.num_programs(1)):
                if score_to_ordinal(tl.load(floats + segment)) >= bound:
                    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
                    valid = ids < vocab_size
                    scores = load_scores(
                        logits, ids, valid, flags, row_floats, bits, bias, counts, bit_words
                    )
                    relevant = valid & (score_to_ordinal(scores) >= bound)
                    append_to_list(ids, scores, relevant, ints + SEGMENTS + 1, listed, MAX_LISTED)
        else:
            distance = candidate_distance(candidate_score, best, temp, center, mode)
            mass_before = tl.full([], 0, tl.int64)
            winner_value = -float("inf")
            winner = vocab_size
            winner_score = -float("inf")
            for segment in range(tl.program_id(1), num_segments, tl.num_programs(1)):
                if (mode == 2) | (tl.load(floats + segment) >= candidate_score):
                    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
                    valid = ids < vocab_size
                    scores = load_scores(
                        logits, ids, valid, flags, row_floats, bits, bias, counts, bit_words
                    )
                    z = scaled_difference(scores, best, temp)
                    own_distance = tl.where(mode == 2, tl.abs(center - z), -scores)
                    likelier = (scores > candidate_score) | (
                        (scores == candidate_score) & (ids < candidate)
                    )
                    is_before = (own_distance < distance) | ((own_distance == distance) & likelier)
                    valid &= is_before & (scores > -float("inf"))
                    mass_before += tl.sum(tl.where(valid, integer_mass(z), 0), 0)
                    values = z + gumbel_noise_triton(key0, key1, ids)
                    values = tl.where(valid, values, -float("inf"))
                    highest = tl.max(values, 0)
                    is_first = valid & (values == highest)
                    first = tl.min(tl.where(is_first, ids, vocab_size), 0)
                    is_first &= ids == first
                    first_score = tl.max(tl.where(is_first, scores, -float("inf")), 0)
                    replaces = (highest > winner_value) | (
                        (highest == winner_value) & (first < winner)
                    )
                    winner = tl.where(replaces, first, winner)
                    winner_score = tl.where(replaces, first_score, winner_score)
                    winner_value = tl.maximum(winner_value, highest)
            tl.atomic_add(masses + sample, mass_before)
            tl.store(ints + tl.program_id(1), winner)
            tl.store(floats + (4 + BINS) * SEGMENTS + tl.program_id(1), winner_score)
        if is_last_program(ints + SEGMENTS):
            # An atomic exchange gives all threads the same value. A load followed by a store
            # would not.
            num_listed = tl.atomic_xchg(ints + SEGMENTS + 1, 0)
            use_list = (mode == 0) & (num_listed <= MAX_LISTED)
            size = tl.where(use_list, num_listed, vocab_size)
            settled = False
            if mode != 0:
                MASS_UNIT: tl.constexpr = 2.0**-40
                zero = tl.full([], 0, tl.int64)
                tried_mass = tl.atomic_xchg(masses + sample, zero).to(tl.float64)
                limit = tl.where(mode == 2, typical_mass, top_mass) * mass
                j = tl.arange(0, SEGMENTS)
                exists = j < tl.num_programs(1)
                winners = tl.load(ints + j, mask=exists, other=vocab_size, cache_modifier=".cg")
                exists &= winners < vocab_size
                winner_scores = load_results(floats + (4 + BINS) * SEGMENTS + j, exists)
                next_candidate, next_score = find_winner(
                    winner_scores, winners, exists, best, temp, key0, key1, GREEDY_TEMPERATURE
                )
                has_next = tl.sum(exists.to(tl.int32), 0) > 0
                settled = (tried_mass * MASS_UNIT < limit) | (has_next == 0)
                candidate = tl.where(settled, candidate, next_candidate)
                candidate_score = tl.where(settled, candidate_score, next_score)
                tl.store(ints + SEGMENTS + 2, candidate)
                tl.store(own_floats + 3, candidate_score)
            if (settled == 0) & ((mode == 0) | (is_last != 0)):
                candidate = find_kept_candidate(
                    candidate,
                    candidate_score,
                    logits,
                    flags,
                    row_floats,
                    bits,
                    bias,
                    counts,
                    bit_words,
                    listed,
                    use_list,
                    size,
                    vocab_size,
                    best,
                    mass,
                    center,
                    mode,
                    temp,
                    k,
                    top_mass,
                    typical_mass,
                    min_prob,
                    key0,
                    key1,
                    SEGMENT,
                    MAX_LISTED,
                )
                settled = candidate >= 0
            if settled:
                tl.store(ints + SEGMENTS + 2, -1)
                tl.store(tokens + sample, candidate)
                record_token(candidate, position, flags, bits, counts, recent, bit_words)


@jit
def candidate_distance(score, best, temp, center, mode):
    """Return where the candidate stands in the order of its mode; earlier tokens have less."""
    z = scaled_difference(score, best, temp)
    return tl.where(mode == 2, tl.abs(center - z), -score)


@jit
def append_to_list(ids, scores, chosen, counter, listed, MAX_LISTED: tl.constexpr):
    """Append the chosen tokens and their scores to a list, as far as it has room."""
    place = tl.atomic_add(counter, tl.sum(chosen.to(tl.int32), 0))
    place += tl.cumsum(chosen.to(tl.int32), 0) - 1
    fits = chosen & (place < MAX_LISTED)
    tl.store(listed + place, ids, mask=fits)
    tl.store(listed + MAX_LISTED + place, scores.to(tl.int32, bitcast=True), mask=fits)


@jit
def load_candidates(
    logits,
    flags,
    row_floats,
    bits,
    bias,
    counts,
    bit_words,
    listed,
    use_list,
    start,
    size,
    WIDTH: tl.constexpr,
    MAX_LISTED: tl.constexpr,
):
    """Load a tile of token ids and their scores, from the list or from the whole row of logits."""
    ids = start + tl.arange(0, WIDTH)
    valid = ids < size
    if use_list:
        place = ids
        ids = tl.load(listed + place, mask=valid, other=0, cache_modifier=".cg")
        encoded = tl.load(listed + MAX_LISTED + place, mask=valid, other=0, cache_modifier=".cg")
        scores = encoded.to(tl.float32, bitcast=True)
    else:
        scores = load_scores(logits, ids, valid, flags, row_floats, bits, bias, counts, bit_words)
    return ids, scores, valid


@jit
def find_kept_candidate(
    candidate,
    candidate_score,
    logits,
    flags,
    row_floats,
    bits,
    bias,
    counts,
    bit_words,
    listed,
    use_list,
    size,
    vocab_size,
    best,
    whole_mass,
    center,
    mode,
    temp,
    k,
    top_mass,
    typical_mass,
    min_prob,
    key0,
    key1,
    SEGMENT: tl.constexpr,
    MAX_LISTED: tl.constexpr,
):
    """Return the first candidate that truncation keeps.

    One loop sweeps over the tokens again and again, because every copy of its body would have to be
    compiled. Its phases:

        SEARCH_SCORE  finds the lowest kept score bit by bit: of the tokens above it there must be
                      fewer than k, or their mass must be below the limit
        SEARCH_ID     of the tokens with that score, finds how many are kept: those with low ids
        SURVEY        finds the mass of the kept tokens and the winner among them
        TRY           tries a candidate: the mass before it must be below the limit, and fewer than
                      k tokens may come before it. Otherwise the winner among those is the next one

    top_p is a share of the mass that top_k and min_p leave, and typical_p of what all others leave.
    Without typical_p the tokens that equal the k-th best score are all surveyed; the mass of those
    too many is taken off again. Both searches need a sweep for each bit. Tokens that are listed fit
    into registers and are searched there instead.
    """
    SEARCH_SCORE: tl.constexpr = 0
    SEARCH_ID: tl.constexpr = 1
    SURVEY: tl.constexpr = 2
    TRY: tl.constexpr = 3
    DONE: tl.constexpr = 4
    MASS_UNIT: tl.constexpr = 2.0**-40
    min_z = tl.where(min_prob > 0.0, tl.log(tl.maximum(min_prob, 1e-30)), -float("inf"))
    is_typical = typical_mass < 1.0
    lowest = tl.full([], 0x007FFFFF, tl.uint32)  # the ordinal of -inf
    kept_ordinal = (
        lowest  # tokens above this score are kept, and those at it with ids below `kept_id`
    )
    kept_id = 0
    lower = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    id_lower = 0
    id_step = 1 << 30
    num_tied = 0  # tokens at the lowest kept score that are kept
    by_mass = mode < 0  # whether the score is searched for top_p; at first for top_k
    mass_limit = whole_mass
    phase = tl.where(mode == 0, SURVEY, TRY)
    if k > 0:
        phase = tl.full([], SEARCH_SCORE, tl.int32)
        if use_list:
            place = tl.arange(0, MAX_LISTED)
            encoded = tl.load(
                listed + MAX_LISTED + place, mask=place < size, other=0, cache_modifier=".cg"
            )
            ordinals = score_to_ordinal(encoded.to(tl.float32, bitcast=True))
            lower = kth_highest(tl.where(place < size, ordinals, 0), k)
            bit = tl.full([], 0, tl.uint32)
            if is_typical == 0:
                kept_ordinal = tl.maximum(lower, lowest)
                kept_id = vocab_size
                phase = tl.full([], SURVEY, tl.int32)
    while phase != DONE:
        candidate_ordinal = score_to_ordinal(candidate_score)
        candidate_z = scaled_difference(candidate_score, best, temp)
        distance = tl.abs(center - candidate_z)
        border = tl.where(phase == SURVEY, lowest, candidate_ordinal)
        border = tl.where(phase == SEARCH_ID, lower, border)
        searched = tl.where(bit == 0, lower, lower | (bit - 1))
        border = tl.where(phase == SEARCH_SCORE, searched, border)
        border_id = tl.where(phase == TRY, candidate, vocab_size)
        border_id = tl.where(phase == SEARCH_ID, id_lower + id_step, border_id)
        by_distance = is_typical & (phase == TRY)
        num_above = 0
        num_ties = 0
        mass_above = tl.full([], 0, tl.int64)
        mass_before = tl.full([], 0, tl.int64)
        weighted = tl.full([], 0.0, tl.float64)
        winner_value = -float("inf")
        winner = vocab_size
        winner_score = -float("inf")
        for start in range(0, size, SEGMENT):
            ids, scores, valid = load_candidates(
                logits,
                flags,
                row_floats,
                bits,
                bias,
                counts,
                bit_words,
                listed,
                use_list,
                start,
                size,
                SEGMENT,
                MAX_LISTED,
            )
            ordinals = score_to_ordinal(scores)
            z = scaled_difference(scores, best, temp)
            valid &= (ordinals > kept_ordinal) | ((ordinals == kept_ordinal) & (ids < kept_id))
            valid &= (z >= min_z) & (scores > -float("inf"))
            is_above = valid & (ordinals > border)
            is_tied = valid & (ordinals == border) & (ids < border_id)
            own_distance = tl.abs(center - z)
            likelier = is_above | is_tied
            is_nearer = (own_distance < distance) | ((own_distance == distance) & likelier)
            is_before = tl.where(by_distance, valid & is_nearer, likelier)
            mass = integer_mass(z)
            num_above += tl.sum(is_above.to(tl.int32), 0)
            num_ties += tl.sum(is_tied.to(tl.int32), 0)
            mass_above += tl.sum(tl.where(is_above, mass, 0), 0)
            mass_before += tl.sum(tl.where(is_before, mass, 0), 0)
            if is_typical:
                product = tl.exp(z).to(tl.float64) * tl.maximum(z, -1.0e30).to(tl.float64)
                weighted += tl.sum(tl.where(is_before, product, 0.0), 0)
            values = tl.where(is_before, z + gumbel_noise_triton(key0, key1, ids), -float("inf"))
            highest = tl.max(values, 0)
            is_first = is_before & (values == highest)
            first = tl.min(tl.where(is_first, ids, vocab_size), 0)
            first_score = tl.max(tl.where(is_first & (ids == first), scores, -float("inf")), 0)
            replaces = (highest > winner_value) | ((highest == winner_value) & (first < winner))
            winner = tl.where(replaces, first, winner)
            winner_score = tl.where(replaces, first_score, winner_score)
            winner_value = tl.maximum(winner_value, highest)
        probability_above = mass_above.to(tl.float64) * MASS_UNIT
        probability_before = mass_before.to(tl.float64) * MASS_UNIT
        if phase == SEARCH_SCORE:
            fits = tl.where(by_mass, probability_above < mass_limit, num_above < k)
            is_found = bit == 0
            lower = tl.where(is_found | fits, lower, lower | bit)
            bit = bit >> 1
            if is_found:
                own_z = scaled_difference(ordinal_to_score(tl.maximum(lower, lowest)), best, temp)
                own_mass = tl.maximum(tl.exp(own_z).to(tl.float64), 1e-300)
                room = tl.minimum((mass_limit - probability_above) / own_mass, 1.0e9)
                num_tied = tl.where(by_mass, tl.ceil(room).to(tl.int32), k - num_above)
                exceeds = is_typical & (num_tied < num_ties)
                phase = tl.where(exceeds & (use_list == 0), SEARCH_ID, SURVEY)
                id_lower = vocab_size
                if exceeds & use_list:
                    ids, ordinals, masses = load_kept(
                        listed, size, kept_ordinal, kept_id, best, temp, min_z, MAX_LISTED
                    )
                    id_lower = find_tie_end(ids, ordinals == lower, num_tied)
                is_searched = exceeds & (use_list == 0)
                kept_ordinal = tl.where(is_searched, kept_ordinal, tl.maximum(lower, lowest))
                kept_id = tl.where(is_searched, kept_id, id_lower)
                id_lower = 0
                id_step = 1 << 30
        elif phase == SEARCH_ID:
            id_lower = tl.where(num_ties <= num_tied, id_lower + id_step, id_lower)
            id_step = id_step >> 1
            if id_step == 0:
                kept_ordinal = tl.maximum(lower, lowest)
                kept_id = id_lower
                phase = tl.full([], SURVEY, tl.int32)
        elif phase == SURVEY:
            candidate = tl.minimum(winner, vocab_size - 1)
            candidate_score = winner_score
            searches_mass = is_typical & (top_mass < 1.0) & (by_mass == 0)
            if searches_mass:
                by_mass = mode == 0
                mass_limit = top_mass * probability_before
                lower = tl.full([], 0, tl.uint32)
                bit = tl.full([], 0x80000000, tl.uint32)
                phase = tl.full([], SEARCH_SCORE, tl.int32)
                if use_list:
                    ids, ordinals, masses = load_kept(
                        listed, size, kept_ordinal, kept_id, best, temp, min_z, MAX_LISTED
                    )
                    lower = find_lowest_kept(ordinals, masses, mass_limit)
                    bit = tl.full([], 0, tl.uint32)
            else:
                excess = tl.where(is_typical | (k == 0), 0, tl.maximum(num_above - k, 0))
                kept_z = scaled_difference(ordinal_to_score(kept_ordinal), best, temp)
                excess_mass = excess.to(tl.int64) * integer_mass(kept_z)
                whole_mass = (mass_before - excess_mass).to(tl.float64) * MASS_UNIT
                center = (weighted / tl.maximum(probability_before, 1e-300)).to(tl.float32)
                needs_try = is_typical | (top_mass < 1.0) | (excess > 0)
                phase = tl.where(needs_try & (winner < vocab_size), TRY, DONE)
        else:
            share = tl.where(is_typical, typical_mass, top_mass)
            accepted = (share >= 1.0) | (probability_before < share * whole_mass)
            accepted &= is_typical | (k == 0) | (num_above + num_ties < k)
            goes_on = (accepted == 0) & (winner < vocab_size)
            candidate = tl.where(goes_on, winner, candidate)
            candidate_score = tl.where(goes_on, winner_score, candidate_score)
            phase = tl.where(goes_on, TRY, DONE)
    return candidate


@jit
def load_kept(listed, size, kept_ordinal, kept_id, best, temp, min_z, MAX_LISTED: tl.constexpr):
    """Load the ids, ordinals and masses of a whole list; those of tokens not kept are 0."""
    place = tl.arange(0, MAX_LISTED)
    exists = place < size
    ids = tl.load(listed + place, mask=exists, other=0, cache_modifier=".cg")
    encoded = tl.load(listed + MAX_LISTED + place, mask=exists, other=0, cache_modifier=".cg")
    scores = encoded.to(tl.float32, bitcast=True)
    ordinals = score_to_ordinal(scores)
    z = scaled_difference(scores, best, temp)
    is_kept = (ordinals > kept_ordinal) | ((ordinals == kept_ordinal) & (ids < kept_id))
    is_kept &= exists & (z >= min_z) & (scores > -float("inf"))
    return ids, tl.where(is_kept, ordinals, 0), tl.where(is_kept, integer_mass(z), 0)


@jit
def find_lowest_kept(ordinals, masses, mass_limit, MASS_UNIT: tl.constexpr = 2.0**-40):
    """Find the lowest ordinal above which there is less than a mass, bit by bit."""
    lower = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        mass_above = tl.sum(tl.where(ordinals > (lower | (bit - 1)), masses, 0), 0)
        fits = mass_above.to(tl.float64) * MASS_UNIT < mass_limit
        lower = tl.where(fits, lower, lower | bit)
        bit = bit >> 1
    return lower


@jit
def find_tie_end(ids, is_tied, num_kept):
    """Find the highest id below which there are at most `num_kept` of the tied tokens."""
    end = 0
    step = 1 << 30
    for _ in range(31):
        num_below = tl.sum((is_tied & (ids < end + step)).to(tl.int32), 0)
        end = tl.where(num_below <= num_kept, end + step, end)
        step = step >> 1
    return end


@jit
def kth_highest(ordinals, k):
    """Find the k-th highest of a tile of ordinals, bit by bit; 0 if there are fewer."""
    last = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        enough = tl.sum((ordinals >= (last | bit)).to(tl.int32), 0) >= k
        last = tl.where(enough, last | bit, last)
        bit = bit >> 1
    return last


@jit
def relevance_bound(
    candidate_score,
    best,
    temp,
    min_prob,
    k,
    is_typical,
    block_bests,
    SEGMENTS: tl.constexpr,
    BLOCKS_PER_SEGMENT: tl.constexpr,
):
    """Return an ordinal below which no token matters.

    With top_k: k blocks have a token at least as high as the k-th highest block best. With min_p:
    its own border, widened by more than rounding can move it. Without either, only tokens before
    the candidate matter, or any token if typical_p needs the entropy. Forbidden tokens, whose score
    is -inf, do not matter: there are others.
    """
    needs_all = (k > 0) | (min_prob > 0.0) | is_typical
    bound = tl.where(needs_all, 0, score_to_ordinal(candidate_score))
    if k > 0:
        block = tl.arange(0, SEGMENTS * BLOCKS_PER_SEGMENT)
        scores = load_results(block_bests + block, block < tl.num_programs(1) * BLOCKS_PER_SEGMENT)
        bound = kth_highest(score_to_ordinal(scores), k)
    if min_prob > 0.0:
        lowest = best + temp * tl.log(min_prob)
        margin = 1e-5 * (tl.abs(lowest) + tl.abs(best))
        bound = tl.maximum(bound, score_to_ordinal(lowest - margin))
    return tl.maximum(bound, 0x00800000)  # the ordinal after that of -inf


# ---- report ----


@jit(do_not_specialize=["rows", "tokens"])
def report_kernel(
    logits,  # [samples, vocab]
    rows,  # [samples]
    row_ints,  # of SamplingRows
    tokens,  # [samples]
    reports,  # [samples, 2 + 2 * MAX_TOP_LOGPROBS]
    floats,  # of SamplingScratch, like the next
    ints,
    logits_stride,
    vocab_size,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    PDL: tl.constexpr,
    BINS: tl.constexpr = BINS_PER_SEGMENT,
    FLAGS: tl.constexpr = FLAGS,
    LOGPROBS_FLAG: tl.constexpr = LOGPROBS_FLAG,
    MAX_TOP: tl.constexpr = MAX_TOP_LOGPROBS,
    NUM_INTS: tl.constexpr = NUM_INTS,
    NUM_TOP: tl.constexpr = NUM_TOP,
):
    """Count the tokens before the sampled one and list those that may be among the likeliest.

    Both concern the logits. Segments without such tokens are not read. Of the tokens at the bound,
    which are many if the logits are flat, only those with low ids are listed. The last program of a
    sample writes its report.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample).to(tl.int64)
    row_ints += row * NUM_INTS
    if (tl.load(row_ints + FLAGS) & LOGPROBS_FLAG) != 0:
        floats += sample * ((6 + BINS) * SEGMENTS + 8 + SEGMENTS * (SEGMENT // BLOCK))
        ints += sample * (SEGMENTS + 8 + 2 * MAX_LISTED)
        logits += sample * logits_stride
        listed = ints + SEGMENTS + 8
        num_top = tl.load(row_ints + NUM_TOP)
        token = tl.load(tokens + sample)
        token_score = load_logits(logits + token, token >= 0)
        top_bound = tl.load(ints + SEGMENTS + 4).to(tl.uint32, bitcast=True)
        tie_end = tl.load(ints + SEGMENTS + 7)
        for segment in range(tl.program_id(1), tl.cdiv(vocab_size, SEGMENT), tl.num_programs(1)):
            segment_best = tl.load(floats + 2 * SEGMENTS + segment)
            has_top = (num_top > 0) & (score_to_ordinal(segment_best) >= top_bound)
            if has_top | (segment_best >= token_score):
                ids = segment * SEGMENT + tl.arange(0, SEGMENT)
                valid = ids < vocab_size
                scores = load_logits(logits + ids, valid)
                is_before = (scores > token_score) | ((scores == token_score) & (ids < token))
                num_before = tl.sum((valid & is_before).to(tl.int32), 0)
                tl.atomic_add(ints + SEGMENTS + 5, num_before)
                if has_top:
                    ordinals = score_to_ordinal(scores)
                    is_tie = valid & (ordinals == top_bound) & (ids < tie_end)
                    # A segment cannot place more than its first num_top ties.
                    is_tie &= tl.cumsum(is_tie.to(tl.int32), 0) <= num_top
                    relevant = (valid & (ordinals > top_bound)) | is_tie
                    append_to_list(ids, scores, relevant, ints + SEGMENTS + 1, listed, MAX_LISTED)
        if is_last_program(ints + SEGMENTS):
            log_sum_exp = tl.load(floats + (6 + BINS) * SEGMENTS + 2)
            num_before = tl.atomic_xchg(ints + SEGMENTS + 5, 0)
            num_listed = tl.atomic_xchg(ints + SEGMENTS + 1, 0)
            reports += sample * (2 + 2 * MAX_TOP)
            tl.store(reports, num_before + 1)
            logprob = token_score - log_sum_exp
            tl.store(reports + 1, logprob.to(tl.int32, bitcast=True))
            if num_top > 0:
                if num_listed <= MAX_LISTED:
                    sort_listed(listed, num_listed, num_top, log_sum_exp, reports + 2, MAX_LISTED)
                else:
                    pick_likeliest(logits, vocab_size, num_top, log_sum_exp, reports + 2, SEGMENT)


@jit
def sort_listed(
    listed,
    size,
    num_top,
    log_sum_exp,
    report,
    MAX_LISTED: tl.constexpr,
    WIDTH: tl.constexpr = 64,
    MAX_TOP: tl.constexpr = MAX_TOP_LOGPROBS,
):
    """Write the likeliest of the listed tokens; the place of each is the number before it."""
    for start in range(0, size, WIDTH):
        i = start + tl.arange(0, WIDTH)
        exists = i < size
        ids = tl.load(listed + i, mask=exists, other=0, cache_modifier=".cg")
        encoded = tl.load(listed + MAX_LISTED + i, mask=exists, other=0, cache_modifier=".cg")
        scores = encoded.to(tl.float32, bitcast=True)
        place = tl.zeros([WIDTH], tl.int32)
        for other_start in range(0, size, WIDTH):
            j = other_start + tl.arange(0, WIDTH)
            other_exists = j < size
            other_ids = tl.load(listed + j, mask=other_exists, other=0, cache_modifier=".cg")
            other_encoded = tl.load(
                listed + MAX_LISTED + j, mask=other_exists, other=0, cache_modifier=".cg"
            )
            other_scores = other_encoded.to(tl.float32, bitcast=True)
            is_before = other_scores[None, :] > scores[:, None]
            is_tie = other_scores[None, :] == scores[:, None]
            is_before |= is_tie & (other_ids[None, :] < ids[:, None])
            is_before &= other_exists[None, :]
            place += tl.sum(is_before.to(tl.int32), 1)
        is_top = exists & (place < num_top)
        logprobs = scores - log_sum_exp
        tl.store(report + place, ids, mask=is_top)
        tl.store(report + MAX_TOP + place, logprobs.to(tl.int32, bitcast=True), mask=is_top)


@jit
def pick_likeliest(
    logits,
    vocab_size,
    num_top,
    log_sum_exp,
    report,
    SEGMENT: tl.constexpr,
    MAX_TOP: tl.constexpr = MAX_TOP_LOGPROBS,
):
    """Write the likeliest tokens one by one: for rows whose likeliest tokens fill the same bins."""
    last_score = float("inf")
    last_id = -1
    for place in range(tl.minimum(num_top, vocab_size)):
        next_score = -float("inf")
        next_id = vocab_size
        for start in range(0, vocab_size, SEGMENT):
            ids = start + tl.arange(0, SEGMENT)
            valid = ids < vocab_size
            scores = load_logits(logits + ids, valid)
            valid &= (scores < last_score) | ((scores == last_score) & (ids > last_id))
            highest = tl.max(tl.where(valid, scores, -float("inf")), 0)
            first = tl.min(tl.where(valid & (scores == highest), ids, vocab_size), 0)
            replaces = (highest > next_score) | ((highest == next_score) & (first < next_id))
            next_id = tl.where(replaces, first, next_id)
            next_score = tl.maximum(next_score, highest)
        tl.store(report + place, next_id)
        logprob = next_score - log_sum_exp
        tl.store(report + MAX_TOP + place, logprob.to(tl.int32, bitcast=True))
        last_score = next_score
        last_id = next_id


# ---- shared functions ----


@jit
def find_winner(scores, ids, valid, best, temp, key0, key1, GREEDY_TEMPERATURE: tl.constexpr):
    """Return the token with the highest noisy score, and its score; greedy: the highest score."""
    values = scores
    if temp >= GREEDY_TEMPERATURE:
        values = scaled_difference(scores, best, temp) + gumbel_noise_triton(key0, key1, ids)
    values = tl.where(valid, values, -float("inf"))
    is_best = valid & (values == tl.max(values, 0))
    winner = tl.min(tl.where(is_best, ids, 0x7FFFFFFF), 0)
    return winner, tl.max(tl.where(valid & (ids == winner), scores, -float("inf")), 0)


@jit
def total_mass(segment_masses, segment_bests, valid, best, temp):
    """Add up the masses of segments, each relative to its own best score, relative to `best`."""
    masses = tl.load(segment_masses, mask=valid, other=0.0, cache_modifier=".cg")
    return tl.sum(masses * tl.exp(scaled_difference(segment_bests, best, temp)), 0)


@jit
def load_temperature_and_keys(
    floats,
    ints,
    position,
    SEED_WORDS: tl.constexpr = SEED_WORDS,
    TEMPERATURE: tl.constexpr = TEMPERATURE,
):
    """Return the temperature of a row and the two noise keys of a position."""
    key0 = noise_key_triton(tl.load(ints + SEED_WORDS), position)
    key1 = noise_key_triton(tl.load(ints + SEED_WORDS + 1), position)
    return tl.load(floats + TEMPERATURE).to(tl.float32), key0, key1


@jit
def is_last_program(counter):
    """Whether all other programs of the sample have stored their results. Resets the counter."""
    tl.debug_barrier()  # the stores of all threads come before the release by one thread
    last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(counter, 0)
    return last


@jit
def scaled_difference(scores, best, temp):
    """Return (scores - best) / temp, also where both are -inf."""
    return tl.div_rn(scores - tl.maximum(best, -3.0e38), temp + tl.zeros_like(scores))


@jit
def integer_mass(z):
    """Return exp(z) in units of 2**-40."""
    return (tl.exp(z) * 1099511627776.0).to(tl.int64)


@jit
def score_to_ordinal(scores):
    """Map scores to unsigned integers of the same order; -0.0 counts as 0.0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def ordinal_to_score(ordinal):
    """Undo `score_to_ordinal`."""
    bits = (ordinal ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def noise_key_triton(
    seed_word,
    position,
    MULTIPLIER_1: tl.constexpr = MULTIPLIER_1,
    MULTIPLIER_2: tl.constexpr = MULTIPLIER_2,
):
    """Compute one of the two `noise_keys` inside a kernel, as uint32."""
    x = seed_word.to(tl.uint32) ^ position.to(tl.uint32)
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) * MULTIPLIER_2
    return x ^ (x >> 16)


@jit
def noise_bits_triton(
    key0,
    key1,
    tokens,
    MULTIPLIER_1: tl.constexpr = MULTIPLIER_1,
    MULTIPLIER_2: tl.constexpr = MULTIPLIER_2,
    INCREMENT_1: tl.constexpr = INCREMENT_1,
):
    """Return the 31 random bits of each token."""
    x = tokens.to(tl.uint32) * INCREMENT_1 + key0
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15) ^ key1) * MULTIPLIER_2
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@jit
def gumbel_noise_triton(key0, key1, tokens, UNIFORM_SCALE: tl.constexpr = UNIFORM_SCALE):
    """Compute `gumbel_noise` inside a kernel.

    The integers, and hence v, are the same; logarithms differ by a few units in the last place.
    log1p(-v) is log(u) + e / u, where u is 1 - v rounded and e is what the rounding lost.
    """
    v = (noise_bits_triton(key0, key1, tokens).to(tl.float32) + 0.5) * UNIFORM_SCALE
    u = 1.0 - v
    return -tl.log(-tl.log(u) - ((1.0 - u) - v) / u)

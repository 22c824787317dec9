"""Fused sampling on the GPU: from logits to tokens without a sort, without the host.

A batch of mixed sampling parameters takes at most two launches. The token of a sample is the one
with the highest (score - best) / temperature + Gumbel noise among those that min_p, top_k and top_p
keep; the lowest id wins among equals. A greedy sample takes its highest score.

Truncation always keeps a prefix of the order of tokens (score, then lower id), so no sort
is needed. A candidate is kept if it is likely enough for min_p, if fewer than top_k tokens come
before it, and if those hold less than top_p of the mass. The winner without truncation is usually
kept, and then it is the result. Otherwise the winner among the tokens before it is the next
candidate, and so on. Each attempt excludes the last candidate and everything after it, in
expectation half of the excess.

Each launch has one program for every sample and segment of the vocabulary. The last program of a
sample to finish combines the results of its segments.

    scan    finds the winner without truncation, and settles every sample that needs no more
    verify  lists the tokens that matter to the other samples (those before the winner, or those
            that can be among the top_k; usually few), then tries candidates until one is kept

Masses are sums of integers, exp(z) in units of 2**-40, so the order of additions does not matter.
Scores are float32. The result therefore equals that of runtime/sampler except for near-exact ties:
noisy scores, or masses at the border of top_p, that agree to about 1e-6.

This file must not know requests or where logits come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.sampling_reference import (
    GREEDY_TEMPERATURE,
    INCREMENT_1,
    MULTIPLIER_1,
    MULTIPLIER_2,
    UNIFORM_SCALE,
    PenaltyTensors,
    SampleResult,
    SamplingTensors,
    apply_penalties_reference,
    sample_tokens_reference,
)

TARGET_PROGRAMS = 512  # approximate number of programs of the verify launch


@dataclass(frozen=True)
class SamplingScratch:
    """Buffers that one launch passes to the next, allocated once and used by all calls.

    With S segments (a power of two), each sample has

        floats  S best scores by segment, S masses by segment, S masses at temperature 1,
                then of the sample: best score, mass, log-sum-exp, unused;
                then the best score of each block
        ints    S winners by segment,
                then of the sample: finished programs, listed tokens, candidate, bound;
                then the list of tokens

    Counters are zero between calls.
    """

    floats: torch.Tensor  # [samples, ...] float32
    ints: torch.Tensor  # [samples, ...] int32
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
        num_floats = 3 * segments + 4 + segments * (segment // block)
        num_ints = segments + 4 + max_listed
        return cls(
            torch.zeros(num_samples, num_floats, dtype=torch.float32, device=device),
            torch.zeros(num_samples, num_ints, dtype=torch.int32, device=device),
            segment,
            block,
            max_listed,
        )


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingTensors,
    scratch: SamplingScratch | None = None,
    truncated: bool = True,
    with_logprobs: bool = False,
) -> SampleResult:
    """Sample a token for each row of logits [samples, vocab].

    rows [samples] index `params`; positions [samples] are those of the tokens to sample. Without
    `truncated` no row may use top_k, top_p or min_p. Log-probabilities and ranks are valid only
    with `with_logprobs`. Without either option one launch is enough.
    """
    if not use_triton(logits) or scratch is None:
        return sample_tokens_reference(logits, rows, positions, params)
    return sample_tokens_triton(logits, rows, positions, params, scratch, truncated, with_logprobs)


def sample_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingTensors,
    scratch: SamplingScratch,
    truncated: bool = True,
    with_logprobs: bool = False,
) -> SampleResult:
    """Run the kernels."""
    num_samples, vocab_size = logits.shape
    tokens_and_ranks = torch.empty(2, num_samples, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(num_samples, dtype=torch.float32, device=logits.device)
    segments = -(-vocab_size // scratch.segment)
    arguments = (
        logits,
        rows,
        positions,
        *params,
        tokens_and_ranks,
        logprobs,
        scratch.floats,
        scratch.ints,
        logits.stride(0),
        params.temperature.stride(0),
        vocab_size,
        num_samples,
    )
    options = {
        "SEGMENTS": next_power_of_2(segments),
        "SEGMENT": scratch.segment,
        "BLOCK": scratch.block,
        "MAX_LISTED": scratch.max_listed,
        "GREEDY_TEMPERATURE": GREEDY_TEMPERATURE,
        "WITH_LOGPROBS": with_logprobs,
        **pdl_options(logits.device),
    }
    needs_verify = truncated or with_logprobs
    scan_kernel[(num_samples, segments)](
        *arguments, NEEDS_VERIFY=needs_verify, **options, num_warps=4
    )
    if needs_verify:
        programs = max(1, min(segments, TARGET_PROGRAMS // num_samples))
        verify_kernel[(num_samples, programs)](*arguments, **options, num_warps=8)
    return SampleResult(tokens_and_ranks[0], logprobs, tokens_and_ranks[1])


def apply_penalties(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, penalties: PenaltyTensors
) -> None:
    """Change logits [samples, vocab] float32 in place, before `sample_tokens`.

    Samples whose row has no penalties stay as they are.
    """
    if use_triton(logits):
        apply_penalties_triton(logits, rows, positions, penalties)
    else:
        apply_penalties_reference(logits, rows, positions, penalties)


def apply_penalties_triton(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, penalties: PenaltyTensors
) -> None:
    """Run the kernel."""
    num_samples = len(logits)
    history = penalties.history
    chunks = -(-history.shape[1] // 64)
    grid = (num_samples, max(1, min(chunks, TARGET_PROGRAMS // num_samples)))
    penalties_kernel[grid](
        logits,
        rows,
        positions,
        *penalties,
        logits.stride(0),
        history.stride(0),
        WIDTH=64,
        num_warps=4,
        **pdl_options(logits.device),
    )


@jit
def penalties_kernel(
    logits,  # [samples, vocab]
    rows,  # [samples]
    positions,  # [samples]
    repetition,  # [rows]
    frequency,  # [rows]
    presence,  # [rows]
    history,  # [rows, length]
    prompt_lens,  # [rows]
    logits_stride,
    history_stride,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Penalize the tokens in the history of one sample, WIDTH places at a time.

    Every place of the history is compared with every other. The last occurrence of a token applies
    the penalties for all its occurrences.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample).to(tl.int64)
    repetition_penalty = tl.load(repetition + row)
    frequency_penalty = tl.load(frequency + row)
    presence_penalty = tl.load(presence + row)
    if (repetition_penalty != 1.0) | (frequency_penalty != 0.0) | (presence_penalty != 0.0):
        end = tl.load(positions + sample)
        prompt_len = tl.load(prompt_lens + row)
        logits += sample * logits_stride
        history += row * history_stride
        for start in range(tl.program_id(1) * WIDTH, end, tl.num_programs(1) * WIDTH):
            i = start + tl.arange(0, WIDTH)
            token = tl.load(history + i, mask=i < end, other=-1)
            num_later = tl.zeros([WIDTH], tl.int32)
            output_count = tl.zeros([WIDTH], tl.int32)
            for other_start in range(0, end, WIDTH):
                j = other_start + tl.arange(0, WIDTH)
                other_token = tl.load(history + j, mask=j < end, other=-2)
                same = token[:, None] == other_token[None, :]
                num_later += tl.sum((same & (j[None, :] > i[:, None])).to(tl.int32), 1)
                output_count += tl.sum((same & (j >= prompt_len)[None, :]).to(tl.int32), 1)
            is_last_occurrence = (i < end) & (num_later == 0)
            s = tl.load(logits + token, mask=is_last_occurrence, other=0.0)
            s = tl.where(s > 0, s / repetition_penalty, s * repetition_penalty)
            s = s - frequency_penalty * output_count
            s = s - tl.where(output_count > 0, presence_penalty, 0.0)
            tl.store(logits + token, s, mask=is_last_occurrence)


@jit
def scan_kernel(
    logits,  # [samples, vocab]
    rows,  # [samples]
    positions,  # [samples]
    temperature,  # [rows], entries `param_stride` apart
    top_p,  # [rows], entries `param_stride` apart
    min_p,  # [rows], entries `param_stride` apart
    top_k,  # [rows]
    seed_words,  # [rows, 2]
    tokens_and_ranks,  # [2, samples]
    logprobs,  # [samples]
    floats,
    ints,
    logits_stride,
    param_stride,
    vocab_size,
    num_samples,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    GREEDY_TEMPERATURE: tl.constexpr,
    WITH_LOGPROBS: tl.constexpr,
    NEEDS_VERIFY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program scans one segment; the last one of a sample finds the sample's winner."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row = tl.load(rows + sample).to(tl.int64)
    temp, key0, key1 = load_temperature_and_keys(
        row, sample, temperature, param_stride, seed_words, positions
    )
    logits += sample * logits_stride
    floats += sample * (3 * SEGMENTS + 4 + SEGMENTS * (SEGMENT // BLOCK))
    ints += sample * (SEGMENTS + 4 + MAX_LISTED)
    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    scores = load_scores(logits + ids, ids < vocab_size)
    segment_best = tl.max(scores, 0)
    tl.store(floats + segment, segment_best)
    segment_winner = find_winner(
        scores, ids, ids < vocab_size, segment_best, temp, key0, key1, GREEDY_TEMPERATURE
    )
    tl.store(ints + segment, segment_winner)
    if WITH_LOGPROBS:
        mass_at_1 = tl.sum(tl.exp(scaled_difference(scores, segment_best, 1.0)), 0)
        tl.store(floats + 2 * SEGMENTS + segment, mass_at_1)
    if NEEDS_VERIFY:  # noqa: SIM102, this condition is known when compiling
        if temp >= GREEDY_TEMPERATURE:
            mass = tl.sum(tl.exp(scaled_difference(scores, segment_best, temp)), 0)
            tl.store(floats + SEGMENTS + segment, mass)
            block = segment * (SEGMENT // BLOCK) + tl.arange(0, SEGMENT // BLOCK)
            block_best = tl.max(tl.reshape(scores, (SEGMENT // BLOCK, BLOCK)), 1)
            tl.store(floats + 3 * SEGMENTS + 4 + block, block_best)
    if is_last_program(ints + SEGMENTS):
        j = tl.arange(0, SEGMENTS)
        valid = j < tl.num_programs(1)
        segment_bests = tl.load(floats + j, mask=valid, other=-float("inf"), cache_modifier=".cg")
        winners = tl.load(ints + j, mask=valid, other=0, cache_modifier=".cg")
        best = tl.max(segment_bests, 0)
        winner_scores = load_scores(logits + winners, valid)
        candidate = find_winner(
            winner_scores, winners, valid, best, temp, key0, key1, GREEDY_TEMPERATURE
        )
        candidate = tl.minimum(candidate, vocab_size - 1)
        candidate_score = tl.load(logits + candidate).to(tl.float32)
        tl.store(tokens_and_ranks + sample, candidate)
        tl.store(tokens_and_ranks + num_samples + sample, 1)
        if WITH_LOGPROBS:
            total_at_1 = total_mass(floats + 2 * SEGMENTS + j, segment_bests, valid, best, 1.0)
            log_sum_exp = best + tl.log(total_at_1)
            tl.store(floats + 3 * SEGMENTS + 2, log_sum_exp)
            tl.store(logprobs + sample, candidate_score - log_sum_exp)
        if NEEDS_VERIFY:
            k = tl.load(top_k + row).to(tl.int32)
            min_prob = tl.load(min_p + row * param_stride).to(tl.float32)
            top_mass = tl.load(top_p + row * param_stride)
            truncates = (k > 0) | (min_prob > 0.0) | (top_mass < 1.0)
            unsettled = (temp >= GREEDY_TEMPERATURE) & (truncates | WITH_LOGPROBS)
            tl.store(ints + SEGMENTS + 2, tl.where(unsettled, candidate, -1))
            if unsettled:
                mass = total_mass(floats + SEGMENTS + j, segment_bests, valid, best, temp)
                tl.store(floats + 3 * SEGMENTS, best)
                tl.store(floats + 3 * SEGMENTS + 1, mass)
                bound = relevance_bound(
                    candidate_score,
                    best,
                    temp,
                    min_prob,
                    k,
                    floats + 3 * SEGMENTS + 4,
                    SEGMENTS,
                    SEGMENT // BLOCK,
                )
                tl.store(ints + SEGMENTS + 3, bound.to(tl.int32, bitcast=True))


@jit
def verify_kernel(
    logits,  # [samples, vocab]
    rows,  # [samples]
    positions,  # [samples]
    temperature,  # [rows], entries `param_stride` apart
    top_p,  # [rows], entries `param_stride` apart
    min_p,  # [rows], entries `param_stride` apart
    top_k,  # [rows]
    seed_words,  # [rows, 2]
    tokens_and_ranks,  # [2, samples]
    logprobs,  # [samples]
    floats,
    ints,
    logits_stride,
    param_stride,
    vocab_size,
    num_samples,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    GREEDY_TEMPERATURE: tl.constexpr,
    WITH_LOGPROBS: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the relevant tokens of a sample; the last program tries candidates among them."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0).to(tl.int64)
    floats += sample * (3 * SEGMENTS + 4 + SEGMENTS * (SEGMENT // BLOCK))
    ints += sample * (SEGMENTS + 4 + MAX_LISTED)
    candidate = tl.load(ints + SEGMENTS + 2)
    if candidate >= 0:  # the scan did not settle this sample
        logits += sample * logits_stride
        bound = tl.load(ints + SEGMENTS + 3).to(tl.uint32, bitcast=True)
        for segment in range(tl.program_id(1), tl.cdiv(vocab_size, SEGMENT), tl.num_programs(1)):
            if score_to_ordinal(tl.load(floats + segment)) >= bound:
                ids = segment * SEGMENT + tl.arange(0, SEGMENT)
                scores = load_scores(logits + ids, ids < vocab_size)
                relevant = (ids < vocab_size) & (score_to_ordinal(scores) >= bound)
                place = tl.atomic_add(ints + SEGMENTS + 1, tl.sum(relevant.to(tl.int32), 0))
                place += tl.cumsum(relevant.to(tl.int32), 0) - 1
                tl.store(ints + SEGMENTS + 4 + place, ids, mask=relevant & (place < MAX_LISTED))
        if is_last_program(ints + SEGMENTS):
            row = tl.load(rows + sample).to(tl.int64)
            temp, key0, key1 = load_temperature_and_keys(
                row, sample, temperature, param_stride, seed_words, positions
            )
            k = tl.load(top_k + row).to(tl.int32)
            min_prob = tl.load(min_p + row * param_stride).to(tl.float32)
            top_mass = tl.load(top_p + row * param_stride).to(tl.float64)
            # An atomic exchange gives all threads the same value. A load followed by a store
            # would not.
            num_listed = tl.atomic_xchg(ints + SEGMENTS + 1, 0)
            use_list = num_listed <= MAX_LISTED
            size = tl.where(use_list, num_listed, vocab_size)
            best = tl.load(floats + 3 * SEGMENTS)
            mass = tl.load(floats + 3 * SEGMENTS + 1).to(tl.float64)
            candidate, num_before = find_kept_candidate(
                candidate,
                logits,
                ints + SEGMENTS + 4,
                use_list,
                size,
                vocab_size,
                best,
                mass,
                temp,
                k,
                top_mass,
                min_prob,
                key0,
                key1,
                SEGMENT,
                MAX_LISTED,
            )
            tl.store(tokens_and_ranks + sample, candidate)
            tl.store(tokens_and_ranks + num_samples + sample, num_before + 1)
            if WITH_LOGPROBS:
                candidate_score = tl.load(logits + candidate).to(tl.float32)
                log_sum_exp = tl.load(floats + 3 * SEGMENTS + 2)
                tl.store(logprobs + sample, candidate_score - log_sum_exp)


@jit
def find_kept_candidate(
    candidate,
    logits,
    listed_ids,
    use_list,
    size,
    vocab_size,
    best,
    whole_mass,
    temp,
    k,
    top_mass,
    min_prob,
    key0,
    key1,
    SEGMENT: tl.constexpr,
    MAX_LISTED: tl.constexpr,
):
    """Return the first candidate that truncation keeps, and how many tokens come before it.

    top_p is a share of the mass that top_k and min_p leave. So where these apply, their tokens are
    surveyed first, and the winner among them is the first candidate. That survey may count too many
    tokens that equal the k-th best score; their mass is taken off again.
    """
    MASS_UNIT: tl.constexpr = 2.0**-40
    min_z = tl.where(min_prob > 0.0, tl.log(tl.maximum(min_prob, 1e-30)), -float("inf"))
    if (k > 0) | (min_prob > 0.0):
        last = kth_best_ordinal(logits, listed_ids, use_list, size, k, SEGMENT, MAX_LISTED)
        count, mass, candidate = survey_before(
            logits,
            listed_ids,
            use_list,
            size,
            last,
            vocab_size,
            vocab_size,
            best,
            temp,
            min_z,
            key0,
            key1,
            SEGMENT,
        )
        candidate = tl.minimum(candidate, vocab_size - 1)  # if all scores are NaN, none is left
        excess = tl.where(k > 0, tl.maximum(count - k, 0), 0).to(tl.int64)
        last_mass = integer_mass(scaled_difference(ordinal_to_score(last), best, temp))
        whole_mass = (mass - excess * last_mass).to(tl.float64) * MASS_UNIT
    searching = True
    count = 0
    while searching:
        candidate_score = tl.load(logits + candidate).to(tl.float32)
        count, mass, next_candidate = survey_before(
            logits,
            listed_ids,
            use_list,
            size,
            score_to_ordinal(candidate_score),
            candidate,
            vocab_size,
            best,
            temp,
            min_z,
            key0,
            key1,
            SEGMENT,
        )
        in_top_k = (k == 0) | (count < k)
        in_min_p = scaled_difference(candidate_score, best, temp) >= min_z
        accepted = in_top_k & in_min_p
        accepted &= (top_mass >= 1.0) | (mass.to(tl.float64) * MASS_UNIT < top_mass * whole_mass)
        searching = (next_candidate < vocab_size) & (accepted == 0)
        candidate = tl.where(searching, next_candidate, candidate)
    return candidate, count


@jit
def survey_before(
    logits,
    listed_ids,
    use_list,
    size,
    border,
    border_id,
    vocab_size,
    best,
    temp,
    min_z,
    key0,
    key1,
    SEGMENT: tl.constexpr,
):
    """Survey the tokens that come before (border, border_id) in the order and that min_p keeps.

    Returns their number, their mass and their winner, which is `vocab_size` if there are none.
    """
    count = 0
    mass = tl.full([], 0, tl.int64)
    winner_value = -float("inf")
    winner = vocab_size
    for start in range(0, size, SEGMENT):
        ids, scores, valid = load_candidates(logits, listed_ids, use_list, start, size, SEGMENT)
        ordinals = score_to_ordinal(scores)
        z = scaled_difference(scores, best, temp)
        is_before = (ordinals > border) | ((ordinals == border) & (ids < border_id))
        valid &= is_before & (z >= min_z)
        values = tl.where(valid, z + gumbel_noise_triton(key0, key1, ids), -float("inf"))
        count += tl.sum(valid.to(tl.int32), 0)
        mass += tl.sum(tl.where(valid, integer_mass(z), 0), 0)
        highest = tl.max(values, 0)
        first = tl.min(tl.where(valid & (values == highest), ids, vocab_size), 0)
        replaces = (highest > winner_value) | ((highest == winner_value) & (first < winner))
        winner = tl.where(replaces, first, winner)
        winner_value = tl.maximum(winner_value, highest)
    return count, mass, winner


@jit
def kth_best_ordinal(
    logits,
    listed_ids,
    use_list,
    size,
    k,
    SEGMENT: tl.constexpr,
    MAX_LISTED: tl.constexpr,
):
    """Return the k-th highest score as an ordinal.

    With fewer than k tokens, or k = 0, return the ordinal of -inf, which every token reaches.
    """
    last = tl.full([], 0, tl.uint32)
    if k > 0:
        if use_list:
            _ids, scores, valid = load_candidates(logits, listed_ids, use_list, 0, size, MAX_LISTED)
            last = kth_highest(tl.where(valid, score_to_ordinal(scores), 0), k)
        else:
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                count = 0
                for start in range(0, size, SEGMENT):
                    _ids, scores, valid = load_candidates(
                        logits, listed_ids, use_list, start, size, SEGMENT
                    )
                    reaches = valid & (score_to_ordinal(scores) >= (last | bit))
                    count += tl.sum(reaches.to(tl.int32), 0)
                last = tl.where(count >= k, last | bit, last)
                bit = bit >> 1
    return tl.maximum(last, 0x007FFFFF)


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
    block_bests,
    SEGMENTS: tl.constexpr,
    BLOCKS_PER_SEGMENT: tl.constexpr,
):
    """Return an ordinal below which no token matters.

    With top_k: k blocks have a token at least as high as the k-th highest block best. With min_p:
    its own border, widened by more than rounding can move it. Without either, only tokens before
    the candidate matter. Forbidden tokens, whose score is -inf, matter only if there are no others:
    a grammar may forbid most of the vocabulary.
    """
    bound = tl.where((k > 0) | (min_prob > 0.0), 0, score_to_ordinal(candidate_score))
    if k > 0:
        block = tl.arange(0, SEGMENTS * BLOCKS_PER_SEGMENT)
        scores = tl.load(
            block_bests + block,
            mask=block < tl.num_programs(1) * BLOCKS_PER_SEGMENT,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        bound = kth_highest(score_to_ordinal(scores), k)
    if min_prob > 0.0:
        lowest = best + temp * tl.log(min_prob)
        margin = 1e-5 * (tl.abs(lowest) + tl.abs(best))
        bound = tl.maximum(bound, score_to_ordinal(lowest - margin))
    if best > -float("inf"):
        bound = tl.maximum(bound, 0x00800000)  # the ordinal after that of -inf
    return bound


@jit
def load_candidates(logits, listed_ids, use_list, start, size, WIDTH: tl.constexpr):
    """Load a tile of token ids and their scores, from the list or from the whole row of logits."""
    ids = start + tl.arange(0, WIDTH)
    valid = ids < size
    if use_list:
        ids = tl.load(listed_ids + ids, mask=valid, other=0, cache_modifier=".cg")
    return ids, load_scores(logits + ids, valid), valid


@jit
def load_scores(pointers, valid):
    """Load scores as float32; NaN counts as -inf."""
    scores = tl.load(pointers, mask=valid, other=-float("inf")).to(tl.float32)
    return tl.where(scores == scores, scores, -float("inf"))


@jit
def find_winner(scores, ids, valid, best, temp, key0, key1, GREEDY_TEMPERATURE: tl.constexpr):
    """Return the id of the highest noisy score, or of the highest score if sampling is greedy."""
    values = scores
    if temp >= GREEDY_TEMPERATURE:
        values = scaled_difference(scores, best, temp) + gumbel_noise_triton(key0, key1, ids)
    values = tl.where(valid, values, -float("inf"))
    return tl.min(tl.where(valid & (values == tl.max(values, 0)), ids, 0x7FFFFFFF), 0)


@jit
def total_mass(segment_masses, segment_bests, valid, best, temp):
    """Add up the masses of segments, each relative to its own best score, relative to `best`."""
    masses = tl.load(segment_masses, mask=valid, other=0.0, cache_modifier=".cg")
    return tl.sum(masses * tl.exp(scaled_difference(segment_bests, best, temp)), 0)


@jit
def load_temperature_and_keys(row, sample, temperature, param_stride, seed_words, positions):
    """Return the temperature of a row and the two noise keys of its position."""
    position = tl.load(positions + sample)
    key0 = noise_key_triton(tl.load(seed_words + 2 * row), position)
    key1 = noise_key_triton(tl.load(seed_words + 2 * row + 1), position)
    return tl.load(temperature + row * param_stride).to(tl.float32), key0, key1


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

"""Sampling in torch: Gumbel noise, a total order of tokens, truncation, penalties and the rest.

The kernels (kernels/sampling in Triton, native/ on a CPU) must agree with these functions. They
also sample on a CPU without native kernels. This file must not know requests.

Noise. Gumbel noise is a function of (seed, position, token id) and of nothing else. No random
stream is consumed, so a result does not depend on other requests in the batch, on how the
vocabulary is split over tensor parallel ranks, on preemption or on a restart. The recipe, in
unsigned 32-bit arithmetic that wraps (`>>` is logical), for any other implementation to follow:

    mix(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    seed     lo, hi = the low and high 32 bits of the seed
             w0 = mix(mix(lo + 0x9E3779B9) ^ hi);   w1 = mix(mix(hi + 0x85EBCA6B) ^ lo)
    position k0 = mix(w0 ^ position);               k1 = mix(w1 ^ position)
    token    x = token * 0x9E3779B9 + k0
             x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x ^= k1
             x *= 0x846CA68B;  x ^= x >> 16
    uniform  v = (float32(x & 0x7FFFFFFF) + 0.5) * (1 - 2**-24) * 2**-31
    Gumbel   -log(-log1p(-v))

Large noise decides which token wins, and noise is large where v is near 0. float32 resolves values
near 0 down to 2**-32. That is why the formula is -log1p(-v) and not -log(u) with u near 1, where
float32 has steps of 2**-24. The factor 1 - 2**-24 keeps v below 1 after rounding, so the noise is
always finite: from -2.8 to 22.2.

torch has no unsigned 32-bit arithmetic, but int32 products wrap to the same bits. A logical shift
is an arithmetic shift with the copies of the sign bit masked off.

Order. Tokens are ordered by score, and equal scores by the lower id. Half-precision logits have
many equal values, for which torch.topk guarantees no order.

Truncation. min_p, top_k, top_p and typical_p apply in this order, each to the tokens that the
previous one keeps:

- min_p keeps tokens that are at least min_p times as likely as the best one.
- top_k keeps exactly k tokens, in the order above.
- top_p keeps a token while the likelier ones together hold less than top_p of the mass.
- typical_p orders by distance of the surprise from the entropy, likelier first among equals, and
  then keeps by the rule of top_p.

All sums are running sums in float64. Trailing zeros add nothing to them, so a result does not
depend on how wide other requests make the tensor.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from bloomery.kernels.green_list import find_green_list
from bloomery.kernels.sampling_rows import (
    BAD,
    BANNED_FLAG,
    BIASED,
    BIASED_FLAG,
    DELTA,
    FIRST_END,
    FLAGS,
    FREQUENCY,
    GREEN_FLAG,
    LOGPROBS_FLAG,
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
    NUM_GREEN,
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
    TOP_K,
    TYPICAL_P,
    SampleOutputs,
    SamplingRows,
)

NUM_FIRST_CANDIDATES = 512  # tokens that are sorted first; more only if these are not enough
GREEDY_TEMPERATURE = 1e-5  # below it sampling is greedy: noise would not change the result
UINT32_MASK = 0xFFFFFFFF
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
INCREMENT_1 = 0x9E3779B9
UNIFORM_SCALE = (1 - 2.0**-24) * 2.0**-31


# ---- noise ----


def noise_keys(word_pairs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mix word pairs [samples, 2] of the seeds with positions [samples] into key pairs.

    All are int32.
    """
    x = word_pairs ^ positions.to(torch.int32).unsqueeze(-1)
    _xor_shift(x, 16)
    x *= MULTIPLIER_1
    _xor_shift(x, 15)
    x *= _to_signed(MULTIPLIER_2)
    _xor_shift(x, 16)
    return x


def gumbel_noise(key_pairs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the noise [samples, n] in float32 of token ids [n] or [samples, n].

    key_pairs: [samples, 2] int32 from `noise_keys`.
    """
    x = tokens.to(torch.int32) * _to_signed(INCREMENT_1) + key_pairs[:, :1]
    _xor_shift(x, 16)
    x *= MULTIPLIER_1
    _xor_shift(x, 15)
    x ^= key_pairs[:, 1:]
    x *= _to_signed(MULTIPLIER_2)
    _xor_shift(x, 16)
    x &= 0x7FFFFFFF
    negative_uniform = x.to(torch.float32).add_(0.5).mul_(-UNIFORM_SCALE)
    return negative_uniform.log1p_().neg_().log_().neg_()


def _xor_shift(x: torch.Tensor, shift: int) -> None:
    """Compute x ^= x >> shift in place with a logical shift."""
    x ^= (x >> shift).bitwise_and_(UINT32_MASK >> shift)


def _to_signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


# ---- order ----


def stable_topk(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` highest scores and their ids, each [samples, count], best first.

    scores: [samples, vocab] float32. Equal scores are ordered by id.
    """
    vocab_size = scores.shape[-1]
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    if scores.is_cuda:
        best = _top_sort_keys(scores, reversed_ids, count)
    else:  # one row at a time stays in the CPU cache
        best = torch.stack([_top_sort_keys(row, reversed_ids, count) for row in scores])
    ids = vocab_size - 1 - (best & UINT32_MASK)
    return scores.gather(-1, ids), ids


def _top_sort_keys(scores: torch.Tensor, reversed_ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the highest int64 keys, which compare like (score, -id).

    The upper half of a key is the score's bits, made to order like an integer. The lower half is
    the reversed id.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    sort_keys = torch.add(reversed_ids, bits.to(torch.int64), alpha=1 << 32)
    if count == scores.shape[-1]:
        return sort_keys.sort(dim=-1, descending=True).values
    return sort_keys.topk(count, dim=-1).values


# ---- truncation ----


def truncation_mask(
    z: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    typical_p: torch.Tensor | None,
    total_mass: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which candidates remain [samples, width] and whether `width` was enough [samples].

    z [samples, width] float64: log-probabilities less the best one, best first. Parameters are
    [samples, 1]; top_k 0 is off. `total_mass` [samples, 1] is the sum of exp(z) over all tokens of
    the vocabulary that min_p keeps; it is used for samples without top_k. The width was enough if
    the last token to keep lies inside it.
    """
    width = z.shape[-1]
    keep = z >= min_p.log()
    keep &= (torch.arange(width, device=z.device) < top_k) | (top_k == 0)
    mass = torch.where(keep, z.exp(), 0.0)
    running_mass = mass.cumsum(-1)
    mass_inside = running_mass[:, -1:]
    full_mass = mass_inside
    if total_mass is not None:
        full_mass = torch.where(top_k > 0, mass_inside, total_mass)
    keep &= (_exclusive(running_mass) < top_p * full_mass) | (top_p >= 1)
    inside_top_k = (top_k > 0) & (top_k <= width)
    inside_top_p = (top_k == 0) & (top_p < 1) & (mass_inside >= top_p * full_mass)
    if typical_p is not None:
        keep &= _typical_mask(z, torch.where(keep, mass, 0.0), typical_p)
    return keep, (inside_top_k | inside_top_p).squeeze(-1)


def _typical_mask(z: torch.Tensor, mass: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    total_mass = mass.cumsum(-1)[:, -1:]
    probability = mass / total_mass
    present = mass > 0
    surprise = torch.where(present, total_mass.log() - z, 0.0)
    entropy = (probability * surprise).cumsum(-1)[:, -1:]
    distance = torch.where(present, (surprise - entropy).abs(), torch.inf)
    order = distance.sort(dim=-1, stable=True).indices
    keep = _exclusive(probability.gather(-1, order).cumsum(-1)) < typical_p
    return torch.zeros_like(keep).scatter(-1, order, keep) | (typical_p >= 1)


def _exclusive(running_sum: torch.Tensor) -> torch.Tensor:
    """Turn an inclusive running sum into an exclusive one."""
    return F.pad(running_sum[:, :-1], (1, 0))


# ---- adjusted scores ----


def unpack_bits(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Turn a bit set [words] int32 into booleans [vocab]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten()[:vocab_size].bool()


def adjusted_scores(
    logits: torch.Tensor, row: int, position: int, state: SamplingRows
) -> torch.Tensor:
    """Return the scores [vocab] of one sample as float32: its logits, unless its row changes them.

    The order is: permitted tokens, bias, banned tokens, green list, penalties.
    """
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    flags = int(state.ints[row, FLAGS])
    vocab_size = len(scores)
    params = state.floats[row].float()
    bit_sets = state.bits[row]
    permitted = None
    if flags & PERMITTED_FLAG:
        permitted = unpack_bits(bit_sets[PERMITTED], vocab_size)
        scores = scores.masked_fill(~permitted, -torch.inf)
    if flags & BIASED_FLAG:
        biased = unpack_bits(bit_sets[BIASED], vocab_size)
        scores = torch.where(biased, scores + state.bias[row], scores)
    if flags & BANNED_FLAG:
        if permitted is None:
            permitted = torch.ones(vocab_size, dtype=torch.bool, device=scores.device)
        banned = banned_tokens(row, position, permitted, state)
        scores = scores.masked_fill(banned, -torch.inf)
    if flags & GREEN_FLAG:
        previous = int(state.recent[row, (position - 1) % NUM_RECENT])
        green = find_green_list(previous, int(state.ints[row, NUM_GREEN]), vocab_size)
        scores[green.to(scores.device)] += params[DELTA]
    if flags & PENALIZED_FLAG:
        in_output = unpack_bits(bit_sets[OUTPUT], vocab_size)
        occurs = in_output | unpack_bits(bit_sets[PROMPT], vocab_size)
        counts = torch.where(in_output, state.counts[row].float(), 0.0)
        scores = penalized(
            scores, occurs, counts, params[REPETITION], params[FREQUENCY], params[PRESENCE]
        )
    return scores


def penalized(
    scores: torch.Tensor,
    occurs: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Return scores [vocab] with penalties, all in float32.

    occurs: whether the prompt or the output has the token.
    """
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(occurs, repeated, scores)
    return scores - frequency * output_counts - presence * (output_counts > 0)


def banned_tokens(
    row: int, position: int, permitted: torch.Tensor, state: SamplingRows
) -> torch.Tensor:
    """Return which tokens [vocab] bad words and min_tokens forbid at a position.

    A bad word forbids its last token if its other tokens end the output. Bad words that would leave
    no permitted token are ignored, and then stop tokens are, for the same reason.
    """
    vocab_size = len(permitted)
    ints = state.ints[row].tolist()
    banned = unpack_bits(state.bits[row, BAD], vocab_size)
    for last_token, start, length in state.bad_words[row, : ints[NUM_WORDS]].tolist():
        if position - length < ints[PROMPT_LEN]:
            continue
        expected = state.word_tokens[row, start : start + length].tolist()
        places = [place % NUM_RECENT for place in range(position - length, position)]
        if state.recent[row, places].tolist() == expected:
            banned[last_token] = True
    if not (permitted & ~banned).any():
        banned = torch.zeros_like(banned)
    if position < ints[FIRST_END]:
        with_stops = banned | unpack_bits(state.bits[row, STOPS], vocab_size)
        if (permitted & ~with_stops).any():
            banned = with_stops
    return banned


# ---- sampling ----


def sample_tokens_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingRows,
    outputs: SampleOutputs,
) -> None:
    """Sample one token for each row of logits; see kernels/sampling.sample_tokens."""
    for sample, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        scores = adjusted_scores(logits[sample], row, position, state)
        token = choose_token(scores, row, position, state)
        outputs.tokens[sample] = token
        if int(state.ints[row, FLAGS]) & LOGPROBS_FLAG:
            num_top = int(state.ints[row, NUM_TOP])
            outputs.reports[sample] = report_logprobs(logits[sample].float(), token, num_top)
        record_token(row, position, token, state)


def choose_token(scores: torch.Tensor, row: int, position: int, state: SamplingRows) -> int:
    """Return the token that a row samples from its scores [vocab].

    Few tokens are sorted at first, and more only if they are needed.
    """
    vocab_size = len(scores)
    temperature, top_p, min_p, typical_p = state.floats[row, : TYPICAL_P + 1].tolist()
    top_k = int(state.ints[row, TOP_K])
    if temperature < GREEDY_TEMPERATURE or not (scores > -torch.inf).any():
        return int(scores.argmax())
    seeds = state.ints[row, SEED_WORDS : SEED_WORDS + 2].unsqueeze(0)
    key_pairs = noise_keys(seeds, torch.tensor([position], device=scores.device))
    relative = (scores - scores.amax()).nan_to_num(nan=0.0, neginf=-torch.inf)
    z = relative / torch.tensor(temperature, dtype=torch.float32, device=scores.device)
    z = z.masked_fill(z < min_z(min_p), -torch.inf)
    if top_k == 0 and top_p >= 1.0 and typical_p >= 1.0:
        all_ids = torch.arange(vocab_size, dtype=torch.int32, device=scores.device)
        return int((z + gumbel_noise(key_pairs, all_ids)[0]).argmax())
    total_mass = z.exp().sum(dtype=torch.float64).view(1, 1)
    width = min(vocab_size, max(NUM_FIRST_CANDIDATES, top_k))
    while True:
        values, ids = stable_topk(scores.unsqueeze(0), width)
        sorted_z = (values.double() - values[:, :1]).nan_to_num(nan=0.0, neginf=-torch.inf)
        sorted_z = sorted_z / temperature

        def column(number: float) -> torch.Tensor:
            return torch.tensor([[number]], dtype=torch.float64, device=scores.device)

        keep, enough = truncation_mask(
            sorted_z,
            column(min_p),
            column(top_k),
            column(top_p),
            column(typical_p) if typical_p < 1.0 else None,
            total_mass,
        )
        if bool(enough) or width == vocab_size:
            break
        width = min(vocab_size, 16 * width)
    noisy = torch.where(keep, sorted_z + gumbel_noise(key_pairs, ids), -torch.inf)
    is_best = noisy == noisy.amax(-1, keepdim=True)
    return int(torch.where(is_best, ids, vocab_size).amin())


def min_z(min_p: float) -> float:
    """Return the lowest scaled score that min_p keeps, rounded to float32."""
    if min_p <= 0.0:
        return -math.inf
    return torch.tensor(min_p, dtype=torch.float64).log().float().item()


def record_token(row: int, position: int, token: int, state: SamplingRows) -> None:
    """Update a row's state with the token that was sampled for a position."""
    flags = int(state.ints[row, FLAGS])
    if flags & (BANNED_FLAG | GREEN_FLAG):
        state.recent[row, position % NUM_RECENT] = token
    if not flags & PENALIZED_FLAG:
        return
    word = int(state.bits[row, OUTPUT, token // 32])
    bit = _to_signed(1 << token % 32)
    count = 0
    if word & bit:
        count = int(state.counts[row, token])
    state.bits[row, OUTPUT, token // 32] = word | bit
    state.counts[row, token] = min(count + 1, MAX_COUNT)


# ---- log-probabilities ----


def report_logprobs(logits: torch.Tensor, token: int, num_top: int) -> torch.Tensor:
    """Return the report of one sample: the log-probabilities under its unchanged logits [vocab]."""
    log_sum_exp = logits.logsumexp(-1)
    lower_id = torch.arange(len(logits), device=logits.device) < token
    comes_before = (logits > logits[token]) | ((logits == logits[token]) & lower_id)
    num_top = min(num_top, len(logits))
    top_logits, top_ids = stable_topk(logits.unsqueeze(0), num_top)
    report = torch.zeros(2 + 2 * MAX_TOP_LOGPROBS, dtype=torch.int32, device=logits.device)
    report[0] = 1 + comes_before.sum()
    report[1] = (logits[token] - log_sum_exp).view(torch.int32)
    report[2 : 2 + num_top] = top_ids[0].to(torch.int32)
    top_logprobs = (top_logits[0] - log_sum_exp).contiguous()
    first = 2 + MAX_TOP_LOGPROBS
    report[first : first + num_top] = top_logprobs.view(torch.int32)
    return report

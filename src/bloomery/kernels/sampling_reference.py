"""Sampling in torch: Gumbel noise, a total order of tokens, truncation and penalties.

runtime/sampler builds on these functions on every device, and the fused kernels (kernels/sampling
in Triton, native/ on a CPU) must agree with them. This file must not know requests or rows.

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

from typing import NamedTuple

import torch
import torch.nn.functional as F

GREEDY_TEMPERATURE = 1e-5  # below it sampling is greedy: noise would not change the result
UINT32_MASK = 0xFFFFFFFF
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
INCREMENT_1 = 0x9E3779B9
INCREMENT_2 = 0x85EBCA6B
UNIFORM_SCALE = (1 - 2.0**-24) * 2.0**-31


class SamplingTensors(NamedTuple):
    """Sampling parameters on the device, one entry for each row.

    The three floats are columns of one table, or tensors of their own.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor  # 1 is off
    min_p: torch.Tensor  # 0 is off
    top_k: torch.Tensor  # integers; 0 is off
    seed_words: torch.Tensor  # [rows, 2] int32, from `seed_words`


class SampleResult(NamedTuple):
    """One sampled token for each row of logits."""

    tokens: torch.Tensor  # [samples] int32
    logprobs: torch.Tensor  # [samples] float32, of the tokens under the unchanged logits
    ranks: torch.Tensor  # [samples] int32; 1 is the most likely token


class PenaltyTensors(NamedTuple):
    """Penalties in float32 and the token history, one entry for each row."""

    repetition: torch.Tensor  # over prompt and output; 1 is off
    frequency: torch.Tensor  # over the output; 0 is off
    presence: torch.Tensor  # over the output; 0 is off
    history: torch.Tensor  # [rows, length] int32; a sample at position p reads positions below p
    prompt_lens: torch.Tensor  # [rows]


# ---- noise ----


def seed_words(seed: int) -> tuple[int, int]:
    """Turn a 64-bit seed into the two int32 words that `noise_keys` takes, once per request."""
    low = seed & UINT32_MASK
    high = seed >> 32 & UINT32_MASK
    first = _mix(_mix(low + INCREMENT_1) ^ high)
    second = _mix(_mix(high + INCREMENT_2) ^ low)
    return _to_signed(first), _to_signed(second)


def noise_keys(word_pairs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mix word pairs [samples, 2] from `seed_words` with positions [samples] into key pairs.

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


def _mix(x: int) -> int:
    x &= UINT32_MASK
    x = ((x ^ x >> 16) * MULTIPLIER_1) & UINT32_MASK
    x = ((x ^ x >> 15) * MULTIPLIER_2) & UINT32_MASK
    return x ^ x >> 16


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


# ---- penalties ----


def penalized(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    prompt_lens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Return scores [samples, vocab] with penalties for the tokens so far.

    tokens [samples, length] are the histories; those below the sample's position count. Positions,
    prompt lengths and penalties are [samples, 1], the penalties in float32.
    """
    place = torch.arange(tokens.shape[1], device=scores.device)
    present = place < positions
    in_output = present & (place >= prompt_lens)
    occurs = torch.zeros_like(scores).scatter_add_(1, tokens, present.float()) > 0
    output_counts = torch.zeros_like(scores).scatter_add_(1, tokens, in_output.float())
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    penalized_scores = torch.where(occurs, repeated, scores)
    return penalized_scores - frequency * output_counts - presence * (output_counts > 0)


def apply_penalties_reference(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, penalties: PenaltyTensors
) -> None:
    """Change logits [samples, vocab] in place; rows and positions are [samples]."""
    index = rows.long()
    repetition, frequency, presence = (values[index].unsqueeze(-1) for values in penalties[:3])
    result = penalized(
        logits,
        penalties.history[index].long(),
        positions.unsqueeze(-1),
        penalties.prompt_lens[index].unsqueeze(-1),
        repetition,
        frequency,
        presence,
    )
    logits.copy_(result)


# ---- sampling ----


def sample_tokens_reference(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: SamplingTensors
) -> SampleResult:
    """Sample one token for each row of logits by sorting; see kernels/sampling.sample_tokens."""
    raw = logits.float()
    vocab_size = raw.shape[-1]
    index = rows.long()
    temperature, top_p, min_p, top_k = (values[index].unsqueeze(-1) for values in params[:4])
    values, ids = stable_topk(raw, vocab_size)
    divisor = temperature.double().clamp(min=GREEDY_TEMPERATURE)
    z = (values.double() - values[:, :1]) / divisor
    keep, _ = truncation_mask(z, min_p.double(), top_k, top_p.double(), None, None)
    noise = gumbel_noise(noise_keys(params.seed_words[index], positions), ids)
    noisy = torch.where(keep, z + noise, -torch.inf)
    is_best = noisy == noisy.amax(-1, keepdim=True)
    winners = torch.where(is_best, ids, vocab_size).amin(-1)
    is_greedy = temperature.squeeze(-1) < GREEDY_TEMPERATURE
    tokens = torch.where(is_greedy, ids[:, 0], winners)
    token_logits = raw.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    token_places = (ids == tokens.unsqueeze(-1)).to(torch.int32).argmax(-1)
    return SampleResult(
        tokens.to(torch.int32),
        token_logits - raw.logsumexp(-1),
        token_places.to(torch.int32) + 1,
    )

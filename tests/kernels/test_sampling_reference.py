"""Torch sampling: the noise recipe bit for bit, the order of tokens, and truncation.

Truncation is compared with plain loops and with the logits warpers of transformers.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from bloomery.kernels.sampling_reference import (
    gumbel_noise,
    noise_keys,
    stable_topk,
    truncation_mask,
)
from bloomery.runtime.sampler import seed_words

UINT32_MASK = 2**32 - 1

# ---- noise ----


def scalar_mix(x: int) -> int:
    x &= UINT32_MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & UINT32_MASK
    x ^= x >> 15
    x = x * 0x846CA68B & UINT32_MASK
    return x ^ x >> 16


def scalar_keys(seed: int, position: int) -> tuple[int, int]:
    low = seed & UINT32_MASK
    high = seed >> 32
    w0 = scalar_mix(scalar_mix(low + 0x9E3779B9) ^ high)
    w1 = scalar_mix(scalar_mix(high + 0x85EBCA6B) ^ low)
    return scalar_mix(w0 ^ position), scalar_mix(w1 ^ position)


def scalar_bits(seed: int, position: int, token: int) -> int:
    k0, k1 = scalar_keys(seed, position)
    x = (token * 0x9E3779B9 + k0) & UINT32_MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & UINT32_MASK
    x ^= x >> 15
    x ^= k1
    x = x * 0x846CA68B & UINT32_MASK
    x ^= x >> 16
    return x & 0x7FFFFFFF


def scalar_gumbel(seed: int, position: int, token: int) -> float:
    bits = np.float32(scalar_bits(seed, position, token))
    v = (bits + np.float32(0.5)) * np.float32((1 - 2.0**-24) * 2.0**-31)
    return -math.log(-math.log1p(-float(v)))


def noise(seeds: list[int], positions: list[int], tokens: torch.Tensor) -> torch.Tensor:
    word_pairs = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32)
    return gumbel_noise(noise_keys(word_pairs, torch.tensor(positions)), tokens)


seeds64 = (
    st.integers(0, 2**64 - 1) | st.integers(0, 100) | st.integers(0, 100).map(lambda i: i << 32)
)


@given(
    seeds64, st.integers(0, 2**31 - 1), st.lists(st.integers(0, 300_000), min_size=1, max_size=40)
)
@settings(max_examples=200, deadline=None)
def test_noise_follows_the_documented_recipe(seed, position, tokens):
    word_pairs = torch.tensor([seed_words(seed)], dtype=torch.int32)
    key_pairs = noise_keys(word_pairs, torch.tensor([position]))
    unsigned_keys = tuple(key & UINT32_MASK for key in key_pairs[0].tolist())
    assert unsigned_keys == scalar_keys(seed, position)
    values = gumbel_noise(key_pairs, torch.tensor(tokens))[0].tolist()
    for token, value in zip(tokens, values):
        assert value == pytest.approx(scalar_gumbel(seed, position, token), rel=2e-6, abs=2e-6)


def test_the_noise_recipe_never_changes():
    """Results that people keep together with their seeds depend on these values."""
    cases = ((0, 0, 0), (1, 5, 7), (2**64 - 1, 131071, 151935))
    assert [scalar_bits(*case) for case in cases] == [517320509, 266163407, 834292120]
    assert noise([0], [0], torch.tensor([0])).item() == pytest.approx(1.2887443, abs=1e-6)
    assert noise([1], [5], torch.tensor([7])).item() == pytest.approx(2.0225096, abs=1e-6)


def test_noise_does_not_depend_on_vocab_shards_or_other_samples():
    tokens = torch.arange(5000)
    seeds = [3, 9, 3]
    positions = [7, 7, 8]
    full = noise(seeds, positions, tokens)
    for start, end in ((0, 1), (1, 4999), (1234, 1300), (4990, 5000)):
        assert torch.equal(noise(seeds, positions, tokens[start:end]), full[:, start:end])
    assert torch.equal(noise([9], [7], tokens)[0], full[1])
    subset = torch.randint(0, 5000, (3, 50))
    assert torch.equal(noise(seeds, positions, subset), full.gather(1, subset))


def token_with_bits(seed: int, position: int, x: int) -> int:
    """Return the token (as a 32-bit number) whose mixed bits are x."""
    k0, k1 = scalar_keys(seed, position)
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & UINT32_MASK
    x ^= k1
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & UINT32_MASK
    x ^= x >> 16
    return (x - k0) * pow(0x9E3779B9, -1, 2**32) & UINT32_MASK


@pytest.mark.parametrize(
    ("bits", "value"),
    [(0, 22.18071), (1, 21.08210), (2**31 - 1, -2.81155), (2**31 - 256, -2.74322)],
)
def test_noise_is_finite_at_both_ends_of_its_range(bits, value):
    token = token_with_bits(11, 4, bits)
    assert scalar_bits(11, 4, token) == bits
    signed = torch.tensor([token], dtype=torch.int64).to(torch.int32)
    assert noise([11], [4], signed).item() == pytest.approx(value, abs=1e-4)


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


NUM_SAMPLES = 8000
SEEDS_AND_POSITIONS = {
    "positions": ([5] * NUM_SAMPLES, list(range(NUM_SAMPLES))),
    "seeds": (list(range(NUM_SAMPLES)), [3] * NUM_SAMPLES),
    "high bits of seeds": ([i << 48 for i in range(NUM_SAMPLES)], [3] * NUM_SAMPLES),
    "bit 32 up": ([i << 32 for i in range(NUM_SAMPLES)], [0] * NUM_SAMPLES),
    "seed and position together": (list(range(NUM_SAMPLES)), list(range(NUM_SAMPLES))),
    "strides": (
        [i * 4096 for i in range(NUM_SAMPLES)],
        [i % 7 for i in range(NUM_SAMPLES)],
    ),
}


@pytest.mark.parametrize("first", [0, 1, 40_000])
@pytest.mark.parametrize("variation", SEEDS_AND_POSITIONS)
def test_sampled_tokens_follow_the_softmax(variation, first):
    """50 outcomes, 49 degrees of freedom: 95 is exceeded by chance once in about 10,000."""
    logits = torch.linspace(0, -3, 50)
    tokens = torch.arange(first, first + 50)
    winners = (logits + noise(*SEEDS_AND_POSITIONS[variation], tokens)).argmax(-1)
    observed = torch.bincount(winners, minlength=50).double()
    expected = logits.double().softmax(-1) * NUM_SAMPLES
    assert chi_square(observed, expected) < 95
    assert 0.5 * (observed - expected).abs().sum() / NUM_SAMPLES < 0.05


@pytest.mark.parametrize("variation", SEEDS_AND_POSITIONS)
def test_successive_samples_are_independent(variation):
    """Pairs of winners over 8 x 8 outcomes have 63 degrees of freedom."""
    winners = noise(*SEEDS_AND_POSITIONS[variation], torch.arange(8)).argmax(-1)
    for lag in (1, 2, 16):
        pairs = torch.bincount(winners[:-lag] * 8 + winners[lag:], minlength=64).double()
        uniform = torch.full((64,), pairs.sum() / 64, dtype=torch.float64)
        assert chi_square(pairs, uniform) < 115


@pytest.mark.parametrize("variation", SEEDS_AND_POSITIONS)
def test_noise_of_different_token_ids_is_independent(variation):
    values = noise(*SEEDS_AND_POSITIONS[variation], torch.arange(64)).double()
    correlation = torch.corrcoef(values.T) - torch.eye(64)
    assert correlation.abs().max() < 5.5 / math.sqrt(NUM_SAMPLES)  # 2016 pairs


def test_noise_has_the_gumbel_distribution():
    """Kolmogorov-Smirnov test over one wide row and over many rows."""
    for values in (
        noise([1], [2], torch.arange(200_000))[0],
        noise([7] * 50_000, list(range(50_000)), torch.arange(4)),
    ):
        ascending = values.double().flatten().sort().values
        expected = torch.exp(-torch.exp(-ascending))
        steps = torch.arange(1, len(ascending) + 1) / len(ascending)
        assert (steps - expected).abs().max() * math.sqrt(len(ascending)) < 2.0


def test_the_largest_noise_values_are_all_different():
    """The upper tail decides which token wins; coarse uniform values would repeat in it."""
    largest = noise([13], [0], torch.arange(4_000_000))[0].topk(2000).values
    assert len(set(largest.tolist())) >= 1998
    assert 13 < largest[0] < 20


# ---- order ----

SCORES_WITH_TIES = st.sampled_from(
    [0.0, -0.0, 1.5, -1.5, 2.0, -float("inf"), 1e-45, -1e-45, 3e38, -3e38]
)


@given(
    st.lists(st.lists(SCORES_WITH_TIES, min_size=12, max_size=12), min_size=1, max_size=4),
    st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_topk_orders_by_score_and_then_by_lowest_id(rows, count):
    scores = torch.tensor(rows)
    values, ids = stable_topk(scores, count)
    for row, top_values, top_ids in zip(scores.tolist(), values.tolist(), ids.tolist()):
        expected = sorted(range(12), key=lambda i: (-row[i], i))[:count]
        assert top_ids == expected
        assert top_values == [row[i] for i in expected]


def test_topk_of_half_precision_logits_and_a_large_vocabulary():
    scores = (torch.randn(3, 50_000) * 3).bfloat16().float()
    for count in (1, 50, 1000, 50_000):
        _, ids = stable_topk(scores, count)
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(ids, expected)


def test_topk_does_not_change_its_input():
    scores = torch.randn(2, 100)
    original = scores.clone()
    stable_topk(scores, 5)
    assert torch.equal(scores, original)


# ---- truncation ----


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def sorted_scores(width: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    """Random scores [1, width], descending, less the best one."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, width, generator=generator, dtype=torch.float64) * spread
    scores = scores.sort(dim=-1, descending=True).values
    return scores - scores[:, :1]


def truncate(z, min_p=0.0, top_k=0, top_p=1.0, typical_p=1.0, total_mass=None):
    if total_mass is None:
        excluded = z < math.log(min_p) if min_p else z < -math.inf
        total_mass = z.exp().masked_fill(excluded, 0).sum(-1, True)
    return truncation_mask(
        z, column(min_p), torch.tensor([[top_k]]), column(top_p), column(typical_p), total_mass
    )


def truncate_by_loops(z: list[float], min_p, top_k, top_p, typical_p) -> list[bool]:
    remaining = [i for i in range(len(z)) if math.exp(z[i]) >= min_p]
    remaining = remaining[:top_k] if top_k else remaining
    if top_p < 1:
        total = math.fsum(math.exp(z[i]) for i in remaining)
        mass_before = 0.0
        within_top_p = []
        for i in remaining:
            if mass_before < top_p * total:
                within_top_p.append(i)
            mass_before += math.exp(z[i])
        remaining = within_top_p
    if typical_p < 1:
        total = math.fsum(math.exp(z[i]) for i in remaining)
        surprise = {i: math.log(total) - z[i] for i in remaining}
        entropy = math.fsum(math.exp(-s) * s for s in surprise.values())
        mass_before = 0.0
        within_typical_p = []
        for i in sorted(remaining, key=lambda i: abs(surprise[i] - entropy)):
            if mass_before < typical_p:
                within_typical_p.append(i)
            mass_before += math.exp(-surprise[i])
        remaining = within_typical_p
    return [i in remaining for i in range(len(z))]


probabilities = st.sampled_from([1.0, 0.999, 0.95, 0.9, 0.5, 0.2, 0.01, 1e-9])


@given(
    st.integers(0, 10_000),
    st.integers(2, 60),
    st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0]),
    st.integers(0, 70),
    probabilities,
    probabilities,
)
@settings(max_examples=400, deadline=None)
def test_truncation_equals_plain_loops(seed, width, min_p, top_k, top_p, typical_p):
    z = sorted_scores(width, seed)
    mask, _ = truncate(z, min_p, top_k, top_p, typical_p)
    assert mask[0].tolist() == truncate_by_loops(z[0].tolist(), min_p, top_k, top_p, typical_p)
    assert mask.any()


WARPERS = [
    (lambda: TopKLogitsWarper(7), {"top_k": 7}),
    (lambda: TopPLogitsWarper(0.8), {"top_p": 0.8}),
    (lambda: MinPLogitsWarper(0.1), {"min_p": 0.1}),
    (lambda: TypicalLogitsWarper(0.6), {"typical_p": 0.6}),
]


@pytest.mark.parametrize(
    ("warper", "parameters"), WARPERS, ids=["top_k", "top_p", "min_p", "typical_p"]
)
def test_truncation_equals_transformers(warper, parameters):
    for seed in range(50):
        z = sorted_scores(40, seed)
        expected = warper()(torch.zeros(1, 1, dtype=torch.int64), z.clone()) > -math.inf
        mask, _ = truncate(z, **parameters)
        assert torch.equal(mask, expected)


def test_truncation_does_not_depend_on_the_width_once_it_is_enough():
    for seed in range(100):
        z = sorted_scores(2000, seed, spread=3.0)
        total = z.exp().sum(-1, True)
        full_mask, _ = truncate(z, top_p=0.9, total_mass=total)
        for width in (1, 10, 100, 500, 1000):
            mask, enough = truncate(z[:, :width], top_p=0.9, total_mass=total)
            inside = float(z[:, :width].exp().sum()) >= 0.9 * float(total)
            assert bool(enough) is inside
            assert torch.equal(mask, full_mask[:, :width])
            assert not bool(enough) or not full_mask[:, width:].any()


def test_truncation_does_not_depend_on_padding():
    for seed in range(50):
        z = sorted_scores(50, seed)
        padding = torch.full((1, 300), -math.inf, dtype=torch.float64)
        padded = torch.cat((z, padding), 1)
        total = z.exp().sum(-1, True)
        mask, _ = truncate(z, top_k=50, top_p=0.9, typical_p=0.7, total_mass=total)
        padded_mask, _ = truncate(padded, top_k=50, top_p=0.9, typical_p=0.7, total_mass=total)
        assert torch.equal(padded_mask[:, :50], mask)
        assert not padded_mask[:, 50:].any()

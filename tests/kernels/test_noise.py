"""The noise is the documented recipe, bit for bit, and good enough to sample from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.kernels.noise import gumbel, keys, words

MASK = 2**32 - 1


def mix(x: int) -> int:
    x &= MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def plain_keys(seed: int, position: int) -> tuple[int, int]:
    low = seed & MASK
    high = seed >> 32
    w0 = mix(mix(low + 0x9E3779B9) ^ high)
    w1 = mix(mix(high + 0x85EBCA6B) ^ low)
    return mix(w0 ^ position), mix(w1 ^ position)


def plain_bits(seed: int, position: int, token: int) -> int:
    k0, k1 = plain_keys(seed, position)
    x = (token * 0x9E3779B9 + k0) & MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x ^= k1
    x = x * 0x846CA68B & MASK
    x ^= x >> 16
    return x & 0x7FFFFFFF


def plain_gumbel(seed: int, position: int, token: int) -> float:
    v = (np.float32(plain_bits(seed, position, token)) + np.float32(0.5)) * np.float32(
        (1 - 2.0**-24) * 2.0**-31
    )
    return -math.log(-math.log1p(-float(v)))


def noise(seeds: list[int], positions: list[int], tokens: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([words(seed) for seed in seeds], dtype=torch.int32)
    return gumbel(keys(rows, torch.tensor(positions)), tokens)


seeds64 = (
    st.integers(0, 2**64 - 1) | st.integers(0, 100) | st.integers(0, 100).map(lambda i: i << 32)
)


@given(
    seeds64, st.integers(0, 2**31 - 1), st.lists(st.integers(0, 300_000), min_size=1, max_size=40)
)
@settings(max_examples=200, deadline=None)
def test_recipe(seed, position, tokens):
    key = keys(torch.tensor([words(seed)], dtype=torch.int32), torch.tensor([position]))
    assert tuple(k & MASK for k in key[0].tolist()) == plain_keys(seed, position)
    drawn = gumbel(key, torch.tensor(tokens))[0].tolist()
    for token, value in zip(tokens, drawn):
        assert value == pytest.approx(plain_gumbel(seed, position, token), rel=2e-6, abs=2e-6)


def test_recipe_never_changes():
    """Results that people keep with their seeds depend on these."""
    cases = ((0, 0, 0), (1, 5, 7), (2**64 - 1, 131071, 151935))
    assert [plain_bits(*case) for case in cases] == [517320509, 266163407, 834292120]
    assert noise([0], [0], torch.tensor([0])).item() == pytest.approx(1.2887443, abs=1e-6)
    assert noise([1], [5], torch.tensor([7])).item() == pytest.approx(2.0225096, abs=1e-6)


def test_cut_vocabulary_and_neighbours_change_nothing():
    tokens = torch.arange(5000)
    whole = noise([3, 9, 3], [7, 7, 8], tokens)
    for start, end in ((0, 1), (1, 4999), (1234, 1300), (4990, 5000)):
        assert torch.equal(noise([3, 9, 3], [7, 7, 8], tokens[start:end]), whole[:, start:end])
    assert torch.equal(noise([9], [7], tokens)[0], whole[1])
    picked = torch.randint(0, 5000, (3, 50))
    assert torch.equal(noise([3, 9, 3], [7, 7, 8], picked), whole.gather(1, picked))


def inverse(seed: int, position: int, x: int) -> int:
    """The token (as a 32-bit number) whose mixed bits are x."""
    k0, k1 = plain_keys(seed, position)
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & MASK
    x ^= k1
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & MASK
    x ^= x >> 16
    return (x - k0) * pow(0x9E3779B9, -1, 2**32) & MASK


@pytest.mark.parametrize(
    ("bits", "value"),
    [(0, 22.18071), (1, 21.08210), (2**31 - 1, -2.81155), (2**31 - 256, -2.74322)],
)
def test_ends_of_the_range(bits, value):
    token = inverse(11, 4, bits)
    assert plain_bits(11, 4, token) == bits
    signed = torch.tensor([token], dtype=torch.int64).to(torch.int32)
    assert noise([11], [4], signed).item() == pytest.approx(value, abs=1e-4)


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


DRAWS = 8000
WAYS = {
    "positions": ([5] * DRAWS, list(range(DRAWS))),
    "seeds": (list(range(DRAWS)), [3] * DRAWS),
    "high bits of seeds": ([i << 48 for i in range(DRAWS)], [3] * DRAWS),
    "bit 32 up": ([i << 32 for i in range(DRAWS)], [0] * DRAWS),
    "seed and position together": (list(range(DRAWS)), list(range(DRAWS))),
    "strides": ([i * 4096 for i in range(DRAWS)], [i % 7 for i in range(DRAWS)]),
}


@pytest.mark.parametrize("first", [0, 1, 40_000])
@pytest.mark.parametrize("way", WAYS)
def test_winners_follow_the_softmax(way, first):
    """50 outcomes, 49 degrees of freedom: 95 is passed by chance once in about 10,000."""
    logits = torch.linspace(0, -3, 50)
    winners = (logits + noise(*WAYS[way], torch.arange(first, first + 50))).argmax(-1)
    observed = torch.bincount(winners, minlength=50).double()
    expected = logits.double().softmax(-1) * DRAWS
    assert chi_square(observed, expected) < 95
    assert 0.5 * (observed - expected).abs().sum() / DRAWS < 0.05


@pytest.mark.parametrize("way", WAYS)
def test_successive_draws_are_independent(way):
    """Pairs of winners over 8 x 8 outcomes, 63 degrees of freedom; each draw with the next one of its way."""
    winners = noise(*WAYS[way], torch.arange(8)).argmax(-1)
    for lag in (1, 2, 16):
        pairs = torch.bincount(winners[:-lag] * 8 + winners[lag:], minlength=64).double()
        assert chi_square(pairs, torch.full((64,), pairs.sum() / 64, dtype=torch.float64)) < 115


@pytest.mark.parametrize("way", WAYS)
def test_token_ids_are_independent(way):
    values = noise(*WAYS[way], torch.arange(64)).double()
    correlation = torch.corrcoef(values.T) - torch.eye(64)
    assert correlation.abs().max() < 5.5 / math.sqrt(DRAWS)  # 2016 pairs


def test_distribution():
    """Kolmogorov-Smirnov against the Gumbel distribution, over one wide line and over many lines."""
    for values in (
        noise([1], [2], torch.arange(200_000))[0],
        noise([7] * 50_000, list(range(50_000)), torch.arange(4)),
    ):
        found = values.double().flatten().sort().values
        expected = torch.exp(-torch.exp(-found))
        steps = torch.arange(1, len(found) + 1) / len(found)
        assert (steps - expected).abs().max() * math.sqrt(len(found)) < 2.0


def test_the_tail_that_decides_is_fine():
    """The largest values are all different: a coarse uniform would repeat them."""
    largest = noise([13], [0], torch.arange(4_000_000))[0].topk(2000).values
    assert len(set(largest.tolist())) >= 1998
    assert 13 < largest[0] < 20

"""Sampling kernels under the interpreter: the tokens and log-probabilities of the reference."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import jit, tl
from bloomery.kernels.sampling import (
    SamplingScratch,
    gumbel_noise_triton,
    noise_bits_triton,
    noise_key_triton,
    sample_tokens_triton,
    score_tokens_triton,
)
from bloomery.kernels.sampling_reference import (
    gumbel_noise,
    noise_keys,
    report_logprobs,
)
from bloomery.kernels.sampling_rows import MAX_TOP_LOGPROBS, NUM_TOP, SampleOutputs
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.runtime.sampler import Sampler, seed_words
from tests.kernels.sampling_oracles import SAMPLING_KINDS, check_sampling

SMALL_SCRATCH = {"segment": 64, "block": 8, "max_listed": 64}


@pytest.mark.parametrize("kind", SAMPLING_KINDS)
def test_each_parameter_equals_the_reference(kind: str) -> None:
    torch.manual_seed(7)
    assert check_sampling(2, 150, 2.0, kind, torch.float32, "cpu", **SMALL_SCRATCH) == 0


@pytest.mark.parametrize(
    ("spread", "dtype"), [(0.0, torch.float32), (3.0, torch.float16), (3.0, torch.bfloat16)]
)
def test_mixed_parameters_equal_the_reference(spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    assert check_sampling(7, 150, spread, "mixed", dtype, "cpu", 3, **SMALL_SCRATCH) == 0


@pytest.mark.parametrize("kind", ["both", "typical_p and others", "logprobs"])
def test_sampling_is_right_when_lists_overflow(kind: str) -> None:
    torch.manual_seed(8)
    sizes = {"segment": 64, "block": 8, "max_listed": 4}
    assert check_sampling(2, 150, 0.5, kind, torch.float32, "cpu", **sizes) == 0


@pytest.mark.parametrize("num_top", [0, 4, 60])
def test_given_tokens_are_scored(num_top: int) -> None:
    torch.manual_seed(9)
    logits = torch.randn(3, 150).bfloat16()
    sampler = Sampler(2, 150)
    sampler.state.ints[sampler.scoring_row, NUM_TOP] = num_top
    rows = torch.full((3,), sampler.scoring_row, dtype=torch.int32)
    tokens = torch.tensor([0, 149, 70])
    outputs = SampleOutputs(tokens, sampler.outputs.reports[:3])
    scratch = SamplingScratch.allocate(3, 150, "cpu", **SMALL_SCRATCH)
    score_tokens_triton(logits, rows, sampler.state, outputs, scratch)
    for report, row_logits, token in zip(outputs.reports, logits.float(), tokens.tolist()):
        expected = report_logprobs(row_logits, token, num_top)
        assert torch.equal(report[0], expected[0])
        assert torch.equal(report[2 : 2 + num_top], expected[2 : 2 + num_top])
        first = 2 + MAX_TOP_LOGPROBS
        for part in (slice(1, 2), slice(first, first + num_top)):
            torch.testing.assert_close(
                report[part].view(torch.float32), expected[part].view(torch.float32)
            )


def make_flat_logits(vocab_size: int) -> torch.Tensor:
    """Rows in which very many logits are equal; the likeliest tokens of the last are neighbours."""
    ids = torch.arange(vocab_size)
    few_finite = torch.full((vocab_size,), -float("inf"))
    few_finite[[vocab_size - 1, 300, 7]] = torch.tensor([1.0, 2.0, 1.0])
    last_is_higher = torch.zeros(vocab_size)
    last_is_higher[vocab_size - 3 :] = 1.0
    signed_zeros = torch.where(ids % 2 == 0, 0.0, -0.0)
    neighbours = torch.where((ids >= 64) & (ids < 192), ids.float(), -ids.float())
    return torch.stack(
        [
            torch.zeros(vocab_size),
            few_finite,
            last_is_higher,
            signed_zeros,
            torch.randint(0, 3, (vocab_size,)).float(),
            torch.randn(vocab_size).mul(4).round(),
            neighbours,
        ]
    )


@pytest.mark.parametrize("num_top", [1, 5, 20, MAX_TOP_LOGPROBS])
def test_the_likeliest_of_flat_logits_are_listed(num_top: int) -> None:
    """Ties go to the lowest id, and they do not fill the list."""
    vocab_size = 1100
    torch.manual_seed(10)
    logits = make_flat_logits(vocab_size)
    num_rows = len(logits)
    sampler = Sampler(num_rows, vocab_size)
    sampler.state.ints[sampler.scoring_row, NUM_TOP] = num_top
    rows = torch.full((num_rows,), sampler.scoring_row, dtype=torch.int32)
    tokens = torch.randint(0, vocab_size, (num_rows,))
    outputs = SampleOutputs(tokens, sampler.outputs.reports[:num_rows])
    sizes = {"segment": 128, "block": 8, "max_listed": 1024}
    scratch = SamplingScratch.allocate(num_rows, vocab_size, "cpu", **sizes)
    listed = scratch.ints[:, -2 * scratch.max_listed : -scratch.max_listed]
    listed.fill_(-1)
    score_tokens_triton(logits.bfloat16(), rows, sampler.state, outputs, scratch)
    first = 2 + MAX_TOP_LOGPROBS
    for report, row_logits, token in zip(outputs.reports, logits, tokens.tolist()):
        expected = report_logprobs(row_logits.bfloat16().float(), token, num_top)
        assert report[0] == expected[0]
        assert report[2 : 2 + num_top].tolist() == expected[2 : 2 + num_top].tolist()
        torch.testing.assert_close(
            report[first : first + num_top].view(torch.float32),
            expected[first : first + num_top].view(torch.float32),
        )
    if num_top < MAX_TOP_LOGPROBS:
        assert (listed >= 0).sum(-1).max() < 20 * num_top


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1e-4, "top_p": 0.5, "top_k": 1},
        {"min_p": 0.5, "top_k": 1},
        {"typical_p": 0.01, "top_k": 1},
    ],
    ids=["greedy", "top_p and top_k", "min_p and top_k", "typical_p and top_k"],
)
def test_ties_go_to_the_lowest_id_and_tokens_stay_inside_the_vocabulary(
    params: dict[str, float],
) -> None:
    """Also if all logits are NaN."""
    infinity = float("inf")
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0, 2.0], [float("nan")] * 5, [-infinity] * 4 + [3.0]])
    sampler = Sampler(1, 5)
    sampling = ResolvedSampling(logprobs=2, **params)  # type: ignore[arg-type]
    sampler.admit(0, NewRequestData((1,), 1, sampling, ()))
    sampler.upload_new_requests()
    rows = torch.zeros(3, dtype=torch.int32)
    scratch = SamplingScratch.allocate(3, 5, "cpu", segment=8, block=4, max_listed=4)
    outputs = sampler.outputs.first(3)
    sample_tokens_triton(logits, rows, rows, sampler.state, outputs, scratch)
    assert outputs.tokens.tolist()[::2] == [1, 4]
    assert 0 <= outputs.tokens[1] < 5


@jit
def store_noise_kernel(seed_pairs, positions, bits, noise, WIDTH: tl.constexpr):
    sample = tl.program_id(0)
    token = tl.arange(0, WIDTH)
    position = tl.load(positions + sample)
    key0 = noise_key_triton(tl.load(seed_pairs + 2 * sample), position)
    key1 = noise_key_triton(tl.load(seed_pairs + 2 * sample + 1), position)
    random_bits = noise_bits_triton(key0, key1, token)
    tl.store(bits + sample * WIDTH + token, random_bits.to(tl.int32))
    tl.store(noise + sample * WIDTH + token, gumbel_noise_triton(key0, key1, token))


def test_noise_in_a_kernel_follows_the_documented_recipe() -> None:
    """The bits are those that tests/kernels/test_sampling_reference.py fixes."""
    seed_pairs = torch.tensor([seed_words(seed) for seed in (0, 1, 2**64 - 1)], dtype=torch.int32)
    positions = torch.tensor([0, 5, 131071])
    bits = torch.zeros(3, 1024, dtype=torch.int32)
    noise = torch.zeros(3, 1024)
    store_noise_kernel[(3,)](seed_pairs, positions, bits, noise, WIDTH=1024)
    assert bits[0, 0] == 517320509
    assert bits[1, 7] == 266163407
    expected = gumbel_noise(noise_keys(seed_pairs, positions), torch.arange(1024))
    torch.testing.assert_close(noise, expected, rtol=0, atol=2e-6)

"""Fused sampling kernels under the interpreter: the tokens of the reference, and the sampler's."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import jit, tl
from bloomery.kernels.sampling import (
    SamplingScratch,
    gumbel_noise_triton,
    noise_bits_triton,
    noise_key_triton,
    sample_tokens,
    sample_tokens_triton,
)
from bloomery.kernels.sampling_reference import (
    SamplingTensors,
    gumbel_noise,
    noise_keys,
    sample_tokens_reference,
    seed_words,
)
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.runtime.sampler import Sampler
from tests.kernels.sampling_oracles import check_penalties, check_sampling

SMALL_SCRATCH = {"segment": 64, "block": 8, "max_listed": 64}


@pytest.mark.parametrize(
    ("kind", "spread", "dtype"),
    [
        ("greedy", 0.0, torch.float32),
        ("free", 2.0, torch.float16),
        ("top_p", 3.0, torch.float32),
        ("top_p", 0.0, torch.float32),
        ("top_k", 2.0, torch.float16),
        ("min_p", 2.0, torch.float32),
        ("both", 0.0, torch.float32),
        ("both", 3.0, torch.float16),
    ],
)
def test_sampling_kernels_equal_the_reference(kind: str, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    assert check_sampling(3, 150, spread, kind, dtype, "cpu", **SMALL_SCRATCH) == 0


def test_sampling_is_right_when_the_candidate_list_overflows() -> None:
    torch.manual_seed(8)
    sizes = {"segment": 64, "block": 8, "max_listed": 4}
    assert check_sampling(2, 150, 0.5, "both", torch.float32, "cpu", **sizes) == 0


def test_sampling_kernels_equal_the_sampler() -> None:
    """Rows come in any order and differ in their sampling params, as in a captured step."""
    torch.manual_seed(9)
    samplings = [
        ResolvedSampling(temperature=0.0),
        ResolvedSampling(temperature=0.7, seed=1),
        ResolvedSampling(temperature=1.3, top_p=0.8, seed=2**63 + 5),
        ResolvedSampling(temperature=0.9, top_k=7, seed=3),
        ResolvedSampling(temperature=1.0, top_k=40, top_p=0.5, min_p=0.02, seed=4),
    ]
    vocab_size = 150
    sampler = Sampler(len(samplings) + 1, vocab_size)
    for row, sampling in enumerate(samplings):
        sampler.admit(row, NewRequestData((1, 2, 3), 3, sampling, ()))
    logits = torch.randn(5, vocab_size) * 2
    rows = [3, 0, 4, 2, 1]
    positions = [3, 9, 70, 4, 8]
    requests = [(row, position, ()) for row, position in zip(rows, positions)]
    expected = sampler.sample(logits, requests).tokens.tolist()
    params = SamplingTensors(
        *sampler.float_params[:, :3].unbind(1), sampler.top_k, sampler.seed_words
    )
    row_index = torch.tensor(rows, dtype=torch.int32)
    position_index = torch.tensor(positions, dtype=torch.int32)
    scratch = SamplingScratch.allocate(5, vocab_size, "cpu", **SMALL_SCRATCH)
    by_kernel = sample_tokens_triton(logits, row_index, position_index, params, scratch)
    assert by_kernel.tokens.tolist() == expected
    by_dispatch = sample_tokens(logits, row_index, position_index, params)
    assert by_dispatch.tokens.tolist() == expected


def one_row_params(temperature: float, top_p: float, min_p: float, top_k: int) -> SamplingTensors:
    return SamplingTensors(
        torch.full((1,), temperature),
        torch.full((1,), top_p),
        torch.full((1,), min_p),
        torch.full((1,), top_k, dtype=torch.int64),
        torch.zeros(1, 2, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    "params",
    [
        one_row_params(0.0, 1.0, 0.0, 0),
        one_row_params(1e-4, 0.5, 0.0, 1),
        one_row_params(1.0, 1.0, 0.5, 1),
    ],
    ids=["greedy", "top_p and top_k", "min_p and top_k"],
)
def test_ties_go_to_the_lowest_id_and_tokens_stay_inside_the_vocabulary(
    params: SamplingTensors,
) -> None:
    """Also if all logits are NaN."""
    infinity = float("inf")
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0, 2.0], [float("nan")] * 5, [-infinity] * 4 + [3.0]])
    rows = torch.zeros(3, dtype=torch.int32)
    scratch = SamplingScratch.allocate(3, 5, "cpu", segment=8, block=4, max_listed=4)
    result = sample_tokens_triton(logits, rows, rows, params, scratch)
    assert result.tokens.tolist()[::2] == [1, 4]
    assert 0 <= result.tokens[1] < 5


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


def test_penalties_kernel_equals_the_reference() -> None:
    torch.manual_seed(2)
    assert check_penalties(3, 40, 100, "cpu") < 1e-6


def test_cpu_tensors_are_sampled_by_the_reference() -> None:
    params = one_row_params(0.0, 1.0, 0.0, 0)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    zero = torch.zeros(1, dtype=torch.int32)
    scratch = SamplingScratch.allocate(1, 3, "cpu")
    result = sample_tokens(logits, zero, zero, params, scratch)
    assert result.tokens.tolist() == [1]
    assert result.ranks.tolist() == [1]
    torch.testing.assert_close(result.logprobs, logits.log_softmax(-1)[:, 1])
    assert result.tokens.equal(sample_tokens_reference(logits, zero, zero, params).tokens)

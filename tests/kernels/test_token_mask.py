"""Token masks: every implementation forbids the same tokens, and the samplers then agree."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.sampling import SamplingScratch, sample_tokens_triton
from bloomery.kernels.sampling_reference import (
    SamplingTensors,
    sample_tokens_reference,
    seed_words,
)
from bloomery.kernels.token_mask import (
    TokenMasks,
    mask_logits,
    mask_logits_reference,
    mask_logits_triton,
)
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.native import ops
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.runtime.sampler import Sampler

VOCAB_SIZES = (31, 64, 150, 4100)


def random_masks(seed: int, count: int, vocab_size: int, density: float) -> torch.Tensor:
    """Masks [count, words] in which each token is allowed with a probability."""
    generator = torch.Generator().manual_seed(seed)
    num_words = -(-vocab_size // 32)
    allowed = torch.rand(count, num_words * 32, generator=generator) < density
    allowed[:, 7] = True  # one token at least
    weights = 1 << torch.arange(32)
    words = (allowed.view(count, num_words, 32) * weights).sum(-1)
    return words.to(torch.int32)


def masked_example(seed: int, vocab_size: int) -> tuple[torch.Tensor, TokenMasks]:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(seed))
    words = random_masks(seed, 3, vocab_size, 0.3)
    return logits, TokenMasks(words, torch.tensor([4, 0, 2]))


def test_the_reference_forbids_tokens_bit_by_bit() -> None:
    logits, masks = masked_example(1, 70)
    masked = logits.clone()
    mask_logits_reference(masked, masks)
    for slot in range(5):
        for token in range(70):
            forbidden = False
            if slot in (4, 0, 2):
                word = int(masks.words[[4, 0, 2].index(slot), token // 32])
                forbidden = not word >> token % 32 & 1
            expected = -torch.inf if forbidden else float(logits[slot, token])
            assert float(masked[slot, token]) == expected


@pytest.mark.skipif(not triton_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_kernel_equals_the_reference(vocab_size: int) -> None:
    logits, masks = masked_example(2, vocab_size)
    expected = logits.clone()
    mask_logits_reference(expected, masks)
    mask_logits_triton(logits, masks)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_native_operation_equals_the_reference(vocab_size: int) -> None:
    try:
        pool = ThreadPool(2)
    except NativeBuildError as reason:
        pytest.skip(str(reason))
    logits, masks = masked_example(3, vocab_size)
    expected = logits.clone()
    mask_logits_reference(expected, masks)
    by_native = logits.clone()
    ops.mask_logits(pool, by_native, masks.words, masks.slots)
    assert torch.equal(by_native, expected)
    mask_logits(logits, masks, pool)
    assert torch.equal(logits, expected)


SAMPLINGS = (
    ResolvedSampling(temperature=0.0),
    ResolvedSampling(temperature=0.8, seed=1),
    ResolvedSampling(temperature=1.0, top_k=40, seed=2),  # more than a mask may leave
    ResolvedSampling(temperature=1.2, top_p=0.7, seed=3),
    ResolvedSampling(temperature=1.0, min_p=0.1, top_k=9, top_p=0.9, seed=4),
)


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5])
def test_all_samplers_choose_the_same_allowed_tokens(density: float) -> None:
    """The torch sampler, the reference, the GPU kernels and the CPU kernels."""
    vocab_size = 300
    count = len(SAMPLINGS)
    logits = 3 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(5))
    masks = TokenMasks(random_masks(6, count, vocab_size, density), torch.arange(count))
    sampler = Sampler(count + 1, vocab_size)
    for row, sampling in enumerate(SAMPLINGS):
        sampler.admit(row, NewRequestData((1, 2), 2, sampling, ()))
    positions = torch.arange(10, 10 + count)
    jobs = [(row, int(position), ()) for row, position in enumerate(positions)]
    expected = sampler.sample(logits, jobs, masks).tokens
    masked = logits.clone()
    mask_logits_reference(masked, masks)
    assert all(float(row[token]) > -torch.inf for row, token in zip(masked, expected, strict=True))
    params = SamplingTensors(
        torch.tensor([sampling.temperature for sampling in SAMPLINGS], dtype=torch.float64),
        torch.tensor([sampling.top_p for sampling in SAMPLINGS], dtype=torch.float64),
        torch.tensor([sampling.min_p for sampling in SAMPLINGS], dtype=torch.float64),
        torch.tensor([sampling.top_k for sampling in SAMPLINGS]),
        torch.tensor([seed_words(sampling.seed) for sampling in SAMPLINGS], dtype=torch.int32),
    )
    rows = torch.arange(count, dtype=torch.int32)
    reference = sample_tokens_reference(masked, rows, positions, params).tokens
    assert reference.tolist() == expected.tolist()
    if triton_interpreted():
        scratch = SamplingScratch.allocate(count, vocab_size, "cpu", segment=64, block=8)
        fused = sample_tokens_triton(masked, rows, positions, params, scratch).tokens
        assert fused.tolist() == expected.tolist()
    try:
        pool = ThreadPool(1)
    except NativeBuildError:
        return
    table = torch.stack([params.temperature, params.top_p, params.min_p], 1).contiguous()
    native = ops.sample_tokens(
        pool, masked, rows, positions, table, 3, params.top_k, params.seed_words
    )
    assert native.tolist() == expected.tolist()

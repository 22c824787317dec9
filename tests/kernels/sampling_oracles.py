"""Comparisons of the sampling kernels with their references, for tests and benchmarks.

Tests run the kernels under Triton's interpreter, benchmarks/products.py runs them on a GPU.
"""

from __future__ import annotations

import torch

from bloomery.kernels import sampling
from bloomery.kernels.sampling_reference import (
    PenaltyTensors,
    SamplingTensors,
    apply_penalties_reference,
    sample_tokens_reference,
    seed_words,
)
from tests.kernels.oracles import relative_error, run_in_poisoned_memory

SAMPLING_KINDS = ("greedy", "free", "top_p", "top_k", "min_p", "both")


def make_sampling_params(rows: int, kind: str, device: str) -> SamplingTensors:
    """Make random sampling params: one of SAMPLING_KINDS, or "mixed", which differs by row.

    "free" has a temperature only; "both" combines top_p, top_k and, in odd rows, min_p.
    """
    temperature = torch.rand(rows) * 1.3 + 0.2
    top_p = torch.ones(rows)
    min_p = torch.zeros(rows)
    top_k = torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):
        row_kind = kind
        if kind == "mixed":
            row_kind = SAMPLING_KINDS[int(torch.randint(len(SAMPLING_KINDS), ()))]
        if row_kind == "greedy":
            temperature[row] = 0.0
        if row_kind in ("top_p", "both"):
            top_p[row] = torch.rand(()) * 0.98 + 0.01
        if row_kind == "min_p" or (row_kind == "both" and row % 2):
            min_p[row] = torch.rand(()) ** 2
        if row_kind in ("top_k", "both"):
            top_k[row] = torch.randint(1, 200, ())
    seeds = torch.tensor([seed_words(7919 * row + 3) for row in range(rows)], dtype=torch.int32)
    floats = torch.stack((temperature, top_p, min_p), 1).double().to(device).unbind(1)
    return SamplingTensors(*floats, top_k.to(device), seeds.to(device))


def check_sampling(
    samples: int,
    vocab_size: int,
    logit_scale: float,
    kind: str,
    dtype: torch.dtype,
    device: str,
    **scratch_sizes: int,
) -> float:
    """Share of samples whose token, rank or logprob differs from the reference's.

    The second round uses the scratch memory of the first, and computes no logprobs.
    """
    params = make_sampling_params(samples + 3, kind, device)
    scratch = sampling.SamplingScratch.allocate(samples, vocab_size, device, **scratch_sizes)
    wrong = 0.0
    for with_logprobs in (True, False):
        logits = (torch.randn(samples, vocab_size, device=device) * logit_scale).to(dtype)
        rows = torch.randperm(samples + 3, device=device)[:samples].int()
        positions = torch.randint(1 << 17, (samples,), device=device, dtype=torch.int32)
        inputs = (logits, rows, positions, params)
        actual = run_in_poisoned_memory(
            lambda inputs=inputs, with_logprobs=with_logprobs: sampling.sample_tokens_triton(
                *inputs, scratch, with_logprobs=with_logprobs
            )
        )
        expected = sample_tokens_reference(*inputs)
        same = actual.tokens == expected.tokens
        if with_logprobs:
            same &= actual.ranks == expected.ranks
            same &= (actual.logprobs - expected.logprobs).abs() < 1e-4
        wrong = max(wrong, 1 - same.double().mean().item())
    return wrong


def check_distribution(samples: int, device: str) -> float:
    """Total variation distance between sampled tokens and the softmax."""
    logits = torch.randn(1, 50, device=device).repeat(samples, 1)
    params = make_sampling_params(1, "free", device)
    rows = torch.zeros(samples, dtype=torch.int32, device=device)
    positions = torch.arange(samples, device=device)
    scratch = sampling.SamplingScratch.allocate(samples, 50, device, segment=64)
    tokens = sampling.sample_tokens_triton(
        logits, rows, positions, params, scratch, False, False
    ).tokens
    frequency = torch.bincount(tokens.long(), minlength=50).double() / samples
    probability = (logits[0].double() / params.temperature[0]).softmax(-1)
    return (frequency - probability).abs().sum().item() / 2


def check_penalties(samples: int, vocab_size: int, length: int, device: str) -> float:
    """Relative error of the penalties kernel. Row 0 has penalties that change nothing."""
    rows = torch.randperm(samples + 2, device=device)[:samples].int()
    lowest = torch.tensor([[0.5], [-0.5], [-0.5]], device=device)
    penalties = torch.rand(3, samples + 2, device=device) + lowest
    penalties[:, 0] = torch.tensor([1.0, 0.0, 0.0])
    history = torch.randint(vocab_size, (samples + 2, length), dtype=torch.int32, device=device)
    prompt_lens = torch.randint(length // 2, (samples + 2,), device=device)
    positions = torch.randint(length // 2, length, (samples,), device=device)
    tensors = PenaltyTensors(*penalties, history, prompt_lens)
    actual, expected = torch.randn(1, samples, vocab_size, device=device).repeat(2, 1, 1)
    sampling.apply_penalties_triton(actual, rows, positions, tensors)
    apply_penalties_reference(expected, rows, positions, tensors)
    return relative_error(actual, expected)

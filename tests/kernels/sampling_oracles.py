"""Comparisons of the sampling kernels with their reference, for tests and benchmarks.

Tests run the kernels under Triton's interpreter, benchmarks/products.py runs them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from bloomery.kernels import sampling
from bloomery.kernels.sampling_reference import sample_tokens_reference
from bloomery.kernels.sampling_rows import (
    BANNED,
    GREEN,
    LOGPROBS_FLAG,
    MAX_TOP_LOGPROBS,
    NUM_BIT_SETS,
    NUM_TOP,
    SampleOutputs,
)
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.runtime.sampler import Sampler
from tests.kernels.oracles import run_in_poisoned_memory

PROMPT_LEN = 5


def random_bias(random: Random, vocab_size: int) -> tuple[tuple[int, float], ...]:
    tokens = random.sample(range(vocab_size), min(vocab_size, 40))
    return tuple((token, random.uniform(-5, 5)) for token in tokens)


def random_words(random: Random, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Words of one and of several tokens; all tokens are small, so that words match."""
    return tuple(
        tuple(random.randrange(min(vocab_size, 4)) for _ in range(random.randint(1, 3)))
        for _ in range(6)
    )


# What a row asks for, given a random number generator and the size of the vocabulary.
SAMPLING_KINDS: dict[str, Callable[[Random, int], dict[str, object]]] = {
    "greedy": lambda random, vocab: {"temperature": 0.0},
    "free": lambda random, vocab: {},
    "top_p": lambda random, vocab: {"top_p": random.uniform(0.01, 0.99)},
    "top_k": lambda random, vocab: {"top_k": random.randint(1, 200)},
    "min_p": lambda random, vocab: {"min_p": random.random() ** 2},
    "both": lambda random, vocab: {
        "top_p": random.uniform(0.01, 0.99),
        "top_k": random.randint(1, 200),
        "min_p": random.choice((0.0, random.random() ** 2)),
    },
    "typical_p": lambda random, vocab: {"typical_p": random.uniform(0.1, 0.95)},
    "typical_p and others": lambda random, vocab: {
        "typical_p": random.uniform(0.1, 0.95),
        "top_p": random.choice((1.0, 0.8)),
        "top_k": random.choice((0, 30)),
        "min_p": random.choice((0.0, 0.02)),
    },
    "penalties": lambda random, vocab: {
        "temperature": random.choice((0.0, 0.7)),
        "repetition_penalty": random.uniform(0.7, 1.5),
        "frequency_penalty": random.choice((0.0, 0.3, -0.2)),
        "presence_penalty": random.choice((0.0, 0.5)),
    },
    "penalties and top_p": lambda random, vocab: {
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "min_p": random.choice((0.0, 0.01)),
    },
    "logit_bias": lambda random, vocab: {"logit_bias": random_bias(random, vocab)},
    "allowed": lambda random, vocab: {
        "allowed_token_ids": tuple(random.sample(range(vocab), 3)),
        "top_k": random.choice((0, 2)),
    },
    "bad words": lambda random, vocab: {
        "temperature": random.choice((0.0, 1.0)),
        "allowed_token_ids": (0, 1, 2, 3),
        "bad_words": random_words(random, vocab),
    },
    "min_tokens": lambda random, vocab: {
        "allowed_token_ids": random.choice(((0, 1, 2), (0,))),
        "min_tokens": random.randint(1, 3),
    },
    "watermark": lambda random, vocab: {"watermark": (0.25, 2.0), "top_p": 0.9},
    "logprobs": lambda random, vocab: {
        "temperature": random.choice((0.0, 0.7)),
        "logprobs": random.choice((0, 1, 5, 20)),
    },
}


def make_sampling(kind: str, random: Random, vocab_size: int) -> ResolvedSampling:
    """Make random parameters of a kind; "mixed" combines two kinds."""
    options: dict[str, object] = {"temperature": random.uniform(0.2, 1.5)}
    kinds = [kind]
    if kind == "mixed":
        kinds = random.choices(tuple(SAMPLING_KINDS), k=2)
        options["logprobs"] = random.choice((None, 0, 3))
    for name in kinds:
        options |= SAMPLING_KINDS[name](random, vocab_size)
    return ResolvedSampling(seed=random.getrandbits(64), **options)  # type: ignore[arg-type]


def make_request(kind: str, random: Random, vocab_size: int) -> NewRequestData:
    """Make a request with a prompt and some output, both of few different tokens."""
    num_tokens = PROMPT_LEN + random.randint(0, 4)
    tokens = tuple(random.randrange(min(vocab_size, 9)) for _ in range(num_tokens))
    return NewRequestData(tokens, PROMPT_LEN, make_sampling(kind, random, vocab_size), (0, 7))


def check_sampling(
    samples: int,
    vocab_size: int,
    logit_scale: float,
    kind: str,
    dtype: torch.dtype,
    device: str,
    seed: int = 1,
    **scratch_sizes: int,
) -> float:
    """Share of samples whose token, or whose log-probabilities, differ from the reference's.

    There are two rounds: the second uses the scratch memory and the state of the first.
    """
    random = Random(seed)
    sampler = Sampler(samples + 3, vocab_size, device)
    reference = Sampler(samples + 3, vocab_size, device)
    scratch = sampling.SamplingScratch.allocate(samples, vocab_size, device, **scratch_sizes)
    rows = random.sample(range(samples + 3), samples)
    positions = []
    for row in rows:
        request = make_request(kind, random, vocab_size)
        sampler.admit(row, request)
        reference.admit(row, request)
        positions.append(len(request.tokens))
    sampler.upload_new_requests()
    reference.upload_new_requests()
    row_index = torch.tensor(rows, dtype=torch.int32, device=device)
    wrong = 0.0
    for turn in range(2):
        for tensor, source in zip(reference.state, sampler.state):
            tensor.copy_(source)
        logits = torch.randn(samples, vocab_size, device=device) * logit_scale
        logits = (logits * 16).round().div(16).to(dtype)  # with ties
        places = [position + turn for position in positions]
        position_index = torch.tensor(places, device=device)
        actual = sampler.outputs.first(samples)
        expected = reference.outputs.first(samples)
        inputs = (logits, row_index, position_index)
        run_in_poisoned_memory(
            lambda inputs=inputs, actual=actual: sampling.sample_tokens_triton(
                *inputs, sampler.state, actual, scratch
            )
        )
        sample_tokens_reference(*inputs, reference.state, expected)
        same = actual.tokens == expected.tokens
        flags = [sampler.requests[row].flags for row in rows]
        wants_logprobs = torch.tensor([bool(flag & LOGPROBS_FLAG) for flag in flags])
        same &= ~wants_logprobs.to(device) | compare_reports(sampler, actual, expected, rows)
        if bool(same.all()):  # then the state of the rows must agree too
            assert torch.equal(sampler.state.recent, reference.state.recent)
            assert torch.equal(sampler.state.counts, reference.state.counts)
            # The reference computes banned tokens and green lists without storing them.
            bit_sets = [index for index in range(NUM_BIT_SETS) if index not in (BANNED, GREEN)]
            assert torch.equal(sampler.state.bits[:, bit_sets], reference.state.bits[:, bit_sets])
        wrong = max(wrong, 1 - same.double().mean().item())
    return wrong


def compare_reports(
    sampler: Sampler, actual: SampleOutputs, expected: SampleOutputs, rows: list[int]
) -> torch.Tensor:
    """Return which samples [samples] have the same ranks, top tokens and log-probabilities."""
    first_logprob = 2 + MAX_TOP_LOGPROBS
    num_top = sampler.state.ints[rows, NUM_TOP].unsqueeze(-1)
    is_top = torch.arange(MAX_TOP_LOGPROBS, device=num_top.device) < num_top
    left, right = actual.reports, expected.reports
    same = left[:, 0] == right[:, 0]
    for column in (1, slice(first_logprob, None)):
        difference = left[:, column].contiguous().view(torch.float32)
        difference = difference - right[:, column].contiguous().view(torch.float32)
        near = difference.abs() < 1e-4
        if isinstance(column, slice):
            near = (near | ~is_top).all(-1)
        same &= near
    ids_agree = left[:, 2:first_logprob] == right[:, 2:first_logprob]
    return same & (ids_agree | ~is_top).all(-1)


def check_distribution(samples: int, device: str) -> float:
    """Total variation distance between sampled tokens and the softmax."""
    temperature = 0.8
    sampler = Sampler(1, 50, device, extra_samples=samples)
    sampling_params = ResolvedSampling(temperature=temperature, seed=3)
    sampler.admit(0, NewRequestData((1,), 1, sampling_params, ()))
    sampler.upload_new_requests()
    logits = torch.randn(1, 50, device=device).repeat(samples, 1)
    rows = torch.zeros(samples, dtype=torch.int32, device=device)
    positions = torch.arange(samples, device=device)
    scratch = sampling.SamplingScratch.allocate(samples, 50, device, segment=64)
    outputs = sampler.outputs.first(samples)
    sampling.sample_tokens_triton(logits, rows, positions, sampler.state, outputs, scratch)
    frequency = torch.bincount(outputs.tokens, minlength=50).double() / samples
    probability = (logits[0].double() / temperature).softmax(-1)
    return (frequency - probability).abs().sum().item() / 2

"""The sampler compared with Python loops over one row of logits, alone and in batches.

Every test runs with torch and with the native CPU kernels. tests/kernels/test_sampling.py compares
the GPU kernels with torch.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery import sampling as limits
from bloomery.kernels import sampling_rows
from bloomery.kernels.sampling import SamplingScratch
from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.runtime.sampler import (
    SCORED_TOKENS,
    Sampler,
    count_sampler_bytes,
    read_reports,
)
from tests.kernels.test_sampling_reference import scalar_gumbel

VOCAB_SIZE = 97
# Float32 cannot distinguish nearer values: then either token, or either side of a border, is right.
TOLERANCE = 2e-6


# ---- the reference: one row of logits, one token, Python numbers ----


def process_logits(
    logits: list[float],
    sampling: ResolvedSampling,
    tokens: list[int],
    prompt_len: int,
    stop_ids: tuple[int, ...],
) -> list[float]:
    """Return the logits after every logits processor and penalty, given the tokens so far."""
    z = list(logits)
    output = tokens[prompt_len:]
    if sampling.allowed_token_ids:
        z = [x if i in sampling.allowed_token_ids else -math.inf for i, x in enumerate(z)]
    for token, bias in sampling.logit_bias:
        z[token] += bias
    forbidden = [
        word[-1]
        for word in sampling.bad_words
        if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])
    ]
    z = forbid(z, forbidden)
    if len(output) < sampling.min_tokens:
        z = forbid(z, stop_ids)
    if sampling.watermark:
        gamma, delta = sampling.watermark
        generator = torch.Generator().manual_seed(15485863 * tokens[-1])
        permutation = torch.randperm(len(z), generator=generator)
        for token in permutation[: int(len(z) * gamma)].tolist():
            z[token] += delta
    for token in set(tokens):
        if z[token] > 0:
            z[token] = z[token] / sampling.repetition_penalty
        else:
            z[token] = z[token] * sampling.repetition_penalty
    for token in set(output):
        z[token] -= sampling.frequency_penalty * output.count(token)
        z[token] -= sampling.presence_penalty
    return z


def forbid(z: list[float], ids: list[int] | tuple[int, ...]) -> list[float]:
    """Rule out ids, unless no token would be left."""
    remaining = [-math.inf if i in ids else x for i, x in enumerate(z)]
    return remaining if max(remaining) > -math.inf else z


def truncate(z: list[float], sampling: ResolvedSampling) -> tuple[list[int], set[int]]:
    """Return the ids that may be sampled, and those too near to a border to decide."""
    ids = sorted((i for i in range(len(z)) if z[i] > -math.inf), key=lambda i: (-z[i], i))
    best = z[ids[0]]
    mass = {i: math.exp((z[i] - best) / sampling.temperature) for i in ids}
    min_p = sampling.min_p
    doubtful = {i for i in ids[1:] if 0 < abs(mass[i] - min_p) < TOLERANCE * min_p}
    ids = [i for i in ids if mass[i] >= min_p or i in doubtful]
    if 0 < sampling.top_k < len(ids):
        border = z[ids[sampling.top_k - 1]]
        doubtful |= {i for i in ids if 0 < abs(z[i] - border) < TOLERANCE}
        ids = ids[: sampling.top_k]
    if sampling.top_p < 1:
        ids, near = take_mass(ids, mass, sampling.top_p)
        doubtful |= near
    if sampling.typical_p < 1:
        if doubtful.intersection(ids):
            return ids, set(ids)
        total = math.fsum(mass[i] for i in ids)
        surprise = {i: math.log(total) + (best - z[i]) / sampling.temperature for i in ids}
        entropy = math.fsum(mass[i] / total * surprise[i] for i in ids)
        distance = {i: abs(surprise[i] - entropy) for i in ids}
        order = sorted(ids, key=lambda i: distance[i])  # stable: likelier first
        ids, doubtful = take_mass(order, mass, sampling.typical_p)
        border = distance[ids[-1]]
        doubtful |= {i for i in order if 0 < abs(distance[i] - border) < TOLERANCE}
    return ids, doubtful


def take_mass(order: list[int], mass: dict[int, float], share: float) -> tuple[list[int], set[int]]:
    """Take ids while those before hold less than `share` of the mass; also return near ties."""
    total = math.fsum(mass[i] for i in order)
    mass_before = 0.0
    selected = []
    near = set()
    for i in order:
        if mass_before and abs(mass_before / total - share) < TOLERANCE * share:
            near.add(i)
        if mass_before < share * total:
            selected.append(i)
        mass_before += mass[i]
    return selected, near


def correct_tokens(logits: torch.Tensor, request: NewRequestData, tokens: list[int]) -> set[int]:
    """Return the correct token; more than one only where float32 cannot decide."""
    sampling = request.sampling
    z = process_logits(logits.tolist(), sampling, tokens, request.prompt_len, request.stop_ids)
    best = max(z)
    if sampling.temperature < 1e-5:
        return {z.index(best)} | {i for i, x in enumerate(z) if 0 < best - x < TOLERANCE}
    ids, doubtful = truncate(z, sampling)
    noisy = {
        i: (z[i] - best) / sampling.temperature + scalar_gumbel(sampling.seed, len(tokens), i)
        for i in {*ids, *doubtful}
    }
    highest = max((noisy[i] for i in ids if i not in doubtful), default=-math.inf)
    return {i for i, value in noisy.items() if value > highest - TOLERANCE}


# ---- helpers ----


def new_request(
    sampling: ResolvedSampling,
    prompt: list[int],
    output: list[int] = (),
    stop_ids: tuple[int, ...] = (),
) -> NewRequestData:
    return NewRequestData(tuple(prompt) + tuple(output), len(prompt), sampling, stop_ids)


def fake_logits(tokens: list[int], vocab_size: int = VOCAB_SIZE, salt: int = 0) -> torch.Tensor:
    """Return logits that depend on all tokens so far.

    They are coarse, so that many are equal, as in half precision.
    """
    generator = torch.Generator().manual_seed(hash((salt, *tokens)) % 2**40)
    return torch.randn(vocab_size, generator=generator).mul_(3).bfloat16().float()


def sample_one(
    sampler: Sampler, row: int, tokens: list[int], vocab_size: int = VOCAB_SIZE, salt: int = 0
) -> int:
    logits = fake_logits(tokens, vocab_size, salt).unsqueeze(0)
    return sample_row(sampler, logits, row, len(tokens))


def sample_row(sampler: Sampler, logits: torch.Tensor, row: int, position: int) -> int:
    """Return the token sampled from logits [1, vocab]."""
    ((tokens, _),) = sampler.sample(logits, [(row, position, ())]).collect()
    return tokens[0]


@functools.cache
def native_pool() -> ThreadPool:
    return ThreadPool(2)


def build_sampler(implementation: str, num_rows: int, vocab_size: int) -> Sampler:
    if implementation == "torch":
        return Sampler(num_rows, vocab_size)
    try:
        return Sampler(num_rows, vocab_size, pool=native_pool())
    except NativeBuildError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", params=["torch", "native"])
def implementation(request):
    return request.param


def run_alone(
    implementation: str,
    request: NewRequestData,
    steps: int,
    vocab_size: int = VOCAB_SIZE,
    salt: int = 0,
    row: int = 0,
) -> list[int]:
    """Return a request's output when it is alone in the sampler."""
    sampler = build_sampler(implementation, row + 1, vocab_size)
    sampler.admit(row, request)
    tokens = list(request.tokens)
    for _ in range(steps):
        tokens.append(sample_one(sampler, row, tokens, vocab_size, salt))
    return tokens[request.prompt_len :]


CASES = {
    "greedy": ResolvedSampling(temperature=0.0),
    "temperature": ResolvedSampling(temperature=0.7),
    "hot": ResolvedSampling(temperature=5.0),
    "top_k": ResolvedSampling(top_k=5),
    "top_k 1": ResolvedSampling(top_k=1),
    "top_k beyond the vocabulary": ResolvedSampling(top_k=1000),
    "top_p": ResolvedSampling(top_p=0.6),
    "top_p tiny": ResolvedSampling(top_p=1e-9),
    "min_p": ResolvedSampling(min_p=0.1),
    "min_p 1": ResolvedSampling(min_p=1.0),
    "typical_p": ResolvedSampling(typical_p=0.5),
    "all truncations": ResolvedSampling(
        temperature=1.5, top_k=30, top_p=0.9, min_p=0.02, typical_p=0.8
    ),
    "repetition": ResolvedSampling(temperature=0.0, repetition_penalty=1.8),
    "repetition below 1": ResolvedSampling(temperature=0.5, repetition_penalty=0.6),
    "frequency": ResolvedSampling(temperature=0.0, frequency_penalty=1.3),
    "presence": ResolvedSampling(temperature=0.0, presence_penalty=-1.5),
    "all penalties": ResolvedSampling(
        temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.6
    ),
    "logit_bias": ResolvedSampling(temperature=0.8, logit_bias=((3, 6.0), (5, -100.0), (96, 5.5))),
    "allowed": ResolvedSampling(temperature=1.3, allowed_token_ids=(90, 4, 17)),
    "allowed, greedy": ResolvedSampling(temperature=0.0, allowed_token_ids=(90, 4, 17)),
    "bad words": ResolvedSampling(
        temperature=0.6, allowed_token_ids=(1, 2, 3), bad_words=((1, 1), (2, 3, 1), (3,), (1, 2, 1))
    ),
    "watermark": ResolvedSampling(temperature=0.0, watermark=(0.5, 2.0)),
    "watermark, sampled": ResolvedSampling(temperature=0.9, watermark=(0.25, 4.0), top_p=0.9),
    "min_tokens": ResolvedSampling(temperature=0.7, allowed_token_ids=(0, 1, 2), min_tokens=5),
}


@pytest.mark.parametrize("name", CASES)
def test_each_parameter_equals_the_reference(implementation, name):
    num_certain = 0
    for seed in range(6):
        request = new_request(replace(CASES[name], seed=seed), [5, 96, 3, 3, 1], stop_ids=(0, 2))
        sampler = build_sampler(implementation, 1, VOCAB_SIZE)
        sampler.admit(0, request)
        tokens = list(request.tokens)
        for _ in range(15):
            correct = correct_tokens(fake_logits(tokens), request, tokens)
            num_certain += len(correct) == 1
            tokens.append(sample_one(sampler, 0, tokens))
            assert tokens[-1] in correct
    assert num_certain >= 85  # of 90: the reference is seldom uncertain


floats = st.sampled_from
samplings = st.builds(
    ResolvedSampling,
    temperature=floats([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=floats([0, 0, 1, 3, 20, 600]),
    top_p=floats([1.0, 1.0, 0.95, 0.5]),
    min_p=floats([0.0, 0.0, 0.05, 0.5]),
    typical_p=floats([1.0, 1.0, 0.9, 0.3]),
    repetition_penalty=floats([1.0, 1.0, 1.3, 0.7]),
    frequency_penalty=floats([0.0, 0.0, 0.5, -0.5]),
    presence_penalty=floats([0.0, 0.0, 0.7, -0.7]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=floats([(), ((1, 3.0), (2, -3.0)), ((96, 50.0),)]),
    allowed_token_ids=floats([(), (), tuple(range(0, VOCAB_SIZE, 7)), (4, 9)]),
    bad_words=floats([(), (), ((4,),), ((4, 9), (9, 9), (9, 4, 4))]),
    min_tokens=floats([0, 0, 2, 4]),
    watermark=floats([None, None, (0.5, 2.0)]),
    logprobs=floats([None, None, 0, 3]),
)
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)
new_requests = st.builds(new_request, samplings, prompts, st.just(()), floats([(), (4,), (0, 9)]))


@given(st.lists(new_requests, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_mixed_batches_equal_the_reference_and_a_run_alone(implementation, requests, rng):
    """Requests use any rows in any order, are preempted and resumed: the tokens are the same."""
    steps = 6
    num_rows = 9
    sampler = build_sampler(implementation, num_rows, VOCAB_SIZE)
    expected = [
        run_alone(implementation, request, steps, salt=i) for i, request in enumerate(requests)
    ]
    tokens = [list(request.tokens) for request in requests]
    final_lens = [request.prompt_len + steps for request in requests]
    rows: dict[int, int] = {}  # index of the request -> row
    while any(len(ids) < final_len for ids, final_len in zip(tokens, final_lens)):
        for i, request in enumerate(requests):
            if i in rows and rng.random() < 0.2:
                sampler.release(rows.pop(i))
            elif i not in rows and rng.random() < 0.7:
                free_rows = [row for row in range(num_rows) if row not in rows.values()]
                rows[i] = rng.choice(free_rows)
                sampler.admit(rows[i], replace(request, tokens=tuple(tokens[i])))
        batch = [i for i in rows if len(tokens[i]) < final_lens[i] and rng.random() < 0.8]
        rng.shuffle(batch)
        if not batch:
            continue
        logits = torch.stack([fake_logits(tokens[i], salt=i) for i in batch])
        original = logits.clone()
        samples = [(rows[i], len(tokens[i]), ()) for i in batch]
        accepted = sampler.sample(logits, samples).collect()
        assert torch.equal(logits, original)
        for i, row_logits, (new_tokens, logprobs) in zip(batch, logits, accepted):
            assert new_tokens[0] in correct_tokens(row_logits, requests[i], tokens[i])
            assert len(logprobs) == (requests[i].sampling.logprobs is not None)
            tokens[i] += new_tokens
    outputs = [ids[request.prompt_len :] for ids, request in zip(tokens, requests)]
    assert outputs == expected


# ---- seeds ----


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.95}, {"typical_p": 0.8}]
)
def test_twenty_runs_among_random_requests_give_the_same_tokens(implementation, params):
    vocab_size = 1500
    rng = random.Random(4)
    request = new_request(ResolvedSampling(seed=2**63 + 11, **params), [1, 2, 3])
    expected = run_alone(implementation, request, 8, vocab_size)
    for _ in range(20):
        sampler = build_sampler(implementation, 12, vocab_size)
        num_others = rng.randrange(1, 8)
        rows = rng.sample(range(12), num_others + 1)
        own_row = rows[0]
        for row in rows[1:]:
            other_sampling = ResolvedSampling(
                seed=rng.getrandbits(64),
                temperature=rng.choice([0.0, 1.0]),
                top_k=rng.choice([0, 7, 700]),
            )
            sampler.admit(row, new_request(other_sampling, [9]))
        sampler.admit(own_row, request)
        tokens = list(request.tokens)
        for step in range(8):
            order = rng.sample(rows, num_others + 1)
            logits = []
            samples = []
            for row in order:
                is_own = row == own_row
                logits.append(fake_logits(tokens if is_own else [row, step], vocab_size))
                samples.append((row, len(tokens) if is_own else 1 + step, ()))
            accepted = sampler.sample(torch.stack(logits), samples).collect()
            tokens += accepted[order.index(own_row)][0]
        assert tokens[3:] == expected


def test_tokens_depend_on_seeds_and_positions(implementation):
    flat = torch.zeros(1, VOCAB_SIZE)
    outputs = set()
    for seed in (0, 1, 2**32, 2**63):
        sampler = build_sampler(implementation, 1, VOCAB_SIZE)
        sampler.admit(0, new_request(ResolvedSampling(seed=seed), [1]))
        output = tuple(sample_row(sampler, flat, 0, position) for position in range(1, 13))
        outputs.add(output)
    assert len(outputs) == 4
    assert all(len(set(output)) > 5 for output in outputs)


def test_samples_follow_the_truncated_distribution(implementation):
    logits = torch.linspace(0, -4, 60)
    sampling = ResolvedSampling(temperature=0.8, top_k=20, seed=3)
    sampler = build_sampler(implementation, 1, 60)
    sampler.admit(0, new_request(sampling, [1]))
    num_samples = 2000
    tokens = [
        sampler.sample(logits.unsqueeze(0), [(0, position, ())]).tokens
        for position in range(1, num_samples + 1)
    ]
    observed = torch.bincount(torch.cat(tokens), minlength=60).double()
    expected = (logits.double()[:20] / 0.8).softmax(-1) * num_samples
    assert observed[20:].sum() == 0
    assert ((observed[:20] - expected) ** 2 / expected).sum() < 50  # 19 degrees of freedom


# ---- borders ----


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0, "top_k": 1}]
)
def test_ties_go_to_the_lowest_id(implementation, params):
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [11, 40, 90]] = 2.5
    for seed in range(5):
        sampler = build_sampler(implementation, 1, VOCAB_SIZE)
        sampler.admit(0, new_request(ResolvedSampling(seed=seed, **params), [1]))
        assert sample_row(sampler, logits, 0, 1) == 11


def test_top_k_keeps_exactly_k_among_equals(implementation):
    logits = torch.zeros(1, VOCAB_SIZE)
    sampler = build_sampler(implementation, 1, VOCAB_SIZE)
    sampler.admit(0, new_request(ResolvedSampling(top_k=3), [1]))
    tokens = {sample_row(sampler, logits, 0, position) for position in range(1, 200)}
    assert tokens == {0, 1, 2}


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.97}, {"top_p": 0.9999}, {"typical_p": 0.9}, {"top_k": 700}, {"top_p": 0.2}],
)
def test_truncation_beyond_the_first_candidates(implementation, params):
    """Truncation keeps more tokens than the candidates that are sorted first."""
    vocab_size = 20_000
    num_certain = 0
    for seed, spread in ((0, 0.5), (1, 1.0), (2, 3.0)):
        logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
        request = new_request(ResolvedSampling(temperature=0.9, seed=seed, **params), [1])
        sampler = build_sampler(implementation, 3, vocab_size)
        sampler.admit(2, request)
        sampler.admit(0, new_request(ResolvedSampling(top_k=3), [1]))
        for position in (1, 2, 3):
            correct = correct_tokens(logits, request, [1] * position)
            num_certain += len(correct) == 1
            samples = [(0, 5, ()), (2, position, ())]
            accepted = sampler.sample(torch.stack([-logits, logits]), samples).collect()
            assert accepted[1][0][0] in correct
    assert num_certain == 9


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-5, 1e-3, 1e5, 3.4e38])
def test_extreme_temperatures_stay_finite(implementation, temperature):
    logits = torch.tensor([[50.0, -1000.0, 3.0, 49.0]])
    for params in ({}, {"top_p": 0.9}, {"top_k": 2}):
        sampling = ResolvedSampling(temperature=temperature, allowed_token_ids=(0, 1, 3), **params)
        sampler = build_sampler(implementation, 1, 4)
        sampler.admit(0, new_request(sampling, [1]))
        tokens = {sample_row(sampler, logits, 0, position) for position in range(1, 60)}
        assert tokens <= {0, 1, 3}
        assert tokens == {0} if temperature < 0.1 else 0 in tokens


@pytest.mark.parametrize("logit", [4.0, -4.0])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("in_prompt", [0, 2])
def test_penalties_are_exact(implementation, logit, count, in_prompt):
    """A rival just above the penalized value wins, one just below loses.

    The other request has a longer history; its tokens must not be read.
    """
    sampling = ResolvedSampling(
        temperature=0.0, repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.25
    )
    value = logit
    if count or in_prompt:
        value = logit / 1.25 if logit > 0 else logit * 1.25
    value -= 0.5 * count + (0.25 if count else 0.0)
    sampler = build_sampler(implementation, 2, VOCAB_SIZE)
    sampler.admit(1, new_request(sampling, [7] * 20))
    for rival, winner in ((value + 0.01, 8), (value - 0.01, 7)):
        # An earlier request has left its history in the same row.
        sampler.admit(0, new_request(sampling, [1] + [7] * in_prompt, [7] * 9))
        sampler.release(0)
        request = new_request(sampling, [1] + [7] * in_prompt, [7] * count)
        sampler.admit(0, request)
        logits = torch.full((2, VOCAB_SIZE), -50.0)
        logits[0, 7] = logit
        logits[0, 8] = rival
        samples = [(0, len(request.tokens), ()), (1, 20, ())]
        assert sampler.sample(logits, samples).collect()[0][0] == (winner,)


def test_min_tokens_is_exact(implementation):
    """Stop tokens are by far the likeliest: one comes right after min_tokens other tokens."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [0, 7]] = 50.0
    for min_tokens in (0, 1, 5):
        sampler = build_sampler(implementation, 1, VOCAB_SIZE)
        sampling = ResolvedSampling(temperature=0.0, min_tokens=min_tokens)
        sampler.admit(0, new_request(sampling, [1, 2], stop_ids=(0, 7)))
        output = [sample_row(sampler, logits, 0, 2 + i) for i in range(min_tokens + 1)]
        assert [token in (0, 7) for token in output] == [False] * min_tokens + [True]


def test_a_rule_that_would_leave_no_token_is_ignored(implementation):
    logits = torch.arange(float(VOCAB_SIZE)).repeat(2, 1)
    sampler = build_sampler(implementation, 2, VOCAB_SIZE)
    all_bad = ResolvedSampling(temperature=0.0, allowed_token_ids=(5, 6), bad_words=((5,), (6,)))
    only_stop = ResolvedSampling(allowed_token_ids=(5,), min_tokens=3)
    sampler.admit(0, new_request(all_bad, [1]))
    sampler.admit(1, new_request(only_stop, [1], stop_ids=(5,)))
    accepted = sampler.sample(logits, [(0, 1, ()), (1, 1, ())]).collect()
    assert [tokens for tokens, _ in accepted] == [(6,), (5,)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.9},
        {"typical_p": 0.5},
        {"min_p": 0.5},
    ],
)
def test_broken_logits_still_give_a_token(implementation, params, value):
    sampler = build_sampler(implementation, 1, VOCAB_SIZE)
    sampler.admit(0, new_request(ResolvedSampling(**params), [1]))
    logits = torch.full((1, VOCAB_SIZE), value)
    assert 0 <= sample_row(sampler, logits, 0, 1) < VOCAB_SIZE


# ---- speculative decoding ----


@given(new_requests, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_speculative_decoding_equals_a_run_without_drafts(implementation, request, rng):
    """Good and bad drafts, batched with a request without any, change no token or logprob."""
    request = replace(request, sampling=replace(request.sampling, logprobs=2))
    expected = run_alone(implementation, request, 14)
    other_request = new_request(ResolvedSampling(temperature=0.0, repetition_penalty=1.5), [8])
    sampler = build_sampler(implementation, 3, VOCAB_SIZE)
    sampler.admit(1, request)
    sampler.admit(2, other_request)
    tokens = list(request.tokens)
    other_tokens = [8]
    while len(tokens) < request.prompt_len + 10:
        done = len(tokens) - request.prompt_len
        drafts = [
            token if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE)
            for token in expected[done : done + rng.randrange(5)]
        ]
        logits = [fake_logits(other_tokens)]
        logits += [fake_logits(tokens + drafts[:k]) for k in range(len(drafts) + 1)]
        samples = [(2, len(other_tokens), ()), (1, len(tokens), tuple(drafts))]
        accepted = sampler.sample(torch.stack(logits), samples).collect()
        (other_new, _), (new_tokens, logprobs) = accepted
        wrong = [k for k, token in enumerate(drafts) if token != expected[done + k]]
        num_right = wrong[0] if wrong else len(drafts)
        assert list(new_tokens) == expected[done : done + num_right + 1]
        for k, entry in enumerate(logprobs):
            context = tokens + list(new_tokens[:k])
            logprob = fake_logits(context).log_softmax(-1)[new_tokens[k]].item()
            assert entry.token == new_tokens[k]
            assert entry.logprob == pytest.approx(logprob, abs=1e-5)
        assert len(logprobs) == len(new_tokens)
        tokens += new_tokens
        other_tokens += other_new
    assert other_tokens[1:] == run_alone(implementation, other_request, len(other_tokens) - 1)


# ---- log-probabilities ----


def check_logprobs(entry, logits: torch.Tensor, token: int, count: int) -> None:
    exact = logits.double().log_softmax(-1).tolist()
    order = sorted(range(len(exact)), key=lambda i: (-logits[i].item(), i))
    top_logprobs = [exact[i] for i in order[:count]]
    assert entry.token == token
    assert entry.logprob == pytest.approx(exact[token], abs=1e-5)
    assert entry.rank == order.index(token) + 1
    assert [i for i, _ in entry.top] == order[:count]
    assert [logprob for _, logprob in entry.top] == pytest.approx(top_logprobs, abs=1e-5)


def test_logprobs_are_those_of_the_unchanged_logits(implementation):
    """Penalties and temperature do not matter; there are as many top tokens as requested."""
    counts = [None, 0, 1, 5, 20]
    sampler = build_sampler(implementation, 5, VOCAB_SIZE)
    sampling = ResolvedSampling(
        temperature=2.0, top_k=50, logit_bias=((3, 20.0),), repetition_penalty=1.5
    )
    for row, count in enumerate(counts):
        own_sampling = replace(sampling, seed=row, logprobs=count)
        sampler.admit(row, new_request(own_sampling, [3, 4]))
    logits = torch.stack([fake_logits([row]) for row in range(5)])
    accepted = sampler.sample(logits, [(row, 2, ()) for row in range(5)]).collect()
    assert accepted[0][1] == ()
    for row in range(1, 5):
        tokens, logprobs = accepted[row]
        check_logprobs(logprobs[0], logits[row], tokens[0], counts[row])


@pytest.mark.parametrize("count", [0, 3, VOCAB_SIZE, VOCAB_SIZE + 5])
def test_prompt_logprobs(implementation, count):
    tokens = [3, 96, 0, 5, 5, 5, 17, 1, 2, 3]
    logits = torch.stack([fake_logits(tokens[: i + 1]) for i in range(9)])
    sampler = build_sampler(implementation, 1, VOCAB_SIZE)
    reports = sampler.score_tokens(logits, tokens[1:], count)
    entries = read_reports(reports, tokens[1:], [min(count, VOCAB_SIZE)] * 9)
    assert len(entries) == 9
    for entry, row_logits, token in zip(entries, logits, tokens[1:]):
        check_logprobs(entry, row_logits, token, count)


def test_logprobs_of_long_prompts_are_computed_in_chunks(implementation):
    num_positions = 2 * SCORED_TOKENS + 3
    logits = torch.randn(num_positions, VOCAB_SIZE)
    sampler = build_sampler(implementation, 1, VOCAB_SIZE)
    one_by_one = [
        sampler.score_tokens(row_logits.unsqueeze(0), [i % VOCAB_SIZE], 2)
        for i, row_logits in enumerate(logits)
    ]
    tokens = [i % VOCAB_SIZE for i in range(num_positions)]
    assert torch.equal(sampler.score_tokens(logits, tokens, 2), torch.cat(one_by_one))


def test_half_precision_logits_give_the_same_tokens(implementation):
    logits = fake_logits([1]).unsqueeze(0)
    for params in ({"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 2.0}):
        outputs = []
        for typed_logits in (logits, logits.bfloat16()):
            sampler = build_sampler(implementation, 1, VOCAB_SIZE)
            sampler.admit(0, new_request(ResolvedSampling(logprobs=3, **params), [1]))
            outputs.append(sampler.sample(typed_logits, [(0, 1, ())]).collect())
        assert outputs[0] == outputs[1]


def test_requests_fit_into_the_tables():
    assert limits.MAX_LOGPROBS == sampling_rows.MAX_TOP_LOGPROBS
    assert limits.MAX_BAD_WORDS == sampling_rows.MAX_BAD_WORDS
    assert limits.MAX_BAD_WORD_TOKENS == sampling_rows.MAX_BAD_WORD_TOKENS
    assert 2 * limits.MAX_BAD_WORD_LENGTH <= sampling_rows.NUM_RECENT


def test_the_memory_of_a_sampler_is_known_before_it_is_allocated() -> None:
    sampler = Sampler(5, 1000, extra_samples=3)
    scratch = SamplingScratch.allocate(SCORED_TOKENS, 1000, "cpu")
    buffers = (scratch.floats, scratch.ints, scratch.masses, scratch.swaps)
    tensors = (*sampler.state, *sampler.outputs, *buffers, sampler.mask_upload.sent.buffer)
    num_bytes = count_sampler_bytes(5, 1000, extra_samples=3)
    assert num_bytes == sum(tensor.nbytes for tensor in tensors)

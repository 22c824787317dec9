"""The sampler against loops that nobody can misread, alone and among neighbours."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.messages import ResolvedSampling, NewRequestData
from bloomery.runtime.sampler import CHUNK, Sampler
from tests.kernels.test_noise import plain_gumbel

VOCAB = 97
CLOSE = 2e-6  # what float32 may blur: nearer than this, either token or either side of a border is right


# ---- the plain reference: one line, one token, Python numbers --------------------------------------------


def edited(
    logits: list[float],
    s: ResolvedSampling,
    tokens: list[int],
    prompt_len: int,
    stop_ids: tuple[int, ...],
) -> list[float]:
    """Logits after every edit and penalty, given the tokens so far."""
    z = list(logits)
    output = tokens[prompt_len:]
    if s.allowed_token_ids:
        z = [x if i in s.allowed_token_ids else -math.inf for i, x in enumerate(z)]
    for token, bias in s.logit_bias:
        z[token] += bias
    bad = [
        word[-1]
        for word in s.bad_words
        if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])
    ]
    z = ruled(z, bad)
    if len(output) < s.min_tokens:
        z = ruled(z, stop_ids)
    if s.watermark:
        gamma, delta = s.watermark
        generator = torch.Generator().manual_seed(15485863 * tokens[-1])
        for token in torch.randperm(len(z), generator=generator)[: int(len(z) * gamma)].tolist():
            z[token] += delta
    for token in set(tokens):
        z[token] = (
            z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
        )
    for token in set(output):
        z[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return z


def ruled(z: list[float], out: list[int] | tuple[int, ...]) -> list[float]:
    left = [-math.inf if i in out else x for i, x in enumerate(z)]
    return left if max(left) > -math.inf else z


def truncated(z: list[float], s: ResolvedSampling) -> tuple[list[int], set[int]]:
    """The ids that may win, and those on a border too near to call."""
    ids = sorted((i for i in range(len(z)) if z[i] > -math.inf), key=lambda i: (-z[i], i))
    best = z[ids[0]]
    mass = {i: math.exp((z[i] - best) / s.temperature) for i in ids}
    doubtful = {i for i in ids[1:] if 0 < abs(mass[i] - s.min_p) < CLOSE * s.min_p}
    ids = [i for i in ids if mass[i] >= s.min_p or i in doubtful]
    if 0 < s.top_k < len(ids):
        border = z[ids[s.top_k - 1]]
        doubtful |= {i for i in ids if 0 < abs(z[i] - border) < CLOSE}
        ids = ids[: s.top_k]
    if s.top_p < 1:
        ids, near = prefix(ids, mass, s.top_p)
        doubtful |= near
    if s.typical_p < 1:
        if doubtful.intersection(ids):
            return ids, set(ids)
        total = math.fsum(mass[i] for i in ids)
        surprise = {i: math.log(total) + (best - z[i]) / s.temperature for i in ids}
        entropy = math.fsum(mass[i] / total * surprise[i] for i in ids)
        distance = {i: abs(surprise[i] - entropy) for i in ids}
        order = sorted(ids, key=lambda i: distance[i])  # stable: likelier first
        ids, doubtful = prefix(order, mass, s.typical_p)
        doubtful |= {i for i in order if 0 < abs(distance[i] - distance[ids[-1]]) < CLOSE}
    return ids, doubtful


def prefix(order: list[int], mass: dict[int, float], share: float) -> tuple[list[int], set[int]]:
    total = math.fsum(mass[i] for i in order)
    before = 0.0
    chosen = []
    near = set()
    for i in order:
        if before and abs(before / total - share) < CLOSE * share:
            near.add(i)
        if before < share * total:
            chosen.append(i)
        before += mass[i]
    return chosen, near


def plausible(logits: torch.Tensor, start: NewRequestData, tokens: list[int]) -> set[int]:
    """The right token; more than one only where float32 cannot tell."""
    z = edited(logits.tolist(), start.sampling, tokens, start.prompt_len, start.stop_ids)
    s = start.sampling
    if s.temperature < 1e-5:
        best = max(z)
        return {z.index(best)} | {i for i, x in enumerate(z) if 0 < best - x < CLOSE}
    ids, doubtful = truncated(z, s)
    best = max(z)
    noisy = {
        i: (z[i] - best) / s.temperature + plain_gumbel(s.seed, len(tokens), i)
        for i in {*ids, *doubtful}
    }
    highest = max((noisy[i] for i in ids if i not in doubtful), default=-math.inf)
    return {i for i, value in noisy.items() if value > highest - CLOSE}


# ---- driving -------------------------------------------------------------------------------------------


def started(
    sampling: ResolvedSampling,
    prompt: list[int],
    output: list[int] = (),
    stop_ids: tuple[int, ...] = (),
) -> NewRequestData:
    return NewRequestData(tuple(prompt) + tuple(output), len(prompt), sampling, stop_ids)


def line_for(tokens: list[int], vocab: int = VOCAB, salt: int = 0) -> torch.Tensor:
    """A model whose logits depend on all tokens so far; coarse, so that many are equal, as in half precision."""
    generator = torch.Generator().manual_seed(hash((salt, *tokens)) % 2**40)
    return torch.randn(vocab, generator=generator).mul_(3).bfloat16().float()


def one(sampler: Sampler, row: int, tokens: list[int], vocab: int = VOCAB, salt: int = 0) -> int:
    ((drawn, _),) = sampler.sample(
        line_for(tokens, vocab, salt).unsqueeze(0), [(row, len(tokens), ())]
    ).collect()
    return drawn[0]


def alone(
    start: NewRequestData, steps: int, vocab: int = VOCAB, salt: int = 0, row: int = 0
) -> list[int]:
    """A sequence's output with nobody else there."""
    sampler = Sampler(row + 1, vocab)
    sampler.admit(row, start)
    tokens = list(start.tokens)
    for _ in range(steps):
        tokens.append(one(sampler, row, tokens, vocab, salt))
    return tokens[start.prompt_len :]


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
def test_each_parameter_against_the_reference(name):
    certain = 0
    for seed in range(6):
        start = started(replace(CASES[name], seed=seed), [5, 96, 3, 3, 1], stop_ids=(0, 2))
        sampler = Sampler(1, VOCAB)
        sampler.admit(0, start)
        tokens = list(start.tokens)
        for _ in range(15):
            right = plausible(line_for(tokens), start, tokens)
            certain += len(right) == 1
            tokens.append(one(sampler, 0, tokens))
            assert tokens[-1] in right
    assert certain >= 85  # of 90: the reference seldom abstains


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
    allowed_token_ids=floats([(), (), tuple(range(0, VOCAB, 7)), (4, 9)]),
    bad_words=floats([(), (), ((4,),), ((4, 9), (9, 9), (9, 4, 4))]),
    min_tokens=floats([0, 0, 2, 4]),
    watermark=floats([None, None, (0.5, 2.0)]),
    logprobs=floats([None, None, 0, 3]),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
sequences = st.builds(started, samplings, prompts, st.just(()), floats([(), (4,), (0, 9)]))


@given(st.lists(sequences, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_mixed_batches_equal_the_reference_and_the_solitary_run(starts, rng):
    """Any rows, any order, leaving and coming back with their history at any time: the same tokens."""
    steps = 6
    rows = 9
    sampler = Sampler(rows, VOCAB)
    expected = [alone(start, steps, salt=i) for i, start in enumerate(starts)]
    tokens = [list(start.tokens) for start in starts]
    seats: dict[int, int] = {}  # sequence -> row
    while any(len(tokens[i]) < start.prompt_len + steps for i, start in enumerate(starts)):
        for i, start in enumerate(starts):
            if i in seats and rng.random() < 0.2:
                sampler.release(seats.pop(i))
            elif i not in seats and rng.random() < 0.7:
                seats[i] = rng.choice([row for row in range(rows) if row not in seats.values()])
                sampler.admit(seats[i], replace(start, tokens=tuple(tokens[i])))
        batch = [
            i for i in seats if len(tokens[i]) < starts[i].prompt_len + steps and rng.random() < 0.8
        ]
        rng.shuffle(batch)
        if not batch:
            continue
        logits = torch.stack([line_for(tokens[i], salt=i) for i in batch])
        before = logits.clone()
        gains = sampler.sample(logits, [(seats[i], len(tokens[i]), ()) for i in batch]).collect()
        assert torch.equal(logits, before)
        for i, line, (drawn, logprobs) in zip(batch, logits, gains):
            assert drawn[0] in plausible(line, starts[i], tokens[i])
            assert len(logprobs) == (starts[i].sampling.logprobs is not None)
            tokens[i] += drawn
    assert [t[s.prompt_len :] for t, s in zip(tokens, starts)] == expected


# ---- seeds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.95}, {"typical_p": 0.8}]
)
def test_twenty_runs_amid_random_neighbours(shape):
    vocab = 1500
    rng = random.Random(4)
    start = started(ResolvedSampling(seed=2**63 + 11, **shape), [1, 2, 3])
    expected = alone(start, 8, vocab)
    for _ in range(20):
        sampler = Sampler(12, vocab)
        count = rng.randrange(1, 8)
        rows = rng.sample(range(12), count + 1)
        for row in rows[1:]:
            other = ResolvedSampling(
                seed=rng.getrandbits(64),
                temperature=rng.choice([0.0, 1.0]),
                top_k=rng.choice([0, 7, 700]),
            )
            sampler.admit(row, started(other, [9]))
        sampler.admit(rows[0], start)
        tokens = list(start.tokens)
        for step in range(8):
            order = rng.sample(rows, count + 1)
            logits = torch.stack(
                [line_for(tokens if row == rows[0] else [row, step], vocab) for row in order]
            )
            asked = [(row, len(tokens) if row == rows[0] else 1 + step, ()) for row in order]
            tokens += dict(zip(order, sampler.sample(logits, asked).collect()))[rows[0]][0]
        assert tokens[3:] == expected


def test_seeds_and_positions_matter():
    flat = torch.zeros(1, VOCAB)
    outputs = set()
    for seed in (0, 1, 2**32, 2**63):
        sampler = Sampler(1, VOCAB)
        sampler.admit(0, started(ResolvedSampling(seed=seed), [1]))
        outputs.add(
            tuple(sampler.sample(flat, [(0, p, ())]).collect()[0][0][0] for p in range(1, 13))
        )
    assert len(outputs) == 4
    assert all(len(set(output)) > 5 for output in outputs)


def test_draws_follow_the_truncated_distribution():
    logits = torch.linspace(0, -4, 60)
    sampling = ResolvedSampling(temperature=0.8, top_k=20, seed=3)
    sampler = Sampler(1, 60)
    sampler.admit(0, started(sampling, [1]))
    draws = 2000
    tokens = torch.cat(
        [sampler.sample(logits.unsqueeze(0), [(0, p, ())]).tokens for p in range(1, draws + 1)]
    )
    observed = torch.bincount(tokens, minlength=60).double()
    expected = (logits.double()[:20] / 0.8).softmax(-1) * draws
    assert observed[20:].sum() == 0
    assert ((observed[:20] - expected) ** 2 / expected).sum() < 50  # 19 degrees of freedom


# ---- borders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0, "top_k": 1}]
)
def test_ties_go_to_the_lowest_id(shape):
    line = torch.zeros(1, VOCAB)
    line[0, [11, 40, 90]] = 2.5
    for seed in range(5):
        sampler = Sampler(1, VOCAB)
        sampler.admit(0, started(ResolvedSampling(seed=seed, **shape), [1]))
        assert sampler.sample(line, [(0, 1, ())]).collect()[0][0] == (11,)


def test_top_k_keeps_exactly_k_among_equals():
    line = torch.zeros(1, VOCAB)
    sampler = Sampler(1, VOCAB)
    sampler.admit(0, started(ResolvedSampling(top_k=3), [1]))
    assert {sampler.sample(line, [(0, p, ())]).collect()[0][0][0] for p in range(1, 200)} == {
        0,
        1,
        2,
    }


@pytest.mark.parametrize(
    "shape",
    [{"top_p": 0.97}, {"top_p": 0.9999}, {"typical_p": 0.9}, {"top_k": 700}, {"top_p": 0.2}],
)
def test_wide_lines(shape):
    """Borders beyond the candidates that are looked at first."""
    vocab = 20_000
    certain = 0
    for seed, spread in ((0, 0.5), (1, 1.0), (2, 3.0)):
        line = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
        start = started(ResolvedSampling(temperature=0.9, seed=seed, **shape), [1])
        sampler = Sampler(3, vocab)
        sampler.admit(2, start)
        sampler.admit(0, started(ResolvedSampling(top_k=3), [1]))
        for position in (1, 2, 3):
            tokens = [1] * position
            right = plausible(line, start, tokens)
            certain += len(right) == 1
            drawn = sampler.sample(
                torch.stack([-line, line]), [(0, 5, ()), (2, position, ())]
            ).collect()[1][0][0]
            assert drawn in right
    assert certain == 9


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-5, 1e-3, 1e5, 3.4e38])
def test_extreme_temperatures_stay_finite(temperature):
    line = torch.tensor([[50.0, -1000.0, 3.0, 49.0]])
    for shape in ({}, {"top_p": 0.9}, {"top_k": 2}):
        sampler = Sampler(1, 4)
        sampler.admit(
            0,
            started(
                ResolvedSampling(temperature=temperature, allowed_token_ids=(0, 1, 3), **shape), [1]
            ),
        )
        drawn = {sampler.sample(line, [(0, p, ())]).collect()[0][0][0] for p in range(1, 60)}
        assert drawn <= {0, 1, 3}
        assert drawn == {0} if temperature < 0.1 else 0 in drawn


@pytest.mark.parametrize("logit", [4.0, -4.0])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("in_prompt", [0, 2])
def test_penalties_are_exact(logit, count, in_prompt):
    """A rival just above the penalised value wins, one just below loses; a longer neighbour reads no further."""
    s = ResolvedSampling(
        temperature=0.0, repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.25
    )
    value = (logit / 1.25 if logit > 0 else logit * 1.25) if count or in_prompt else logit
    value -= 0.5 * count + (0.25 if count else 0.0)
    sampler = Sampler(2, VOCAB)
    sampler.admit(1, started(s, [7] * 20))
    for rival, winner in ((value + 0.01, 8), (value - 0.01, 7)):
        sampler.admit(0, started(s, [1] + [7] * in_prompt, [7] * 9))
        sampler.release(0)
        start = started(s, [1] + [7] * in_prompt, [7] * count)
        sampler.admit(0, start)
        lines = torch.full((2, VOCAB), -50.0)
        lines[0, 7], lines[0, 8] = logit, rival
        asked = [(0, len(start.tokens), ()), (1, 20, ())]
        assert sampler.sample(lines, asked).collect()[0][0] == (winner,)


def test_min_tokens_is_exact():
    """Token 0 ends and is by far the likeliest: it comes as the first token after min_tokens others."""
    line = torch.zeros(1, VOCAB)
    line[0, [0, 7]] = 50.0
    for least in (0, 1, 5):
        sampler = Sampler(1, VOCAB)
        start = started(
            ResolvedSampling(temperature=0.0, min_tokens=least), [1, 2], stop_ids=(0, 7)
        )
        sampler.admit(0, start)
        drawn = [
            sampler.sample(line, [(0, 2 + i, ())]).collect()[0][0][0] for i in range(least + 1)
        ]
        assert [token in (0, 7) for token in drawn] == [False] * least + [True]


def test_rules_give_way_rather_than_leave_nothing():
    line = torch.arange(float(VOCAB)).unsqueeze(0)
    sampler = Sampler(2, VOCAB)
    sampler.admit(
        0,
        started(
            ResolvedSampling(temperature=0.0, allowed_token_ids=(5, 6), bad_words=((5,), (6,))), [1]
        ),
    )
    sampler.admit(
        1, started(ResolvedSampling(allowed_token_ids=(5,), min_tokens=3), [1], stop_ids=(5,))
    )
    assert [
        g[0] for g in sampler.sample(line.repeat(2, 1), [(0, 1, ()), (1, 1, ())]).collect()
    ] == [(6,), (5,)]


def test_broken_logits_still_give_a_token():
    for shape in (
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.9},
        {"typical_p": 0.5},
        {"min_p": 0.5},
    ):
        for value in (math.nan, math.inf, -math.inf):
            sampler = Sampler(1, VOCAB)
            sampler.admit(0, started(ResolvedSampling(**shape), [1]))
            assert (
                0
                <= sampler.sample(torch.full((1, VOCAB), value), [(0, 1, ())]).collect()[0][0][0]
                < VOCAB
            )


# ---- drafts --------------------------------------------------------------------------------------------------


@given(sequences, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_speculation_equals_the_plain_run(start, rng):
    """Good and bad drafts, beside a row without any: exactly the tokens and log-probabilities of the plain run."""
    start = replace(start, sampling=replace(start.sampling, logprobs=2))
    expected = alone(start, 14)
    sampler = Sampler(3, VOCAB)
    sampler.admit(1, start)
    sampler.admit(2, started(ResolvedSampling(temperature=0.0, repetition_penalty=1.5), [8]))
    tokens = list(start.tokens)
    other = [8]
    while len(tokens) < start.prompt_len + 10:
        done = len(tokens) - start.prompt_len
        drafts = [
            t if rng.random() < 0.7 else rng.randrange(VOCAB)
            for t in expected[done : done + rng.randrange(5)]
        ]
        lines = [line_for(other)] + [line_for(tokens + drafts[:k]) for k in range(len(drafts) + 1)]
        asked = [(2, len(other), ()), (1, len(tokens), tuple(drafts))]
        (first, _), (gained, logprobs) = sampler.sample(torch.stack(lines), asked).collect()
        right = next((k for k, t in enumerate(drafts) if t != expected[done + k]), len(drafts))
        assert list(gained) == expected[done : done + right + 1]
        for k, entry in enumerate(logprobs):
            value = line_for(tokens + list(gained[:k])).log_softmax(-1)[gained[k]].item()
            assert (entry.token, entry.logprob) == (gained[k], pytest.approx(value, abs=1e-5))
        assert len(logprobs) == len(gained)
        tokens += gained
        other += first
    assert other[1:] == alone(
        started(ResolvedSampling(temperature=0.0, repetition_penalty=1.5), [8]), len(other) - 1
    )


# ---- log-probabilities --------------------------------------------------------------------------------------


def check_logprobs(entry, logits: torch.Tensor, token: int, count: int) -> None:
    exact = logits.double().log_softmax(-1).tolist()
    order = sorted(range(len(exact)), key=lambda i: (-logits[i].item(), i))
    assert entry.token == token
    assert entry.logprob == pytest.approx(exact[token], abs=1e-5)
    assert entry.rank == order.index(token) + 1
    assert [i for i, _ in entry.top] == order[:count]
    assert [p for _, p in entry.top] == pytest.approx([exact[i] for i in order[:count]], abs=1e-5)


def test_logprobs_are_the_models_own():
    """Whatever the penalties and the temperature; exactly as many of the best as asked."""
    asked = [None, 0, 1, 5, 20]
    sampler = Sampler(5, VOCAB)
    shape = ResolvedSampling(
        temperature=2.0, top_k=50, logit_bias=((3, 20.0),), repetition_penalty=1.5
    )
    for row, count in enumerate(asked):
        sampler.admit(row, started(replace(shape, seed=row, logprobs=count), [3, 4]))
    logits = torch.stack([line_for([row]) for row in range(5)])
    gains = sampler.sample(logits, [(row, 2, ()) for row in range(5)]).collect()
    assert gains[0][1] == ()
    for line, count, (tokens, logprobs) in list(zip(logits, asked, gains))[1:]:
        check_logprobs(logprobs[0], line, tokens[0], count)


@pytest.mark.parametrize("count", [0, 3, VOCAB, VOCAB + 5])
def test_prompt_logprobs(count):
    tokens = [3, 96, 0, 5, 5, 5, 17, 1, 2, 3]
    logits = torch.stack([line_for(tokens[: i + 1]) for i in range(9)])
    entries = Sampler(1, VOCAB).prompt_logprobs(logits, tokens[1:], count)
    assert len(entries) == 9
    for entry, line, token in zip(entries, logits, tokens[1:]):
        check_logprobs(entry, line, token, count)


def test_long_prompts_are_scored_in_parts():
    # more than twice what is scored at once
    lines = 9
    vocab = CHUNK // 4
    logits = torch.randn(lines, vocab)
    sampler = Sampler(1, vocab)
    singly = [
        sampler.prompt_logprobs(line.unsqueeze(0), [i], 2)[0] for i, line in enumerate(logits)
    ]
    assert sampler.prompt_logprobs(logits, list(range(lines)), 2) == singly


def test_half_precision_logits():
    line = line_for([1])
    for shape in ({"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 2.0}):
        outputs = []
        for logits in (line, line.bfloat16()):
            sampler = Sampler(1, VOCAB)
            sampler.admit(0, started(ResolvedSampling(logprobs=3, **shape), [1]))
            outputs.append(sampler.sample(logits.unsqueeze(0), [(0, 1, ())]).collect())
        assert outputs[0] == outputs[1]


class Work(TorchDispatchMode):
    """Notes every operation that reads as much as the logits."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(arg, torch.Tensor) and arg.numel() >= self.size for arg in args):
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_greedy_batch_is_nothing_but_an_argmax():
    sampler = Sampler(8, VOCAB)
    for row in range(8):
        sampler.admit(row, started(ResolvedSampling(temperature=0.0), [1]))
    logits = torch.randn(8, VOCAB)
    with Work(logits.numel()) as work:
        draws = sampler.sample(logits, [(row, 1, ()) for row in range(8)])
    assert work.seen == ["argmax"]
    assert torch.equal(draws.tokens, logits.argmax(-1))

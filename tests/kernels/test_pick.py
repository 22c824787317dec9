"""Picking without sorting, under the interpreter: the reference's tokens, and the sampler's."""

from __future__ import annotations

import pytest
import torch

from benchmarks.products import check_penalties, check_pick
from bloomery.kernels.launch import jit, tl
from bloomery.kernels.noise import bits_at, gumbel, gumbel_at, key_at, keys, words
from bloomery.kernels.pick import Scratch, Wishes, pick, pick_lines, pick_reference
from bloomery.messages import ResolvedSampling, NewRequestData
from bloomery.runtime.sampler import Sampler

SMALL = {"segment": 64, "block": 8, "listed": 64}


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
def test_kernels_equal_reference(kind: str, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    assert check_pick(3, 150, spread, kind, dtype, "cpu", **SMALL) == 0


def test_lists_that_overflow() -> None:
    torch.manual_seed(8)
    assert check_pick(2, 150, 0.5, "both", torch.float32, "cpu", segment=64, block=8, listed=4) == 0


def test_kernels_equal_the_sampler() -> None:
    """Rows in any order, whose wishes differ, as the captured step sees them."""
    torch.manual_seed(9)
    chosen = [
        ResolvedSampling(temperature=0.0),
        ResolvedSampling(temperature=0.7, seed=1),
        ResolvedSampling(temperature=1.3, top_p=0.8, seed=2**63 + 5),
        ResolvedSampling(temperature=0.9, top_k=7, seed=3),
        ResolvedSampling(temperature=1.0, top_k=40, top_p=0.5, min_p=0.02, seed=4),
    ]
    sampler = Sampler(len(chosen) + 1, 150)
    vocab = 150
    for row, sampling in enumerate(chosen):
        sampler.admit(row, NewRequestData((1, 2, 3), 3, sampling, ()))
    logits = torch.randn(5, vocab) * 2
    rows = [3, 0, 4, 2, 1]
    positions = [3, 9, 70, 4, 8]
    wanted = sampler.sample(
        logits, [(row, position, ()) for row, position in zip(rows, positions)]
    ).tokens
    wishes = Wishes(*sampler.numbers[:, :3].unbind(1), sampler.top_k, sampler.seeds)
    at = torch.tensor(rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
    got = pick_lines(logits, *at, wishes, Scratch.of(5, vocab, "cpu", **SMALL))
    assert got.tokens.tolist() == wanted.tolist()
    assert pick(logits, *at, wishes).tokens.tolist() == wanted.tolist()


def test_ties_and_the_end_of_the_vocabulary() -> None:
    """The lowest id among equals, and never one past the end, also where nothing is a number."""
    logits = torch.tensor(
        [[0.0, 2.0, 2.0, -1.0, 2.0], [float("nan")] * 5, [-float("inf")] * 4 + [3.0]]
    )
    seeds = torch.zeros(1, 2, dtype=torch.int32)
    for wishes in (
        Wishes(
            torch.zeros(1), torch.ones(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64), seeds
        ),
        Wishes(
            torch.full((1,), 1e-4),
            torch.full((1,), 0.5),
            torch.zeros(1),
            torch.ones(1, dtype=torch.int64),
            seeds,
        ),
        Wishes(
            torch.ones(1),
            torch.ones(1),
            torch.full((1,), 0.5),
            torch.ones(1, dtype=torch.int64),
            seeds,
        ),
    ):
        rows = torch.zeros(3, dtype=torch.int32)
        got = pick_lines(
            logits, rows, rows, wishes, Scratch.of(3, 5, "cpu", segment=8, block=4, listed=4)
        )
        assert got.tokens.tolist()[::2] == [1, 4]
        assert 0 <= got.tokens[1] < 5


@jit
def noise_kernel(seeds, positions, bits, noise, WIDTH: tl.constexpr):
    line = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    position = tl.load(positions + line)
    k0 = key_at(tl.load(seeds + 2 * line), position)
    k1 = key_at(tl.load(seeds + 2 * line + 1), position)
    tl.store(bits + line * WIDTH + i, bits_at(k0, k1, i).to(tl.int32))
    tl.store(noise + line * WIDTH + i, gumbel_at(k0, k1, i))


def test_noise_is_the_recipe_in_a_kernel_too() -> None:
    seeds = torch.tensor([words(seed) for seed in (0, 1, 2**64 - 1)], dtype=torch.int32)
    positions = torch.tensor([0, 5, 131071])
    bits = torch.zeros(3, 1024, dtype=torch.int32)
    noise = torch.zeros(3, 1024)
    noise_kernel[(3,)](seeds, positions, bits, noise, WIDTH=1024)
    assert bits[0, 0] == 517320509 and bits[1, 7] == 266163407, (
        "as tests/kernels/test_noise.py has them"
    )
    torch.testing.assert_close(
        noise, gumbel(keys(seeds, positions), torch.arange(1024)), rtol=0, atol=2e-6
    )


def test_penalties() -> None:
    torch.manual_seed(2)
    assert check_penalties(3, 40, 100, "cpu") < 1e-6


def test_without_a_kernel_the_reference_answers() -> None:
    wishes = Wishes(
        torch.tensor([0.0]),
        torch.ones(1),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, 2).int(),
    )
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    zero = torch.zeros(1, dtype=torch.int32)
    got = pick(logits, zero, zero, wishes, Scratch.of(1, 3, "cpu"))
    assert [values.tolist() for values in got[::2]] == [[1], [1]]
    torch.testing.assert_close(got.logprobs, logits.log_softmax(-1)[:, 1])
    assert got.tokens.equal(pick_reference(logits, zero, zero, wishes).tokens)

"""What is kept, against loops; and against the warpers of transformers, which many results in the world come from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from bloomery.kernels.truncate import kept


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def sorted_line(width: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    line = (
        torch.randn(1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * spread
    )
    line = line.sort(dim=-1, descending=True).values
    return line - line[:, :1]


def run(z, min_p=0.0, top_k=0, top_p=1.0, typical_p=1.0, total=None):
    total = (
        z.exp().masked_fill(z < math.log(min_p) if min_p else z < -math.inf, 0).sum(-1, True)
        if total is None
        else total
    )
    return kept(z, column(min_p), torch.tensor([[top_k]]), column(top_p), column(typical_p), total)


def by_loops(z: list[float], min_p, top_k, top_p, typical_p) -> list[bool]:
    left = [i for i in range(len(z)) if math.exp(z[i]) >= min_p]
    left = left[:top_k] if top_k else left
    if top_p < 1:
        total = math.fsum(math.exp(z[i]) for i in left)
        before = 0.0
        kept_ones = []
        for i in left:
            if before < top_p * total:
                kept_ones.append(i)
            before += math.exp(z[i])
        left = kept_ones
    if typical_p < 1:
        total = math.fsum(math.exp(z[i]) for i in left)
        surprise = {i: math.log(total) - z[i] for i in left}
        entropy = math.fsum(math.exp(-s) * s for s in surprise.values())
        before = 0.0
        kept_ones = []
        for i in sorted(left, key=lambda i: abs(surprise[i] - entropy)):
            if before < typical_p:
                kept_ones.append(i)
            before += math.exp(-surprise[i])
        left = kept_ones
    return [i in left for i in range(len(z))]


shares = st.sampled_from([1.0, 0.999, 0.95, 0.9, 0.5, 0.2, 0.01, 1e-9])


@given(
    st.integers(0, 10_000),
    st.integers(2, 60),
    st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0]),
    st.integers(0, 70),
    shares,
    shares,
)
@settings(max_examples=400, deadline=None)
def test_against_loops(seed, width, min_p, top_k, top_p, typical_p):
    z = sorted_line(width, seed)
    found, _ = run(z, min_p, top_k, top_p, typical_p)
    assert found[0].tolist() == by_loops(z[0].tolist(), min_p, top_k, top_p, typical_p)
    assert found.any()


WARPERS = [
    (lambda: TopKLogitsWarper(7), {"top_k": 7}),
    (lambda: TopPLogitsWarper(0.8), {"top_p": 0.8}),
    (lambda: MinPLogitsWarper(0.1), {"min_p": 0.1}),
    (lambda: TypicalLogitsWarper(0.6), {"typical_p": 0.6}),
]


@pytest.mark.parametrize(
    ("warper", "parameters"), WARPERS, ids=["top_k", "top_p", "min_p", "typical_p"]
)
def test_same_as_transformers(warper, parameters):
    for seed in range(50):
        z = sorted_line(40, seed)
        expected = warper()(torch.zeros(1, 1, dtype=torch.int64), z.clone()) > -math.inf
        found, _ = run(z, **parameters)
        assert torch.equal(found, expected)


def test_width_does_not_matter_once_it_is_enough():
    for seed in range(100):
        z = sorted_line(2000, seed, spread=3.0)
        total = z.exp().sum(-1, True)
        whole, _ = run(z, top_p=0.9, total=total)
        for width in (1, 10, 100, 500, 1000):
            part, sure = run(z[:, :width], top_p=0.9, total=total)
            inside = float(z[:, :width].exp().sum()) >= 0.9 * float(total)
            assert bool(sure) is inside
            assert torch.equal(part, whole[:, :width])
            assert not bool(sure) or not whole[:, width:].any()


def test_padding_by_wider_neighbours_changes_nothing():
    for seed in range(50):
        z = sorted_line(50, seed)
        wide = torch.cat((z, torch.full((1, 300), -math.inf, dtype=torch.float64)), 1)
        total = z.exp().sum(-1, True)
        narrow, _ = run(z, top_k=50, top_p=0.9, typical_p=0.7, total=total)
        padded, _ = run(wide, top_k=50, top_p=0.9, typical_p=0.7, total=total)
        assert torch.equal(padded[:, :50], narrow)
        assert not padded[:, 50:].any()

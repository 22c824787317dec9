"""The order is (score descending, id ascending), whatever the ties."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.kernels.order import ordered

few = st.sampled_from([0.0, -0.0, 1.5, -1.5, 2.0, -float("inf"), 1e-45, -1e-45, 3e38, -3e38])


@given(
    st.lists(st.lists(few, min_size=12, max_size=12), min_size=1, max_size=4), st.integers(0, 12)
)
@settings(max_examples=300, deadline=None)
def test_ties_go_to_the_lowest_id(lines, count):
    scores = torch.tensor(lines)
    values, ids = ordered(scores, count)
    for line, found, at in zip(scores.tolist(), values.tolist(), ids.tolist()):
        expected = sorted(range(12), key=lambda i: (-line[i], i))[:count]
        assert at == expected
        assert found == [line[i] for i in expected]


def test_half_precision_logits_and_large_vocabularies():
    scores = (torch.randn(3, 50_000) * 3).bfloat16().float()
    for count in (1, 50, 1000, 50_000):
        _, ids = ordered(scores, count)
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(ids, expected)


def test_input_is_left_alone():
    scores = torch.randn(2, 100)
    before = scores.clone()
    ordered(scores, 5)
    assert torch.equal(scores, before)

"""The arithmetic of who holds what: everything is held once, nothing that cannot be split is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from bloomery.errors import ConfigError
from bloomery.layout import Layout, check, cut, divides
from bloomery.spec import Alibi, Attention, Layer, Mlp, Model, Norm


def model(heads: int = 8, kv: int = 2, layers: int = 4, size: int = 64, vocab: int = 128) -> Model:
    layer = Layer(Attention(heads, kv, 16), Mlp(size), Norm(), None, Norm())
    return Model(vocab, 64, (layer,) * layers, Norm(), 128)


@settings(deadline=None)
@given(some.integers(1, 20000), some.integers(1, 16))
def test_an_inner_dimension_is_held_once_and_nearly_evenly(size: int, ranks: int) -> None:
    spans = [Layout(rank, ranks).span(size) for rank in range(ranks)]
    assert spans[0][0] == 0 and spans[-1][1] == size
    assert all(before[1] == after[0] for before, after in zip(spans, spans[1:]))
    assert size < ranks or all(start < end for start, end in spans)
    assert max(end - start for start, end in spans) <= max(1.05 * size / ranks, size / ranks + 32)


@pytest.mark.parametrize(
    ("size", "ranks"), [(11008, 2), (11008, 4), (14336, 8), (4864, 2), (8960, 4)]
)
def test_widths_of_real_models_are_cut_between_blocks_of_32(size: int, ranks: int) -> None:
    assert all(Layout(rank, ranks).span(size)[0] % 32 == 0 for rank in range(ranks))


@settings(deadline=None)
@given(some.integers(1, 300), some.integers(1, 8))
def test_every_word_has_one_owner(vocab: int, ranks: int) -> None:
    owned = [word for rank in range(ranks) for word in range(*Layout(rank, ranks).words(vocab))]
    assert owned == list(range(vocab))


@pytest.mark.parametrize(
    ("heads", "kv", "ranks"), [(8, 8, 2), (8, 2, 4), (8, 1, 8), (12, 3, 6), (6, 3, 3)]
)
def test_query_heads_find_their_key_head_on_their_rank(heads: int, kv: int, ranks: int) -> None:
    spec = Attention(heads, kv, 16)
    share = heads // kv
    for rank in range(ranks):
        (first, end), (kv_first, kv_end) = Layout(rank, ranks).heads(spec)
        local = (end - first) // (kv_end - kv_first)
        assert [head // share for head in range(first, end)] == [
            kv_first + i // local for i in range(end - first)
        ]


def test_slopes_are_those_of_the_models_heads() -> None:
    found = Layout(1, 2).attention(Attention(6, 6, 16, Alibi()))
    assert found.num_heads == 3 and found.position == Alibi(first=3, heads=6)


def test_uneven_heads_are_refused_with_the_numbers_that_would_work() -> None:
    with pytest.raises(
        ConfigError,
        match="tp 4 does not divide the model's 6 heads over 2 key heads; 1, 2, 6 would",
    ):
        check(model(heads=6, kv=2), 4, 1)
    with pytest.raises(
        ConfigError, match="pp 5 is more stages than the model has layers; at most 4"
    ):
        check(model(), 1, 5)
    assert divides(model(heads=8, kv=1), 8) and not divides(model(size=4), 8)


@given(
    some.lists(some.integers(1, 400), min_size=1, max_size=9),
    some.integers(1, 4),
    some.integers(0, 400),
)
def test_stages_are_as_even_as_can_be(costs: list[int], count: int, head: int) -> None:
    """Against trying every cut."""
    count = min(count, len(costs))

    def slowest(cuts: list[range]) -> int:
        each = [sum(costs[i] for i in layers) for layers in cuts]
        each[-1] += head if count > 1 else 0
        return max(each)

    def every(start: int, left: int) -> list[list[range]]:
        if left == 1:
            return [[range(start, len(costs))]]
        return [
            [range(start, end), *rest]
            for end in range(start + 1, len(costs) - left + 2)
            for rest in every(end, left - 1)
        ]

    found = cut(costs, head, count)
    assert [i for layers in found for i in layers] == list(range(len(costs))) and all(found)
    assert slowest(found) == min(map(slowest, every(0, count)))


def test_experts_weigh_on_their_stage() -> None:
    assert cut([40, 8, 8, 8, 8, 8], 1, 2) == [range(1), range(1, 6)]

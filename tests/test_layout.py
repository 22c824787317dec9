"""Tensor parallel ranks and pipeline stages hold each part once; impossible splits are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.errors import ConfigError
from bloomery.layout import (
    TensorParallelLayout,
    check_parallel_sizes,
    split_stages,
    supports_tensor_parallel,
)
from bloomery.spec import AlibiSpec, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def build_model(
    heads: int = 8, kv_heads: int = 2, layers: int = 4, mlp_size: int = 64
) -> ModelSpec:
    layer = LayerSpec(
        AttentionSpec(heads, kv_heads, 16), MlpSpec(mlp_size), NormSpec(), None, NormSpec()
    )
    return ModelSpec(128, 64, (layer,) * layers, NormSpec(), 128)


@settings(deadline=None)
@given(st.integers(1, 20000), st.integers(1, 16))
def test_an_inner_dimension_is_split_once_and_nearly_evenly(size: int, ranks: int) -> None:
    ranges = [TensorParallelLayout(rank, ranks).split_dimension(size) for rank in range(ranks)]
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:]))
    assert size < ranks or all(start < end for start, end in ranges)
    assert max(end - start for start, end in ranges) <= max(1.05 * size / ranks, size / ranks + 32)


@pytest.mark.parametrize(
    ("size", "ranks"), [(11008, 2), (11008, 4), (14336, 8), (4864, 2), (8960, 4)]
)
def test_widths_of_real_models_are_split_between_blocks_of_32(size: int, ranks: int) -> None:
    for rank in range(ranks):
        start, _ = TensorParallelLayout(rank, ranks).split_dimension(size)
        assert start % 32 == 0


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 8))
def test_every_token_id_has_one_owner(vocab: int, ranks: int) -> None:
    token_ids = []
    for rank in range(ranks):
        token_ids.extend(range(*TensorParallelLayout(rank, ranks).vocab_range(vocab)))
    assert token_ids == list(range(vocab))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 8, 2), (8, 2, 4), (8, 1, 8), (12, 3, 6), (6, 3, 3)]
)
def test_query_heads_have_their_kv_head_on_their_rank(
    heads: int, kv_heads: int, ranks: int
) -> None:
    spec = AttentionSpec(heads, kv_heads, 16)
    group_size = heads // kv_heads
    for rank in range(ranks):
        (first, end), (kv_first, kv_end) = TensorParallelLayout(rank, ranks).heads(spec)
        local_group_size = (end - first) // (kv_end - kv_first)
        global_kv_heads = [head // group_size for head in range(first, end)]
        local_kv_heads = [kv_first + i // local_group_size for i in range(end - first)]
        assert global_kv_heads == local_kv_heads


def test_alibi_slopes_are_those_of_the_models_heads() -> None:
    spec = TensorParallelLayout(1, 2).attention(AttentionSpec(6, 6, 16, AlibiSpec()))
    assert spec.num_heads == 3 and spec.position == AlibiSpec(first_head=3, total_heads=6)


def test_an_impossible_split_is_refused_with_the_sizes_that_would_work() -> None:
    with pytest.raises(
        ConfigError,
        match="tp 4 does not divide the model's 6 heads over 2 KV heads; 1, 2, 6 would",
    ):
        check_parallel_sizes(build_model(heads=6, kv_heads=2), 4, 1)
    with pytest.raises(
        ConfigError, match="pp 5 is more stages than the model has layers; at most 4"
    ):
        check_parallel_sizes(build_model(), 1, 5)
    assert supports_tensor_parallel(build_model(heads=8, kv_heads=1), 8)
    assert not supports_tensor_parallel(build_model(mlp_size=4), 8)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(0, 400),
)
def test_pipeline_stages_are_as_even_as_possible(
    costs: list[int], num_stages: int, head_cost: int
) -> None:
    """Compared with every possible split."""
    num_layers = len(costs)
    num_stages = min(num_stages, num_layers)

    def slowest_stage(stages: list[range]) -> int:
        stage_costs = [sum(costs[i] for i in layers) for layers in stages]
        if num_stages > 1:
            stage_costs[-1] += head_cost
        return max(stage_costs)

    def all_splits(start: int, num_left: int) -> list[list[range]]:
        if num_left == 1:
            return [[range(start, num_layers)]]
        return [
            [range(start, end), *rest]
            for end in range(start + 1, num_layers - num_left + 2)
            for rest in all_splits(end, num_left - 1)
        ]

    stages = split_stages(costs, head_cost, num_stages)
    assert [i for layers in stages for i in layers] == list(range(num_layers))
    assert all(stages)
    assert slowest_stage(stages) == min(map(slowest_stage, all_splits(0, num_stages)))


def test_an_expensive_layer_gets_a_smaller_stage() -> None:
    assert split_stages([40, 8, 8, 8, 8, 8], 1, 2) == [range(1), range(1, 6)]

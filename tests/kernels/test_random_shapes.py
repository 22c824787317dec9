"""Kernels against their references over random shapes: heads, widths, blocks, windows, lengths.

`pytest --hypothesis-profile=explore` tries other shapes than the last time.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.fusion import ActivationEpilogue
from bloomery.kernels.launch import triton_interpreted
from bloomery.spec import AlibiSpec, AttentionGateSpec, AttentionSpec
from tests.kernels.oracles import (
    ALL_ACTIVATIONS,
    ERROR_LIMITS,
    check_activation,
    check_attention,
    check_norm,
    check_rope_and_cache,
    make_attention_case,
)

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)

DTYPES = st.sampled_from([torch.float32, torch.float16])


@st.composite
def attention_specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 2))
    heads_per_kv_head = draw(st.sampled_from([1, 2, 3, 8]))
    return AttentionSpec(
        kv_heads * heads_per_kv_head,
        kv_heads,
        8 * draw(st.integers(8, 32)),
        draw(st.sampled_from([None, AlibiSpec()])),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.just(5.0)),
        chunk=draw(st.none() | st.integers(1, 60)),
        sinks=draw(st.booleans()),
        gate=draw(st.sampled_from([None, AttentionGateSpec(), AttentionGateSpec(per_head=True)])),
    )


# For each sequence: new positions, and positions before them.
SEQUENCES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 70)), min_size=1, max_size=3)


@settings(max_examples=8)
@given(attention_specs(), SEQUENCES, st.sampled_from([16, 32, 64]), DTYPES)
def test_attention(
    spec: AttentionSpec, sequences: list[tuple[int, int]], block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sequences.sort(key=lambda sequence: sequence[0] > 1)  # decodes come first
    query_lens = [query_len for query_len, _ in sequences]
    seq_lens = [query_len + context_len for query_len, context_len in sequences]
    case = make_attention_case(spec, query_lens, seq_lens, block_size, dtype, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # padding rows divide by zero
        assert check_attention(case, TritonPagedAttention()) < ERROR_LIMITS[dtype]


@settings(max_examples=20)
@given(
    st.integers(2, 3000),
    st.sampled_from(["rms", "rms bare", "layer", "layer bias", "layer bare strided"]),
    DTYPES,
)
def test_norms(width: int, options: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert check_norm(width, options, dtype, "cpu") < ERROR_LIMITS[dtype]


@settings(max_examples=20)
@given(st.integers(1, 3000), st.sampled_from(ALL_ACTIVATIONS), DTYPES)
def test_activations(width: int, activation: ActivationEpilogue, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert check_activation(width, activation, dtype, "cpu") < ERROR_LIMITS[dtype]


@settings(max_examples=20)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(8, 32),
    st.integers(0, 4),
    st.sampled_from(
        [
            "",
            "interleaved",
            "tables",
            "rms",
            "layer each",
            "interleaved tables rms",
            "rms bare after",
            "layer value after interleaved",
            "rms value shared gate",
            "scaled tables narrow-gate",
        ]
    ),
    DTYPES,
)
def test_rope_over_any_part_of_a_head(
    heads_per_kv_head: int,
    kv_heads: int,
    eighths: int,
    quarters: int,
    options: str,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    heads = heads_per_kv_head * kv_heads
    head_dim = 8 * eighths
    rope_dim = head_dim * quarters // 8 * 2
    error = check_rope_and_cache(heads, kv_heads, head_dim, rope_dim, options, dtype, "cpu")
    assert error < ERROR_LIMITS[dtype]

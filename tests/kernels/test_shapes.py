"""Kernels against their references over shapes nobody chose: heads, widths, blocks, windows and lengths are drawn.

`pytest --hypothesis-profile=explore` draws others than the last time.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels import case, check_activation, check_attention, check_norm, check_turn
from bloomery.attention.triton_paged import TritonPaged
from bloomery.kernels.activation import ACTIVATIONS
from bloomery.kernels.launch import interpreted
from bloomery.spec import Alibi, Attention

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = st.sampled_from(list(LIMITS))


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    kv_heads = draw(st.integers(1, 2))
    share = draw(st.sampled_from([1, 2, 3, 8]))
    return Attention(
        kv_heads * share,
        kv_heads,
        8 * draw(st.integers(8, 32)),
        draw(st.sampled_from([None, Alibi()])),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.just(5.0)),
    )


SEQUENCES = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 70)), min_size=1, max_size=3
)  # new, before them


@settings(max_examples=8)
@given(attentions(), SEQUENCES, st.sampled_from([16, 32, 64]), DTYPES)
def test_attention(
    spec: Attention, sequences: list[tuple[int, int]], block: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sequences.sort(key=lambda one: one[0] > 1)  # single positions come first
    counts = [new for new, _ in sequences]
    lengths = [new + before for new, before in sequences]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows that stand for nobody divide by zero
        assert (
            check_attention(case(spec, counts, lengths, block, dtype, "cpu"), TritonPaged())
            < LIMITS[dtype]
        )


@settings(max_examples=20)
@given(
    st.integers(2, 3000),
    st.sampled_from(["rms", "rms bare", "layer", "layer bias", "layer bare strided"]),
    DTYPES,
)
def test_norms(width: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert check_norm(width, kind, dtype, "cpu") < LIMITS[dtype]


@settings(max_examples=20)
@given(st.integers(1, 3000), st.sampled_from(list(ACTIVATIONS)), st.booleans(), DTYPES)
def test_activations(width: int, kind: str, gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert check_activation(width, kind, gated, dtype, "cpu") < LIMITS[dtype]


@settings(max_examples=20)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(8, 32),
    st.integers(0, 4),
    st.sampled_from(
        ["", "interleaved", "tables", "rms", "layer each", "interleaved tables rms", "rms bare"]
    ),
    DTYPES,
)
def test_turns(
    share: int, kv_heads: int, eighths: int, quarters: int, kind: str, dtype: torch.dtype
) -> None:
    """Any share of a head is turned."""
    torch.manual_seed(0)
    dim = 8 * eighths
    assert (
        check_turn(share * kv_heads, kv_heads, dim, dim * quarters // 8 * 2, kind, dtype, "cpu")
        < LIMITS[dtype]
    )

"""Merging two attention results, under the interpreter, against attention over all keys."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.merge_attention import (
    merge_attention_states_reference,
    merge_attention_states_triton,
)

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(5, 3, 16), (1, 8, 80), (7, 1, 64)])
def test_merged_results_equal_attention_over_all_keys(tokens: int, heads: int, dim: int) -> None:
    torch.manual_seed(dim)
    scores = 3 * torch.randn(tokens, heads, 11)
    values = torch.randn(11, heads, dim)

    def attention(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        out = torch.einsum("thk,khd->thd", part.softmax(-1), values[keys])
        return out, part.logsumexp(-1).t().contiguous()

    expected, _ = attention(slice(None))
    a, lse_a = attention(slice(0, 4))
    b, lse_b = attention(slice(4, None))
    for merge in (merge_attention_states_triton, merge_attention_states_reference):
        merged = merge(a, b, lse_a, lse_b)
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)

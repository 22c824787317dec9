"""Two attentions made one, under the interpreter, against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.launch import interpreted
from bloomery.kernels.merge import merge_reference, merge_rows

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(5, 3, 16), (1, 8, 80), (7, 1, 64)])
def test_both_equal_attention_over_all_keys(tokens: int, heads: int, dim: int) -> None:
    torch.manual_seed(dim)
    scores = 3 * torch.randn(tokens, heads, 11)
    values = torch.randn(11, heads, dim)

    def attention(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = scores[..., part]
        out = torch.einsum("thk,khd->thd", chosen.softmax(-1), values[part])
        return out, chosen.logsumexp(-1).t().contiguous()

    whole, _ = attention(slice(None))
    (a, log_a) = attention(slice(0, 4))
    (b, log_b) = attention(slice(4, None))
    torch.testing.assert_close(merge_rows(a, b, log_a, log_b), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merge_reference(a, b, log_a, log_b), whole, rtol=1e-5, atol=1e-6)

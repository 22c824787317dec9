"""Comparison of the mixture-of-experts kernels with their references, for tests and benchmarks.

Tests run the kernels under Triton's interpreter, benchmarks/products.py runs them on a GPU.
"""

from __future__ import annotations

import torch

from bloomery.kernels import moe
from tests.kernels.linear_oracles import to_float64
from tests.kernels.oracles import relative_error, run_in_poisoned_memory


def check_experts(
    tokens: int,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    hidden_size: int,
    method: str,
    dtype: torch.dtype,
    device: str,
    tiling: moe.GroupedGemmTiling | None = None,
) -> float:
    """Relative error of routing and experts; infinite if the routing or a second run differs.

    `method` is "gemv" or "grouped".
    """
    router_logits = torch.randn(tokens, num_experts, device=device)
    topk_ids, topk_weights = run_in_poisoned_memory(
        lambda: moe.route_topk_triton(router_logits, top_k, True)
    )
    expected_ids, expected_weights = moe.route_topk_reference(router_logits, top_k, True)
    if not torch.equal(topk_ids, expected_ids):
        return float("inf")
    up = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device)
    up = (up / hidden_size**0.5).to(dtype)
    down = torch.randn(num_experts, hidden_size, intermediate_size, device=device)
    down = (down / intermediate_size**0.5).to(dtype)
    x, residual = torch.randn(2, tokens, hidden_size, device=device).to(dtype)
    topk_ids[0, 0] = num_experts  # no expert: the pair of a padding row
    inputs = (x, topk_ids, topk_weights, up, down, "silu", residual, 0.5)

    def run_kernels() -> torch.Tensor:
        if method == "gemv":
            return moe.fused_experts_gemv(*inputs)
        tilings = None if tiling is None else (tiling, tiling)
        return moe.fused_experts_grouped(*inputs, tilings)

    actual = run_in_poisoned_memory(run_kernels)
    if not torch.equal(actual, run_kernels()):
        return float("inf")
    expected = moe.fused_experts_reference(*map(to_float64, inputs))
    return max(relative_error(topk_weights, expected_weights), relative_error(actual, expected))

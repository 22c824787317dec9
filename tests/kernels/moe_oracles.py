"""Comparison of the mixture-of-experts kernels with their references, for tests and benchmarks.

Tests run the kernels under Triton's interpreter, benchmarks/products.py runs them on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from bloomery.fusion import ActivationEpilogue, NormPrologue, ResidualEpilogue
from bloomery.kernels import moe
from bloomery.kernels.activation import CLAMPED_SWIGLU
from bloomery.spec import RouterSpec
from tests.kernels.linear_oracles import to_float64
from tests.kernels.oracles import relative_error, run_in_poisoned_memory

# Every kind of router, with a number of experts and choices that fits it.
ROUTERS: Mapping[str, tuple[RouterSpec, int, int]] = {
    "softmax": (RouterSpec(), 9, 3),
    "softmax not normalized": (RouterSpec(normalize=False), 16, 4),
    "softmax of the chosen": (RouterSpec(score_chosen_only=True), 32, 4),
    "softmax corrected": (RouterSpec(correction_bias=True, min_normalizer=0.5), 12, 2),
    "softmax by best groups": (
        RouterSpec(num_groups=4, top_groups=2, group_score="max", normalize=False, scale=3.0),
        20,
        6,
    ),
    "sigmoid": (RouterSpec("sigmoid", scale=2.5, min_normalizer=1e-20), 24, 5),
    "sigmoid of the chosen": (RouterSpec("sigmoid", score_chosen_only=True, normalize=False), 6, 1),
    "sigmoid by groups": (
        RouterSpec("sigmoid", correction_bias=True, num_groups=3, top_groups=2, scale=2.5),
        24,
        4,
    ),
    "one expert to a group": (RouterSpec("sigmoid", num_groups=8, top_groups=3), 8, 3),
    "capped and scaled": (RouterSpec(logit_scale=1.5, softcap=2.0, expert_scale=True), 10, 4),
    "sparsemixer": (RouterSpec("sparsemixer", normalize=False, threshold=0.4), 16, 2),
}


# Experts that follow the chosen ones of each token.
FUSED_SHARED = (
    moe.NO_FUSED_SHARED,
    moe.FusedSharedExperts(1, has_gate=True),
    moe.FusedSharedExperts(2, scale=2.5),
)


def check_router(name: str, tokens: int, device: str) -> float:
    """Relative error of the weights that a router gives; infinite if it chooses other experts."""
    router, num_experts, top_k = ROUTERS[name]
    logits = 2 * torch.randn(tokens, 3 + num_experts, device=device)[:, 3:]
    correction_bias = torch.randn(num_experts, device=device) if router.correction_bias else None
    expert_scale = torch.rand(num_experts, device=device) if router.expert_scale else None
    errors = []
    for fused_shared in FUSED_SHARED:
        stacked = logits
        if fused_shared.has_gate:
            stacked = torch.cat((logits, torch.randn(tokens, 1, device=device)), 1)
        inputs = (stacked, top_k, router, correction_bias, expert_scale, fused_shared)
        topk_ids, topk_weights = run_in_poisoned_memory(partial(moe.route_topk_triton, *inputs))
        expected_ids, expected_weights = moe.route_topk_reference(*inputs)
        if not torch.equal(topk_ids, expected_ids):
            return float("inf")
        errors.append(relative_error(topk_weights, expected_weights))
    return max(errors)


# What experts may do besides their products.
EXPERT_KINDS: Mapping[str, ActivationEpilogue] = {
    "plain": ActivationEpilogue("silu", True),
    "clamped, biases": ActivationEpilogue(CLAMPED_SWIGLU, True, (1.0, 1.7, 1.0)),
    "ungated": ActivationEpilogue("relu2", False),
    "weights of the input": ActivationEpilogue("silu", True),
}


def make_expert_options(
    kind: str, num_experts: int, size: int, hidden: int, dtype: torch.dtype, device: str
) -> moe.ExpertOptions:
    """Build random options of experts of that kind."""
    activation = EXPERT_KINDS[kind]
    up_bias = None
    down_bias = None
    if "biases" in kind:
        rows = 2 * size if activation.gated else size
        up_bias = torch.randn(num_experts, rows, device=device).to(dtype)
        down_bias = torch.randn(num_experts, hidden, device=device).to(dtype)
    return moe.ExpertOptions(activation, up_bias, down_bias, kind == "weights of the input")


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
    kind: str = "plain",
) -> float:
    """Relative error of the experts; infinite if a second run differs.

    `method` is "gemv" or "grouped", `kind` one of EXPERT_KINDS.
    """
    router_logits = torch.randn(tokens, num_experts, device=device)
    topk_ids, topk_weights = moe.route_topk_reference(router_logits, top_k, RouterSpec())
    options = make_expert_options(kind, num_experts, intermediate_size, hidden_size, dtype, device)
    up_rows = 2 * intermediate_size if options.activation.gated else intermediate_size
    up = torch.randn(num_experts, up_rows, hidden_size, device=device)
    up = (up / hidden_size**0.5).to(dtype)
    down = torch.randn(num_experts, hidden_size, intermediate_size, device=device)
    down = (down / intermediate_size**0.5).to(dtype)
    x, y, residual = torch.randn(3, tokens, hidden_size, device=device).to(dtype)
    gate_logits = torch.randn(tokens, 1, device=device).to(dtype) if tokens % 2 else None
    norm_weight = torch.randn(hidden_size, device=device)
    fusion = moe.ExpertsFusion(
        NormPrologue("rms", norm_weight, None, 1e-5) if tokens < 3 else None,
        moe.SharedOutput(y, gate_logits),
        ResidualEpilogue(residual, 0.5) if tokens < 10 else None,
    )
    topk_ids[0, 0] = num_experts  # no expert: the pair of a padding row
    inputs = (x, topk_ids, topk_weights, up, down, options, fusion)

    def run_kernels() -> torch.Tensor:
        if method == "gemv":
            return moe.fused_experts_gemv(*inputs)
        tilings = None if tiling is None else (tiling, tiling)
        return moe.fused_experts_grouped(*inputs, tilings)

    actual = run_in_poisoned_memory(run_kernels)
    if not torch.equal(actual, run_kernels()):
        return float("inf")
    expected = moe.fused_experts_reference(*map(to_float64, inputs))
    return relative_error(actual, expected)

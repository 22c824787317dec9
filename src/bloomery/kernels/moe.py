"""Mixture of experts: route tokens to experts, run the experts, and sum their outputs.

    route_topk      a router's logits -> the experts of each token and their weights
    fused_experts   activation(gate) * up of the chosen experts, back down, and the weighted sum

A pair is a (token, choice) pair: one token at one of its top_k experts. Pairs are sorted by expert,
so that the weights of an expert are read once for all of its tokens. The pairs of each expert are
split into blocks. A launch has as many programs as there could be blocks; programs beyond the last
block return immediately. All shapes are known to the host, so a step can be captured in a CUDA
graph. The sum over a token's choices runs in their order, so a result does not depend on other
tokens of the batch. If there are few pairs, which seldom share an expert, each pair is a GEMV of
its own (kernels/gemv), and the down projections of a token end in the sum.

An expert id outside the range, as a padding row may have, selects no expert and adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bloomery.fusion import ActivationEpilogue, NormPrologue, ResidualEpilogue
from bloomery.kernels.activation import activate_tile, activation_reference
from bloomery.kernels.gemv import ExpertRouting, GemvTiling, gemv_triton, supports_gemv
from bloomery.kernels.launch import (
    jit,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
    wait_for_previous,
)
from bloomery.kernels.norm import rms_norm
from bloomery.spec import RouterSpec

FEW_TOKENS = 16  # up to this many, the reference multiplies all tokens by every chosen expert


class GroupedGemmTiling(NamedTuple):
    """How a grouped GEMM is divided into programs."""

    pairs: int
    outputs: int
    inputs: int  # of 16-bit inputs; half as many of 32-bit inputs
    warps: int
    stages: int


# By pairs of a block. The up projection computes two products (gate and up), down computes one.
UP_TILINGS: Mapping[int, GroupedGemmTiling] = {
    16: GroupedGemmTiling(16, 64, 128, 4, 4),
    32: GroupedGemmTiling(32, 64, 128, 4, 4),
    64: GroupedGemmTiling(64, 64, 64, 4, 4),
    128: GroupedGemmTiling(128, 128, 64, 8, 3),
}
DOWN_TILINGS: Mapping[int, GroupedGemmTiling] = {
    16: GroupedGemmTiling(16, 64, 128, 4, 5),
    32: GroupedGemmTiling(32, 64, 128, 4, 5),
    64: GroupedGemmTiling(64, 128, 64, 4, 4),
    128: GroupedGemmTiling(128, 256, 64, 8, 3),
}


# ---- routing ----


@dataclass(frozen=True)
class FusedSharedExperts:
    """The shared expert as experts that every token uses, stacked behind those that it chooses.

    A shared expert that is n times as wide as the others becomes n of them.
    """

    count: int = 0
    scale: float = 1.0  # their weight
    has_gate: bool = False  # it is multiplied by the sigmoid of a logit behind those of the router


NO_FUSED_SHARED = FusedSharedExperts()


def route_topk(
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best experts of each token and their weights, for logits [tokens, experts].

    Expert ids [tokens, top_k] are int32, the best first; of equals the lowest comes first. Weights
    are float32. correction_bias and expert_scale: [experts] in float32. Fused shared experts follow
    the chosen ones.
    """
    route = route_topk_triton if use_triton(logits) else route_topk_reference
    return route(logits, top_k, router, correction_bias, expert_scale, fused_shared)


def route_topk_reference(
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch reference of `route_topk`."""
    shared_weights = torch.full(
        (len(logits), fused_shared.count), fused_shared.scale, device=logits.device
    )
    if fused_shared.has_gate:
        shared_weights = shared_weights * logits[:, -1:].float().sigmoid()
        logits = logits[:, :-1]
    num_experts = logits.shape[1]
    logits = logits.float() * router.logit_scale
    if router.softcap is not None:
        logits = router.softcap * torch.tanh(logits / router.softcap)
    if router.score == "sparsemixer":
        expert_ids, weights = sparsemixer_reference(logits, top_k, router.threshold)
    else:
        scores = logits if router.score_chosen_only else score_experts(logits, router)
        choice = scores if correction_bias is None else scores + correction_bias
        if router.num_groups > 1:
            choice = mask_groups(choice, router)
        expert_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(1, expert_ids)
        if router.score_chosen_only:
            weights = score_experts(weights, router)
    if router.normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.clamp(min=router.min_normalizer)
    weights = weights * router.scale
    if expert_scale is not None:
        weights = weights * expert_scale[expert_ids]
    if fused_shared.count:
        shared_ids = torch.arange(
            num_experts, num_experts + fused_shared.count, device=logits.device
        )
        expert_ids = torch.cat((expert_ids, shared_ids.expand(len(logits), -1)), 1)
        weights = torch.cat((weights, shared_weights), 1)
    return expert_ids.to(torch.int32), weights.contiguous()


def score_experts(logits: torch.Tensor, router: RouterSpec) -> torch.Tensor:
    """Return the scores of logits [tokens, n]."""
    return logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)


def mask_groups(choice: torch.Tensor, router: RouterSpec) -> torch.Tensor:
    """Set the scores outside of each token's best groups of experts to -inf."""
    groups = choice.unflatten(1, (router.num_groups, -1))
    num_best = 1 if router.group_score == "max" else min(2, groups.shape[-1])
    group_scores = groups.topk(num_best, dim=-1).values.sum(-1)
    order = group_scores.sort(dim=-1, descending=True, stable=True).indices
    is_best = torch.zeros_like(group_scores, dtype=torch.bool)
    is_best.scatter_(1, order[:, : router.top_groups], True)
    return groups.masked_fill(~is_best[..., None], -float("inf")).flatten(1)


def sparsemixer_reference(
    logits: torch.Tensor, top_k: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the best expert top_k times; its weight is a softmax over the logits near its own.

    A logit is near if its distance, divided by the larger one of its magnitude and the best logit,
    is at most `threshold`. Experts that were taken do not count.
    """
    remaining = logits
    expert_ids = []
    weights = []
    for _ in range(top_k):
        best, expert = remaining.max(-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        near = remaining.masked_fill(distance > threshold, -float("inf"))
        expert_ids.append(expert)
        weights.append(near.softmax(-1).gather(1, expert))
        remaining = remaining.scatter(1, expert, -float("inf"))
    return torch.cat(expert_ids, 1), torch.cat(weights, 1)


def route_topk_triton(
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel."""
    launch = describe_routing(logits, top_k, router, correction_bias, expert_scale, fused_shared)
    route_topk_kernel[(len(logits),)](
        *launch.arguments,
        **launch.constants,
        num_warps=launch.warps,
        **pdl_options(logits.device),
    )
    return launch.topk_ids, launch.topk_weights


class RoutingLaunch(NamedTuple):
    """The results of a router's kernel, its arguments and the number of warps."""

    topk_ids: torch.Tensor  # [tokens, top_k]
    topk_weights: torch.Tensor  # [tokens, top_k]
    arguments: tuple[torch.Tensor | float, ...]
    constants: dict[str, str | int | bool]
    warps: int


def describe_routing(
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> RoutingLaunch:
    """Allocate the results of `route_topk` and return the arguments of `choose_experts`."""
    tokens = len(logits)
    num_experts = logits.shape[1] - fused_shared.has_gate
    num_choices = top_k + fused_shared.count
    topk_ids = torch.empty(tokens, num_choices, dtype=torch.int32, device=logits.device)
    topk_weights = torch.empty(tokens, num_choices, dtype=torch.float32, device=logits.device)
    arguments = (
        logits,
        logits if correction_bias is None else correction_bias,
        logits if expert_scale is None else expert_scale,
        topk_ids,
        topk_weights,
        logits.stride(0),
        float(router.logit_scale),
        float(router.softcap or 1.0),
        float(router.min_normalizer),
        float(router.scale),
        float(router.threshold),
        float(fused_shared.scale),
    )
    constants: dict[str, str | int | bool] = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS_POW2": next_power_of_2(num_experts),
        "TOP_K": top_k,
        "TOP_K_POW2": next_power_of_2(num_choices),
        "NUM_SHARED": fused_shared.count,
        "HAS_SHARED_GATE": fused_shared.has_gate,
        "SCORE": router.score,
        "SCORE_CHOSEN_ONLY": router.score_chosen_only,
        "SOFTCAP": router.softcap is not None,
        "HAS_CORRECTION": correction_bias is not None,
        "HAS_EXPERT_SCALE": expert_scale is not None,
        "NUM_GROUPS": router.num_groups,
        "GROUPS_POW2": next_power_of_2(router.num_groups),
        "TOP_GROUPS": router.top_groups,
        "GROUP_MEMBERS": 1 if router.group_score == "max" else 2,
        "NORMALIZE": router.normalize,
    }
    warps = 1 if num_experts <= 128 else 4
    return RoutingLaunch(topk_ids, topk_weights, arguments, constants, warps)


@jit
def route_topk_kernel(
    logits,  # [tokens, NUM_EXPERTS], rows `stride` apart
    correction_bias,  # [NUM_EXPERTS]
    expert_scale,  # [NUM_EXPERTS]
    topk_ids,  # [tokens, TOP_K + NUM_SHARED]
    topk_weights,  # [tokens, TOP_K + NUM_SHARED]
    stride,
    logit_scale,
    softcap,
    min_normalizer,
    weight_scale,
    threshold,
    shared_weight,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    SCORE: tl.constexpr,
    SCORE_CHOSEN_ONLY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_MEMBERS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program routes one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    choose_experts(
        tl.program_id(0).to(tl.int64),
        logits,
        correction_bias,
        expert_scale,
        topk_ids,
        topk_weights,
        stride,
        logit_scale,
        softcap,
        min_normalizer,
        weight_scale,
        threshold,
        shared_weight,
        NUM_EXPERTS,
        EXPERTS_POW2,
        TOP_K,
        TOP_K_POW2,
        NUM_SHARED,
        HAS_SHARED_GATE,
        SCORE,
        SCORE_CHOSEN_ONLY,
        SOFTCAP,
        HAS_CORRECTION,
        HAS_EXPERT_SCALE,
        NUM_GROUPS,
        GROUPS_POW2,
        TOP_GROUPS,
        GROUP_MEMBERS,
        NORMALIZE,
    )


@jit
def choose_experts(
    token,
    logits,  # [tokens, NUM_EXPERTS], rows `stride` apart
    correction_bias,  # [NUM_EXPERTS]
    expert_scale,  # [NUM_EXPERTS]
    topk_ids,  # [tokens, TOP_K + NUM_SHARED]
    topk_weights,  # [tokens, TOP_K + NUM_SHARED]
    stride,
    logit_scale,
    softcap,
    min_normalizer,
    weight_scale,
    threshold,
    shared_weight,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    SCORE: tl.constexpr,
    SCORE_CHOSEN_ONLY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_MEMBERS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Route one token: take the best expert TOP_K times, and store the choices.

    The ids and weights of the choices are lanes of `chosen_ids` and `chosen_weights`. Fused
    shared experts take the lanes behind them.
    """
    e = tl.arange(0, EXPERTS_POW2)
    is_expert = e < NUM_EXPERTS
    row = tl.load(logits + token * stride + e, mask=is_expert, other=-float("inf"))
    row = row.to(tl.float32) * logit_scale
    if SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        row = softcap * (2.0 * tl.sigmoid(2.0 * row / softcap) - 1.0)
        row = tl.where(is_expert, row, -float("inf"))
    top = tl.max(row, 0)
    scores = row
    if not SCORE_CHOSEN_ONLY:
        if SCORE == "softmax":
            exponentials = tl.exp(row - top)
            scores = exponentials / tl.sum(exponentials, 0)
        elif SCORE == "sigmoid":
            scores = tl.sigmoid(row)
    remaining = tl.where(is_expert, scores, -float("inf"))
    if HAS_CORRECTION:
        remaining += tl.load(correction_bias + e, mask=is_expert, other=0.0)
    if NUM_GROUPS > 1:
        remaining = mask_groups_tile(
            remaining,
            e,
            NUM_EXPERTS // NUM_GROUPS,
            NUM_GROUPS,
            GROUPS_POW2,
            TOP_GROUPS,
            GROUP_MEMBERS,
        )
    j = tl.arange(0, TOP_K_POW2)
    chosen_ids = tl.zeros([TOP_K_POW2], tl.int32)
    chosen_weights = tl.zeros([TOP_K_POW2], tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(remaining, 0)
        expert = tl.min(tl.where(remaining == best, e, NUM_EXPERTS - 1), 0)
        if SCORE == "sparsemixer":
            distance = (best - row) / tl.maximum(tl.abs(row), best)
            is_near = (distance <= threshold) & is_expert
            weight = 1.0 / tl.sum(tl.where(is_near, tl.exp(remaining - best), 0.0), 0)
        else:
            weight = tl.sum(tl.where(e == expert, scores, 0.0), 0)
        chosen_ids = tl.where(j == choice, expert, chosen_ids)
        chosen_weights = tl.where(j == choice, weight, chosen_weights)
        remaining = tl.where(e == expert, -float("inf"), remaining)
    is_choice = j < TOP_K
    if SCORE_CHOSEN_ONLY:
        if SCORE == "softmax":
            chosen_weights = tl.where(is_choice, chosen_weights, -float("inf"))
            chosen_weights = tl.exp(chosen_weights - tl.max(chosen_weights, 0))
            chosen_weights = chosen_weights / tl.sum(chosen_weights, 0)
        else:
            chosen_weights = tl.where(is_choice, tl.sigmoid(chosen_weights), 0.0)
    if NORMALIZE:
        total = tl.sum(chosen_weights, 0)
        chosen_weights = chosen_weights / tl.maximum(total, min_normalizer)
    chosen_weights = chosen_weights * weight_scale
    if HAS_EXPERT_SCALE:
        chosen_weights *= tl.load(expert_scale + chosen_ids)
    NUM_CHOICES: tl.constexpr = TOP_K + NUM_SHARED
    if NUM_SHARED > 0:
        if HAS_SHARED_GATE:
            gate = tl.load(logits + token * stride + NUM_EXPERTS).to(tl.float32)
            shared_weight = shared_weight * tl.sigmoid(gate)
        chosen_ids = tl.where(is_choice, chosen_ids, NUM_EXPERTS + j - TOP_K)
        chosen_weights = tl.where(is_choice, chosen_weights, shared_weight)
    is_stored = j < NUM_CHOICES
    tl.store(topk_ids + token * NUM_CHOICES + j, chosen_ids, mask=is_stored)
    tl.store(topk_weights + token * NUM_CHOICES + j, chosen_weights, mask=is_stored)


@jit
def mask_groups_tile(
    scores,  # [experts]
    e,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_MEMBERS: tl.constexpr,
):
    """Set the scores outside of the best TOP_GROUPS groups to -inf.

    A group is ranked by the sum of its GROUP_MEMBERS best scores.
    """
    g = tl.arange(0, GROUPS_POW2)
    is_member = (e // GROUP_SIZE)[None, :] == g[:, None]  # [groups, experts]
    members = tl.where(is_member, scores[None, :], -float("inf"))
    first = tl.max(members, 1)
    group_scores = first
    if GROUP_MEMBERS == 2 and GROUP_SIZE > 1:
        first_expert = tl.min(tl.where(members == first[:, None], e[None, :], 2147483647), 1)
        others = tl.where(e[None, :] == first_expert[:, None], -float("inf"), members)
        group_scores = first + tl.max(others, 1)
    group_scores = tl.where(g < NUM_GROUPS, group_scores, -float("inf"))
    is_best = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(group_scores, 0)
        group = tl.min(tl.where(group_scores == best, g, NUM_GROUPS - 1), 0)
        is_best = is_best | (g == group)
        group_scores = tl.where(g == group, -float("inf"), group_scores)
    keeps = tl.max((is_member & is_best[:, None]).to(tl.int32), 0) > 0
    return tl.where(keeps, scores, -float("inf"))


# ---- experts ----


class SharedOutput(NamedTuple):
    """The output of the expert that every token uses, and the logits of its gate."""

    y: torch.Tensor  # [tokens, hidden]
    gate_logits: torch.Tensor | None = None  # [tokens, 1]: y is multiplied by their sigmoid

    def weighted_reference(self) -> torch.Tensor:
        """Apply the gate in torch."""
        return self.y if self.gate_logits is None else torch.sigmoid(self.gate_logits) * self.y


class PreparedInputs(NamedTuple):
    """Rows of x, normed and rounded to 16-bit integers relative to the largest of each chunk."""

    words: torch.Tensor  # [rows, chunks, words] int32: all high bytes, then all low bytes
    scales: torch.Tensor  # [rows, chunks, 2] float32: the scale, and the sum of the chunk's values


class ExpertsFusion(NamedTuple):
    """What is computed together with the experts of a block."""

    prologue: NormPrologue | None = None  # an RMS norm of x
    shared: SharedOutput | None = None  # is added
    residual: ResidualEpilogue | None = None  # is added last
    # The result of the prologue, if it is known, for kernels that multiply integers.
    prepared: PreparedInputs | None = None

    def apply_prologue(self, x: torch.Tensor) -> tuple[torch.Tensor, ExpertsFusion]:
        """Return x after the norm, and what is still to be fused."""
        if self.prologue is None:
            return x, self
        normed = rms_norm(x, self.prologue.weight, self.prologue.eps)
        return normed, self._replace(prologue=None)


class ExpertOptions(NamedTuple):
    """What the experts of a block do besides their two products.

    weights_input: the routing weights multiply the experts' input instead of their output.
    """

    activation: ActivationEpilogue = ActivationEpilogue("silu", True)
    up_bias: torch.Tensor | None = None  # [experts, gate | up]
    down_bias: torch.Tensor | None = None  # [experts, hidden]
    weights_input: bool = False


def fused_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, with what is fused around it.

    x [tokens, hidden], topk_ids and topk_weights [tokens, top_k], up [experts, gate | up, hidden],
    down [experts, hidden, expert size].
    """
    run_experts = fused_experts_reference
    if use_triton(x):
        run_experts = fused_experts_grouped
        seldom_shared = topk_ids.numel() <= max(topk_ids.shape[1], len(up) // 4)
        if seldom_shared and supports_gemv(up) and supports_gemv(down):
            run_experts = fused_experts_gemv
    return run_experts(x, topk_ids, topk_weights, up, down, options, fusion)


def fused_experts_reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
) -> torch.Tensor:
    """Loop over the chosen experts.

    With a few tokens, all of them are multiplied by every chosen expert. Reading the weights
    dominates the time anyway, and so the sums of a token do not depend on how many others chose the
    same expert.
    """
    activation, up_bias, down_bias, weights_input = options
    x, fusion = fusion.apply_prologue(x)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    all_tokens = len(x) <= FEW_TOKENS
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < len(up):
            continue
        is_chosen = topk_ids == expert
        token = is_chosen.any(1).nonzero()[:, 0]
        rows = slice(None) if all_tokens else token
        weights = (topk_weights * is_chosen).sum(1, keepdim=True)[rows].float()
        h = F.linear(x[rows], up[expert])
        if weights_input:  # the product is linear, so its result can be multiplied as well
            h = h * weights.to(h.dtype)
        if up_bias is not None:
            h = h + up_bias[expert].to(h.dtype)
        outputs = F.linear(activation_reference(h, activation), down[expert]).float()
        if down_bias is not None:
            outputs = outputs + down_bias[expert].float()
        if not weights_input:
            outputs = outputs * weights
        if all_tokens:
            outputs = outputs[token]
        y.index_add_(0, token, outputs)
    if fusion.shared is not None:
        y = y + fusion.shared.weighted_reference().float()
    if fusion.residual is not None:
        y = fusion.residual.tensor.float() + fusion.residual.scale * y
    return y.to(x.dtype)


def fused_experts_gemv(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
) -> torch.Tensor:
    """Run the kernels for a few tokens: one GEMV for each pair."""
    activation, up_bias, down_bias, weights_input = options
    input_weights = topk_weights if weights_input else None
    up_routing = ExpertRouting(topk_ids, len(up), input_weights)
    h = gemv_triton(x, up, up_bias, fusion.prologue, activation, routing=up_routing)
    output_weights = None if weights_input else topk_weights
    return expert_down_gemv(h, down, down_bias, topk_ids, output_weights, x, fusion)


def expert_down_gemv(
    h: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    x: torch.Tensor,
    fusion: ExpertsFusion,
) -> torch.Tensor:
    """Multiply h [pairs, size] by the experts' down projections and sum: [tokens, hidden], like x.

    It must follow the kernel of the up projection, see `expert_down_gemv_kernel`. Without weights
    all of them are 1. The shared expert's output and the residual are added.
    """
    tokens, top_k = topk_ids.shape
    num_experts, hidden, columns = down.shape
    tiling = select_down_tiling(columns, down.element_size())
    launch = describe_expert_sum(x, fusion)
    expert_down_gemv_kernel[(-(-hidden // tiling.outputs), tokens)](
        h,
        down,
        topk_ids,
        topk_ids if topk_weights is None else topk_weights,
        x if bias is None else bias,
        *launch.arguments,
        NUM_OUTPUTS=hidden,
        COLUMNS=columns,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        HAS_WEIGHTS=topk_weights is not None,
        HAS_BIAS=bias is not None,
        **launch.constants,
        VECTOR=16 // down.element_size(),
        BLOCK_OUT=tiling.outputs,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return launch.out


def select_down_tiling(columns: int, itemsize: int) -> GemvTiling:
    """Choose how programs divide the down projections of a token's experts.

    A program reads 4 rows of each expert, in tiles that end where a row ends if they can. A thread
    reads 16 bytes of each row, so that no values move between threads.
    """
    block_k = 2048 // itemsize
    while block_k > 512 // itemsize and columns % block_k:
        block_k //= 2
    if columns % block_k:
        block_k = min(next_power_of_2(columns), 2048 // itemsize)
    return GemvTiling(4, block_k, max(1, block_k * itemsize // 512))


@jit
def expert_down_gemv_kernel(
    x,  # [tokens * TOP_K, COLUMNS]
    weight,  # [NUM_EXPERTS, NUM_OUTPUTS, COLUMNS]
    expert_ids,  # [tokens, TOP_K]
    topk_weights,  # [tokens, TOP_K]
    bias,  # [NUM_EXPERTS, NUM_OUTPUTS]
    shared,  # [tokens, NUM_OUTPUTS]
    gate_logits,  # [tokens]
    residual,  # [tokens, NUM_OUTPUTS]
    out,  # [tokens, NUM_OUTPUTS]
    residual_scale,
    NUM_OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of one token: the sum over its experts. Tiles are [outputs, k].

    The kernel before this one, the up projection, lets it start only after its own wait. So the
    experts are known above the wait, and their first weights arrive during it.

    Every thread sums the weighted products of all experts before threads exchange their sums.
    """
    launch_dependents(PDL)
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.minimum(output, NUM_OUTPUTS - 1)
    k = tl.arange(0, BLOCK_K)[None, :]
    row_ptr = weight + row[:, None] * COLUMNS + k
    expert_ids += token * TOP_K
    topk_weights += token * TOP_K
    x += token * (TOP_K * COLUMNS)
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = TOP_K * BLOCKS
    SIZE: tl.constexpr = NUM_OUTPUTS * COLUMNS
    first = load_expert_tile(
        row_ptr, expert_ids, 0, k, SIZE, NUM_EXPERTS, COLUMNS, BLOCK_K, BLOCKS, STEPS
    )
    second = load_expert_tile(
        row_ptr, expert_ids, 1, k, SIZE, NUM_EXPERTS, COLUMNS, BLOCK_K, BLOCKS, STEPS
    )
    wait_for_previous(PDL)
    next_v = load_pair_input(x, 0, k, COLUMNS, BLOCK_K, BLOCKS)
    total = tl.zeros([BLOCK_OUT], tl.float32)
    y = tl.zeros([BLOCK_OUT, BLOCK_K // VECTOR], tl.float32)
    for step in tl.static_range(STEPS):
        tile = first.to(tl.float32)
        first = second
        if step + 2 < STEPS:
            second = load_expert_tile(
                row_ptr,
                expert_ids,
                step + 2,
                k,
                SIZE,
                NUM_EXPERTS,
                COLUMNS,
                BLOCK_K,
                BLOCKS,
                STEPS,
            )
        v = next_v.to(tl.float32)
        if step + 1 < STEPS:
            next_v = load_pair_input(x, step + 1, k, COLUMNS, BLOCK_K, BLOCKS)
        pair_weight = load_pair_weight(
            expert_ids, topk_weights, step // BLOCKS, NUM_EXPERTS, HAS_WEIGHTS
        )
        products = tl.reshape(tile * (v * pair_weight), (BLOCK_OUT, BLOCK_K // VECTOR, VECTOR))
        y += tl.sum(products, 2)
        if HAS_BIAS and step % BLOCKS == 0:
            expert = load_expert(expert_ids + step // BLOCKS, NUM_EXPERTS)
            total += pair_weight * tl.load(bias + expert * NUM_OUTPUTS + row).to(tl.float32)
    store_expert_sum(
        total + tl.sum(y, 1),
        token,
        output,
        shared,
        gate_logits,
        residual,
        out,
        residual_scale,
        NUM_OUTPUTS,
        HAS_SHARED,
        HAS_GATE,
        HAS_RESIDUAL,
    )


@jit
def load_expert(expert_id, NUM_EXPERTS: tl.constexpr):
    """Return the expert of a pair, or 0 for an id outside of the range."""
    expert = tl.load(expert_id)
    return tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, 0).to(tl.int64)


@jit
def load_pair_weight(
    expert_ids,
    topk_weights,
    pair: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Return the weight of a pair: 0 for an id outside of the range."""
    expert = tl.load(expert_ids + pair)
    pair_weight = 1.0
    if HAS_WEIGHTS:
        pair_weight = tl.load(topk_weights + pair).to(tl.float32)
    return tl.where((expert >= 0) & (expert < NUM_EXPERTS), pair_weight, 0.0)


@jit
def load_expert_tile(
    row_ptr,
    expert_ids,
    step: tl.constexpr,
    k,
    SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Load a step's tile of the rows of an expert, with zeros past the end of the row."""
    pair: tl.constexpr = min(step, STEPS - 1) // BLOCKS
    first_column: tl.constexpr = step % BLOCKS * BLOCK_K
    ptr = row_ptr + load_expert(expert_ids + pair, NUM_EXPERTS) * SIZE + first_column
    if first_column + BLOCK_K <= COLUMNS:
        return tl.load(ptr, eviction_policy="evict_first")
    else:
        mask = first_column + k < COLUMNS
        return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")


@jit
def load_pair_input(
    x,
    step: tl.constexpr,
    k,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Load a step's part of the input of a pair: [1, k]."""
    first_column: tl.constexpr = step % BLOCKS * BLOCK_K
    ptr = x + step // BLOCKS * COLUMNS + first_column + k
    if first_column + BLOCK_K <= COLUMNS:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=first_column + k < COLUMNS, other=0.0)


def fused_experts_grouped(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    options: ExpertOptions = ExpertOptions(),  # noqa: B008 (it is immutable)
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
    tilings: tuple[GroupedGemmTiling, GroupedGemmTiling] | None = None,
) -> torch.Tensor:
    """Run the kernels for many tokens: a grouped GEMM over experts."""
    x, fusion = fusion.apply_prologue(x.contiguous())
    num_experts = len(up)
    num_pairs = topk_ids.numel()
    # float32 does not use tensor cores here: its sums fill the registers.
    max_block = 32 if x.dtype == torch.float32 else 128
    block = min(max_block, max(16, next_power_of_2(num_pairs // num_experts)))
    up_tiling, down_tiling = tilings or (UP_TILINGS[block], DOWN_TILINGS[block])
    order = sort_by_expert(topk_ids, num_experts)
    activation, up_bias, down_bias, weights_input = options
    input_weights = topk_weights if weights_input else None
    top_k = topk_ids.shape[1]
    h = grouped_gemm(x, up, up_bias, order, up_tiling, top_k, activation, input_weights)
    y = grouped_gemm(h, down, down_bias, order, down_tiling, 1, None)
    output_weights = None if weights_input else topk_weights
    return sum_expert_outputs(y, topk_ids, output_weights, num_experts, x, fusion)


def pair_products(
    x: torch.Tensor, topk_ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply the row of every pair by the matrix of its expert, and end there.

    x [pairs, in], weight [experts, out, in], bias [experts, out] -> [pairs, out]. Rows of pairs
    without an expert are not defined.
    """
    if not use_triton(x):
        return pair_products_reference(x, topk_ids, weight, bias)
    num_experts = len(weight)
    num_pairs = topk_ids.numel()
    few_pairs = num_pairs <= max(topk_ids.shape[1], num_experts // 4)
    if few_pairs and supports_gemv(weight):
        return gemv_triton(x, weight, bias, routing=ExpertRouting(topk_ids, num_experts))
    max_block = 32 if x.dtype == torch.float32 else 128
    block = min(max_block, max(16, next_power_of_2(num_pairs // num_experts)))
    order = sort_by_expert(topk_ids, num_experts)
    return grouped_gemm(order.gather(x), weight, bias, order, DOWN_TILINGS[block], 1, None)


def pair_products_reference(
    x: torch.Tensor, topk_ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same as `pair_products`, in torch."""
    pair_experts = topk_ids.flatten()
    y: torch.Tensor | None = None
    for expert in pair_experts.unique().tolist():
        if not 0 <= expert < len(weight):
            continue
        pairs = (pair_experts == expert).nonzero()[:, 0]
        products = F.linear(x[pairs], weight[expert], None if bias is None else bias[expert])
        if y is None:
            y = x.new_zeros(len(x), products.shape[1])
        y[pairs] = products
    return x.new_zeros(len(x), weight[0].shape[0]) if y is None else y


def sum_pairs(
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_experts: int,
    x: torch.Tensor,
    fusion: ExpertsFusion,
) -> torch.Tensor:
    """Return the weighted sum over each token's experts, [tokens, hidden], for y [pairs, hidden].

    Without weights all of them are 1. The shared expert's output and the residual are added.
    """
    if use_triton(x):
        return sum_expert_outputs(y, topk_ids, topk_weights, num_experts, x, fusion)
    is_routed = (topk_ids >= 0) & (topk_ids < num_experts)
    weights = is_routed.float() if topk_weights is None else topk_weights * is_routed
    total = (y.view(*topk_ids.shape, -1).float() * weights[..., None]).sum(1)
    if fusion.shared is not None:
        total = total + fusion.shared.weighted_reference().float()
    if fusion.residual is not None:
        total = fusion.residual.tensor.float() + fusion.residual.scale * total
    return total.to(x.dtype)


class ExpertOrder(NamedTuple):
    """Pairs sorted by expert."""

    sorted_pairs: torch.Tensor  # [pairs] int32
    # [2, experts] int32: each expert's first place in sorted_pairs, and the number of its pairs
    expert_ranges: torch.Tensor

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x [pairs, width] in this order."""
        # Places behind the last pair that has an expert are not written.
        return x[self.sorted_pairs.clamp(0, len(x) - 1)]


def sort_by_expert(topk_ids: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sort the pairs of topk_ids [tokens, top_k] by expert; the order is stable."""
    num_pairs = topk_ids.numel()
    device = topk_ids.device
    sorted_pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    expert_ranges = torch.empty(2, num_experts, dtype=torch.int32, device=device)
    sort_by_expert_kernel[(num_experts,)](
        topk_ids,
        sorted_pairs,
        expert_ranges,
        num_pairs,
        num_experts,
        WIDTH=min(8192, max(32, next_power_of_2(num_pairs))),
        num_warps=8 if num_pairs > 1024 else 4,
        **pdl_options(device),
    )
    return ExpertOrder(sorted_pairs, expert_ranges)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: ExpertOrder,
    tiling: GroupedGemmTiling,
    pairs_per_row: int,
    activation: ActivationEpilogue | None,
    input_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply every pair by the weights of its expert: [pairs, outputs].

    With an activation (the up projection), x has one row for each token, of `pairs_per_row` pairs,
    and the result has one row for each sorted pair. Without (down), x has sorted pairs and the
    result has pairs. `input_weights` [tokens, top_k] multiply the rows of x.
    """
    num_experts, rows, inputs = weight.shape
    num_pairs = len(order.sorted_pairs)
    gated = activation is not None and activation.gated
    outputs = rows // 2 if gated else rows
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    block_in = tiling.inputs * 2 // x.element_size()
    max_blocks = (num_pairs + num_experts * (tiling.pairs - 1)) // tiling.pairs
    blocks = min(num_pairs, max_blocks)
    name, _, params = activation or ActivationEpilogue("", False)
    grouped_gemm_kernel[(-(-outputs // tiling.outputs), blocks)](
        x,
        weight,
        x if bias is None else bias,
        x if input_weights is None else input_weights,
        out,
        order.sorted_pairs,
        order.expert_ranges,
        *params,
        NUM_EXPERTS=num_experts,
        EXPERTS_POW2=next_power_of_2(num_experts),
        OUTPUTS=outputs,
        INPUTS=inputs,
        PAIRS_PER_ROW=pairs_per_row,
        IS_UP=activation is not None,
        ACTIVATION=name,
        GATED=gated,
        HAS_BIAS=bias is not None,
        WEIGHTS_INPUT=input_weights is not None,
        BLOCK_PAIRS=tiling.pairs,
        BLOCK_OUT=tiling.outputs,
        BLOCK_IN=block_in,
        STAGES=tiling.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out


@jit
def sort_by_expert_kernel(
    topk_ids,  # [pairs]
    sorted_pairs,  # [pairs]
    expert_ranges,  # [2, experts]: each expert's first place in sorted_pairs, and its pairs
    num_pairs,
    num_experts,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places the pairs of one expert, in their order, after those of lower experts."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    place = 0
    count = 0
    for start in range(0, num_pairs, WIDTH):
        pair = start + tl.arange(0, WIDTH)
        e = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1)
        place += tl.sum(((e >= 0) & (e < expert)).to(tl.int32), 0)
        count += tl.sum((e == expert).to(tl.int32), 0)
    tl.store(expert_ranges + expert, place)
    tl.store(expert_ranges + num_experts + expert, count)
    for start in range(0, num_pairs, WIDTH):
        pair = start + tl.arange(0, WIDTH)
        is_member = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1) == expert
        tl.store(
            sorted_pairs + place + tl.cumsum(is_member.to(tl.int32), 0) - 1, pair, mask=is_member
        )
        place += tl.sum(is_member.to(tl.int32), 0)


@jit
def grouped_gemm_kernel(
    x,  # [rows, INPUTS]
    weight,  # [NUM_EXPERTS, OUTPUTS, INPUTS], or [NUM_EXPERTS, 2 * OUTPUTS, INPUTS] if gated
    bias,  # [NUM_EXPERTS, OUTPUTS], or [NUM_EXPERTS, 2 * OUTPUTS] if gated
    input_weights,  # [pairs]
    out,  # [pairs, OUTPUTS]
    sorted_pairs,  # [pairs]
    expert_ranges,  # [2, NUM_EXPERTS]
    param0,
    param1,
    param2,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IS_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTS_INPUT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT outputs of up to BLOCK_PAIRS pairs of one expert."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert, start, end = locate_expert_block(
        tl.program_id(1), expert_ranges, NUM_EXPERTS, EXPERTS_POW2, BLOCK_PAIRS
    )
    if expert < NUM_EXPERTS:
        place = start + tl.arange(0, BLOCK_PAIRS)
        is_pair = (place < end)[:, None]
        pair = tl.load(sorted_pairs + place, mask=place < end, other=0).to(tl.int64)
        n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        k = tl.arange(0, BLOCK_IN)
        WEIGHT_ROWS: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
        x_row = pair // PAIRS_PER_ROW if IS_UP else place.to(tl.int64)
        x_tile = x + x_row[:, None] * INPUTS + k[None, :]
        weight_row = expert.to(tl.int64) * WEIGHT_ROWS + n
        weight_tile = weight + weight_row[:, None] * INPUTS + k[None, :]
        y = tl.zeros([BLOCK_PAIRS, BLOCK_OUT], tl.float32)
        z = y
        is_output = (n < OUTPUTS)[:, None]
        for k0 in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            is_input = (k0 + k < INPUTS)[None, :]
            v = tl.load(x_tile + k0, mask=is_pair & is_input, other=0.0)
            w = tl.load(weight_tile + k0, mask=is_output & is_input, other=0.0)
            y = tl.dot(v, tl.trans(w), y, input_precision=PRECISION)
            if GATED:
                up_tile = weight_tile + OUTPUTS * INPUTS + k0
                w_up = tl.load(up_tile, mask=is_output & is_input, other=0.0)
                z = tl.dot(v, tl.trans(w_up), z, input_precision=PRECISION)
        if WEIGHTS_INPUT:
            input_weight = tl.load(input_weights + pair).to(tl.float32)[:, None]
            y = y * input_weight
            z = z * input_weight
        if HAS_BIAS:
            y += tl.load(bias + weight_row, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_bias = tl.load(bias + weight_row + OUTPUTS, mask=n < OUTPUTS, other=0.0)
                z += up_bias.to(tl.float32)[None, :]
        if IS_UP:
            y = activate_tile(y, z, ACTIVATION, GATED, param0, param1, param2)
        out_row = (place if IS_UP else pair).to(tl.int64)
        out_offset = out_row[:, None] * OUTPUTS + n[None, :]
        out_mask = is_pair & (n < OUTPUTS)[None, :]
        tl.store(out + out_offset, y.to(out.dtype.element_ty), mask=out_mask)


@jit
def locate_expert_block(
    block,
    expert_ranges,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Return the expert of a block, its first place in sorted_pairs, and the end of the expert.

    The expert is NUM_EXPERTS or more if there is no such block.
    """
    e = tl.arange(0, EXPERTS_POW2)
    count = tl.load(expert_ranges + NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=0)
    blocks = (count + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    last_blocks = tl.cumsum(blocks, 0)
    expert = tl.sum((last_blocks <= block).to(tl.int32), 0)
    is_member = e == expert
    expert_start = tl.load(expert_ranges + tl.minimum(expert, NUM_EXPERTS - 1))
    first_block = tl.sum(tl.where(is_member, last_blocks - blocks, 0), 0)
    start = expert_start + (block - first_block) * BLOCK_PAIRS
    return expert, start, expert_start + tl.sum(tl.where(is_member, count, 0), 0)


class ExpertSumLaunch(NamedTuple):
    """The result of a kernel that ends in `store_expert_sum`, and what that function takes."""

    out: torch.Tensor  # [tokens, hidden]
    # shared output, gate logits, residual, out, residual scale
    arguments: tuple[torch.Tensor | float, ...]
    constants: dict[str, bool]


def describe_expert_sum(x: torch.Tensor, fusion: ExpertsFusion) -> ExpertSumLaunch:
    """Allocate the sum over each token's experts, like x, and describe what is added to it."""
    shared = fusion.shared
    residual = fusion.residual
    gate_logits = None if shared is None else shared.gate_logits
    out = torch.empty_like(x)
    arguments = (
        out if shared is None else shared.y.contiguous(),
        out if gate_logits is None else gate_logits.contiguous(),
        out if residual is None else residual.tensor.contiguous(),
        out,
        1.0 if residual is None else residual.scale,
    )
    constants = {
        "HAS_SHARED": shared is not None,
        "HAS_GATE": gate_logits is not None,
        "HAS_RESIDUAL": residual is not None,
    }
    return ExpertSumLaunch(out, arguments, constants)


@jit
def store_expert_sum(
    total,  # [columns] of the token
    token,
    column,
    shared,  # [tokens, HIDDEN]
    gate_logits,  # [tokens]
    residual,  # [tokens, HIDDEN]
    out,  # [tokens, HIDDEN]
    residual_scale,
    HIDDEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add the shared expert's output and the residual to a token's sum, and store it."""
    place = token * HIDDEN + column
    inside = column < HIDDEN
    if HAS_SHARED:
        shared_output = tl.load(shared + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared_output *= tl.sigmoid(tl.load(gate_logits + token).to(tl.float32))
        total += shared_output
    if HAS_RESIDUAL:
        residual_values = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        total = residual_values + residual_scale * total
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def sum_expert_outputs(
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_experts: int,
    x: torch.Tensor,
    fusion: ExpertsFusion,
) -> torch.Tensor:
    """Return the weighted sum over each token's experts, [tokens, hidden], for y [pairs, hidden].

    Without weights all of them are 1. The shared expert's output and the residual are added.
    """
    launch = describe_expert_sum(x, fusion)
    tokens, hidden = x.shape
    width = min(1024, next_power_of_2(hidden))
    sum_expert_outputs_kernel[(tokens, -(-hidden // width))](
        y,
        topk_ids,
        topk_ids if topk_weights is None else topk_weights,
        *launch.arguments,
        num_experts,
        HIDDEN=hidden,
        TOP_K=topk_ids.shape[1],
        WIDTH=width,
        HAS_WEIGHTS=topk_weights is not None,
        **launch.constants,
        num_warps=4,
        **pdl_options(x.device),
    )
    return launch.out


@jit
def sum_expert_outputs_kernel(
    y,  # [tokens * TOP_K, HIDDEN]
    topk_ids,  # [tokens, TOP_K]
    topk_weights,  # [tokens, TOP_K]
    shared,  # [tokens, HIDDEN]
    gate_logits,  # [tokens]
    residual,  # [tokens, HIDDEN]
    out,  # [tokens, HIDDEN]
    residual_scale,
    num_experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program sums WIDTH columns of one token."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(topk_ids + pair)
        # The rows of invalid experts were never written, so they are not read either.
        valid_width = tl.where((expert >= 0) & (expert < num_experts), HIDDEN, 0)
        expert_output = tl.load(y + pair * HIDDEN + column, mask=column < valid_width, other=0.0)
        expert_output = expert_output.to(tl.float32)
        if HAS_WEIGHTS:
            expert_output *= tl.load(topk_weights + pair).to(tl.float32)
        total += expert_output
    store_expert_sum(
        total,
        token,
        column,
        shared,
        gate_logits,
        residual,
        out,
        residual_scale,
        HIDDEN,
        HAS_SHARED,
        HAS_GATE,
        HAS_RESIDUAL,
    )

"""Products of mixture-of-experts layers with weights of any format.

Kernels multiply packed experts as they are where they can. Otherwise the experts that tokens were
routed to are dequantized during the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from bloomery.fusion import NormPrologue
from bloomery.kernels.activation import apply_activation
from bloomery.kernels.moe import (
    NO_FUSED_SHARED,
    ExpertOptions,
    ExpertsFusion,
    FusedSharedExperts,
    PreparedInputs,
    SharedOutput,
    fused_experts,
    fused_experts_reference,
    pair_products,
    pair_products_reference,
    route_topk,
    sum_pairs,
)
from bloomery.kernels.packed import PackedWeight, describe_layout
from bloomery.kernels.packed_moe import (
    can_prepare_experts,
    packed_fused_experts,
    packed_pair_products,
    supports_packed_experts,
)
from bloomery.kernels.packed_moe_gemv import route_and_prepare
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool
from bloomery.quant.base import PreparedWeight
from bloomery.quant.dense import DenseWeight
from bloomery.quant.lora import LinearAdapters
from bloomery.quant.native import NativeWeight
from bloomery.quant.quantized_weight import (
    QuantizedWeight,
    count_rows,
    dequantize_range,
    has_kernels,
)
from bloomery.spec import RouterSpec


class QuantizedExperts:
    """A stack of expert matrices [experts, out, in] that dequantizes one when it is indexed."""

    def __init__(self, weight: PreparedWeight, num_experts: int):
        self.weight = weight  # [experts * out, in]
        self.num_experts = num_experts
        self.rows_per_expert = count_rows(weight) // num_experts

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, expert: int) -> torch.Tensor:
        start = expert * self.rows_per_expert
        return dequantize_range(self.weight, start, start + self.rows_per_expert)

    def dequantize_all(self) -> torch.Tensor:
        """Dequantize every expert: [experts, out, in]."""
        num_rows = self.num_experts * self.rows_per_expert
        matrices = dequantize_range(self.weight, 0, num_rows)
        return matrices.unflatten(0, (self.num_experts, -1))

    def dequantize(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """Dequantize these experts, [n] -> [n, out, in], without copying the ids to the host."""
        first_rows = expert_ids.long()[:, None] * self.rows_per_expert
        offsets = torch.arange(self.rows_per_expert, device=expert_ids.device)
        rows = (first_rows + offsets).flatten()
        matrices = self.weight.gather(rows)
        return matrices.unflatten(0, (-1, self.rows_per_expert))


class ExpertAdapters(NamedTuple):
    """The LoRA adapters of all experts of a block."""

    up: LinearAdapters
    down: LinearAdapters


@dataclass(frozen=True)
class ExpertStack:
    """The experts of a block, with weights of any format."""

    num_experts: int
    up: PreparedWeight  # [experts * (gate | up), hidden]
    down: PreparedWeight  # [experts * hidden, intermediate]
    options: ExpertOptions = ExpertOptions()  # noqa: RUF009 (it is immutable)
    adapters: ExpertAdapters | None = None


def run_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: ExpertStack,
    fusion: ExpertsFusion = ExpertsFusion(),  # noqa: B008 (it is immutable)
) -> torch.Tensor:
    """Run every token through its experts and sum up the weighted results: [tokens, hidden].

    x: [tokens, hidden]
    expert_ids and expert_weights: [tokens, top_k]; ids outside of 0:num_experts add nothing
    fusion: what is computed together with the experts
    """
    if experts.adapters is not None and experts.adapters.up.is_active:
        return run_adapted_experts(x, expert_ids, expert_weights, experts, experts.adapters, fusion)
    native = find_native_experts(x, experts, fusion)
    if native is not None:
        return run_native_experts(native, x, expert_ids, expert_weights, experts, fusion.shared)
    num_experts = experts.num_experts
    up = experts.up
    down = experts.down
    options = experts.options
    if isinstance(up, DenseWeight) and isinstance(down, DenseWeight):
        dense_up = up.weight.unflatten(0, (num_experts, -1))
        dense_down = down.weight.unflatten(0, (num_experts, -1))
        return fused_experts(x, expert_ids, expert_weights, dense_up, dense_down, options, fusion)
    if x.is_cuda:
        packed_up = find_packed(up, x.dtype)
        packed_down = find_packed(down, x.dtype)
        if packed_up is not None and packed_down is not None:
            return packed_fused_experts(
                x, expert_ids, expert_weights, packed_up, packed_down, num_experts, options, fusion
            )
    ups = QuantizedExperts(up, num_experts)
    downs = QuantizedExperts(down, num_experts)
    if not x.is_cuda:
        # The reference indexes one expert after another.
        stacks: tuple[Any, Any] = (ups, downs)
        return fused_experts_reference(x, expert_ids, expert_weights, *stacks, options, fusion)
    if expert_ids.numel() >= num_experts:
        dense_up = ups.dequantize_all()
        dense_down = downs.dequantize_all()
        return fused_experts(x, expert_ids, expert_weights, dense_up, dense_down, options, fusion)
    # Fewer routings than experts: dequantize one copy per routing, even of the same expert.
    is_local = (expert_ids >= 0) & (expert_ids < num_experts)
    local_ids = torch.where(is_local, expert_ids, 0).flatten()
    copies = torch.arange(len(local_ids), device=x.device).view_as(expert_ids)
    copy_ids = torch.where(is_local, copies, -1).int()
    dense_up = ups.dequantize(local_ids)
    dense_down = downs.dequantize(local_ids)
    up_bias = None if options.up_bias is None else options.up_bias[local_ids]
    down_bias = None if options.down_bias is None else options.down_bias[local_ids]
    options = options._replace(up_bias=up_bias, down_bias=down_bias)
    return fused_experts(x, copy_ids, expert_weights, dense_up, dense_down, options, fusion)


class RoutedInputs(NamedTuple):
    """The experts of each token, their weights, and the experts' input if it is prepared."""

    expert_ids: torch.Tensor  # [tokens, top_k]
    weights: torch.Tensor  # [tokens, top_k]
    prepared: PreparedInputs | None


def route_inputs(
    x: torch.Tensor,
    experts: ExpertStack,
    prologue: NormPrologue | None,
    logits: torch.Tensor,
    top_k: int,
    router: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    fused_shared: FusedSharedExperts = NO_FUSED_SHARED,
) -> RoutedInputs:
    """Route x [tokens, hidden] by its logits, and prepare it for the experts in the same launch."""
    routing = (logits, top_k, router, correction_bias, expert_scale, fused_shared)
    packed_up = find_packed(experts.up, x.dtype)
    packed_down = find_packed(experts.down, x.dtype)
    if (
        x.is_cuda
        and packed_up is not None
        and packed_down is not None
        and can_prepare_experts(
            x, packed_up, packed_down, experts.num_experts, top_k + fused_shared.count
        )
    ):
        layout = describe_layout(packed_up)
        return RoutedInputs(*route_and_prepare(x, layout, prologue, *routing))
    return RoutedInputs(*route_topk(*routing), None)


class NativeExperts(NamedTuple):
    """The experts of a block in the layout of the native CPU kernels."""

    pool: ThreadPool
    up: ops.NativeMatrix
    down: ops.NativeMatrix


def find_native_experts(
    x: torch.Tensor, experts: ExpertStack, fusion: ExpertsFusion
) -> NativeExperts | None:
    """Return the experts for native kernels; None if those cannot run them."""
    options = experts.options
    num_experts = experts.num_experts
    match experts.up, experts.down:
        case NativeWeight(up, pool), NativeWeight(down):
            pass
        case _:
            return None
    if not up.holds_experts(num_experts, options.activation.gated):
        return None
    if not down.holds_experts(num_experts, gated=False):
        return None
    if fusion.prologue is not None or fusion.residual is not None:
        return None
    if not pool.accepts(x, options.up_bias, options.down_bias, *(fusion.shared or ())):
        return None
    return NativeExperts(pool, up, down)


def run_native_experts(
    native: NativeExperts,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: ExpertStack,
    shared: SharedOutput | None,
) -> torch.Tensor:
    """Run the experts with native CPU kernels, on pairs sorted by expert."""
    pool, up, down = native
    activation, up_bias, down_bias, weights_input = experts.options
    num_experts = experts.num_experts
    order, starts = ops.sort_pairs(pool, expert_ids, num_experts)
    input_weights = expert_weights if weights_input else None
    output_weights = None if weights_input else expert_weights
    top_k = expert_ids.shape[1]
    h = ops.expert_linear(pool, up, x, up_bias, order, starts, top_k, activation, input_weights)
    y = ops.expert_linear(pool, down, h, down_bias, order, starts, top_k, None)
    shared_output, gate_logits = shared or (None, None)
    return ops.sum_experts(
        pool, y, expert_ids, output_weights, num_experts, shared_output, gate_logits
    )


def run_adapted_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: ExpertStack,
    adapters: ExpertAdapters,
    fusion: ExpertsFusion,
) -> torch.Tensor:
    """Run the experts with the adapters of each token.

    An adapter adds to each of the two products, so these end in memory before the activation and
    before the weighted sum.
    """
    native = find_native_experts(x, experts, fusion)
    if native is not None:
        return run_adapted_native_experts(
            native, x, expert_ids, expert_weights, experts, adapters, fusion.shared
        )
    x, fusion = fusion.apply_prologue(x)
    activation, up_bias, down_bias, weights_input = experts.options
    top_k = expert_ids.shape[1]
    pair_input = x.repeat_interleave(top_k, 0)
    if weights_input:
        pair_input = (pair_input * expert_weights.flatten()[:, None]).to(x.dtype)
    multiply = partial(multiply_pairs, expert_ids=expert_ids, num_experts=experts.num_experts)
    h = multiply(experts.up, pair_input, up_bias)
    h = apply_activation(adapters.up.add(pair_input, h, None, expert_ids), activation)
    y = adapters.down.add(h, multiply(experts.down, h, down_bias), None, expert_ids)
    return sum_pairs(
        y, expert_ids, None if weights_input else expert_weights, experts.num_experts, x, fusion
    )


def multiply_pairs(
    weight: PreparedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    expert_ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Multiply the row of every (token, choice) pair by the matrix of its expert.

    weight [experts * out, in], x [pairs, in], bias [experts, out] -> [pairs, out]. Rows of pairs
    without an expert are not defined.
    """
    if x.is_cuda:
        packed = find_packed(weight, x.dtype)
        if packed is not None:
            return packed_pair_products(x, expert_ids, packed, bias, num_experts)
        if isinstance(weight, DenseWeight):
            matrices = weight.weight.unflatten(0, (num_experts, -1))
        else:
            matrices = QuantizedExperts(weight, num_experts).dequantize_all()
        return pair_products(x, expert_ids, matrices, bias)
    stack: Any = QuantizedExperts(weight, num_experts)  # the reference indexes one after another
    return pair_products_reference(x, expert_ids, stack, bias)


def run_adapted_native_experts(
    native: NativeExperts,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: ExpertStack,
    adapters: ExpertAdapters,
    shared: SharedOutput | None,
) -> torch.Tensor:
    """Run the experts and the adapters of each token with native CPU kernels."""
    pool, up, down = native
    activation, up_bias, down_bias, weights_input = experts.options
    num_experts = experts.num_experts
    num_pairs = expert_ids.numel()
    order, starts = ops.sort_pairs(pool, expert_ids, num_experts)
    input_weights = expert_weights if weights_input else None
    pair_input = ops.pair_inputs(pool, x, num_pairs, None, input_weights)

    def multiply(
        matrix: ops.NativeMatrix, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ordered = ops.pair_inputs(pool, inputs, num_pairs, order)
        return ops.expert_linear(pool, matrix, ordered, bias, order, starts, 1, None)

    h = adapters.up.add(pair_input, multiply(up, pair_input, up_bias), pool, expert_ids)
    h = ops.activate(pool, h, activation)
    y = adapters.down.add(h, multiply(down, h, down_bias), pool, expert_ids)
    output_weights = None if weights_input else expert_weights
    shared_output, gate_logits = shared or (None, None)
    return ops.sum_experts(
        pool, y, expert_ids, output_weights, num_experts, shared_output, gate_logits
    )


def find_packed(weight: PreparedWeight, dtype: torch.dtype) -> PackedWeight | None:
    """The packed matrix, if kernels multiply its experts as they are."""
    if not isinstance(weight, QuantizedWeight):
        return None
    packed = weight.packed
    if has_kernels(packed) and supports_packed_experts(packed, dtype):
        return packed
    return None

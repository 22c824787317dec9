"""Products of mixture-of-experts layers with weights of any format.

Kernels multiply packed experts as they are where they can. Otherwise the experts that tokens were
routed to are dequantized during the step.
"""

from __future__ import annotations

from typing import Any

import torch

from bloomery.kernels.moe import fused_experts, fused_experts_reference
from bloomery.kernels.packed import PackedWeight
from bloomery.kernels.packed_moe import packed_fused_experts, supports_packed_experts
from bloomery.quant.base import PreparedWeight
from bloomery.quant.dense import DenseWeight
from bloomery.quant.quantized_weight import (
    QuantizedWeight,
    count_rows,
    dequantize_range,
    has_kernels,
)


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


def run_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: PreparedWeight,
    down: PreparedWeight,
    num_experts: int,
    activation: str,
) -> torch.Tensor:
    """Run every token through its experts and sum up the weighted results: [tokens, hidden].

    x: [tokens, hidden]
    expert_ids and expert_weights: [tokens, top_k]; ids outside of 0:num_experts add nothing
    up: [experts * (gate | up), hidden]
    down: [experts * hidden, intermediate]
    """
    if isinstance(up, DenseWeight) and isinstance(down, DenseWeight):
        dense_up = up.weight.unflatten(0, (num_experts, -1))
        dense_down = down.weight.unflatten(0, (num_experts, -1))
        return fused_experts(x, expert_ids, expert_weights, dense_up, dense_down, activation)
    if x.is_cuda:
        packed_up = find_packed(up, x.dtype)
        packed_down = find_packed(down, x.dtype)
        if packed_up is not None and packed_down is not None:
            return packed_fused_experts(
                x, expert_ids, expert_weights, packed_up, packed_down, num_experts, activation
            )
    ups = QuantizedExperts(up, num_experts)
    downs = QuantizedExperts(down, num_experts)
    if not x.is_cuda:
        # The reference indexes one expert after another.
        stacks: tuple[Any, Any] = (ups, downs)
        return fused_experts_reference(x, expert_ids, expert_weights, *stacks, activation)
    if expert_ids.numel() >= num_experts:
        dense_up = ups.dequantize_all()
        dense_down = downs.dequantize_all()
        return fused_experts(x, expert_ids, expert_weights, dense_up, dense_down, activation)
    # Fewer routings than experts: dequantize one copy per routing, even of the same expert.
    is_local = (expert_ids >= 0) & (expert_ids < num_experts)
    local_ids = torch.where(is_local, expert_ids, 0).flatten()
    copies = torch.arange(len(local_ids), device=x.device).view_as(expert_ids)
    copy_ids = torch.where(is_local, copies, -1).int()
    dense_up = ups.dequantize(local_ids)
    dense_down = downs.dequantize(local_ids)
    return fused_experts(x, copy_ids, expert_weights, dense_up, dense_down, activation)


def find_packed(weight: PreparedWeight, dtype: torch.dtype) -> PackedWeight | None:
    """The packed matrix, if kernels multiply its experts as they are."""
    if not isinstance(weight, QuantizedWeight):
        return None
    packed = weight.packed
    if has_kernels(packed) and supports_packed_experts(packed, dtype):
        return packed
    return None

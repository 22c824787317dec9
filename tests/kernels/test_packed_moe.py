"""Packed experts under the interpreter, against the loop over dequantized experts in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bloomery.kernels.moe import route_topk
from bloomery.kernels.packed import GroupedScales, pack_codes
from bloomery.kernels.packed_gemv import PackedGemvTiling
from bloomery.kernels.packed_moe import (
    packed_experts_gemv,
    packed_experts_grouped,
    packed_fused_experts_reference,
    supports_packed_experts,
)
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS
from tests.kernels.oracles import relative_error
from tests.kernels.packed_oracles import MAIN_FORMATS, make_packed_weight

FP16 = torch.float16
NUM_EXPERTS = 3

CASES = [(packed_experts_gemv, 1, packed_format) for packed_format in ("int4 128 zero", "fp8 row")]
CASES += [
    (packed_experts_grouped, 20, packed_format)
    for packed_format in (*MAIN_FORMATS.values(), "int4 64 zero")
]


@pytest.mark.parametrize(("run_experts", "tokens", "packed_format"), CASES)
def test_kernels_equal_reference(
    run_experts: Callable[..., torch.Tensor], tokens: int, packed_format: str
) -> None:
    torch.manual_seed(tokens)
    size = 64 if packed_format.startswith(("int8", "fp8")) else 128  # hidden and intermediate
    up = make_packed_weight(packed_format, NUM_EXPERTS * 2 * size, size, "cpu")
    down = make_packed_weight(packed_format, NUM_EXPERTS * size, size, "cpu")
    x = torch.randn(tokens, size).to(FP16)
    topk_ids, topk_weights = route_topk(torch.randn(tokens, NUM_EXPERTS), 2, True)
    # Expert numbers out of range belong to padding rows, which have no expert.
    topk_ids[0, 1] = -1
    topk_ids[tokens // 2, 0] = NUM_EXPERTS if tokens > 1 else 1
    tiling = PackedGemvTiling(32, 32, 1) if run_experts is packed_experts_gemv else None
    actual = run_experts(x, topk_ids, topk_weights, up, down, NUM_EXPERTS, "silu", tiling)
    expected = packed_fused_experts_reference(
        x.double(), topk_ids, topk_weights, up, down, NUM_EXPERTS
    )
    assert relative_error(actual, expected) < 2 * LINEAR_ERROR_LIMITS[FP16]


def test_supported_weights() -> None:
    packed = make_packed_weight("int4 128 zero", 64, 512, "cpu")
    assert supports_packed_experts(packed, FP16)
    assert not supports_packed_experts(packed, torch.float32)
    act_order = make_packed_weight("int4 128 zero order", 64, 512, "cpu")
    assert not supports_packed_experts(act_order, FP16)
    groups_of_16 = GroupedScales(pack_codes(torch.zeros(4, 48), 4), torch.ones(4, 3))
    assert not supports_packed_experts(groups_of_16, FP16)

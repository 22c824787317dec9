"""Packed experts under the interpreter, against the loop over dequantized experts in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bloomery.fusion import NormPrologue, ResidualEpilogue
from bloomery.kernels.moe import ExpertsFusion, SharedOutput, route_topk
from bloomery.kernels.norm import rms_norm_reference
from bloomery.kernels.packed import GroupedScales, describe_layout, pack_codes
from bloomery.kernels.packed_gemm import PackedGemmTiling
from bloomery.kernels.packed_gemv import PackedGemvTiling
from bloomery.kernels.packed_moe import (
    packed_experts_gemv,
    packed_experts_grouped,
    packed_fused_experts_reference,
    supports_packed_experts,
)
from bloomery.kernels.packed_moe_gemv import (
    ExpertGemvTiling,
    packed_experts_gemv_summed,
    route_and_prepare,
    supports_expert_gemv,
)
from bloomery.spec import RouterSpec
from tests.kernels.linear_oracles import LINEAR_ERROR_LIMITS
from tests.kernels.moe_oracles import make_expert_options
from tests.kernels.oracles import relative_error
from tests.kernels.packed_oracles import MAIN_FORMATS, MXFP4, make_packed_weight

FP16 = torch.float16
NUM_EXPERTS = 3

CASES = [
    (packed_experts_gemv, 1, "int4 128 zero", "plain"),
    (packed_experts_gemv, 1, "fp8 row", "ungated"),
    (packed_experts_gemv, 2, MXFP4, "clamped, biases"),
    (packed_experts_gemv, 2, MXFP4, "weights of the input"),
    (packed_experts_gemv_summed, 1, "int4 32 zero", "plain"),
    (packed_experts_gemv_summed, 2, MXFP4, "clamped, biases"),
    (packed_experts_gemv_summed, 2, MXFP4, "weights of the input"),
    (packed_experts_gemv_summed, 2, "int8 16 signed", "ungated"),
    (packed_experts_grouped, 20, MXFP4, "clamped, biases"),
    (packed_experts_grouped, 20, MXFP4, "weights of the input"),
    (packed_experts_grouped, 20, "int4 64 zero", "ungated"),
    *(
        (packed_experts_grouped, 20, packed_format, "plain")
        for packed_format in MAIN_FORMATS.values()
    ),
]


@pytest.mark.parametrize(("run_experts", "tokens", "packed_format", "kind"), CASES)
def test_kernels_equal_reference(
    run_experts: Callable[..., torch.Tensor], tokens: int, packed_format: str, kind: str
) -> None:
    torch.manual_seed(tokens)
    size = 64 if packed_format.startswith(("int8", "fp8")) else 128  # hidden and intermediate
    if packed_format == MXFP4:
        size = 160  # the last unit of a row is incomplete
    options = make_expert_options(kind, NUM_EXPERTS, size, size, FP16, "cpu")
    up_rows = 2 * size if options.activation.gated else size
    up = make_packed_weight(packed_format, NUM_EXPERTS * up_rows, size, "cpu")
    down = make_packed_weight(packed_format, NUM_EXPERTS * size, size, "cpu")
    x = torch.randn(tokens, size).to(FP16)
    topk_ids, topk_weights = route_topk(torch.randn(tokens, NUM_EXPERTS), 2, RouterSpec())
    # Expert numbers out of range belong to padding rows, which have no expert.
    topk_ids[0, 1] = -1
    topk_ids[tokens // 2, 0] = NUM_EXPERTS if tokens > 1 else 1
    tilings: tuple[object, object] = (None, None)
    if run_experts is packed_experts_gemv:
        tilings = (PackedGemvTiling(32, 32, 1),) * 2
    elif run_experts is packed_experts_gemv_summed:
        tilings = (ExpertGemvTiling(64, 4, 1), ExpertGemvTiling(64, 4, 1))
    elif kind == "clamped, biases":  # iterations that end behind the row
        tilings = (PackedGemmTiling(16, 64, 4, 2, 1, 4), PackedGemmTiling(16, 64, 4, 2, 1, 4))
    prologue = NormPrologue("rms", torch.randn(size), None, 1e-5)
    shared = SharedOutput(torch.randn(tokens, size).to(FP16), torch.randn(tokens, 1).to(FP16))
    residual = ResidualEpilogue(torch.randn(tokens, size).to(FP16), 0.7)
    fusion = ExpertsFusion(prologue, shared, residual)
    routing = (topk_ids, topk_weights, up, down, NUM_EXPERTS, options, fusion)
    actual = run_experts(x, *routing, tilings=tilings)
    expected = packed_fused_experts_reference(x.double(), *routing)
    assert relative_error(actual, expected) < 2 * LINEAR_ERROR_LIMITS[FP16]


@pytest.mark.parametrize("packed_format", [MXFP4, "int4 32", "int8 16 signed"])
def test_inputs_are_routed_and_rounded_in_one_launch(packed_format: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 1088).to(FP16)
    prologue = NormPrologue("rms", torch.randn(1088), None, 1e-5)
    logits = torch.randn(2, 10)
    layout = describe_layout(make_packed_weight(packed_format, 8, 1088, "cpu"))
    ids, weights, prepared = route_and_prepare(x, layout, prologue, logits, 3, RouterSpec())
    expected_ids, expected_weights = route_topk(logits, 3, RouterSpec())
    assert torch.equal(ids, expected_ids)
    assert relative_error(weights, expected_weights) < 1e-6
    columns = 128 // layout.bits
    expected = rms_norm_reference(x.float(), prologue.weight, prologue.eps)
    high, low = prepared.words.view(torch.int8).unflatten(-1, (2, columns)).unbind(2)
    values = (high.float() * 256 + low.view(torch.uint8).float()) * prepared.scales[..., :1]
    if packed_format == "int4 32":  # the even columns of eight come first
        values = values.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(2)
    assert relative_error(values.flatten(1), expected) < 1e-4
    assert relative_error(prepared.scales[..., 1], values.sum(-1)) < 1e-3


def test_supported_weights() -> None:
    packed = make_packed_weight("int4 128 zero", 64, 512, "cpu")
    assert supports_packed_experts(packed, FP16)
    assert not supports_packed_experts(packed, torch.float32)
    act_order = make_packed_weight("int4 128 zero order", 64, 512, "cpu")
    assert not supports_packed_experts(act_order, FP16)
    groups_of_16 = GroupedScales(pack_codes(torch.zeros(4, 48), 4), torch.ones(4, 3))
    assert not supports_packed_experts(groups_of_16, FP16)
    assert supports_expert_gemv(packed, FP16)
    assert not supports_expert_gemv(packed, torch.float32)
    for other in ("int4 row", "nf4 64", "fp8 row"):
        assert not supports_expert_gemv(make_packed_weight(other, 64, 512, "cpu"), FP16)

"""A linear layer gives the same result whether or not its weights fuse norm and epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from bloomery.fusion import (
    ActivationEpilogue,
    Epilogue,
    NormPrologue,
    QkTransform,
    QkvEpilogue,
    ResidualEpilogue,
)
from bloomery.kernels.gemv import fused_linear_reference
from bloomery.kernels.norm import RmsNorm
from bloomery.layers.linear import (
    AddResidual,
    DeferredAdd,
    LinearLayer,
    LowRankPart,
    add_normed,
    apply_norm,
    materialize,
)

HIDDEN = 16


@dataclass(frozen=True)
class FusingWeight:
    """Weights that fuse everything, a product without epilogue only, or nothing."""

    weight: torch.Tensor
    fuses: str  # "all", "product" or "nothing"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def fused_linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        prologue: NormPrologue | None,
        epilogue: Epilogue,
    ) -> torch.Tensor | None:
        if self.fuses == "nothing" or (self.fuses == "product" and epilogue is not None):
            return None
        return fused_linear_reference(x, self.weight, bias, prologue, epilogue)


class CountingGroup:
    """Two tensor parallel ranks with equal parts."""

    rank = 0
    size = 2

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return 2 * x

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        raise AssertionError("a linear layer gathers nothing")


@pytest.mark.parametrize("fuses", ["all", "product", "nothing"])
@pytest.mark.parametrize("kind", ["none", "residual", "activation", "gated", "qkv"])
def test_fused_and_separate_operations_agree(kind: str, fuses: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, HIDDEN)
    weight = torch.randn(2 * HIDDEN, HIDDEN)
    bias = torch.randn(2 * HIDDEN)
    norm = NormPrologue("rms", torch.randn(HIDDEN), None, 1e-5)
    residual = torch.randn(3, 2 * HIDDEN)
    kv_cache = torch.zeros(2, 8, 1, 8)
    expected_cache = torch.zeros(2, 8, 1, 8)
    slot_mapping = torch.tensor([5, 0, 2])
    layer_epilogues = {
        "none": None,
        "residual": AddResidual(residual, 0.5),
        "activation": ActivationEpilogue("silu", gated=False),
        "gated": ActivationEpilogue("silu", gated=True),
        "qkv": QkvEpilogue(kv_cache, slot_mapping, QkTransform()),
    }
    epilogues: dict[str, Epilogue] = {
        **layer_epilogues,
        "residual": ResidualEpilogue(residual, 0.5),
        "qkv": QkvEpilogue(expected_cache, slot_mapping, QkTransform()),
    }
    expected = fused_linear_reference(x, weight, bias, norm, epilogues[kind])
    layer = LinearLayer(FusingWeight(weight, fuses), bias)
    actual = materialize(layer(x, norm, layer_epilogues[kind]))
    assert torch.allclose(actual, expected, atol=1e-6)
    assert torch.allclose(kv_cache, expected_cache, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fuses", ["all", "product", "nothing"])
@pytest.mark.parametrize("kind", ["none", "residual", "gated", "qkv"])
def test_a_low_rank_part_gives_what_the_merged_weights_give(
    kind: str, fuses: str, rows: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, HIDDEN)
    weight = torch.randn(2 * HIDDEN, HIDDEN)
    bias = torch.randn(2 * HIDDEN)
    down = torch.randn(4, HIDDEN)
    up = torch.randn(2 * HIDDEN, 4)
    norm = NormPrologue("rms", torch.randn(HIDDEN), None, 1e-5)
    low_rank = LowRankPart(
        LinearLayer(FusingWeight(down, fuses)), LinearLayer(FusingWeight(up, fuses), bias)
    )
    layer = LinearLayer(FusingWeight(weight, fuses), low_rank=low_rank)
    merged = LinearLayer(FusingWeight(weight + up @ down, fuses), bias)
    caches = torch.zeros(2, 2, 8, 1, 8)
    results = []
    for linear, kv_cache in zip((layer, merged), caches):
        epilogue = {
            "none": None,
            "residual": AddResidual(torch.ones(rows, 2 * HIDDEN), 0.5),
            "gated": ActivationEpilogue("silu", gated=True),
            "qkv": QkvEpilogue(kv_cache, torch.arange(rows), QkTransform()),
        }[kind]
        results.append(materialize(linear(x, norm, epilogue)))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*caches, atol=1e-4, rtol=1e-4)


def test_results_are_summed_over_the_ranks_before_the_epilogue() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, HIDDEN)
    weight = torch.randn(HIDDEN, HIDDEN)
    residual = torch.randn(3, HIDDEN)
    group = CountingGroup()
    layer = LinearLayer(FusingWeight(weight, "all"), None, group)
    actual = materialize(layer(x, None, AddResidual(residual)))
    assert torch.allclose(actual, residual + 2 * F.linear(x, weight), atol=1e-6)
    assert group.num_sums == 1


@pytest.mark.parametrize("outer_kind", ["rms", "layer"])
def test_a_deferred_addition_norms_what_it_adds(outer_kind: Literal["rms", "layer"]) -> None:
    torch.manual_seed(0)
    residual, y = torch.randn(2, 3, 8)
    inner = NormPrologue("rms", torch.randn(8), None, 1e-5)
    outer = NormPrologue(outer_kind, torch.randn(8), None, 1e-5)
    expected_total = residual + 0.5 * apply_norm(y, inner)
    deferred = DeferredAdd(residual, y, 0.5, RmsNorm(inner.weight, inner.eps))
    torch.testing.assert_close(
        deferred.materialize_normed(outer), apply_norm(expected_total, outer)
    )
    torch.testing.assert_close(deferred.materialize(), expected_total)
    added = add_normed(y, inner, AddResidual(residual, 0.5), None)
    torch.testing.assert_close(materialize(added), expected_total)

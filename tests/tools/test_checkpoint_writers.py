"""Written tensors equal those that the formats' own libraries write."""

from __future__ import annotations

import torch

from bloomery.quant.int8 import quantize_int8
from bloomery.tools.checkpoint_writers import int8_tensors, nf4_tensors
from tests.quant.test_library_parity import GOLDEN, golden_tensors

NF4_SUFFIXES = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
)


def test_nf4_tensors_equal_those_of_bitsandbytes() -> None:
    expected = golden_tensors("bnb-nf4-nested")
    actual = nf4_tensors(GOLDEN["weight"], 0, "float32")
    for suffix in NF4_SUFFIXES:
        assert torch.equal(actual[suffix], expected[suffix]), suffix


def test_int8_tensors_equal_those_of_bitsandbytes_but_for_ties() -> None:
    expected = golden_tensors("bnb-int8")
    actual = int8_tensors(GOLDEN["weight"].half().float(), 0)
    assert (actual["weight"].int() - expected["weight"].int()).abs().max() <= 1
    assert (actual["weight"] != expected["weight"]).float().mean() < 0.01
    torch.testing.assert_close(actual["SCB"], expected["SCB"])
    assert quantize_int8(GOLDEN["weight"]).codes.abs().max() == 127
